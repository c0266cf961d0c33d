"""ZPG: its estimate by hand, and its direction on a linear utility."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from test_ncrs import FakeBudget, answers

from agents.zpg import ZPG
from pbrl.policy import GaussianPolicy
from pbrl.types import Preferences


def make(experts: int = 10, **changes: Any) -> ZPG:
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    settings: dict[str, Any] = {
        "trajectories": 64,
        "learning_rate": 2e-3,
        "smoothing": 4.5e-2,
        "experts": experts,
        "collect": "sampled",
        "common_start": False,
    }
    return ZPG(policy=policy, rng=np.random.default_rng(0), **{**settings, **changes})


def shares(values: list[float], answered: list[bool] | None = None) -> Preferences:
    return answers([2 * value - 1 for value in values], answered, label=[round(value) for value in values])


def one_step(agent: ZPG, preferences: Preferences) -> tuple[np.ndarray, np.ndarray]:
    """The update, and the direction u that was tried."""
    budget, before = FakeBudget(), agent.parameters.copy()
    pairs = agent.ask(budget)  # type: ignore[arg-type]
    assert pairs is not None
    assert pairs.experts == agent.experts
    agent.tell(pairs, preferences)
    parameters = budget.asked[0][0]
    assert_array_equal(parameters[0], before)
    return agent.parameters - before, (parameters[1] - parameters[0]) / 4.5e-2


def test_the_update_by_hand() -> None:
    update, u = one_step(make(), shares([0.7, 0.7, 0.2, 1.0]))
    logits = [np.log(0.7 / 0.3), np.log(0.7 / 0.3), np.log(0.2 / 0.8), np.log(0.95 / 0.05)]  # 1 is trimmed to 1 - 1/20
    assert_allclose(update, 2e-3 * np.mean(logits) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)


def test_skipped_pairs_have_no_say() -> None:
    some, _ = one_step(make(), shares([0.7, 0.0, 0.2], [True, False, True]))
    fewer, _ = one_step(make(), shares([0.7, 0.2]))
    assert_array_equal(some, fewer)
    none, _ = one_step(make(), shares([0.5, 0.5], [False, False]))
    assert not none.any()


def test_one_expert_pools_labels_before_the_logit() -> None:
    update, u = one_step(make(experts=1), shares([1.0, 1.0, 1.0, 0.0]))
    assert_allclose(update, 2e-3 * np.log(0.75 / 0.25) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)
    unanimous, u = one_step(make(experts=1), shares([1.0] * 4))
    assert_allclose(unanimous, 2e-3 * np.log(0.875 / 0.125) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)  # trimmed to 1 - 1/8


def test_unbiased_in_direction_on_a_linear_utility() -> None:
    """The utility g . theta, answered by many experts through a logistic link: the mean update points along g."""
    agent = make(experts=100_000, learning_rate=1.0)
    rng = np.random.default_rng(1)
    g = rng.standard_normal(agent.policy.size)
    updates = []
    for _ in range(4000):
        pairs = agent.ask(FakeBudget())  # type: ignore[arg-type]
        assert pairs is not None
        gap = g @ agent.search.s * agent.search.radius
        share = rng.binomial(agent.experts, 1 / (1 + np.exp(-gap))) / agent.experts
        before = agent.parameters
        agent.tell(pairs, shares([share] * 32))
        updates.append(agent.parameters - before)
        agent.search.x = before
    mean = np.mean(updates, axis=0)
    assert mean @ g / np.linalg.norm(mean) / np.linalg.norm(g) > 0.97
    assert mean @ g / (g @ g) == pytest.approx(1, abs=0.1)  # E[(g . u) u] = g


def test_bad_settings() -> None:
    with pytest.raises(ValueError, match="experts must be at least 1, not 0"):
        make(experts=0)
    with pytest.raises(ValueError, match=r"must be positive, not -0.1 and 0.045"):
        make(learning_rate=-0.1)
