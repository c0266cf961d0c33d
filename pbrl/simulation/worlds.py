"""A few worlds of one task that one thread resets and steps together.

Two kinds with the same methods: `NativeWorlds` in compiled loops, for tasks with compiled observation and reward, and
`PlainWorlds` in dm_control's own environments, for all tasks; the latter is the reference in the tests.
Both begin an episode by dm_control's own `initialize_episode`, or by the task's faster one with the same result.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.random import RandomState
from numpy.typing import NDArray

from pbrl.simulation import native, tasks
from pbrl.simulation.native import Batch, Episodes, Policies
from pbrl.simulation.tasks import Task
from pbrl.types import Bool, Float64


class Worlds(Protocol):
    """Some worlds, of which the first n are in use."""

    @property
    def physics(self) -> list[Any]:
        """dm_control's physics of each."""

    def reset(self, streams: Sequence[RandomState | None]) -> None:
        """Begin an episode in each of the first worlds that is given a stream, drawn from it."""

    def observe(self, obs: Float64) -> None:
        """Fill the present observations [n, obs]."""

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged: fill obs, rewards, ended, diverged."""

    def run(self, policies: Policies, episodes: Episodes) -> None:
        """Run whole episodes from the present states, filling `episodes`."""


def begin_episode(environment: Any, physics: Any, stream: RandomState) -> None:
    """What dm_control's `Environment.reset` does, but drawn from `stream`."""
    environment.task._random = stream
    with physics.reset_context():
        environment.task.initialize_episode(physics)


def flatten(observation: Any) -> Float64:
    """dm_control's dictionary of observations as one vector."""
    return np.concatenate([np.ravel(value) for value in observation.values()])


@functools.cache
def _observe_and_reward(task: str | Task) -> Any:
    """The task's compiled observation and reward, kept for as long as the process lives."""
    module, environment = tasks.native(task), tasks.load(task)
    assert module is not None, f"{task} has no compiled observation and reward"
    obs_size = len(flatten(environment.reset().observation))
    function = native.observe_and_reward(module.observe, module.reward, module.constants(environment), obs_size)
    return function, obs_size


def check(name: str, array: NDArray[Any], kind: type, shape: tuple[int, ...], *, may_be_empty: bool = False) -> None:
    """Refuse an array that compiled code would read or write beyond its end: there, nothing is checked any more."""
    fits = array.shape == shape or (may_be_empty and len(array) == 0)
    if not fits or array.dtype != kind or not array.flags.c_contiguous:
        order = "" if array.flags.c_contiguous else " and is not contiguous"
        raise ValueError(f"{name} must be {np.dtype(kind)} {shape}, but is {array.dtype} {array.shape}{order}")


