"""A task of one's own: everything that works with the suite's tasks works with it."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import numpy as np
import own_task
import pytest
from numpy.testing import assert_array_equal
from omegaconf import OmegaConf

from pbrl.policy import GaussianPolicy
from pbrl.run.settings import instantiate
from pbrl.simulation import tasks
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.tasks import Task
from pbrl.simulation.vector import BatchedEnv
from pbrl.simulation.worlds import flatten
from pbrl.types import Trajectories

TASK = Task("hold", own_task.load)


def collect(simulator: Simulator) -> Trajectories:
    policy = GaussianPolicy(
        simulator.obs_size, simulator.act_size, hidden=[8], hidden_gain=1, output_gain=1, initial_log_std=0
    )
    parameters, rows = policy.initial(np.random.default_rng(0)), np.zeros(10, np.int64)
    return simulator.collect(policy, parameters, rows, iteration=0, keep=("observations", "actions"))


def test_it_runs_in_compiled_loops_and_in_its_own_environment() -> None:
    fast = Simulator(TASK, seed=0, threads=2)
    assert (fast.task, fast.native, fast.steps, fast.obs_size, fast.act_size) == ("hold", True, 100, 2, 1)
    assert fast.action_bounds == ([-1.0], [2.0])
    ours, plain = collect(fast), collect(Simulator(TASK, seed=0, threads=3, native=False))
    assert_array_equal(ours.observations, plain.observations)
    np.testing.assert_allclose(ours.task_rewards, plain.task_rewards, rtol=0, atol=1e-12)
    assert len(np.unique(ours.task_rewards[:, -1])) == 10
    get_observation = fast.environment().task.get_observation
    replayed = [flatten(get_observation(physics)) for physics in fast.replay(ours, 4)]
    assert_array_equal(np.array(replayed, np.float32), ours.observations[4])  # type: ignore[index]


def test_it_runs_without_compiled_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_task, "reward", own_task.reward.py_func)  # type: ignore[attr-defined]
    simulator = Simulator(TASK, seed=0)
    assert not simulator.native
    assert np.isfinite(collect(simulator).task_rewards).all()
    with pytest.raises(ValueError, match="hold has no compiled observation and reward"):
        Simulator(TASK, seed=0, native=True)


def test_compiled_loops_refuse_a_task_that_they_would_change() -> None:
    class Ending(own_task.Hold):
        def get_termination(self, physics: Any) -> float | None:
            return 0.0 if physics.data.qpos[0] > 1 else None

    def load() -> Any:
        environment = own_task.load()
        environment._task = Ending()
        return environment

    load.__module__ = own_task.__name__
    with pytest.raises(ValueError, match="Ending has its own get_termination"):
        collect(Simulator(Task("ending", load), seed=0, threads=1))
    assert len(collect(Simulator(Task("ending", load), seed=0, native=False))) == 10


def test_it_comes_from_a_yaml_by_target() -> None:
    node = OmegaConf.create({"_target_": f"{own_task.__name__}.load", "stiffness": 50.0})
    stiff = tasks.find("hold", instantiate(node, _partial_=True, allow=[own_task.__name__]))
    assert tasks.native(stiff) is sys.modules[own_task.__name__]
    loose = tasks.find("hold", own_task.load)
    one, other = (collect(Simulator(task, seed=0)) for task in (stiff, loose))
    assert_array_equal(one.observations[:, 0], other.observations[:, 0])  # type: ignore[index]
    assert (one.observations[:, 5] != other.observations[:, 5]).any(axis=1).all()  # type: ignore[index]
    assert tasks.find("walker_walk") == "walker_walk"


def test_it_is_a_vector_environment() -> None:
    batch = BatchedEnv(5, TASK, threads=2)
    obs, _ = batch.reset(seed=0)
    assert obs.shape == (5, 2)
    rewards = batch.step(batch.action_space.sample())[1]
    assert (rewards > 0).any()


def test_what_cannot_be_simulated_is_refused() -> None:
    def without_random() -> Any:
        environment = own_task.load()
        environment._task = object()
        return environment

    with pytest.raises(TypeError, match=r"must load a dm_control.rl.control.Environment, not a NoneType"):
        Simulator(Task("mine", lambda: None), seed=0)
    with pytest.raises(TypeError, match=r"must be a dm_control.suite.base.Task.*, not a object"):
        Simulator(Task("mine", without_random), seed=0)
    with pytest.raises(ValueError, match="the length of hold, not 101"):
        Simulator(TASK, seed=0, steps=101)
    assert tasks.native(Task("mine", partial(own_task.load, stiffness=1.0))) is own_task
