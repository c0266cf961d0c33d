"""DPO: its loss and gradient against a computation by hand, what must not matter, and that it learns."""

import numpy as np
import pytest
import torch

from pbrl.simulation.simulator import Simulator
from tests.agents.toy import (
    ACT,
    OBS,
    STEPS,
    TARGET,
    TRAJECTORIES,
    after_the_end,
    behaviour,
    make,
    pairs_of,
    preferences,
    toy_ledger,
    train,
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


def loss_by_hand(agent, parameters, reference, pairs, q):
    collected = pairs.behaviour

    def log_ratio(row):
        obs, actions = (part[row, : collected.lengths[row]] for part in (collected.observations, collected.actions))
        return sum(log_pi(agent.policy, parameters, obs, actions) - log_pi(agent.policy, reference, obs, actions))

    def log_ratio_mean(row):
        return log_ratio(row) / max(1, collected.lengths[row])

    LR = log_ratio if agent.log_ratio == "sum" else log_ratio_mean
    D = [agent.beta * (LR(j) - LR(i)) for i, j in zip(pairs.first, pairs.second, strict=True)]
    sigmoid = 1 / (1 + np.exp(-np.array(D)))
    return np.mean(-(q * np.log(sigmoid) + (1 - q) * np.log(1 - sigmoid)))


@pytest.mark.parametrize(("log_ratio", "beta"), [("sum", 0.1), ("mean", 2.0)])
def test_loss_and_gradient_by_hand(log_ratio, beta, rng):
    """At the second step, since D = 0 at the first."""
    pairs = pairs_of(behaviour(lengths=LENGTHS))
    settings = {"log_ratio": log_ratio, "beta": beta, "learning_rate": 0.03, "max_gradient_norm": 1e9}
    one, two = (make("dpo", gradient_steps=n, **settings) for n in (1, 2))
    reference = two.parameters
    assert one.tell(pairs, preferences(Q))["loss"] == pytest.approx(np.log(2))
    loss = two.tell(pairs, preferences(Q))["loss"]
    theta = one.parameters.astype(np.float64)
    assert loss == pytest.approx(loss_by_hand(two, theta, reference, pairs, Q), rel=1e-4)
    assert abs(loss - np.log(2)) > 0.01
    for _ in range(5):
        u = rng.standard_normal(theta.size)
        up, down = (loss_by_hand(two, theta + h * u, reference, pairs, Q) for h in (1e-6, -1e-6))
        assert two.theta.grad.numpy() @ u == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-4)


def test_first_gradient_in_closed_form():
    """One step each: dL/dD = 1/2 - q, and d log pi / d mean = (a - mean) / std^2."""
    collected = behaviour(n=2, lengths=[1, 1])
    agent = make("dpo", gradient_steps=1, max_gradient_norm=1e9, initial_log_std=0.3)
    means = agent.policy.mean_actions(agent.parameters, collected.observations[:, 0])
    agent.tell(pairs_of(collected), preferences([0.9]))
    residuals = (collected.actions[:, 0] - means) / np.exp(0.3)
    first, second = residuals / np.exp(0.3)
    np.testing.assert_allclose(agent.theta.grad[-2 * ACT : -ACT], (0.5 - 0.9) * 0.1 * (second - first), rtol=1e-4)
    first, second = residuals**2 - 1
    np.testing.assert_allclose(agent.theta.grad[-ACT:], (0.5 - 0.9) * 0.1 * (second - first), rtol=1e-4)


def test_the_order_within_a_pair_does_not_matter():
    pairs = pairs_of(behaviour())
    swapped = type(pairs)(behaviour=pairs.behaviour, first=pairs.second, second=pairs.first)
    one, other = make("dpo"), make("dpo")
    metrics, mirrored = one.tell(pairs, preferences(Q)), other.tell(swapped, preferences(1 - Q))
    assert metrics == pytest.approx(mirrored, rel=1e-4)
    np.testing.assert_allclose(one.parameters, other.parameters, atol=1e-6)


