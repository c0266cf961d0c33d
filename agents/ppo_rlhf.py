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

from agents.pairing import paired_at_random
from agents.ppo import PPO
from agents.reward_model import RewardModel
from pbrl.ledger import Budget
from pbrl.policy import GaussianPolicy
from pbrl.threads import workers
from pbrl.types import Float32, Metrics, Pairs, Preferences


class PPORLHF:
    """Learn what the teacher rewards, and then what is rewarded."""

    def __init__(
        self,
        *,
        policy: GaussianPolicy,
        rng: np.random.Generator,
        trajectories: int,
        reward_model: Callable[..., RewardModel],
        ppo: Callable[..., PPO],
        standardise: bool,
    ) -> None:
        self.policy, self.rng, self.pairs, self.standardise = policy, rng, trajectories // 2, standardise
        self.reward_model = reward_model(obs_size=policy.obs_size, act_size=policy.act_size, rng=rng)
        self.ppo = ppo(policy=policy, rng=rng)
        self.learnt_returns: Float32 | None = None  # of the trajectories last told about [N], for the record

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.ppo.parameters

    def ask(self, budget: Budget) -> Pairs | None:
        """Trajectories of pi, paired at random."""
        return paired_at_random(budget, self.policy, self.parameters, pairs=self.pairs, rng=self.rng)

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:
        """Fit r, then improve pi on it."""
        self.learnt_returns = None
        self.reward_model.remember(pairs, preferences)
        with workers() as pool:
            metrics = self.reward_model.fit(pool)
            if not metrics or not pairs.behaviour.lengths.any():  # r means nothing yet, or nobody took a step
                return metrics
            r = self.reward_model.reward(pairs.behaviour, pool)  # [N, T], 0 after the end
            self.learnt_returns = r.sum(axis=1)
            accuracy = _accuracy(self.learnt_returns, pairs, preferences)
            if self.standardise:
                lived = np.arange(r.shape[1]) < pairs.behaviour.lengths[:, None]
                r = (r - r[lived].mean()) / (r[lived].std() + np.float32(1e-8))
            return {**metrics, **accuracy, **self.ppo.update(pairs.behaviour, r, pool)}

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


def _accuracy(returns: Float32, pairs: Pairs, preferences: Preferences) -> Metrics:
    """In how many of the decided pairs the learnt returns [N] have the teacher's order."""
    q = preferences.probability
    decided = preferences.answered & (q != 0.5)
    agreed = (returns[pairs.second] > returns[pairs.first]) == (q > 0.5)
    return {"reward_accuracy": float(agreed[decided].mean())} if decided.any() else {}