class NativeWorlds:
    """Worlds in compiled loops."""

    def __init__(self, task: str | Task, count: int) -> None:
        self.environment = tasks.load(task)
        tasks.check_compiled(self.environment)
        module: Any = tasks.native(task)
        if hasattr(module, "initialize_episode"):
            self.environment.task.initialize_episode = functools.partial(
                module.initialize_episode, self.environment.task
            )
        share_model = not getattr(module, "WRITES_MODEL", True)
        # dm_control switches actuation off in the model while it resets: no two threads may share a model.
        self.physics = [self.environment.physics.copy(share_model=share_model) for _ in range(count)]
        function, self.obs_size = _observe_and_reward(task)
        self.batch = Batch(
            observe_and_reward=function.address,
            rows=np.stack([native.addresses(physics) for physics in self.physics]),
            dynamics=native.dynamics(self.environment),
        )

    def reset(self, streams: Sequence[RandomState | None]) -> None:
        """Begin an episode in each of the first worlds that is given a stream, drawn from it."""
        for physics, stream in zip(self.physics, streams, strict=False):
            if stream is not None:
                begin_episode(self.environment, physics, stream)

    def observe(self, obs: Float64) -> None:
        """Fill the present observations [n, obs]."""
        worlds = self._first(len(obs))
        check("obs", obs, np.float64, (len(worlds.rows), self.obs_size))
        native.observe_all(worlds, obs)

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged. No such task ends before its time limit."""
        worlds = self._first(len(obs))
        n, act_size = len(worlds.rows), len(worlds.dynamics.low)
        check("actions", actions, np.float64, (n, act_size))
        check("obs", obs, np.float64, (n, self.obs_size))
        check("rewards", rewards, np.float64, (n,))
        check("diverged", diverged, np.bool_, (n,))
        native.step_all(worlds, actions, obs, rewards, diverged)
        ended[:] = False

    def run(self, policies: Policies, episodes: Episodes) -> None:
        """Run whole episodes from the present states, filling `episodes`."""
        worlds = self._first(len(episodes.rewards))
        n, steps, act_size = len(worlds.rows), episodes.rewards.shape[-1], len(worlds.dynamics.low)
        check("rewards", episodes.rewards, np.float64, (n, steps))
        check("policy", episodes.policy, np.int64, (n,))
        check("noise", episodes.noise, np.float32, (n, steps, act_size), may_be_empty=True)
        check("observations", episodes.observations, np.float32, (n, steps + 1, self.obs_size), may_be_empty=True)
        check("actions", episodes.actions, np.float32, (n, steps, act_size), may_be_empty=True)
        check("lengths", episodes.lengths, np.int64, (n,))
        check("diverged", episodes.diverged, np.bool_, (n,))
        if policies.sizes[0] != self.obs_size or not act_size <= policies.sizes[-1]:
            raise ValueError(f"a policy of layers {policies.sizes} does not act on {self.obs_size} observations")
        native.run_episodes(worlds, policies, episodes)

    def _first(self, count: int) -> Batch:
        """The first so many worlds; fewer if there are not as many, which `check` notices."""
        return self.batch._replace(rows=self.batch.rows[:count])


class PlainWorlds:
    """Worlds in dm_control's own environments."""

    def __init__(self, task: str | Task, count: int) -> None:
        self.environments = [tasks.load(task) for _ in range(count)]
        self.dynamics = native.dynamics(self.environments[0])

    @property
    def physics(self) -> list[Any]:
        """dm_control's physics of each."""
        return [environment.physics for environment in self.environments]

    def reset(self, streams: Sequence[RandomState | None]) -> None:
        """Begin an episode in each of the first worlds that is given a stream, drawn from it."""
        for environment, stream in zip(self.environments, streams, strict=False):
            if stream is not None:
                environment.task._random = stream
                environment.reset()

    def observe(self, obs: Float64) -> None:
        """Fill the present observations [n, obs]."""
        for environment, row in zip(self.environments, obs, strict=False):
            row[:] = flatten(environment.task.get_observation(environment.physics))

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged: fill obs, rewards, ended, diverged."""
        rewards[:] = 0.0
        for i in np.flatnonzero(~diverged):
            try:
                step = self.environments[i].step(np.clip(actions[i], self.dynamics.low, self.dynamics.high))
            except tasks.PhysicsError:
                diverged[i] = True
            else:
                obs[i], rewards[i], ended[i] = flatten(step.observation), step.reward, step.discount == 0

    def run(self, policies: Policies, episodes: Episodes) -> None:
        """Run whole episodes from the present states; `pbrl.simulation.native.run_episodes` in Python."""
        policy, noise, rewards, observations, actions, lengths, diverged = episodes
        n, steps = rewards.shape
        obs, action = np.zeros((n, policies.sizes[0])), np.zeros((n, len(self.dynamics.low)), np.float32)
        ended, over = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self.observe(obs)
        for t in range(steps):
            observations[:, t] = obs[: len(observations)]
            native.act(policies, policy, obs.astype(np.float32), noise, t, action)
            actions[:, t] = action[: len(actions)]
            was_over = over.copy()
            self.step(action.astype(np.float64), obs, rewards[:, t], ended, over)
            diverged |= over & ~was_over
            lengths[over & ~was_over] = t
            over |= ended
            lengths[over & ended] = np.minimum(lengths[over & ended], t + 1)
        observations[:, steps] = obs[: len(observations)]
