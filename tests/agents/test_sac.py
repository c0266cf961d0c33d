"""SAC: targets, losses and temperature by hand, the buffer of steps, and that it learns a task known in closed form."""

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import agents.replay
from agents.replay import Batch, Replay
from agents.sac import SAC, _step, random_actions
from pbrl.policy import SquashedGaussianPolicy
from pbrl.run import checkpoint
from tests.agents.toy import ACT, OBS, STEPS, StubBudget, behaviour

BOUNDS = (np.array([-1.0, -3.0]), np.array([1.0, 5.0]))  # the second action has centre 1 and scale 4
SETTINGS = {
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "critic_hidden": [16, 16],
    "critic_hidden_gain": 1.0,
    "critic_output_gain": 1.0,
    "initial_temperature": 0.1,
    "temperature_learning_rate": 1e-4,
    "gamma": 0.9,
    "target_tau": 0.25,
    "target_every": 2,
    "batch_size": 64,
    "buffer_trajectories": 5,
    "random_trajectories": 2,
    "updates_per_step": 0.25,
}


def make(seed=0, **changes):
    policy = SquashedGaussianPolicy(
        OBS,
        ACT,
        hidden=[16, 16],
        activation="relu",
        hidden_gain=1.0,
        output_gain=1.0,
        log_std_bounds=(-5.0, 2.0),
        action_bounds=BOUNDS,
    )
    return SAC(policy=policy, rng=np.random.default_rng(seed), **(SETTINGS | changes))


def batch_of(n=64, seed=0):
    rng = np.random.default_rng(seed)
    arrays = (
        rng.standard_normal((n, OBS)),
        rng.uniform(*BOUNDS, size=(n, ACT)),
        rng.standard_normal(n),
        rng.standard_normal((n, OBS)),
        rng.random(n) < 0.7,
    )
    return Batch(*(torch.from_numpy(each.astype(np.float32)) for each in arrays))


# By hand: double precision, plain NumPy


def network(parameters, x, outputs):
    parameters = np.asarray(parameters, np.float64)
    for width in (16, 16, outputs):
        inputs = x.shape[1]
        weights, parameters = parameters[: inputs * width].reshape(inputs, width), parameters[inputs * width :]
        x, parameters = x @ weights + parameters[:width], parameters[width:]
        x = np.maximum(x, 0) if len(parameters) else x
    return x


def act(theta, obs, noise):
    """The action, and the log-density of the action in units of the bounds."""
    outputs = network(theta, obs, 2 * ACT)
    mean, log_std = outputs[:, :ACT], -5 + 3.5 * (np.tanh(outputs[:, ACT:]) + 1)
    u = np.tanh(mean + np.exp(log_std) * noise)
    gaussian = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    low, high = BOUNDS
    return (low + high) / 2 + (high - low) / 2 * u, (gaussian - np.log(1 - u**2)).sum(1)


def Q(parameters, obs, actions):  # noqa: N802
    low, high = BOUNDS
    units = (actions - (low + high) / 2) / ((high - low) / 2)
    return network(parameters, np.concatenate([obs, units], axis=1), 1)[:, 0]


