"""Yardsticks: SAC and PPO on the true reward, to see what the preferences cost.

They are no agents of the benchmark: they ask nothing, and their budget (`pbrl.ledger.YardstickBudget`) is the only one
that hands out true rewards. `yardstick: true` in their settings says so, to the runner and to the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from agents.ppo import PPO
from agents.ppo_rlhf import standardised
from agents.sac import SAC
from pbrl.ledger import YardstickBudget
from pbrl.policy import Policy
from pbrl.threads import workers
from pbrl.types import Float32, Metrics


class SACTrue:
    """SAC on the true reward: trajectories one after the other, each followed by updates."""

    def __init__(
        self, *, policy: Policy, rng: np.random.Generator, sac: Callable[..., SAC], yardstick: Literal[True]
    ) -> None:
        self.policy, self.rng, self.yardstick = policy, rng, yardstick
        self.sac = sac(policy=policy, rng=rng)

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.sac.parameters

    def iterate(self, budget: YardstickBudget) -> Metrics:
        """Collect and learn by turns."""
        metrics: Metrics = {}
        with workers() as pool:
            while budget.trajectories_left:
                behaviour = self.sac.collect(budget, 1)
                self.sac.replay.add(behaviour, budget.true_rewards(behaviour).astype(np.float32))
                metrics = self.sac.learn(int(behaviour.lengths.sum()), pool.map)
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"sac": self.sac.state_dict(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.sac.load_state_dict(state["sac"])
        self.rng.bit_generator.state = state["rng"]


class PPOTrue:
    """PPO on the true reward, standardised as PPO-RLHF standardises its learnt one."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        ppo: Callable[..., PPO],
        standardise: bool,
        yardstick: Literal[True],
    ) -> None:
        self.policy, self.rng, self.standardise, self.yardstick = policy, rng, standardise, yardstick
        self.ppo = ppo(policy=policy, rng=rng)

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.ppo.parameters

    def iterate(self, budget: YardstickBudget) -> Metrics:
        """Collect, then improve pi on the true reward."""
        arms, keep = np.zeros(budget.trajectories_left, np.int64), ("observations", "actions")
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=keep
        )
        if not behaviour.lengths.any():  # no trajectory has a step
            return {}
        r = budget.true_rewards(behaviour).astype(np.float32)
        with workers() as pool:
            return self.ppo.update(behaviour, standardised(r, behaviour) if self.standardise else r, pool)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"ppo": self.ppo.state_dict(), "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.ppo.load_state_dict(state["ppo"])
        self.rng.bit_generator.state = state["rng"]
