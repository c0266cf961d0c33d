"""The query budget: the only way from an agent to trajectories and to the teacher. It counts, and refuses."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np

from pbrl.types import (
    Answers,
    Behaviour,
    Clips,
    Film,
    Float32,
    Float64,
    Int64,
    Metrics,
    Oracle,
    Pairs,
    Preferences,
    Question,
    Reason,
    Trajectories,
    join,
)

if TYPE_CHECKING:
    from pbrl.policy import LowRank, Policy


class Simulator(Protocol):
    """What collects: `pbrl.simulation.simulator.Simulator`, or anything else with its `collect`."""

    def collect(
        self,
        policy: Policy,
        parameters: Float32 | LowRank,
        assignment: Int64,
        *,
        iteration: int,
        first_trajectory: int,
        mean_actions: bool,
        common_start: bool,
        keep: Collection[str],
    ) -> Trajectories:
        """N trajectories, row i under `parameters[assignment[i]]`."""


class PreferenceLog(Protocol):
    """What keeps every comparison: `pbrl.run.preference_log.PreferenceLog`."""

    def append(self, answers: Answers, /, **about: Any) -> None:
        """Note one question."""

    def state_dict(self) -> dict[str, Any]:
        """How much has been logged; all of it is on disk when this returns."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""

    def find_problem(self, state: Mapping[str, Any]) -> str | None:
        """Why the log cannot be continued from `state_dict()`; None if it can."""

    def close(self) -> None:
        """The run is over."""


class BudgetError(ValueError):
    """The budget does not cover what was asked, or the question makes no sense. Nothing was charged."""


class Budget:
    """One iteration's budget: all that an agent gets of the world.

    It has no attribute that leads to the ledger, the simulator or the oracle.
    """

    __slots__ = ("__weakref__", "iteration")

    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    @property
    def trajectories_left(self) -> int:
        """How many trajectories can still be collected in this iteration."""
        return _LEDGERS[self].left(self)["trajectories"]

    @property
    def pairs_left(self) -> int:
        """How many pairs can still be compared in this iteration."""
        return _LEDGERS[self].left(self)["pairs"]

    @property
    def bits_left(self) -> int:
        """How many answers can still be had in this iteration: one for each expert asked about a pair."""
        return _LEDGERS[self].left(self)["bits"]

    def collect(
        self,
        policy: Policy,
        parameters: Float32 | LowRank,  # [K, d], or K policies that differ little
        assignment: Int64,  # [N] which of the K acts in each trajectory
        *,
        mean_actions: bool,
        common_start: bool,
        keep: Collection[str],
    ) -> Behaviour:
        """Collect N trajectories and pay for them. `keep`: "observations", "actions", or both."""
        how: dict[str, Any] = {"mean_actions": mean_actions, "common_start": common_start, "keep": tuple(keep)}
        return _LEDGERS[self]._collect(self, policy, parameters, assignment, **how)

    def compare(self, pairs: Pairs) -> Preferences:
        """Ask the teacher, and pay. Any trajectory that is still remembered may be asked about."""
        return _LEDGERS[self]._compare(self, pairs)

    def note(self, **numbers: float | Float32) -> None:
        """Add numbers to the iteration's record.

        An array [N], one number for each trajectory of this iteration, is recorded as its correlation with the true
        returns, under `<name>_correlation`.
        """
        _LEDGERS[self]._note(self, numbers)


class YardstickBudget(Budget):
    """The budget of a yardstick, which learns from the true rewards themselves: the only key to them."""

    __slots__ = ()

    def true_rewards(self, behaviour: Behaviour) -> Float64:
        """The true rewards [N, T] of trajectories that are still remembered."""
        return _LEDGERS[self]._true_rewards(self, behaviour.number)


# Kept apart from the budgets, so that nothing an agent holds leads to the ledger.
_LEDGERS: WeakKeyDictionary[Budget, Ledger] = WeakKeyDictionary()


