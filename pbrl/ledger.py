"""The query budget: the only way from an agent to trajectories and to the teacher. It counts, and refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from oracles.oracle import Answers, Oracle, Reason
from pbrl.clips import watch
from pbrl.run.preference_log import PreferenceLog
from pbrl.types import Behaviour, Float32, Float64, Int64, Metrics, Pairs, Preferences

if TYPE_CHECKING:  # anything with its `collect` will do
    from pbrl.policy import GaussianPolicy
    from pbrl.simulation.simulator import Simulator


class BudgetError(ValueError):
    """The budget does not cover what was asked, or it makes no sense. Nothing was charged."""


class Budget:
    """One iteration's budget, as an agent receives it."""

    def __init__(self, ledger: Ledger, iteration: int) -> None:
        self._ledger = ledger
        self.iteration = iteration

    @property
    def trajectories_left(self) -> int:
        """How many trajectories can still be collected in this iteration."""
        return self._ledger.trajectories_left

    @property
    def pairs_left(self) -> int:
        """How many pairs can still be compared in this iteration."""
        return self._ledger.pairs_left

    def collect(
        self,
        policy: GaussianPolicy,
        parameters: Float32,  # [K, d]
        assignment: Int64,  # [N] which of the K acts in each trajectory
        *,
        mean_actions: bool,
        common_start: bool,
        keep: Collection[str],
    ) -> Behaviour:
        """Collect N trajectories and pay for them."""
        how = {"mean_actions": mean_actions, "common_start": common_start, "keep": keep}
        return self._ledger._collect(self, policy, parameters, assignment, **how)


