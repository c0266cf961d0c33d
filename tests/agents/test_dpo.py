"""DPO: its loss and gradient against a computation by hand, and what must not matter."""

import numpy as np
import pytest
import torch

from tests.agents.toy import (
    ACT,
    STEPS,
    TRAJECTORIES,
    StubBudget,
    Trial,
    after_the_end,
    behaviour,
    clips_of,
    make,
    pairs_of,
    preferences,
    shown,
)

Q = np.linspace(0.0, 1.0, TRAJECTORIES // 2)
LENGTHS = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]


def log_pi(policy, parameters, obs, actions):
    """log pi(a|s) in double precision, from the formula of a Gaussian."""
    x, rest = obs.astype(np.float64), parameters.astype(np.float64)
    for n, m in zip(policy.sizes[:-1], policy.sizes[1:], strict=True):
        x, rest = x @ rest[: n * m].reshape(n, m) + rest[n * m :][:m], rest[n * m + m :]
        x = np.tanh(x) if len(rest) > policy.act_size else x
    std = np.exp(rest)
    return (-0.5 * ((actions - x) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)).sum(-1)


def loss_by_hand(agent, parameters, reference, collected, pairs, q):
    def LR(row, begin, end):  # noqa: N802
        obs, actions = collected.observations[row, begin:end], collected.actions[row, begin:end]
        total = sum(log_pi(agent.policy, parameters, obs, actions) - log_pi(agent.policy, reference, obs, actions))
        return total if agent.log_ratio == "sum" else total / max(1, end - begin)

    first, second = (
        np.array([LR(*clip) for clip in shown(collected, clips, pairs.steps)]) for clips in (pairs.first, pairs.second)
    )
    sigmoid = 1 / (1 + np.exp(-agent.beta * (second - first)))
    return np.mean(-(q * np.log(sigmoid) + (1 - q) * np.log(1 - sigmoid)))


@pytest.mark.parametrize("asked", [pairs_of, lambda collected: clips_of(collected, 7)], ids=["whole", "clips"])
@pytest.mark.parametrize(("log_ratio", "beta"), [("sum", 0.1), ("mean", 2.0)])
def test_loss_and_gradient_by_hand(log_ratio, beta, asked, rng):
    """At the second step, since D = 0 at the first."""
    collected = behaviour(lengths=LENGTHS)
    pairs = asked(collected)
    settings = {"log_ratio": log_ratio, "beta": beta, "learning_rate": 0.03, "max_gradient_norm": 1e9}
    one, two = (make("dpo", gradient_steps=n, **settings) for n in (1, 2))
    reference = two.parameters
    assert one.learn(collected, pairs, preferences(Q))["loss"] == pytest.approx(np.log(2))
    loss = two.learn(collected, pairs, preferences(Q))["loss"]
    theta = one.parameters.astype(np.float64)
    assert loss == pytest.approx(loss_by_hand(two, theta, reference, collected, pairs, Q), rel=1e-4)
    assert abs(loss - np.log(2)) > 0.01
    for _ in range(5):
        u = rng.standard_normal(theta.size)
        up, down = (loss_by_hand(two, theta + h * u, reference, collected, pairs, Q) for h in (1e-6, -1e-6))
        assert two.theta.grad.numpy() @ u == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-4)


def test_first_gradient_in_closed_form():
    """One step each: dL/dD = 1/2 - q, and d log pi / d mean = (a - mean) / std^2."""
    collected = behaviour(n=2, lengths=[1, 1])
    agent = make("dpo", gradient_steps=1, max_gradient_norm=1e9, policy__initial_log_std=0.3)
    means = agent.policy.mean_actions(agent.parameters, collected.observations[:, 0])
    agent.learn(collected, pairs_of(collected), preferences([0.9]))
    residuals = (collected.actions[:, 0] - means) / np.exp(0.3)
    first, second = residuals / np.exp(0.3)
    np.testing.assert_allclose(agent.theta.grad[-2 * ACT : -ACT], (0.5 - 0.9) * 0.1 * (second - first), rtol=1e-4)
    first, second = residuals**2 - 1
    np.testing.assert_allclose(agent.theta.grad[-ACT:], (0.5 - 0.9) * 0.1 * (second - first), rtol=1e-4)


