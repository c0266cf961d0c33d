"""The floor: a policy as initialised, which collects and asks like the others but never learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from agents.pairing import by_index
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.types import Metrics


class Random:
    """Never updates."""

    def __init__(self, *, policy: Policy, rng: np.random.Generator) -> None:
        self.policy, self.parameters = policy, policy.initial(rng)

    def iterate(self, budget: Budget) -> Metrics:
        """Compare trajectories of the one policy there is, and stay the same."""
        half = budget.trajectories_left // 2
        arms = np.zeros(2 * half, np.int64)
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=()
        )
        budget.compare(by_index(behaviour.number[:half], behaviour.number[half:], budget.pairs_left))
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"parameters": self.parameters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters = state["parameters"]