class Ledger:
    """Counts what a run has asked for, and keeps the true rewards between the simulator and the oracle.

    An iteration is any sequence of collections and comparisons within its budget.
    """

    def __init__(
        self,
        *,
        simulator: Simulator,
        oracle: Oracle,
        trajectories_per_iteration: int,
        pairs_per_iteration: int,
        preference_log: PreferenceLog | None = None,
    ) -> None:
        for name, value in (
            ("trajectories_per_iteration", trajectories_per_iteration),
            ("pairs_per_iteration", pairs_per_iteration),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.simulator = simulator
        self.oracle = oracle
        self.trajectories_per_iteration = trajectories_per_iteration
        self.pairs_per_iteration = pairs_per_iteration
        self.preference_log = preference_log
        self._counts = Counter(trajectories=0, env_steps=0, pairs_asked=0, pairs_answered=0)
        self._counts.update(pairs_skipped=0, pairs_equal=0, bits=0)
        self._iteration = -1
        self._budget: Budget | None = None
        # Of this iteration: what agents hold, with the rewards that belong to it.
        self._collections: list[tuple[Behaviour, Float64]] = []
        self._answers: list[Answers] = []

    def open_iteration(self, iteration: int) -> Budget:
        """A fresh budget; the one before it is void."""
        if iteration <= self._iteration:
            raise BudgetError(f"iteration {iteration} has had its budget: {self._iteration} was the last")
        self._iteration = iteration
        self._collections, self._answers = [], []
        self._budget = Budget(self, iteration)
        return self._budget

    @property
    def trajectories_left(self) -> int:
        """How many trajectories can still be collected in this iteration."""
        return self.trajectories_per_iteration - sum(len(behaviour) for behaviour, _ in self._collections)

    @property
    def pairs_left(self) -> int:
        """How many pairs can still be compared in this iteration."""
        return self.pairs_per_iteration - sum(len(answers) for answers in self._answers)

    def _collect(
        self, budget: Budget, policy: GaussianPolicy, parameters: Float32, assignment: Int64, **how: Any
    ) -> Behaviour:
        if budget is not self._budget:
            raise BudgetError(f"the budget of iteration {budget.iteration} is void: it is over")
        assignment = np.asarray(assignment)
        if assignment.ndim != 1 or len(assignment) == 0 or assignment.dtype.kind not in "iu":
            raise BudgetError(
                f"the assignment must be N >= 1 policy numbers, not {assignment.dtype} {assignment.shape}"
            )
        if assignment.min() < 0 or assignment.max() >= len(parameters):
            raise BudgetError(
                f"the assignment must be in 0 .. {len(parameters) - 1}, the policies given, "
                f"not {assignment.min()} .. {assignment.max()}"
            )
        if len(assignment) > self.trajectories_left:
            raise BudgetError(
                f"asked for {len(assignment)} trajectories with {self.trajectories_left} left "
                f"of {self.trajectories_per_iteration} in iteration {self._iteration}"
            )
        if policy.normaliser is not None:
            how["keep"] = {*how["keep"], "observations"}
        collected = self.trajectories_per_iteration - self.trajectories_left
        trajectories = self.simulator.collect(
            policy, parameters, assignment, iteration=self._iteration, first_trajectory=collected, **how
        )
        behaviour = trajectories.without_rewards()
        self._collections.append((behaviour, trajectories.task_rewards))
        self._counts.update(trajectories=len(trajectories), env_steps=int(trajectories.lengths.sum()))
        return behaviour

    def compare(self, pairs: Pairs) -> Preferences:
        """Put the pairs to the oracle, and charge them. The agent may do with the answers what it likes."""
        first_trajectory, rewards = self._paid_for(pairs.behaviour)
        if len(pairs) > self.pairs_left:
            raise BudgetError(
                f"asked about {len(pairs)} pairs with {self.pairs_left} left "
                f"of {self.pairs_per_iteration} in iteration {self._iteration}"
            )
        if pairs.experts < 1:
            raise BudgetError(f"experts must be at least 1, not {pairs.experts}")
        first, second = watch(self.oracle, pairs, rewards)
        every_return = np.concatenate([each.sum(axis=1) for _, each in self._collections])
        question = {
            "mean_return": float(every_return.mean()),
            "episode_steps": rewards.shape[1],
            "experts": pairs.experts,
        }
        answers = self.oracle.compare(first, second, **question)
        self._charge(answers)
        if self.preference_log is not None:
            self.preference_log.append(
                answers,
                iteration=self._iteration,
                first=first_trajectory + pairs.first,
                second=first_trajectory + pairs.second,
                first_step=0 if pairs.first_step is None else pairs.first_step,
                second_step=0 if pairs.second_step is None else pairs.second_step,
                clip_steps=first.steps,
                **question,
            )
        return Preferences(**{name: given.copy() for name, given in vars(answers.preferences).items()})

    def _paid_for(self, asked: Behaviour) -> tuple[int, Float64]:
        """The number of a collection's first trajectory in the iteration, and its true rewards."""
        first_trajectory = 0
        for behaviour, rewards in self._collections:
            if behaviour is asked:
                return first_trajectory, rewards
            first_trajectory += len(behaviour)
        raise BudgetError(f"asked about trajectories that iteration {self._iteration} did not pay for")

    def _charge(self, answers: Answers) -> None:
        self._answers.append(answers)
        self._counts.update(
            pairs_asked=len(answers),
            pairs_answered=int((answers.reason != Reason.SKIPPED).sum()),
            pairs_skipped=int((answers.reason == Reason.SKIPPED).sum()),
            pairs_equal=int((answers.reason == Reason.EQUAL).sum()),
            bits=int(answers.bits.sum()),
        )

    def calibrate(
        self,
        simulator: Simulator,
        policy: GaussianPolicy,
        parameters: Float32,
        *,
        trajectories: int,
        mean_actions: bool,
    ) -> None:
        """Let an oracle whose temperature is solved for choose it on trajectories that nobody pays for.

        Call it once the iteration is open, with a simulator of its own and the current policy's `parameters` [d].
        Other oracles need no calibration: nothing is collected.
        """
        if self.oracle.needs_calibration:
            uncharged = simulator.collect(
                policy,
                parameters[None],
                np.zeros(trajectories, dtype=np.int64),
                iteration=self._iteration,
                first_trajectory=0,
                mean_actions=mean_actions,
                common_start=False,
                keep=(),
            )
            self.oracle.calibrate(uncharged.task_rewards)

    def observations(self) -> Float32:
        """All that was observed in this iteration [n, obs], where it was kept, until each trajectory's end."""
        return np.concatenate(
            [
                behaviour.observations[row, : end + 1]
                for behaviour, _ in self._collections
                if behaviour.observations is not None
                for row, end in enumerate(behaviour.lengths)
            ]
        )

    def counts(self) -> dict[str, int]:
        """What has been charged since the run began."""
        return dict(self._counts)

    def iteration_metrics(self, learnt_returns: Float32 | None = None) -> Metrics:
        """How the iteration's trajectories and the teacher did in truth; what is undefined is left out.

        learnt_returns: what an agent that learns a reward makes of the iteration's trajectories [N].
        """
        metrics: dict[str, float] = {}
        if self._collections:
            returns = np.concatenate([rewards.sum(axis=1) for _, rewards in self._collections])
            metrics["return_mean"] = float(returns.mean())
            metrics["return_std"] = float(returns.std())
            metrics["diverged"] = float(sum(behaviour.diverged.sum() for behaviour, _ in self._collections))
            if learnt_returns is not None and min(returns.std(), learnt_returns.std()) > 0:
                metrics["reward_correlation"] = float(np.corrcoef(returns, learnt_returns)[0, 1])
        if self._answers:
            metrics["teacher_tau"] = self._answers[-1].tau
        if decided := sum(answers.decided.sum() for answers in self._answers):
            metrics["teacher_error_rate"] = float(sum(answers.wrong.sum() for answers in self._answers) / decided)
        if answered := sum(answers.preferences.answered.sum() for answers in self._answers):
            confidence = sum(np.abs(answers.preferences.score).sum() for answers in self._answers)  # 0 if skipped
            metrics["teacher_confidence"] = float(confidence / answered)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the next iteration; the log is on disk up to here."""
        return {
            "iteration": self._iteration,
            "counts": self.counts(),
            "oracle": self.oracle.state_dict(),
            "preference_log": self.preference_log and self.preference_log.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self._iteration = state["iteration"]
        self._counts = Counter(state["counts"])
        self.oracle.load_state_dict(state["oracle"])
        if self.preference_log is not None and state["preference_log"] is not None:
            self.preference_log.load_state_dict(state["preference_log"])
        self._budget = None
        self._collections, self._answers = [], []

    def close(self) -> None:
        """The run is over: leave the log as one file."""
        if self.preference_log is not None:
            self.preference_log.close()