def test_the_order_within_a_pair_does_not_matter():
    collected = behaviour()
    pairs = pairs_of(collected)
    swapped = type(pairs)(first=pairs.second, second=pairs.first)
    one, other = make("dpo"), make("dpo")
    metrics = one.learn(collected, pairs, preferences(Q))
    assert other.learn(collected, swapped, preferences(1 - Q)) == pytest.approx(metrics, rel=1e-4)
    np.testing.assert_allclose(one.parameters, other.parameters, atol=1e-6)


def test_a_clip_of_all_steps_is_the_whole_trajectory():
    collected = behaviour(lengths=LENGTHS)
    one, other = make("dpo"), make("dpo")
    one.learn(collected, pairs_of(collected), preferences(Q))
    other.learn(collected, clips_of(collected, STEPS), preferences(Q))
    np.testing.assert_array_equal(one.parameters, other.parameters)


def test_only_what_a_clip_shows_has_influence():
    collected, pairs = behaviour(), clips_of(behaviour(), 7)
    other = behaviour()
    hidden = np.ones((TRAJECTORIES, STEPS), bool)
    for clips in (pairs.first, pairs.second):
        for row, begin, end in shown(collected, clips, 7):
            hidden[row, begin:end] = False
    other.observations[:, :-1][hidden], other.actions[hidden] = np.nan, np.nan
    one, two = make("dpo"), make("dpo")
    one.learn(collected, pairs, preferences(Q))
    two.learn(other, pairs, preferences(Q))
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_skipped_pairs_have_no_influence():
    collected, other, answered = behaviour(), behaviour(), Q < 0.5
    rows = np.arange(TRAJECTORIES).reshape(2, -1)[:, ~answered].ravel()
    other.observations[rows], other.actions[rows] = 7.0, -7.0
    one, two = make("dpo"), make("dpo")
    one.learn(collected, pairs_of(collected), preferences(Q, answered))
    two.learn(other, pairs_of(other), preferences(np.where(answered, Q, 0.5), answered))
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_without_answers_nothing_moves():
    agent = make("dpo")
    agent.learn(behaviour(), pairs_of(behaviour()), preferences(Q))  # Adam has momentum now
    before = agent.parameters
    assert agent.iterate(StubBudget(preferences(Q, np.zeros(len(Q), bool)))) == {}
    np.testing.assert_array_equal(agent.parameters, before)


def test_steps_after_the_end_have_no_influence():
    collected = behaviour(lengths=LENGTHS)
    one, two = make("dpo"), make("dpo")
    one.learn(collected, pairs_of(collected), preferences(Q))
    two.learn(after_the_end(collected, np.nan), pairs_of(collected), preferences(Q))
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_gradients_are_clipped():
    agent = make("dpo", max_gradient_norm=1e-3)
    assert agent.learn(behaviour(), pairs_of(behaviour()), preferences(Q))["gradient_norm"] > 1e-3
    assert agent.theta.grad.norm() == pytest.approx(1e-3, rel=1e-4)


def test_an_iteration_learns_from_random_disjoint_pairs_of_the_present_policy():
    agent, asked = make("dpo"), []
    for _ in range(2):
        collected, before = behaviour(), agent.parameters
        budget = StubBudget(preferences(Q), collected=collected)
        metrics = agent.iterate(budget)
        ((parameters, assignment, how),) = budget.collections
        np.testing.assert_array_equal(parameters, before[None])
        assert assignment.tolist() == [0] * TRAJECTORIES
        assert how == {"mean_actions": False, "common_start": False, "keep": ("observations", "actions")}
        (pairs,) = budget.asked
        both = np.concatenate([pairs.first.trajectory, pairs.second.trajectory])
        assert sorted(both) == collected.number.tolist()
        asked.append(both.tolist())
        assert set(metrics) == {"loss", "kl", "gradient_norm", "log_std"}
        assert (agent.parameters != before).any()
    assert asked[0] != asked[1]


@pytest.mark.parametrize("threads", [1, 3])
def test_same_seed_same_parameters_for_any_number_of_threads(threads):
    reference, trial = (Trial("dpo", "trajectories=16", "pairs=8") for _ in range(2))
    reference.run(2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trial.run(2)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(trial.agent.parameters, reference.agent.parameters)


@pytest.mark.parametrize(
    ("setting", "value"), [("beta", 0.0), ("learning_rate", -1.0), ("gradient_steps", 0), ("batch_pairs", 0)]
)
def test_settings_that_make_no_sense_fail_by_name(setting, value):
    with pytest.raises(Exception, match=setting):
        make("dpo", **{setting: value})
