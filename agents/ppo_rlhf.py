"""PPO on a reward that is learnt from preferences (RLHF).

Christiano et al. 2017, "Deep Reinforcement Learning from Human Preferences", with PPO for the policy:

    trajectories of pi, paired at random
    fit r to the preferences                          (agents.reward_model)
    r_t <- r(s_t, a_t), standardised over the iteration unless told otherwise
    improve pi on r_t                                 (agents.ppo)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from agents.pairing import at_random
from agents.ppo import PPO
from agents.reward_model import RewardModel
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.threads import workers
from pbrl.types import Behaviour, Clips, Float32, Metrics, Pairs, Preferences


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
    ) -> None:
        self.policy, self.rng, self.standardise = policy, rng, standardise
        self.reward_model = reward_model(obs_size=policy.obs_size, act_size=policy.act_size, rng=rng)
        self.ppo = ppo(policy=policy, rng=rng)

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.ppo.parameters

    def iterate(self, budget: Budget) -> Metrics:
        """Compare trajectories of pi, fit r, then improve pi on it."""
        # trajectories of pi, paired at random
        arms = np.zeros(budget.trajectories_left, np.int64)
        keep = ("observations", "actions")
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=keep
        )
        pairs = at_random(behaviour, budget.pairs_left, self.rng)
        preferences = budget.compare(pairs)
        self.reward_model.remember(behaviour, pairs, preferences)
        with workers() as pool:
            # fit r to the preferences
            metrics = self.reward_model.fit(pool)
            if not metrics or not behaviour.lengths.any():  # r means nothing yet, or no trajectory has a step
                return metrics

            # r_t <- r(s_t, a_t), standardised over the iteration unless told otherwise
            r = self.reward_model.reward(behaviour, pool)  # [N, T], 0 after the end
            budget.note(reward=r.sum(axis=1))
            accuracy = _accuracy(r, behaviour, pairs, preferences)
            if self.standardise:
                lived = np.arange(r.shape[1]) < behaviour.lengths[:, None]
                r = (r - r[lived].mean()) / (r[lived].std() + np.float32(1e-8))

            # improve pi on r_t
            return {**metrics, **accuracy, **self.ppo.update(behaviour, r, pool)}

    def save_sb3(self, path: str | Path) -> None:
        """Write a file that Stable-Baselines3's own `PPO.load` opens."""
        self.ppo.save_sb3(path)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "reward_model": self.reward_model.state_dict(),
            "ppo": self.ppo.state_dict(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.reward_model.load_state_dict(state["reward_model"])
        self.ppo.load_state_dict(state["ppo"])
        self.rng.bit_generator.state = state["rng"]


def _accuracy(r: Float32, behaviour: Behaviour, pairs: Pairs, preferences: Preferences) -> Metrics:
    """In how many of the decided pairs the learnt rewards [N, T] have the teacher's order."""
    q = preferences.probability
    decided = preferences.answered & (q != 0.5)
    first, second = (_sums(r, behaviour, clips, pairs.steps) for clips in (pairs.first, pairs.second))
    agreed = (second > first) == (q > 0.5)
    return {"reward_accuracy": float(agreed[decided].mean())} if decided.any() else {}


def _sums(r: Float32, behaviour: Behaviour, clips: Clips, steps: int | None) -> Float32:
    """The learnt return of each clip [P]."""
    rows = behaviour.rows(clips.trajectory)
    lived = r[rows] if steps is None else r[rows[:, None], clips.step[:, None] + np.arange(steps)]
    return np.asarray(lived.sum(axis=1))