def test_losses_temperature_and_targets_by_hand():
    sac, batch = make(), batch_of()
    obs, actions, rewards, next_obs, goes_on = (each.numpy().astype(np.float64) for each in batch)
    theta, critics = sac.parameters, [each.detach().numpy().copy() for each in sac.Q]
    targets = [each.numpy().copy() for each in sac.Q_target]
    noise = np.random.default_rng(0)
    noise.bit_generator.state = sac.rng.bit_generator.state
    first, second = (noise.standard_normal((64, ACT), np.float32) for _ in range(2))

    metrics = sac.update(batch)

    next_actions, next_log_pi = act(theta, next_obs, first)
    value = np.minimum(*(Q(each, next_obs, next_actions) for each in targets)) - 0.1 * next_log_pi
    y = rewards + 0.9 * goes_on * value
    critic_loss = sum(((Q(each, obs, actions) - y) ** 2).mean() for each in critics)
    assert metrics["critic_loss"] == pytest.approx(critic_loss, rel=1e-4)

    moved = [each.detach().numpy() for each in sac.Q]  # the actor's loss is that of the critics after their step
    own_actions, log_pi = act(theta, obs, second)
    actor_loss = (0.1 * log_pi - np.minimum(*(Q(each, obs, own_actions) for each in moved))).mean()
    assert metrics["actor_loss"] == pytest.approx(actor_loss, rel=1e-4)

    assert metrics["entropy"] == pytest.approx(-log_pi.mean(), rel=1e-4)
    # d/d log alpha of alpha (entropy + |A|): Adam's first step is the learning rate against its sign.
    sign = np.sign(-log_pi.mean() + ACT)
    assert math.log(metrics["temperature"]) == pytest.approx(math.log(0.1) - 1e-4 * sign, abs=1e-6)

    for slow, before, fast in zip(sac.Q_target, targets, moved, strict=True):
        np.testing.assert_allclose(slow, before + 0.25 * (fast - before), atol=1e-6)


def test_gradients_by_finite_differences(rng):
    sac, batch = make(actor_learning_rate=1e-12, critic_learning_rate=1e-12), batch_of()
    obs, actions, rewards, next_obs, goes_on = (each.numpy().astype(np.float64) for each in batch)
    theta, critics = sac.parameters.astype(np.float64), [each.detach().numpy().astype(np.float64) for each in sac.Q]
    noise = np.random.default_rng(0)
    noise.bit_generator.state = sac.rng.bit_generator.state
    first, second = (noise.standard_normal((64, ACT), np.float32) for _ in range(2))
    sac.update(batch)
    next_actions, next_log_pi = act(theta, next_obs, first)
    value = np.minimum(*(Q(each, next_obs, next_actions) for each in critics)) - 0.1 * next_log_pi
    y = rewards + 0.9 * goes_on * value

    def actor_loss(theta):
        own_actions, log_pi = act(theta, obs, second)
        return (0.1 * log_pi - np.minimum(*(Q(each, obs, own_actions) for each in critics))).mean()

    def critic_loss(parameters):
        return ((Q(parameters, obs, actions) - y) ** 2).mean()

    for loss, at, gradient in (
        (actor_loss, theta, sac.theta.grad),
        (critic_loss, critics[0], sac.Q[0].grad),
        (critic_loss, critics[1], sac.Q[1].grad),
    ):
        for _ in range(3):
            u = rng.standard_normal(len(at))
            slope = (loss(at + 1e-6 * u) - loss(at - 1e-6 * u)) / 2e-6
            assert gradient.numpy() @ u == pytest.approx(slope, rel=2e-2, abs=1e-3)


def test_slow_copies_follow_every_other_update():
    sac, batch, copies = make(), batch_of(), []
    for _ in range(4):
        sac.update(batch)
        copies.append(sac.Q_target[0].clone())
    assert torch.equal(copies[0], copies[1])
    assert not torch.equal(copies[1], copies[2])
    assert torch.equal(copies[2], copies[3])


def test_new_critics_leave_actor_and_temperature_alone():
    sac, batch = make(), batch_of()
    sac.update(batch)
    theta, alpha, critics = sac.parameters, sac.alpha, [each.detach().clone() for each in sac.Q]
    sac.reset_critics()
    assert (sac.parameters == theta).all()
    assert sac.alpha == alpha
    assert all((one != two).any() for one, two in zip(sac.Q, critics, strict=True))
    assert all(torch.equal(slow, fast.detach()) for slow, fast in zip(sac.Q_target, sac.Q, strict=True))
    assert not any(adam.state for adam in sac.critic_adams)
    before = [each.detach().clone() for each in sac.Q]
    sac.update(batch)  # the new optimiser has the new critics
    assert all((one != two).any() for one, two in zip(sac.Q, before, strict=True))


