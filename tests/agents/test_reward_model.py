"""The reward model: its loss and gradient by hand, what it remembers, what must not matter, and that it learns."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from agents.reward_model import RewardModel
from pbrl.threads import workers
from tests.agents.toy import ACT, OBS, STEPS, TARGET, TRAJECTORIES, after_the_end, behaviour, pairs_of, preferences

Q = np.linspace(0.0, 1.0, TRAJECTORIES // 2)
LENGTHS = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]
SETTINGS = {
    "hidden": [8, 8],
    "hidden_gain": 2**0.5,
    "output_gain": 1.0,
    "output": "linear",
    "learning_rate": 4e-3,
    "batch_pairs": 32,
    "gradient_steps": 10,
    "max_gradient_norm": 0.5,
    "buffer_iterations": 3,
}


def make(seed=0, **changes):
    return RewardModel(obs_size=OBS, act_size=ACT, rng=np.random.default_rng(seed), **(SETTINGS | changes))


def fit(model):
    with workers() as pool:
        return model.fit(pool)


def reward(model, collected):
    with workers() as pool:
        return model.reward(collected, pool)


def weights_of(model):
    return np.concatenate([weights.detach().numpy().ravel() for weights in model.weights])


def reward_by_hand(weights, obs, actions, output):
    """r(s, a) in double precision: leaky ReLU inside."""
    x = np.concatenate([obs, actions], axis=-1).astype(np.float64)
    sizes = [OBS + ACT, *SETTINGS["hidden"], 1]
    for n, m in pairwise(sizes):
        x, weights = x @ weights[: n * m].reshape(m, n).T + weights[n * m :][:m], weights[n * m + m :]
        x = np.where(x > 0, x, 0.01 * x) if len(weights) else x
    return np.tanh(x[..., 0]) if output == "tanh" else x[..., 0]


def loss_by_hand(weights, pairs, q, output):
    collected = pairs.behaviour
    r = reward_by_hand(weights, collected.observations[:, :-1], collected.actions, output)
    sums = np.array([each[:end].sum() for each, end in zip(r, collected.lengths, strict=True)])
    sigmoid = 1 / (1 + np.exp(-(sums[pairs.second] - sums[pairs.first])))
    return np.mean(-(q * np.log(sigmoid) + (1 - q) * np.log(1 - sigmoid)))


@pytest.mark.parametrize("output", ["linear", "tanh"])
def test_loss_and_gradient_by_hand(rng, output):
    pairs = pairs_of(behaviour(lengths=LENGTHS))
    model = make(gradient_steps=1, max_gradient_norm=1e9, output_gain=0.1, output=output)
    weights = weights_of(model).astype(np.float64)
    model.remember(pairs, preferences(Q))
    metrics = fit(model)
    assert metrics["reward_loss"] == pytest.approx(loss_by_hand(weights, pairs, Q, output), rel=1e-5)
    gradient = np.concatenate([each.grad.numpy().ravel() for each in model.weights])
    assert metrics["reward_gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    for _ in range(5):
        u = rng.standard_normal(weights.size)
        up, down = (loss_by_hand(weights + h * u, pairs, Q, output) for h in (1e-6, -1e-6))
        assert gradient @ u == pytest.approx((up - down) / 2e-6, rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("output", ["linear", "tanh"])
def test_reward_by_hand_and_nothing_after_the_end(output):
    model, collected = make(output=output), behaviour(lengths=LENGTHS)
    r = reward(model, collected)
    expected = reward_by_hand(weights_of(model), collected.observations[:, :-1], collected.actions, output)
    before_end = np.arange(STEPS) < LENGTHS[:, None]
    np.testing.assert_allclose(r, np.where(before_end, expected, 0.0), atol=1e-5)
    assert r.dtype == np.float32


def test_the_level_of_the_reward_means_nothing():
    """Preferences do not hold it in place. A linear output learns on from any level; a tanh would be saturated."""
    one, two = make(gradient_steps=1), make(gradient_steps=1)
    with torch.no_grad():
        two.weights[-1] += 10.0
    for model in (one, two):
        model.remember(pairs_of(behaviour()), preferences(Q))
    assert fit(one) == pytest.approx(fit(two), rel=1e-3)


def test_initial_weights_are_orthogonal():
    first, *_, output = [weights for weights in make(output_gain=0.3).weights if weights.ndim == 2]
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(OBS + ACT), atol=1e-5, rtol=0)
    assert output.norm().item() == pytest.approx(0.3)


def test_skipped_pairs_and_steps_after_the_end_have_no_influence():
    collected, answered = behaviour(lengths=LENGTHS), Q < 0.5
    one, two = make(), make()
    one.remember(pairs_of(collected), preferences(Q, answered))
    two.remember(pairs_of(after_the_end(collected, np.nan)), preferences(np.where(answered, Q, 0.123), answered))
    assert fit(one) == fit(two)
    np.testing.assert_array_equal(weights_of(one), weights_of(two))


def test_nothing_is_learnt_from_nothing():
    model = make()
    model.remember(pairs_of(behaviour()), preferences(Q, np.zeros(len(Q), bool)))
    before = weights_of(model)
    assert fit(model) == {}
    np.testing.assert_array_equal(weights_of(model), before)


def test_pairs_of_the_last_iterations_are_drawn_uniformly_without_repetition():
    model = make(gradient_steps=1, batch_pairs=6)
    for seed in range(5):
        model.remember(pairs_of(behaviour(seed)), preferences(np.full(len(Q), seed / 4)))
    assert [float(each.q[0]) for each in model.buffer] == [0.5, 0.75, 1.0]
    drawn = []
    permutation = model.rng.permutation

    class Recorder:
        def permutation(self, n):
            order = permutation(n)
            drawn.append(order[:6])
            return order

    model.rng = Recorder()
    for _ in range(100):
        fit(model)
    assert all(len(set(batch)) == 6 for batch in drawn)
    counts = np.bincount(np.concatenate(drawn), minlength=24)  # 25 each, standard deviation 4.3
    assert counts.min() > 8
    assert counts.max() < 45


def test_saved_and_loaded_it_goes_on_the_same():
    model, again = make(), make(seed=3)
    model.remember(pairs_of(behaviour(0)), preferences(Q))
    fit(model)
    state = model.state_dict()
    again.load_state_dict(state)
    again.rng.bit_generator.state = model.rng.bit_generator.state
    for each in (model, again):
        each.remember(pairs_of(behaviour(1)), preferences(Q))
        fit(each)
    np.testing.assert_array_equal(weights_of(model), weights_of(again))


def test_learns_the_teachers_order():
    """From pairs about closeness to a target, it orders trajectories that it has never seen."""
    model = make(hidden=[32, 32], output_gain=0.01, buffer_iterations=10)

    def returns(collected):
        return -((collected.actions - TARGET) ** 2).sum((1, 2))

    for seed in range(10):
        pairs = pairs_of(behaviour(seed, n=64))
        gap = returns(pairs.behaviour)[pairs.second] - returns(pairs.behaviour)[pairs.first]
        model.remember(pairs, preferences(1 / (1 + np.exp(-gap))))
        fit(model)
    unseen = behaviour(99, n=64)
    assert np.corrcoef(reward(model, unseen).sum(1), returns(unseen))[0, 1] > 0.8


@pytest.mark.parametrize("setting", ["learning_rate", "gradient_steps", "buffer_iterations"])
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        make(**{setting: 0})
