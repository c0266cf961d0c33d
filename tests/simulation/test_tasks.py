"""The natively batched tasks are dm_control's, to the last digit; all others work too."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from dm_control import suite
from dm_control.utils import rewards
from hypothesis import given
from hypothesis import strategies as st
from native_tasks import NATIVE
from scipy import stats

import conf
from pbrl.policy import GaussianPolicy
from pbrl.simulation import tasks
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.tasks import tolerance
from pbrl.simulation.worlds import NativeWorlds, flatten
from pbrl.types import Float64


def dm_control_environment(name: str, stream: np.random.RandomState) -> suite.base.control.Environment:
    """As dm_control's documentation says to make one, without any code of ours."""
    domain, task = next((d, t) for d, t in suite.ALL_TASKS if f"{d}_{t}" == name)
    return suite.load(domain, task, task_kwargs={"random": stream})


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_native_tasks_equal_dm_control_over_a_whole_episode(native_task: str, seed: int) -> None:
    reference = dm_control_environment(native_task, np.random.RandomState(seed))
    worlds = NativeWorlds(native_task, 1)
    expected = reference.reset()
    worlds.reset([np.random.RandomState(seed)])
    obs = np.zeros((1, len(flatten(expected.observation))))
    reward, ended, diverged = np.zeros(1), np.zeros(1, np.bool_), np.zeros(1, np.bool_)
    worlds.observe(obs)
    # The initial state is the same draw, and observations are read off the same physics. The last bit of a product of
    # matrices depends on the processor that NumPy computes it on.
    np.testing.assert_allclose(obs[0], flatten(expected.observation), rtol=0, atol=1e-14)
    spec, random = reference.action_spec(), np.random.default_rng(seed)
    steps = 0
    while not expected.last():
        action = random.uniform(spec.minimum, spec.maximum)
        expected = reference.step(action)
        worlds.step(action[None], obs, reward, ended, diverged)
        np.testing.assert_allclose(obs[0], flatten(expected.observation), rtol=0, atol=1e-9)
        assert abs(reward[0] - expected.reward) <= 1e-9
        assert expected.discount == 1.0
        assert not ended[0]
        assert not diverged[0]
        steps += 1
    assert steps == Simulator(native_task, seed=0).steps == 1000


@pytest.mark.parametrize("name", ["walker_walk", "cheetah_run", "fish_swim", "humanoid_stand"])
def test_initial_states_have_dm_controls_distribution(name: str) -> None:
    """The streams of trajectories, taken together, are as good as dm_control's own seeds."""
    simulator = Simulator(name, seed=7, steps=1)
    policy = small_policy(simulator)
    parameters, count = policy.initial(np.random.default_rng(0)), 150
    ours = simulator.collect(policy, parameters, np.zeros(count, np.int64), iteration=3, keep=["observations"])
    assert ours.observations is not None
    theirs = []
    environment = tasks.load(name)
    for seed in range(count):
        environment.task._random = np.random.RandomState(seed)
        theirs.append(flatten(environment.reset().observation))
    columns = [j for j in range(simulator.obs_size) if np.std([row[j] for row in theirs]) > 1e-6]
    p_values = [stats.ks_2samp(ours.observations[:, 0, j], np.array(theirs, np.float32)[:, j]).pvalue for j in columns]
    assert columns
    assert min(p_values) > 1e-3 / len(columns)


def test_the_configuration_lists_the_suite() -> None:
    names = {path.stem for path in (Path(conf.__file__).parent / "env").glob("*.yaml")}
    assert names == set(tasks.NAMES)


def test_the_native_tasks_are_those_promised() -> None:
    assert {name for name in tasks.NAMES if tasks.native(name)} == set(NATIVE)


def small_policy(simulator: Simulator) -> GaussianPolicy:
    return GaussianPolicy(
        simulator.obs_size, simulator.act_size, hidden=[8], hidden_gain=1, output_gain=1, initial_log_std=0
    )


FIRST = {name.partition("_")[0]: name for name in sorted(tasks.NAMES, reverse=True)}  # of each domain


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in FIRST.values() and name not in NATIVE else pytest.mark.slow)
        for name in sorted(tasks.NAMES)
    ],
)
def test_every_task_of_the_suite_gives_the_same_on_any_number_of_threads(name: str) -> None:
    collected = []
    for threads in (1, 3):
        simulator = Simulator(name, seed=0, threads=threads, steps=3)
        policy = small_policy(simulator)
        parameters, rows = policy.initial(np.random.default_rng(0)), np.zeros(3, np.int64)
        collected.append(simulator.collect(policy, parameters, rows, iteration=0, keep=["observations"]))
        assert simulator.native == (name in NATIVE)
    one, three = collected
    np.testing.assert_array_equal(one.observations, three.observations)
    np.testing.assert_array_equal(one.task_rewards, three.task_rewards)
    assert np.isfinite(one.task_rewards).all()
    assert not one.diverged.any()


def test_an_unknown_task_names_near_matches() -> None:
    with pytest.raises(tasks.UnknownTaskError, match=r"no task 'walker_wlak'.*walker_walk"):
        Simulator("walker_wlak", seed=0)
    with pytest.raises(tasks.UnknownTaskError, match="acrobot_swingup"):
        Simulator("zzzzzz", seed=0)


numbers = st.floats(-20, 20)


@given(x=numbers, lower=numbers, width=st.floats(0, 10) | st.just(math.inf), margin=st.floats(0.01, 10))
def test_tolerance_equals_dm_controls(x: float, lower: float, width: float, margin: float) -> None:
    for sigmoid, value in [("gaussian", 0.1), ("long_tail", 0.1), ("linear", 0.5), ("linear", 0.0), ("quadratic", 0.0)]:
        bounds = lower, lower + width
        ours = tolerance.tolerance(x, bounds, margin, getattr(tolerance, sigmoid), value)
        theirs = rewards.tolerance(x, bounds, margin, sigmoid, value)
        assert ours == pytest.approx(theirs, rel=1e-12, abs=1e-14)
    assert tolerance.tolerance(x, bounds, margin) == pytest.approx(rewards.tolerance(x, bounds, margin), rel=1e-12)
    assert tolerance.tolerance(x, bounds) == rewards.tolerance(x, bounds)


def test_an_observation_is_flattened_in_dm_controls_order() -> None:
    observation: dict[str, Float64] = {"b": np.array([1.0, 2.0]), "a": np.array(3.0)}
    np.testing.assert_array_equal(flatten(observation), [1.0, 2.0, 3.0])
