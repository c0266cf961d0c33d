"""Collections: exact, the same for any number of threads, and honest about what went wrong."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mujoco
import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal

from pbrl.policy import GaussianPolicy, LowRank, Policy, SquashedGaussianPolicy
from pbrl.simulation import native, tasks, worlds
from pbrl.simulation.packing import pack
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.worlds import flatten
from pbrl.types import Behaviour, Float32, Trajectories

MakePolicy = Callable[..., GaussianPolicy]
BOTH = ("observations", "actions")


def two_policies(policy: Policy) -> Float32:
    rng = np.random.default_rng(5)
    first = policy.initial(rng)
    return np.stack([first, first + 0.3 * rng.standard_normal(policy.size).astype(np.float32)])


def assert_same(one: Trajectories, other: Trajectories) -> None:
    for field in ("policy", "lengths", "diverged", "start", "observations", "actions", "task_rewards"):
        assert_array_equal(getattr(one, field), getattr(other, field), err_msg=field)


@pytest.mark.parametrize(
    "task",
    [
        "cheetah_run",
        "cartpole_swingup",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("walker_walk", "swimmer_swimmer6", "quadruped_run")),
    ],
)
def test_the_same_bits_for_any_number_of_threads(task: str, make_policy: MakePolicy) -> None:
    collected = []
    for threads in (1, 2, 4):
        simulator = Simulator(task, seed=11, threads=threads, steps=40)
        policy = make_policy(simulator)
        arms = np.repeat([0, 1], 10)
        collected.append(simulator.collect(policy, two_policies(policy), arms, iteration=2, keep=BOTH))
    assert_same(collected[0], collected[1])
    assert_same(collected[0], collected[2])
    assert collected[0].observations is not None
    assert len(np.unique(collected[0].observations[:, -1], axis=0)) == 20  # no two trajectories are the same


def six_of_rank_1(policy: Policy) -> tuple[LowRank, Float32]:
    """Policies whose last layer and log-std change, and their parameters."""
    rng, change = np.random.default_rng(6), np.zeros((6, policy.size), np.float32)
    weights = rng.standard_normal((6, policy.sizes[-2], 1)) * rng.standard_normal((6, 1, policy.act_size))
    change[:, -weights[0].size - 2 * policy.act_size : -2 * policy.act_size] = 0.2 * weights.reshape(6, -1)
    change[:, -policy.act_size :] = rng.standard_normal((6, policy.act_size))
    base = policy.initial(rng)
    return LowRank.around(policy, base, change, 1), base + change


@pytest.mark.parametrize("task", ["cheetah_run", "cartpole_swingup"])
def test_policies_of_low_rank_have_the_same_bits_for_any_number_of_threads(task: str, make_policy: MakePolicy) -> None:
    collected, arms = [], np.array([5, 1, 0, 2, 3, 4, 4])
    for threads in (1, 3):
        simulator = Simulator(task, seed=11, threads=threads, steps=20)
        policy = make_policy(simulator)
        policies, parameters = six_of_rank_1(policy)
        collected.append(simulator.collect(policy, policies, arms, iteration=2, keep=BOTH))
    assert_same(*collected)
    apart = simulator.collect(policy, parameters, arms, iteration=2, keep=BOTH)
    assert collected[0].actions is not None
    assert apart.actions is not None
    np.testing.assert_allclose(collected[0].actions[:, :3], apart.actions[:, :3], rtol=1e-3, atol=1e-3)


def test_policies_of_low_rank_that_do_not_fit_are_refused(make_policy: MakePolicy) -> None:
    simulator = Simulator("cheetah_run", seed=0, steps=2)
    policy = make_policy(simulator)
    fits, _ = six_of_rank_1(policy)
    first, *others = fits.layers
    for wrong in (
        replace(fits, base=fits.base[:-1]),
        replace(fits, log_std=fits.log_std[:, :-1]),
        replace(fits, layers=others),
        replace(fits, layers=[first._replace(U=first.U[:, 1:]), *others]),
        replace(fits, layers=[first._replace(bias=first.bias[1:]), *others]),
    ):
        with pytest.raises(ValueError, match=r"must have shapes .* not "):
            simulator.collect(policy, wrong, np.zeros(2, np.int64), iteration=0)
    with pytest.raises(ValueError, match="NaN or infinity"):
        simulator.collect(policy, replace(fits, base=fits.base * np.nan), np.zeros(2, np.int64), iteration=0)
    with pytest.raises(ValueError, match=r"assignment must lie in 0\.\.5"):
        simulator.collect(policy, fits, np.array([6]), iteration=0)


def test_the_same_seed_twice_and_another_seed(make_policy: MakePolicy) -> None:
    runs = [Simulator("hopper_hop", seed=seed, steps=30) for seed in (1, 1, 2)]
    policy = make_policy(runs[0])
    arms = np.zeros(6, np.int64)
    first, same, other = (run.collect(policy, two_policies(policy), arms, iteration=0, keep=BOTH) for run in runs)
    assert_same(first, same)
    assert first.observations is not None
    assert other.observations is not None
    assert (first.observations[:, 0] != other.observations[:, 0]).any(axis=1).all()
    next_iteration = runs[0].collect(policy, two_policies(policy), arms, iteration=1, keep=BOTH)
    assert next_iteration.observations is not None
    assert (first.observations[:, 0] != next_iteration.observations[:, 0]).any(axis=1).all()


def test_a_row_alone_equals_the_row_in_a_batch(make_policy: MakePolicy) -> None:
    simulator = Simulator("walker_run", seed=3, steps=60)
    policy = make_policy(simulator)
    parameters, arms = two_policies(policy), np.array([1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0])
    unused = np.full((1, policy.size), 7.0, np.float32)  # a policy that nobody acts by changes nothing
    batch = simulator.collect(policy, np.concatenate([unused, parameters]), arms + 1, iteration=4, keep=BOTH)
    assert_array_equal(batch.policy, arms + 1)
    for i in (0, 1, 7, 10):
        alone = simulator.collect(
            policy, parameters[arms[i]], np.zeros(1, np.int64), iteration=4, first_trajectory=i, keep=BOTH
        )
        assert_array_equal(alone.task_rewards[0], batch.task_rewards[i])
        assert alone.observations is not None
        assert batch.observations is not None
        assert_array_equal(alone.observations[0], batch.observations[i])


def test_collected_actions_are_the_policys(make_policy: MakePolicy) -> None:
    """mean + std * noise, with noise of variance 1 that is independent between trajectories and steps."""
    simulator = Simulator("cheetah_run", seed=0, steps=200)
    policy = make_policy(simulator, initial_log_std=-1.0)
    parameters = two_policies(policy)
    arms = np.repeat([0, 1], 8)
    sampled = simulator.collect(policy, parameters, arms, iteration=0, keep=BOTH)
    assert sampled.observations is not None
    assert sampled.actions is not None
    for arm in (0, 1):
        theta = torch.from_numpy(parameters[arm])
        mean = policy.mean(theta, torch.from_numpy(sampled.observations[arms == arm, :-1])).numpy()
        noise = (sampled.actions[arms == arm] - mean) / np.exp(parameters[arm, -policy.act_size :])
        assert noise.mean() == pytest.approx(0, abs=0.05)
        assert noise.std() == pytest.approx(1, abs=0.05)
        assert abs(np.corrcoef(noise.reshape(8, -1)) - np.eye(8)).max() < 0.15
        assert np.corrcoef(noise[:, 1:].ravel(), noise[:, :-1].ravel())[0, 1] == pytest.approx(0, abs=0.06)
    calm = simulator.collect(policy, parameters, arms, iteration=0, mean_actions=True, keep=BOTH)
    assert calm.observations is not None
    mean = policy.mean(torch.from_numpy(parameters[1]), torch.from_numpy(calm.observations[arms == 1, :-1])).numpy()
    np.testing.assert_allclose(calm.actions[arms == 1], mean, atol=1e-4)  # type: ignore[index]


def test_common_start_shares_states_but_not_noise(make_policy: MakePolicy) -> None:
    simulator = Simulator("walker_walk", seed=0, steps=5)
    policy = make_policy(simulator)
    theta = two_policies(policy)[:1].repeat(2, axis=0)  # the same policy in both arms: only noise can differ
    arms = np.array([0, 1, 1, 0, 0, 1])
    shared = simulator.collect(policy, theta, arms, iteration=0, common_start=True, keep=BOTH)
    assert shared.observations is not None
    assert_array_equal(shared.observations[arms == 0, 0], shared.observations[arms == 1, 0])
    assert (shared.observations[arms == 0, 1] != shared.observations[arms == 1, 1]).any(axis=1).all()
    own = simulator.collect(policy, theta, arms, iteration=0, keep=BOTH)
    assert own.observations is not None
    assert len(np.unique(own.observations[:, 0], axis=0)) == 6


@pytest.mark.parametrize(
    "task", ["walker_walk", "cheetah_run", "hopper_stand", "quadruped_walk", "fish_swim", "humanoid_run"]
)
@pytest.mark.parametrize("mean_actions", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled_loops_equal_dm_controls_environments(task: str, mean_actions: bool, make_policy: MakePolicy) -> None:
    fast, plain = (Simulator(task, seed=1, steps=100, native=native) for native in (True, False))
    policy = make_policy(fast)
    arms = np.array([0, 1, 0])
    settings: dict[str, Any] = {"iteration": 0, "mean_actions": mean_actions, "keep": BOTH}
    ours = fast.collect(policy, two_policies(policy), arms, **settings)
    reference = plain.collect(policy, two_policies(policy), arms, **settings)
    assert_array_equal(ours.actions, reference.actions)
    assert_array_equal(ours.observations, reference.observations)
    np.testing.assert_allclose(ours.task_rewards, reference.task_rewards, rtol=0, atol=1e-9)


@pytest.mark.parametrize("task", ["cheetah_run", "swimmer_swimmer15", "quadruped_walk"])
def test_replay_is_bit_for_bit(task: str, make_policy: MakePolicy) -> None:
    simulator = Simulator(task, seed=9, steps=80)
    policy = make_policy(simulator, initial_log_std=0.5)  # many actions beyond the bounds
    collected = simulator.collect(
        policy, two_policies(policy), np.array([0, 1, 1, 0]), iteration=6, common_start=True, keep=BOTH
    )
    assert collected.observations is not None
    task_object = tasks.load(task).task
    environment = simulator.environment()
    for row, where in ((1, None), (3, environment), (1, environment)):
        seen = [flatten(task_object.get_observation(physics)) for physics in simulator.replay(collected, row, where)]
        assert_array_equal(np.array(seen, np.float32), collected.observations[row])


def test_fields_not_named_in_keep_are_none(make_policy: MakePolicy) -> None:
    simulator = Simulator("hopper_stand", seed=0, steps=3)
    policy = make_policy(simulator)
    bare = simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0)
    assert bare.observations is None
    assert bare.actions is None
    assert bare.task_rewards.shape == (1, 3)
    with pytest.raises(ValueError, match="did not keep its actions"):
        next(simulator.replay(bare, 0))


def test_what_agents_receive_has_no_rewards_in_it(make_policy: MakePolicy) -> None:
    simulator = Simulator("hopper_stand", seed=0, steps=3)
    policy = make_policy(simulator)
    collected = simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0, keep=BOTH)
    behaviour = collected.without_rewards(np.array([7]), ["actions"])
    assert behaviour.number.tolist() == [7]
    assert behaviour.observations is None
    assert type(behaviour) is Behaviour
    assert not any("reward" in name or "return" in name for name in dir(behaviour))


@pytest.mark.parametrize("native", [True, False])
def test_diverged_physics_is_contained_and_reported(
    native: bool, make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A huge force in two of eight worlds: they lose their reward from there on, the others notice nothing."""
    simulator = Simulator("walker_walk", seed=0, threads=2, steps=50, native=native)
    policy = make_policy(simulator)
    arms = np.zeros(8, np.int64)
    healthy = simulator.collect(policy, two_policies(policy), arms, iteration=0, keep=BOTH)
    episodes = []

    def sabotage(physics: Any, after: Callable[[], None]) -> None:
        after()
        episodes.append(physics)
        if len(episodes) in (2, 5):
            physics.data.qfrc_applied[0] = 1e20

    if native:
        begin = worlds.begin_episode
        monkeypatch.setattr(worlds, "begin_episode", lambda e, p, s: sabotage(p, lambda: begin(e, p, s)))
    else:
        for world in simulator._workers:
            for environment in world.environments:  # type: ignore[attr-defined]
                reset = environment.reset
                monkeypatch.setattr(
                    environment, "reset", lambda e=environment, r=reset: sabotage(e.physics, lambda: r())
                )
    broken = simulator.collect(policy, two_policies(policy), arms, iteration=0, keep=BOTH)
    monkeypatch.undo()
    assert broken.diverged.sum() == 2
    assert (broken.lengths[broken.diverged] < 50).all()
    for row in np.flatnonzero(broken.diverged):
        assert not broken.task_rewards[row, broken.lengths[row] :].any()
        assert np.isfinite(broken.observations[row]).all()  # type: ignore[index]
    assert_array_equal(broken.task_rewards[~broken.diverged], healthy.task_rewards[~broken.diverged])
    assert "diverged in 2 of 8 trajectories of iteration 0" in caplog.text
    after = simulator.collect(policy, two_policies(policy), arms, iteration=0, keep=BOTH)
    assert_same(after, healthy)  # and nothing of it is left behind


