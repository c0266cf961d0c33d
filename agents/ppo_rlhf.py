"""PPO on a reward that is learnt from preferences (RLHF).

Christiano et al. 2017, "Deep Reinforcement Learning from Human Preferences", with PPO for the policy:

    trajectories of pi
    ask about pairs of them, or of clips of the last ones      (agents.samplers)
    fit r to the preferences                                   (agents.reward_model)
    r_t <- r(s_t, a_t), standardised over the iteration unless told otherwise
    improve pi on r_t                                          (agents.ppo)

`agent=ppo_rlhf` has the paper's numbers: whole trajectories, paired at random, and one network. `agent=prefppo` has
those of B-Pref (Lee et al. 2021): clips, an ensemble, and a sampler that chooses the questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from agents.ppo import PPO
from agents.reward_model import RewardModel
from agents.samplers import Questions, Sampler
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.threads import workers
from pbrl.types import Behaviour, Float32, Metrics


class PPORLHF:
    """Learn what the teacher rewards, and then what is rewarded."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        reward_model: Callable[..., RewardModel],
        ppo: Callable[..., PPO],
        standardise: bool,
        sampler: Sampler,
        clip_steps: int | None,
        pool: int | None,
        questions: int | None,
        questions_in_all: int | None,
        schedule: Literal["constant", "falling", "rising"],
        iterations: int | None = None,
    ) -> None:
        self.policy, self.rng, self.standardise, self.pool = policy, rng, standardise, pool
        self.reward_model = reward_model(obs_size=policy.obs_size, act_size=policy.act_size, rng=rng)
        self.ppo = ppo(policy=policy, rng=rng)
        self.questions = Questions(
            sampler=sampler,
            clip_steps=clip_steps,
            pool=pool,
            questions=questions,
            questions_in_all=questions_in_all,
            schedule=schedule,
            iterations=iterations,
            rng=rng,
        )

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.ppo.parameters

    def iterate(self, budget: Budget) -> Metrics:
        """Ask about trajectories of pi, fit r, then improve pi on it."""
        # trajectories of pi
        arms = np.zeros(budget.trajectories_left, np.int64)
        keep = ("observations", "actions")
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=keep
        )
        metrics: dict[str, float] = {}
        with workers() as pool:
            # ask about pairs of them, or of clips of the last ones
            self.questions.look_at(behaviour)
            round_of_questions = self.questions.ask(budget, self.reward_model, pool)

            # fit r to the preferences
            if round_of_questions is not None:
                metrics |= self.reward_model.fit(pool)
            if self.reward_model.pairs == 0 or not behaviour.lengths.any():  # r means nothing yet, or no step was made
                return metrics
            if round_of_questions is not None:
                metrics |= self.reward_model.accuracy(*round_of_questions, pool)

            # r_t <- r(s_t, a_t), standardised over the iteration unless told otherwise
            r = self.reward_model.reward(behaviour, pool)  # [N, T], 0 after the end
            budget.note(reward=r.sum(axis=1))
            if self.standardise:
                r = standardised(r, behaviour)

            # improve pi on r_t
            return {**metrics, **self.ppo.update(behaviour, r, pool)}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "reward_model": self.reward_model.state_dict(),
            "ppo": self.ppo.state_dict(),
            "questions": self.questions.state_dict(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.reward_model.load_state_dict(state["reward_model"])
        self.ppo.load_state_dict(state["ppo"])
        self.questions.load_state_dict(state["questions"])
        self.rng.bit_generator.state = state["rng"]


def standardised(r: Float32, behaviour: Behaviour) -> Float32:
    """Rewards [N, T] with mean 0 and standard deviation 1 over the steps before each trajectory's end."""
    lived = np.arange(r.shape[1]) < behaviour.lengths[:, None]
    return np.asarray((r - r[lived].mean()) / (r[lived].std() + np.float32(1e-8)))