def test_moments_of_weights_that_get_no_gradient_become_zero_in_place_of_slow_tiny_numbers():
    weights = torch.ones(3, requires_grad=True)
    adam = torch.optim.Adam([weights], lr=1e-3, fused=True)
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pool.submit(_step, adam, weights, torch.ones(3)).result()
        for _ in range(1000):  # 0.9^1000 is 1e-46, below the least float32 of full precision, 1e-38
            pool.submit(_step, adam, weights, torch.tensor([0.0, 0.0, 1e-6])).result()
        assert pool.submit(lambda: float(torch.tensor(1e-30) * 1e-9)).result() > 0  # but for Adam, they are there
    faded, _, kept = adam.state[weights]["exp_avg"].tolist()
    assert faded == 0
    assert kept == pytest.approx(1e-6, rel=1e-4)


def test_saved_and_loaded_it_goes_on_the_same():
    sac, again, batch = make(), make(seed=4), batch_of()
    for _ in range(3):
        sac.update(batch)
    again.load_state_dict(sac.state_dict())
    again.rng.bit_generator.state = sac.rng.bit_generator.state
    for _ in range(2):
        assert sac.update(batch) == again.update(batch)
    np.testing.assert_array_equal(sac.parameters, again.parameters)


def test_the_same_bits_on_any_number_of_threads():
    alone, together, batch = make(), make(), batch_of()
    with ThreadPoolExecutor(3, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for _ in range(3):
            assert alone.update(batch) == together.update(batch, pool.map)
    np.testing.assert_array_equal(alone.parameters, together.parameters)
    assert all(torch.equal(one, other) for one, other in zip(alone.Q, together.Q, strict=True))


def test_it_learns_where_the_reward_is():
    """The reward is the closeness of the action, in units of its bounds, to a target: one step is all there is."""
    sac = make(actor_learning_rate=1e-2, critic_learning_rate=1e-2, gamma=0.0, initial_temperature=0.01)
    rng, target = np.random.default_rng(1), torch.tensor([0.5, -0.3])
    for _ in range(300):
        obs = torch.from_numpy(rng.standard_normal((64, OBS), np.float32))
        units = torch.from_numpy(rng.uniform(-1, 1, (64, ACT)).astype(np.float32))
        actions = units * torch.tensor([1.0, 4.0]) + torch.tensor([0.0, 1.0])
        sac.update(Batch(obs, actions, -((units - target) ** 2).sum(1), obs, torch.ones(64)))
    mean = sac.policy.mean_actions(sac.parameters, rng.standard_normal((32, OBS), np.float32))
    units = (mean - [0.0, 1.0]) / [1.0, 4.0]
    np.testing.assert_allclose(units.mean(0), [0.5, -0.3], atol=0.15)


@pytest.mark.parametrize(
    "setting", ["actor_learning_rate", "initial_temperature", "target_every", "batch_size", "updates_per_step"]
)
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        make(**{setting: 0})


# The buffer


def marked(first, n=1, lengths=None):
    """Trajectories whose rewards tell where they are from: number + step / 100."""
    collected = behaviour(first, n=n, first=first, lengths=lengths)
    return collected, (collected.number[:, None] + np.arange(STEPS) / 100).astype(np.float32)


def test_a_batch_holds_steps_as_they_were():
    replay = Replay(5)
    collected, rewards = marked(0, n=5, lengths=[STEPS, 4, 0, STEPS, 1])
    replay.add(collected, rewards)
    batch = replay.sample(2000, np.random.default_rng(0))
    seen = set()
    for obs, actions, reward, next_obs, goes_on in zip(*batch, strict=True):
        row, step = divmod(round(float(reward) * 100), 100)
        seen.add((row, step))
        np.testing.assert_array_equal(obs, collected.observations[row, step])
        np.testing.assert_array_equal(actions, collected.actions[row, step])
        np.testing.assert_array_equal(next_obs, collected.observations[row, step + 1])
        assert goes_on == (0 if (row, step) in {(1, 3), (4, 0)} else 1)  # time limits go on
    assert seen == {(row, step) for row, end in enumerate(collected.lengths) for step in range(end)}


@given(st.integers(1, 5), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_the_last_trajectories_are_kept_and_relabelling_touches_every_step_also_after_it_has_wrapped(capacity, added):
    replay, next_number = Replay(capacity), 0
    for n in added:
        replay.add(*marked(next_number, n))
        next_number += n
    kept = [*range(max(0, next_number - capacity), next_number)]
    assert sorted(replay.rewards[: len(replay), 0].astype(int).tolist()) == kept
    np.testing.assert_array_equal(replay.last(len(kept))[:, 0], kept)
    everything = replay.behaviour()
    for row, number in enumerate(replay.rewards[: len(replay), 0].astype(int)):
        expected = np.concatenate([marked(first, n)[0].observations for first, n in where(added)])[number]
        np.testing.assert_array_equal(everything.observations[row], expected)
    replay.relabel(np.full((len(kept), STEPS), -7, np.float32))
    assert {*replay.sample(500, np.random.default_rng(0)).rewards.tolist()} == {-7.0}
    assert (replay.rewards[: len(replay)] == -7).all()


def where(added):
    """First number and size of each collection."""
    return [(sum(added[:place]), n) for place, n in enumerate(added)]


def test_a_saved_buffer_goes_on_the_same_and_each_step_is_stored_once(tmp_path, monkeypatch):
    monkeypatch.setattr(agents.replay, "BLOCK", 2)
    replay, again = Replay(5), Replay(5)
    stored = []
    for iteration, first in enumerate((0, 3, 6)):  # the last wraps
        replay.add(*marked(first, n=3))
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "fixed").glob("*")}
        checkpoint.save(tmp_path, iteration, {"replay": replay.state_dict()})
        now = {path: path.stat().st_mtime_ns for path in (tmp_path / "fixed").glob("*")}
        stored.append(len([path for path in now if before.get(path) != now[path]]))
    # Rows 0, 1 | 2; then rows 3, 4, 0, in all three blocks 0, 1 | 2, 3 | 4; then rows 1, 2, 3, in two of them.
    assert stored == [2, 3, 2]
    again.load_state_dict(checkpoint.load(tmp_path)[1]["replay"])
    for each in (replay, again):
        each.add(*marked(9))
    one, two = (each.sample(50, np.random.default_rng(0)) for each in (replay, again))
    assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


