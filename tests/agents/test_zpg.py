"""ZPG: its estimate by hand, and its direction on a linear utility."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from agents.zpg import ZPG
from pbrl.policy import GaussianPolicy
from tests.agents.toy import StubBudget, preferences


def make(experts=10, **changes):
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    settings = {
        "learning_rate": 2e-3,
        "smoothing": 4.5e-2,
        "experts": experts,
        "collect": "sampled",
        "common_start": False,
        **changes,
    }
    return ZPG(policy=policy, rng=np.random.default_rng(0), **settings)


def one_step(agent, answers):
    """The update, and the direction u that was tried."""
    budget = StubBudget(answers, pairs=len(answers), trajectories=2 * len(answers))
    before = agent.parameters.copy()
    metrics = agent.iterate(budget)
    ((parameters, assignment, how),) = budget.collections
    (pairs,) = budget.asked
    n = len(answers)
    assert pairs.experts == agent.experts
    assert_array_equal(assignment, [0] * n + [1] * n)
    assert_array_equal(pairs.first.trajectory, 100 + np.arange(n))  # paired by index
    assert_array_equal(pairs.second.trajectory, 100 + n + np.arange(n))
    assert how == {"mean_actions": False, "common_start": False, "keep": ()}
    assert_array_equal(parameters[0], before)
    update = agent.parameters - before
    assert metrics["update_norm"] == pytest.approx(np.linalg.norm(update))
    return update, (parameters[1] - parameters[0]) / 4.5e-2


def test_the_update_by_hand():
    update, u = one_step(make(), preferences([0.7, 0.7, 0.2, 1.0]))
    logits = [np.log(0.7 / 0.3), np.log(0.7 / 0.3), np.log(0.2 / 0.8), np.log(0.95 / 0.05)]  # 1 is trimmed to 1 - 1/20
    assert_allclose(update, 2e-3 * np.mean(logits) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)
    assert update @ u > 0


def test_skipped_pairs_have_no_say():
    some, _ = one_step(make(), preferences([0.7, 0.0, 0.2], [True, False, True]))
    fewer, _ = one_step(make(), preferences([0.7, 0.2]))
    assert_array_equal(some, fewer)
    for experts in (1, 10):
        none, _ = one_step(make(experts), preferences([0.9, 0.9], [False, False]))
        assert not none.any()


def test_one_expert_pools_labels_before_the_logit():
    """Whatever the probabilities: they are not what a single expert says."""
    labels = preferences([0.6] * 4, label=[1, 1, 1, 0])
    update, u = one_step(make(experts=1), labels)
    assert_allclose(update, 2e-3 * np.log(0.75 / 0.25) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)
    unanimous, u = one_step(make(experts=1), preferences([1.0] * 4))
    assert_allclose(unanimous, 2e-3 * np.log(0.875 / 0.125) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)  # trimmed to 1 - 1/8
    skipped, u = one_step(make(experts=1), preferences([1.0, 1.0, 0.0, 0.0], [True, True, True, False]))
    assert_allclose(skipped, 2e-3 * np.log((2 / 3) / (1 / 3)) / 4.5e-2 * u, rtol=1e-4, atol=1e-7)


def test_fewer_or_more_pairs_than_half_the_trajectories():
    for pairs, trajectories, collected in ((2, 16, 4), (20, 8, 8)):
        budget = StubBudget(lambda asked: preferences([0.5] * len(asked)), pairs=pairs, trajectories=trajectories)
        make().iterate(budget)
        assert len(budget.collections[0][1]) == collected
        assert budget.pairs_left == 0


def test_unbiased_in_direction_on_a_linear_utility():
    """The utility g . theta, answered by many experts through a logistic link: the mean update points along g."""
    agent = make(experts=100_000, learning_rate=1.0)
    rng, before = np.random.default_rng(1), agent.parameters
    g = rng.standard_normal(agent.policy.size)

    def answer(pairs):
        theta, perturbed = budget.collections[-1][0]
        share = 1 / (1 + np.exp(-g @ (perturbed - theta).astype(np.float64)))
        return preferences(np.full(len(pairs), rng.binomial(agent.experts, share) / agent.experts))

    updates = []
    for _ in range(4000):
        budget = StubBudget(answer, pairs=1, trajectories=2)
        agent.iterate(budget)
        updates.append(agent.parameters - before)
        agent.parameters = before
    mean = np.mean(updates, axis=0)
    assert mean @ g / np.linalg.norm(mean) / np.linalg.norm(g) > 0.97
    assert mean @ g / (g @ g) == pytest.approx(1, abs=0.1)  # E[(g . u) u] = g


def test_settings_that_make_no_sense_fail_by_name():
    with pytest.raises(ValueError, match="experts must be at least 1, not 0"):
        make(experts=0)
    with pytest.raises(ValueError, match=r"learning_rate and smoothing must be positive, not -0.1 and 0.045"):
        make(learning_rate=-0.1)
