"""The floor: a policy as initialised, which collects and asks like the others but never learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pbrl.ledger import Budget
from pbrl.policy import GaussianPolicy
from pbrl.types import Metrics, Pairs, Preferences


class Random:
    """Never updates."""

    def __init__(self, *, policy: GaussianPolicy, rng: np.random.Generator, trajectories: int) -> None:
        self.policy, self.parameters, self.pairs = policy, policy.initial(rng), trajectories // 2

    def ask(self, budget: Budget) -> Pairs | None:
        """Pairs of trajectories of the one policy there is."""
        if budget.trajectories_left < 2 * self.pairs:
            return None
        arms = np.zeros(2 * self.pairs, np.int64)
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=()
        )
        return Pairs(behaviour=behaviour, first=np.arange(self.pairs), second=self.pairs + np.arange(self.pairs))

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:  # noqa: ARG002
        """Listen, and stay the same."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"parameters": self.parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters = state["parameters"]