def test_skipped_pairs_have_no_influence():
    collected, answered = behaviour(), Q < 0.5
    other = behaviour()
    rows = np.concatenate(np.stack([pairs_of(other).first, pairs_of(other).second])[:, ~answered])
    other.observations[rows], other.actions[rows] = 7.0, -7.0
    one, two = make("dpo"), make("dpo")
    one.tell(pairs_of(collected), preferences(Q, answered))
    two.tell(pairs_of(other), preferences(np.where(answered, Q, 0.5), answered))
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_without_answers_nothing_moves():
    agent = make("dpo")
    agent.tell(pairs_of(behaviour()), preferences(Q))  # Adam has momentum now
    before = agent.parameters
    assert agent.tell(pairs_of(behaviour(1)), preferences(Q, np.zeros(len(Q), bool))) == {}
    np.testing.assert_array_equal(agent.parameters, before)


def test_steps_after_the_end_have_no_influence():
    collected = behaviour(lengths=LENGTHS)
    one, two = make("dpo"), make("dpo")
    one.tell(pairs_of(collected), preferences(Q))
    two.tell(pairs_of(after_the_end(collected, np.nan)), preferences(Q))
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_gradients_are_clipped():
    agent = make("dpo", max_gradient_norm=1e-3)
    assert agent.tell(pairs_of(behaviour()), preferences(Q))["gradient_norm"] > 1e-3
    assert agent.theta.grad.norm() == pytest.approx(1e-3, rel=1e-4)


def test_pairs_are_disjoint_and_random():
    agent, ledger = make("dpo"), toy_ledger()
    asked = [agent.ask(ledger.open_iteration(iteration)) for iteration in range(2)]
    for pairs in asked:
        assert sorted(np.concatenate([pairs.first, pairs.second])) == list(range(TRAJECTORIES))
    assert (asked[0].first != asked[1].first).any()


@pytest.mark.parametrize("threads", [1, 3])
def test_same_seed_same_parameters_for_any_number_of_threads(threads):
    reference, agent = make("dpo"), make("dpo")
    train(reference, toy_ledger(), range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        train(agent, toy_ledger(), range(2))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(agent.parameters, reference.parameters)


def test_continuing_equals_not_stopping():
    agent, ledger = make("dpo"), toy_ledger()
    train(agent, ledger, range(2))
    state, books = agent.state_dict(), ledger.state_dict()
    train(agent, ledger, range(2, 4))
    again, ledger = make("dpo", seed=5), toy_ledger()
    again.load_state_dict(state)
    ledger.load_state_dict(books)
    train(again, ledger, range(2, 4))
    np.testing.assert_array_equal(again.parameters, agent.parameters)
    assert again.rng.bit_generator.state == agent.rng.bit_generator.state


def test_in_the_simulator():
    simulator = Simulator("cheetah_run", seed=0, steps=20)
    agent, again = (make("dpo", simulator=simulator) for _ in range(2))
    for each in (agent, again):
        _, metrics = train(each, toy_ledger(simulator=simulator), range(2))
    assert all(np.isfinite(list(each.values())).all() for each in metrics)
    np.testing.assert_array_equal(agent.parameters, again.parameters)


def test_learns():
    agent = make("dpo", initial_log_std=-1.0, learning_rate=1e-2)
    returns, _ = train(agent, toy_ledger(), range(25))
    assert np.mean(returns[-3:]) > 0.5 * np.mean(returns[:2])
    means = agent.policy.mean_actions(agent.parameters, np.zeros((1, OBS), np.float32))
    np.testing.assert_allclose(means[0], TARGET, atol=0.4)


@pytest.mark.parametrize(
    ("setting", "value"), [("beta", 0.0), ("learning_rate", -1.0), ("gradient_steps", 0), ("batch_pairs", 0)]
)
def test_settings_that_make_no_sense_fail_by_name(setting, value):
    with pytest.raises(Exception, match=setting):
        make("dpo", **{setting: value})
