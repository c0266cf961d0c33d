"""Pairs for agents that compare the trajectories of one policy with each other."""

from __future__ import annotations

import numpy as np

from pbrl.ledger import Budget
from pbrl.policy import GaussianPolicy
from pbrl.types import Float32, Pairs


def paired_at_random(
    budget: Budget, policy: GaussianPolicy, parameters: Float32, *, pairs: int, rng: np.random.Generator
) -> Pairs | None:
    """Sample 2 x `pairs` trajectories of the policy, each in one pair; None if the budget does not pay for them."""
    if budget.trajectories_left < 2 * pairs:
        return None
    behaviour = budget.collect(
        policy,
        parameters[None],
        np.zeros(2 * pairs, np.int64),
        mean_actions=False,
        common_start=False,
        keep=("observations", "actions"),
    )
    first, second = rng.permutation(2 * pairs).reshape(2, -1)
    return Pairs(behaviour=behaviour, first=first, second=second)