class Ledger:
    """Counts what a run has asked for, and keeps the true rewards between the simulator and the oracle.

    An iteration is any sequence of collections and comparisons within its budget, or none. The last `remember`
    trajectories may be asked about, of whatever iteration.
    """

    def __init__(
        self,
        *,
        simulator: Simulator,
        oracle: Oracle,
        trajectories_per_iteration: int,
        pairs_per_iteration: int,
        bits_per_iteration: int | None = None,  # None: as many as pairs
        remember: int | None = None,  # None: the trajectories of two iterations
        preference_log: PreferenceLog | None = None,
        yardstick: bool = False,  # whether its budgets hand out true rewards
    ) -> None:
        bits = pairs_per_iteration if bits_per_iteration is None else bits_per_iteration
        remember = 2 * trajectories_per_iteration if remember is None else remember
        for name, value, minimum in (
            ("trajectories_per_iteration", trajectories_per_iteration, 1),
            ("pairs_per_iteration", pairs_per_iteration, 1),
            ("bits_per_iteration", bits, 1),
            ("remember", remember, trajectories_per_iteration),
        ):
            if value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        self.simulator = simulator
        self.oracle = oracle
        self.trajectories_per_iteration = trajectories_per_iteration
        self.pairs_per_iteration = pairs_per_iteration
        self.bits_per_iteration = bits
        self.remember = remember
        self.preference_log = preference_log
        self.yardstick = yardstick
        self._counts = Counter(trajectories=0, env_steps=0, pairs_asked=0, pairs_answered=0)
        self._counts.update(pairs_skipped=0, pairs_equal=0, bits=0)
        self._remembered: list[Trajectories] = []  # in the order of their numbers; none of them empty
        self._iteration = -1
        self._budget: ref[Budget] | None = None
        self._begin()

    def _begin(self) -> None:
        """Forget what belongs to one iteration."""
        self._collections: list[tuple[Behaviour, Float64]] = []  # what was observed, and the returns [N] of it
        self._answers: list[Answers] = []
        self._bits_asked = 0
        self._noted: dict[str, float] = {}
        self.seconds = {"collect": 0.0, "ask": 0.0}

    def open_iteration(self, iteration: int) -> Budget:
        """A fresh budget; the one before it is void."""
        if iteration <= self._iteration:
            raise BudgetError(f"iteration {iteration} has had its budget: {self._iteration} was the last")
        self._iteration = iteration
        self._begin()
        budget = YardstickBudget(iteration) if self.yardstick else Budget(iteration)
        self._budget = ref(budget)  # weakly: nothing but the budget keeps a ledger that is no longer used
        _LEDGERS[budget] = self
        return budget

    def left(self, budget: Budget) -> dict[str, int]:
        """What a budget still covers: nothing, once its iteration is over."""
        if not self._is_current(budget):
            return {"trajectories": 0, "pairs": 0, "bits": 0}
        return {"trajectories": self.trajectories_left, "pairs": self.pairs_left, "bits": self.bits_left}

    @property
    def trajectories_left(self) -> int:
        """How many trajectories can still be collected in this iteration."""
        return self.trajectories_per_iteration - sum(len(behaviour) for behaviour, _ in self._collections)

    @property
    def pairs_left(self) -> int:
        """How many pairs can still be compared in this iteration."""
        return self.pairs_per_iteration - sum(len(answers) for answers in self._answers)

    @property
    def bits_left(self) -> int:
        """How many answers can still be had in this iteration."""
        return self.bits_per_iteration - self._bits_asked

    # Collecting

    def _collect(
        self,
        budget: Budget,
        policy: Policy,
        parameters: Float32 | LowRank,
        assignment: Int64,
        *,
        mean_actions: bool,
        common_start: bool,
        keep: tuple[str, ...],
    ) -> Behaviour:
        self._check_budget(budget)
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
        needed = {*keep}
        if policy.normaliser is not None:
            needed.add("observations")
        if self.oracle.sees == "behaviour":
            needed.add("actions")
        with self._timed("collect"):
            trajectories = self.simulator.collect(
                policy,
                parameters,
                assignment,
                iteration=self._iteration,
                first_trajectory=self.trajectories_per_iteration - self.trajectories_left,
                mean_actions=mean_actions,
                common_start=common_start,
                keep=tuple(sorted(needed)),
            )
        number = self._counts["trajectories"] + np.arange(len(trajectories))
        observed = read_only(trajectories.without_rewards(number, ["observations"]))
        self._collections.append((observed, trajectories.returns))
        self._remember(replace(trajectories, number=number))
        self._counts.update(trajectories=len(trajectories), env_steps=int(trajectories.lengths.sum()))
        return read_only(trajectories.without_rewards(number, keep))

    def _true_rewards(self, budget: Budget, trajectories: Int64) -> Float64:
        self._check_budget(budget)
        if not self.yardstick:
            raise BudgetError("true rewards are for yardsticks alone")
        known = self._known(trajectories)
        return known.task_rewards[known.rows(trajectories)]

    def _remember(self, new: Trajectories) -> None:
        """Keep the true rewards, and the actions where the oracle looks at behaviour; forget the oldest."""
        if self.oracle.sees != "behaviour":
            new = replace(new, actions=None)
        self._remembered.append(replace(new, observations=None))
        surplus = sum(map(len, self._remembered)) - self.remember
        while surplus > 0:
            oldest = self._remembered.pop(0)
            if len(oldest) > surplus:
                self._remembered.insert(0, oldest.take(slice(surplus, None)))
            surplus -= len(oldest)

    # Comparing

    def _compare(self, budget: Budget, pairs: Pairs) -> Preferences:
        self._check_budget(budget)
        if len(pairs) > self.pairs_left:
            raise BudgetError(
                f"asked about {len(pairs)} pairs with {self.pairs_left} left "
                f"of {self.pairs_per_iteration} in iteration {self._iteration}"
            )
        bits = len(pairs) * pairs.experts * getattr(self.oracle, "members", 1)
        if bits > self.bits_left:
            raise BudgetError(
                f"asked for {bits} answers to {len(pairs)} pairs with {self.bits_left} left "
                f"of {self.bits_per_iteration} in iteration {self._iteration}: "
                f"several experts a pair need a larger budget, such as bits={bits}"
            )
        question = self._question(pairs)
        with self._timed("ask"):
            answers = self._with_sums(self.oracle.compare(question), pairs, question.steps)
            self._bits_asked += bits
            self._charge(answers)
            if self.preference_log is not None:
                self.preference_log.append(
                    answers,
                    iteration=self._iteration,
                    first=pairs.first.trajectory,
                    second=pairs.second.trajectory,
                    first_step=pairs.first.step,
                    second_step=pairs.second.step,
                    clip_steps=question.steps,
                    episode_steps=question.episode_steps,
                    mean_return=self._recent_mean_return(),
                    experts=pairs.experts,
                )
        return Preferences(**{name: given.copy() for name, given in vars(answers.preferences).items()})

    def _question(self, pairs: Pairs) -> Question:
        """What the oracle is shown: each clip once, with rewards or with behaviour."""
        asked = np.concatenate([pairs.first.trajectory, pairs.second.trajectory])
        known = self._known(asked)
        episode_steps = known.task_rewards.shape[1]
        steps = episode_steps if pairs.steps is None else int(pairs.steps)
        step = np.concatenate([pairs.first.step, pairs.second.step])
        if step.max() + steps > episode_steps:
            raise BudgetError(
                f"a clip of {steps} steps from step {step.max()} ends after the trajectory, which has {episode_steps}"
            )
        distinct, rows = np.unique(np.stack([asked, step]), axis=1, return_inverse=True)
        clips = Clips(trajectory=distinct[0], step=distinct[1])
        shown: dict[str, Any] = {}
        if self.oracle.sees == "rewards":
            where = known.rows(clips.trajectory)
            shown["rewards"] = known.task_rewards[where[:, None], clips.step[:, None] + np.arange(steps)]
            shown["mean_return"] = self._recent_mean_return()
        else:
            film = known.take(known.rows(clips.trajectory)).without_rewards(clips.trajectory, ["actions"])
            shown["film"] = Film(trajectories=film, step=clips.step)
        return Question(
            first=rows.ravel()[: len(pairs)],
            second=rows.ravel()[len(pairs) :],
            steps=steps,
            episode_steps=episode_steps,
            experts=pairs.experts,
            iteration=self._iteration,
            **shown,
        )

    def _with_sums(self, answers: Answers, pairs: Pairs, steps: int) -> Answers:
        """The answers with the true sums where the oracle does not know them: for the log and the audit."""
        if np.isfinite(answers.first_sum).all() and np.isfinite(answers.second_sum).all():
            return answers
        sums = []
        for clips in (pairs.first, pairs.second):
            known = self._known(clips.trajectory)
            step = clips.step[:, None] + np.arange(steps)
            sums.append(known.task_rewards[known.rows(clips.trajectory)[:, None], step].sum(axis=1))
        return replace(answers, first_sum=sums[0], second_sum=sums[1])

    def _known(self, trajectories: Int64) -> Trajectories:
        """The collections that hold these trajectories, as one; refuses what is not remembered."""
        collected = self._counts["trajectories"]
        oldest = collected - sum(map(len, self._remembered))
        if trajectories.max() >= collected:
            raise BudgetError(f"asked about trajectory {trajectories.max()}, but {collected} have been paid for")
        if trajectories.min() < oldest:
            raise BudgetError(
                f"asked about trajectory {trajectories.min()}, which is forgotten: only {oldest} .. {collected - 1} "
                f"are remembered (remember={self.remember})"
            )
        needed = [part for part in self._remembered if part.number[-1] >= trajectories.min()]
        return needed[0] if len(needed) == 1 else join(needed)

    def _recent_mean_return(self) -> float:
        """Mean true return of the last trajectories, as many as an iteration has."""
        returns = np.concatenate([part.returns for part in self._remembered])
        return float(returns[-self.trajectories_per_iteration :].mean())

    def _charge(self, answers: Answers) -> None:
        self._answers.append(answers)
        self._counts.update(
            pairs_asked=len(answers),
            pairs_answered=int((answers.reason != Reason.SKIPPED).sum()),
            pairs_skipped=int((answers.reason == Reason.SKIPPED).sum()),
            pairs_equal=int((answers.reason == Reason.EQUAL).sum()),
            bits=int(answers.bits.sum()),
        )

    def _is_current(self, budget: Budget) -> bool:
        return self._budget is not None and self._budget() is budget

    def _check_budget(self, budget: Budget) -> None:
        if not self._is_current(budget):
            raise BudgetError(f"the budget of iteration {budget.iteration} is void: it is over")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Add the time spent inside to a part's seconds."""
        begin = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - begin

    # The record

    def _note(self, budget: Budget, numbers: Mapping[str, Any]) -> None:
        self._check_budget(budget)
        for name, value in numbers.items():
            if np.ndim(value) == 0:
                self._noted[name] = float(value)
                continue
            returns = self._returns()
            if np.shape(value) != returns.shape:
                raise ValueError(
                    f"{name} has shape {np.shape(value)}: it must be one number, or one for each of the "
                    f"{len(returns)} trajectories of this iteration"
                )
            if min(returns.std(), np.std(value)) > 0 and np.isfinite(value).all():
                self._noted[f"{name}_correlation"] = float(np.corrcoef(returns, value)[0, 1])

    def _returns(self) -> Float64:
        """True returns of this iteration's trajectories [N]."""
        return np.concatenate([returns for _, returns in self._collections] or [np.empty(0)])

    def calibrate(
        self,
        simulator: Simulator,
        policy: Policy,
        parameters: Float32,
        *,
        trajectories: int,
        mean_actions: bool,
    ) -> None:
        """Let an oracle whose temperature is solved for choose it on trajectories that nobody pays for.

        Call it once the iteration is open, with a simulator of its own and the current policy's `parameters` [d].
        Other oracles need no calibration: nothing is collected.
        """
        if getattr(self.oracle, "needs_calibration", False):
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
            self.oracle.calibrate(uncharged.task_rewards)  # type: ignore[attr-defined]  # an optional part of it

    def observations(self) -> Float32 | None:
        """All that was observed in this iteration [n, obs], until each trajectory's end; None if nothing was kept."""
        seen = [
            behaviour.observations[row, : end + 1]
            for behaviour, _ in self._collections
            if behaviour.observations is not None
            for row, end in enumerate(behaviour.lengths)
        ]
        return np.concatenate(seen) if seen else None

    def counts(self) -> dict[str, int]:
        """What has been charged since the run began."""
        return dict(self._counts)

    def iteration_metrics(self) -> Metrics:
        """How the iteration's trajectories and the teacher did in truth, and what was noted.

        What is undefined is left out.
        """
        metrics: dict[str, float] = {}
        if self._collections:
            returns = self._returns()
            metrics["return_mean"] = float(returns.mean())
            metrics["return_std"] = float(returns.std())
            metrics["diverged"] = float(sum(behaviour.diverged.sum() for behaviour, _ in self._collections))
        metrics |= self._noted
        if self._answers and np.isfinite(self._answers[-1].tau):
            metrics["teacher_tau"] = self._answers[-1].tau
        if decided := sum(answers.decided.sum() for answers in self._answers):
            metrics["teacher_error_rate"] = float(sum(answers.wrong.sum() for answers in self._answers) / decided)
        if answered := sum(answers.preferences.answered.sum() for answers in self._answers):
            confidence = sum(np.abs(answers.preferences.score).sum() for answers in self._answers)  # 0 if skipped
            metrics["teacher_confidence"] = float(confidence / answered)
        return metrics

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the next iteration; the log is on disk up to here."""
        remembered = join(self._remembered) if self._remembered else None
        return {
            "iteration": self._iteration,
            "counts": self.counts(),
            "remembered": remembered and dict(vars(remembered)),
            "oracle": self.oracle.state_dict(),
            "preference_log": self.preference_log and self.preference_log.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        if any(not isinstance(count, int) or count < 0 for count in state["counts"].values()):
            raise ValueError(f"the counts of a ledger are whole numbers, not {state['counts']}")
        self._iteration = state["iteration"]
        self._counts = Counter(state["counts"])
        self._remembered = [Trajectories(**state["remembered"])] if state["remembered"] else []
        self.oracle.load_state_dict(state["oracle"])
        if self.preference_log is not None and state["preference_log"] is not None:
            self.preference_log.load_state_dict(state["preference_log"])
        self._budget = None
        self._begin()

    def close(self) -> None:
        """The run is over: leave the log as one file."""
        if self.preference_log is not None:
            self.preference_log.close()


def read_only(behaviour: Behaviour) -> Behaviour:
    """The same behaviour, with arrays that cannot be written to."""
    for array in vars(behaviour).values():
        if array is not None:
            array.setflags(write=False)
    return behaviour