# Collecting and learning


def test_the_first_trajectories_are_random_and_updates_follow_the_collected_steps(monkeypatch):
    sac, updates = make(), []
    monkeypatch.setattr(sac, "update", lambda batch, _: updates.append(len(batch.obs)) or {"critic_loss": 1.0})
    assert sac.learn(100) == {}  # nothing to learn from
    budget = StubBudget()
    for _ in range(3):
        collected = sac.collect(budget, 1)
        sac.replay.add(collected, np.zeros((1, STEPS), np.float32))
        sac.learn(STEPS)
    assert updates == [64] * 3 * 5  # 20 steps, a quarter of an update each
    used = [parameters[0] for parameters, _, _ in budget.collections]
    assert [np.array_equal(each, random_actions(sac.policy)) for each in used] == [True, True, False]
    np.testing.assert_array_equal(used[2], sac.parameters)


def test_random_actions_are_close_to_uniform_within_the_bounds():
    sac, rng = make(), np.random.default_rng(0)
    theta = torch.from_numpy(random_actions(sac.policy))
    obs, noise = (torch.from_numpy(rng.standard_normal((20_000, n), np.float32)) for n in (OBS, ACT))
    units = (sac.policy.sample(theta, obs, noise)[0].numpy() - [0.0, 1.0]) / [1.0, 4.0]
    shares = np.histogram(units, bins=10, range=(-1, 1))[0] / units.size
    assert shares.min() > 0.06
    assert shares.max() < 0.125
