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
    return native.observe_and_reward(module.observe, module.reward, module.constants(environment), obs_size)


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
        self.batch = Batch(
            observe_and_reward=_observe_and_reward(task).address,
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
        native.observe_all(self._first(len(obs)), obs)

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged. No such task ends before its time limit."""
        native.step_all(self._first(len(obs)), actions, obs, rewards, diverged)
        ended[:] = False

    def run(self, policies: Policies, episodes: Episodes) -> None:
        """Run whole episodes from the present states, filling `episodes`."""
        native.run_episodes(self._first(len(episodes.rewards)), policies, episodes)

    def _first(self, count: int) -> Batch:
        """The first so many worlds."""
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
