"""The reward model: its loss and gradient by hand, what it remembers, what must not matter, and what clips teach it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from teachers import RATIONAL

from agents.reward_model import RewardModel
from pbrl.ledger import Ledger
from pbrl.threads import workers
from pbrl.types import Clips, Pairs, Trajectories
from tests.agents.toy import (
    ACT,
    OBS,
    STEPS,
    TRAJECTORIES,
    after_the_end,
    behaviour,
    clips_of,
    pairs_of,
    preferences,
    shown,
)
from tests.fake_simulator import POLICY
from tests.toy_task import TARGET

Q = np.linspace(0.0, 1.0, TRAJECTORIES // 2)
LENGTHS = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]
SETTINGS = {
    "members": 1,
    "passes": None,
    "stop_at_accuracy": None,
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


def loss_by_hand(weights, collected, pairs, q, output):
    r = reward_by_hand(weights, collected.observations[:, :-1], collected.actions, output)
    first, second = (
        np.array([r[row, begin:end].sum() for row, begin, end in shown(collected, clips, pairs.steps)])
        for clips in (pairs.first, pairs.second)
    )
    sigmoid = 1 / (1 + np.exp(-(second - first)))
    return np.mean(-(q * np.log(sigmoid) + (1 - q) * np.log(1 - sigmoid)))


@pytest.mark.parametrize("asked", [pairs_of, lambda collected: clips_of(collected, 7)], ids=["whole", "clips"])
@pytest.mark.parametrize("output", ["linear", "tanh"])
def test_loss_and_gradient_by_hand(rng, output, asked):
    collected = behaviour(lengths=LENGTHS)
    pairs = asked(collected)
    model = make(gradient_steps=1, max_gradient_norm=1e9, output_gain=0.1, output=output)
    weights = weights_of(model).astype(np.float64)
    model.remember(collected, pairs, preferences(Q))
    metrics = fit(model)
    assert metrics["reward_loss"] == pytest.approx(loss_by_hand(weights, collected, pairs, Q, output), rel=1e-5)
    gradient = np.concatenate([each.grad.numpy().ravel() for each in model.weights])
    assert metrics["reward_gradient_norm"] == pytest.approx(np.linalg.norm(gradient), rel=1e-5)
    for _ in range(5):
        u = rng.standard_normal(weights.size)
        up, down = (loss_by_hand(weights + h * u, collected, pairs, Q, output) for h in (1e-6, -1e-6))
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
        model.remember(behaviour(), pairs_of(behaviour()), preferences(Q))
    assert fit(one) == pytest.approx(fit(two), rel=1e-3)


def test_initial_weights_are_orthogonal():
    first, *_, output = [weights for weights in make(output_gain=0.3).weights if weights.ndim == 2]
    torch.testing.assert_close(first.T @ first, 2 * torch.eye(OBS + ACT), atol=1e-5, rtol=0)
    assert output.norm().item() == pytest.approx(0.3)


def test_skipped_pairs_and_steps_after_the_end_have_no_influence():
    collected, answered = behaviour(lengths=LENGTHS), Q < 0.5
    one, two = make(), make()
    one.remember(collected, pairs_of(collected), preferences(Q, answered))
    other = preferences(np.where(answered, Q, 0.123), answered)
    two.remember(after_the_end(collected, np.nan), pairs_of(collected), other)
    assert fit(one) == fit(two)
    np.testing.assert_array_equal(weights_of(one), weights_of(two))


def test_nothing_is_learnt_from_nothing():
    model = make()
    model.remember(behaviour(), pairs_of(behaviour()), preferences(Q, np.zeros(len(Q), bool)))
    before = weights_of(model)
    assert fit(model) == {}
    np.testing.assert_array_equal(weights_of(model), before)


def test_pairs_of_the_last_iterations_are_drawn_uniformly_without_repetition():
    model = make(gradient_steps=1, batch_pairs=6)
    for seed in range(5):
        model.remember(behaviour(seed), pairs_of(behaviour(seed)), preferences(np.full(len(Q), seed / 4)))
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
    model.remember(behaviour(0), pairs_of(behaviour(0)), preferences(Q))
    fit(model)
    state = model.state_dict()
    again.load_state_dict(state)
    again.rng.bit_generator.state = model.rng.bit_generator.state
    for each in (model, again):
        each.remember(behaviour(1), pairs_of(behaviour(1)), preferences(Q))
        fit(each)
    np.testing.assert_array_equal(weights_of(model), weights_of(again))


def test_learns_the_teachers_order():
    """From pairs about closeness to a target, it orders trajectories that it has never seen."""
    model = make(hidden=[16, 16], output_gain=0.01, buffer_iterations=10)

    def returns(collected):
        return -((collected.actions - TARGET) ** 2).sum((1, 2))

    for seed in range(10):
        collected = behaviour(seed, n=64)
        first, second = returns(collected).reshape(2, -1)
        model.remember(collected, pairs_of(collected), preferences(1 / (1 + np.exp(-(second - first)))))
        fit(model)
    unseen = behaviour(99, n=64)
    assert np.corrcoef(reward(model, unseen).sum(1), returns(unseen))[0, 1] > 0.8


# Clips teach what whole trajectories do not


class Level:
    """A task whose reward is a linear function of the observation. All trajectories have nearly the same return."""

    direction = np.array([1.0, -2.0, 0.5])

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, **how):
        del policy, parameters, how
        n = len(assignment)
        rng = np.random.default_rng([iteration, first_trajectory])
        obs = rng.standard_normal((n, STEPS + 1, OBS))
        along = obs[:, :-1] @ self.direction / (self.direction @ self.direction)
        excess = along.mean(axis=1) + 1e-4 * rng.standard_normal(n)
        obs[:, :-1] -= excess[:, None, None] * self.direction
        number = first_trajectory + np.arange(n)
        return Trajectories(
            policy=np.array(assignment),
            lengths=np.full(n, STEPS),
            diverged=np.zeros(n, bool),
            start=np.zeros((n, 3), np.int64),
            number=number,
            observations=obs.astype(np.float32),
            actions=rng.standard_normal((n, STEPS, ACT), np.float32),
            task_rewards=obs[:, :-1] @ self.direction,
        )


def taught(steps):
    """A reward model after six iterations of the same pairs of trajectories, asked as clips or as a whole (None)."""
    rng, model = np.random.default_rng(0), make(hidden=[16], output_gain=0.01, learning_rate=1e-2, buffer_iterations=10)
    teacher = RATIONAL(tau=1.0, rng=np.random.default_rng(1))
    ledger = Ledger(simulator=Level(), oracle=teacher, trajectories_per_iteration=32, pairs_per_iteration=64)
    for iteration in range(6):
        budget = ledger.open_iteration(iteration)
        how = {"mean_actions": False, "common_start": False, "keep": ("observations", "actions")}
        collected = budget.collect(POLICY, np.zeros((1, 1), np.float32), np.zeros(32, np.int64), **how)
        first, second = collected.number[rng.integers(32, size=(2, 64))]
        begin = rng.integers(STEPS - 4, size=(2, 64))
        pairs = Pairs.whole(first, second)
        if steps is not None:
            one, other = (Clips(trajectory=each, step=at) for each, at in zip((first, second), begin, strict=True))
            pairs = Pairs(first=one, second=other, steps=steps)
        model.remember(collected, pairs, budget.compare(pairs))
        fit(model)
    return model


def surprise(model):
    """Mean cross-entropy of the teacher's answers about clips of 5 steps that the model has not seen."""
    arguments = {"iteration": 99, "first_trajectory": 0}
    unseen = Level().collect(None, None, np.zeros(64, np.int64), **arguments)
    learnt, true = (r.reshape(64, -1, 5).sum(2) for r in (reward(model, unseen), unseen.task_rewards))
    learnt, true = (sums[32:] - sums[:32] for sums in (learnt, true))
    q = 1 / (1 + np.exp(-true))
    best = np.mean(-q * np.log(q) - (1 - q) * np.log1p(-q))
    found = np.mean(np.logaddexp(0, learnt) - q * learnt)
    return found, best


def test_clips_teach_a_reward_that_whole_trajectories_hide():
    from_clips, best = surprise(taught(5))
    from_whole, _ = surprise(taught(None))
    assert best < 0.3
    assert from_clips < best + 0.05
    assert from_whole == pytest.approx(np.log(2), abs=0.02)  # as good as a coin


@pytest.mark.parametrize("setting", ["learning_rate", "gradient_steps", "buffer_iterations"])
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        make(**{setting: 0})