def test_divergence_in_the_middle_of_an_episode(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was earned before stays earned."""
    simulator = Simulator("cheetah_run", seed=0, threads=1, steps=60)
    policy = make_policy(simulator)
    healthy = simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0)
    begin = worlds.begin_episode

    def drift(environment: Any, physics: Any, stream: Any) -> None:
        begin(environment, physics, stream)
        physics.data.qvel[0] = 0
        physics.data.qfrc_applied[0] = 1e9  # accelerates beyond all bounds within some steps

    monkeypatch.setattr(worlds, "begin_episode", drift)
    broken = simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0)
    end = broken.lengths[0]
    assert broken.diverged[0]
    assert 0 < end < 60
    assert broken.task_rewards[0, :end].any()
    assert not broken.task_rewards[0, end:].any()
    assert healthy.lengths[0] == 60


def test_a_task_that_ends_by_itself_stops_there(make_policy: MakePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    simulator = Simulator("cartpole_balance", seed=0, threads=1, steps=20)
    policy = make_policy(simulator)
    simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0)
    [environment] = simulator._workers[0].environments  # type: ignore[attr-defined]
    monkeypatch.setattr(environment.task, "get_termination", lambda physics: 0.0 if physics.time() > 0.065 else None)
    ended = simulator.collect(policy, two_policies(policy), np.array([0]), iteration=0)
    assert ended.lengths[0] == 7  # control steps of 0.01 s
    assert not ended.diverged[0]
    assert ended.task_rewards[0, :7].all()
    assert not ended.task_rewards[0, 7:].any()


def test_physics_does_not_read_the_clock() -> None:
    """MuJoCo's timers take a tenth of the physics' time (docs/performance.md)."""

    def time_of_a_step() -> float:
        model = mujoco.MjModel.from_xml_string("<mujoco/>")
        data = mujoco.MjData(model)
        mujoco.mj_step(model, data)
        return float(data.timer[mujoco.mjtTimer.mjTIMER_STEP].duration)

    assert time_of_a_step() == 0
    native.time_physics(True)
    timed = time_of_a_step()
    native.time_physics(False)
    assert timed > 0
    assert time_of_a_step() == 0


def test_a_collection_is_freed_when_it_is_dropped(make_policy: MakePolicy) -> None:
    simulator = Simulator("hopper_hop", seed=0, steps=3)
    policy = make_policy(simulator)
    collected = simulator.collect(policy, two_policies(policy), np.repeat([0, 1], 4), iteration=0, keep=BOTH)
    references = [weakref.ref(array) for array in vars(collected).values()]
    assert all(reference() is not None for reference in references)
    del collected
    gc.collect()
    assert all(reference() is None for reference in references)


def test_what_is_returned_is_read_only(make_policy: MakePolicy) -> None:
    simulator = Simulator("hopper_hop", seed=0, steps=3)
    policy, arms = make_policy(simulator), np.zeros(2, np.int64)
    collected = simulator.collect(policy, two_policies(policy), arms, iteration=0, keep=BOTH)
    for field, array in vars(collected).items():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
        assert not array.flags.writeable, field
    arms[0] = 1  # the caller's own array is left alone
    assert collected.policy[0] == 0


def squashed(simulator: Simulator, activation: Any = "relu") -> SquashedGaussianPolicy:
    return SquashedGaussianPolicy(
        simulator.obs_size,
        simulator.act_size,
        hidden=(32, 32),
        activation=activation,
        hidden_gain=1.0,
        output_gain=1.0,
        log_std_bounds=(-5, 2),
        action_bounds=simulator.action_bounds,
    )


@pytest.mark.parametrize("task", ["walker_walk", "quadruped_walk"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("mean_actions", [False, True])
def test_squashed_policies_in_compiled_loops_and_in_dm_controls_environments(
    task: str, activation: str, mean_actions: bool
) -> None:
    fast, plain = (Simulator(task, seed=1, steps=60, native=native) for native in (True, False))
    policy, arms = squashed(fast, activation), np.array([0, 1, 0])
    parameters, settings = two_policies(policy), {"iteration": 0, "mean_actions": mean_actions, "keep": BOTH}
    ours = fast.collect(policy, parameters, arms, **settings)  # type: ignore[arg-type]
    reference = plain.collect(policy, parameters, arms, **settings)  # type: ignore[arg-type]
    assert_array_equal(ours.actions, reference.actions)
    assert_array_equal(ours.observations, reference.observations)
    np.testing.assert_allclose(ours.task_rewards, reference.task_rewards, rtol=0, atol=1e-9)
    low, high = fast.action_bounds
    assert ours.actions is not None
    assert (ours.actions >= low).all()
    assert (ours.actions <= high).all()


def test_collected_squashed_actions_are_the_policys() -> None:
    """Undone by atanh, they are mean + std * noise with noise of variance 1."""
    simulator = Simulator("quadruped_walk", seed=0, steps=200)
    policy = squashed(simulator)
    parameters = 0.3 * two_policies(policy)[:1]
    sampled = simulator.collect(policy, parameters, np.zeros(8, np.int64), iteration=0, keep=BOTH)
    assert sampled.observations is not None
    assert sampled.actions is not None
    theta, obs = torch.from_numpy(parameters[0]), torch.tensor(sampled.observations[:, :-1])
    mean, log_std = policy._mean_and_log_std(policy._outputs(theta, obs))
    x = np.arctanh((sampled.actions - policy.centre) / policy.scale)
    noise = (x - mean.numpy()) / np.exp(log_std.numpy())
    noise = noise[np.abs(x) < 4]  # beyond, single precision tells little
    assert noise.mean() == pytest.approx(0, abs=0.05)
    assert noise.std() == pytest.approx(1, abs=0.05)
    assert torch.isfinite(policy.log_probability(theta, obs, torch.tensor(sampled.actions))).all()


def test_bad_input_is_refused_by_name(make_policy: MakePolicy) -> None:
    simulator = Simulator("cheetah_run", seed=0, steps=3)
    policy = make_policy(simulator)
    parameters, one = two_policies(policy), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="threads must be at least 1, not 0"):
        Simulator("cheetah_run", seed=0, threads=0)
    with pytest.raises(ValueError, match="steps must be between 1 and 1000"):
        Simulator("cheetah_run", seed=0, steps=1001)
    with pytest.raises(ValueError, match="acrobot_swingup has no compiled observation and reward"):
        Simulator("acrobot_swingup", seed=0, native=True)
    broken = parameters.copy()
    broken[1, 7] = np.nan
    with pytest.raises(ValueError, match=r"policy \[1\] contain NaN"):
        simulator.collect(policy, broken, one, iteration=0)
    with pytest.raises(ValueError, match=r"must lie in 0..1, not 0..2"):
        simulator.collect(policy, parameters, np.array([0, 2]), iteration=0)
    with pytest.raises(ValueError, match="a policy for each trajectory"):
        simulator.collect(policy, parameters, np.zeros(0, np.int64), iteration=0)
    with pytest.raises(ValueError, match=r"shape \[K, "):
        simulator.collect(policy, parameters[:, 1:], one, iteration=0)
    with pytest.raises(ValueError, match=r"not \['rewards'\]"):
        simulator.collect(policy, parameters, one, iteration=0, keep=["rewards"])
    other = make_policy(Simulator("walker_walk", seed=0))
    with pytest.raises(ValueError, match="maps 24 observations to 6 actions, but cheetah_run has 17 and 6"):
        simulator.collect(other, parameters, one, iteration=0)


def test_arrays_of_episodes_are_checked_where_compiled_code_begins(make_policy: MakePolicy) -> None:
    simulator = Simulator("cheetah_run", seed=0, steps=5)
    policies = pack(policy := make_policy(simulator), two_policies(policy))
    of_walkers = pack(policy := make_policy(Simulator("walker_walk", seed=0)), two_policies(policy))
    some = worlds.NativeWorlds("cheetah_run", 3)
    some.reset([np.random.RandomState(0)] * 3)
    right = native.Episodes(
        policy=np.zeros(3, np.int64),
        noise=np.zeros((3, 5, 6), np.float32),
        rewards=np.zeros((3, 5)),
        observations=np.zeros((3, 6, 17), np.float32),
        actions=np.zeros((3, 5, 6), np.float32),
        lengths=np.full(3, 5),
        diverged=np.zeros(3, np.bool_),
    )
    for name, array in right._asdict().items():
        for wrong in (array[:2], array[..., :-1].copy(), array.astype(np.int16), np.stack([array] * 2)):
            if wrong.shape != array.shape or wrong.dtype != array.dtype:
                with pytest.raises(ValueError, match=r"must be (float|int|bool).* \(\d.*\), but is"):
                    some.run(policies, right._replace(**{name: wrong}))
    with pytest.raises(ValueError, match="does not act on 17 observations"):
        some.run(of_walkers, right)
    assert not right.rewards.any()
    some.run(policies, right)
    assert right.rewards.any()
