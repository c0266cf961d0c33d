"""A few worlds of one task that one thread resets and steps together.

Two kinds with the same methods: `NativeWorlds` at the speed of the physics, for tasks with a file in `pbrl.simulation.tasks`,
and `PlainWorlds` through dm_control's own environments, for all tasks; the latter is the reference in the tests.
Both begin an episode by dm_control's own `initialize_episode`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.random import RandomState

from pbrl.simulation import native, tasks
from pbrl.types import Bool, Float32, Float64, Int64


class Episodes(NamedTuple):
    """What n episodes of T control steps need, and room for what comes of them. Empty arrays: not wanted."""

    packed: Float32  # [K, packed] see GaussianPolicy.pack
    sizes: Int64  # widths of the policy's layers
    std: Float32  # [K, act]
    policy: Int64  # [n] rows of packed
    noise: Float32  # [n, T, act]; empty: mean actions
    rewards: Float64  # [n, T], zero at first
    observations: Float32  # [n, T + 1, obs]
    actions: Float32  # [n, T, act]
    lengths: Int64  # [n], T at first
    diverged: Bool  # [n], False at first


class Worlds(Protocol):
    """Some worlds, of which the first n are in use."""

    def reset(self, streams: Sequence[RandomState | None]) -> None:
        """Begin an episode in each of the first worlds that is given a stream, drawn from it."""

    def observe(self, obs: Float64) -> None:
        """Fill the present observations [n, obs]."""

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged: fill obs, rewards, ended, diverged."""

    def run(self, episodes: Episodes) -> None:
        """Run whole episodes from the present states."""


def begin_episode(environment: Any, physics: Any, stream: RandomState) -> None:
    """What dm_control's `Environment.reset` does, but drawn from `stream`."""
    environment.task._random = stream
    with physics.reset_context():
        environment.task.initialize_episode(physics)


def flatten(observation: Any) -> Float64:
    """dm_control's dictionary of observations as one vector."""
    return np.concatenate([np.ravel(value) for value in observation.values()])


@functools.cache
def _look(name: str) -> native.Look:
    """The task's compiled observation and reward."""
    module, environment = tasks.native(name), tasks.load(name)
    assert module is not None, f"{name} is not natively batched"
    obs_size = len(flatten(environment.reset().observation))
    return native.make_look(module.observe, module.reward, module.constants(environment), obs_size)


class NativeWorlds:
    """Worlds in compiled loops."""

    def __init__(self, name: str, count: int) -> None:
        self.environment = tasks.load(name)
        share_model = not getattr(tasks.native(name), "WRITES_MODEL", True)
        # dm_control switches actuation off in the model while it resets: no two threads may share a model.
        self.physics = [self.environment.physics.copy(share_model=share_model) for _ in range(count)]
        self.rows = np.stack([native.addresses(physics) for physics in self.physics])
        self.look = _look(name)
        self.dynamics = native.dynamics(self.environment)

    def reset(self, streams: Sequence[RandomState | None]) -> None:
        """Begin an episode in each of the first worlds that is given a stream, drawn from it."""
        for physics, stream in zip(self.physics, streams, strict=False):
            if stream is not None:
                begin_episode(self.environment, physics, stream)

    def observe(self, obs: Float64) -> None:
        """Fill the present observations [n, obs]."""
        native.observe_all(self.look, self.rows[: len(obs)], obs)

    def step(self, actions: Float64, obs: Float64, rewards: Float64, ended: Bool, diverged: Bool) -> None:
        """One control step [n, act] of the worlds that have not diverged. No native task ends before its time."""
        native.step_all(self.look, self.rows[: len(obs)], actions, *self.dynamics, obs, rewards, diverged)
        ended[:] = False

    def run(self, episodes: Episodes) -> None:
        """Run whole episodes from the present states."""
        rows: Any = self.rows[: len(episodes.rewards)]
        native.run_episodes(self.look, rows, *self.dynamics, *episodes)  # type: ignore[arg-type]  # a tuple's types


class PlainWorlds:
    """Worlds in dm_control's own environments."""

    def __init__(self, name: str, count: int) -> None:
        self.environments = [tasks.load(name) for _ in range(count)]
        self.low, self.high, *_ = native.dynamics(self.environments[0])

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
                step = self.environments[i].step(np.clip(actions[i], self.low, self.high))
            except tasks.PhysicsError:
                diverged[i] = True
            else:
                obs[i], rewards[i], ended[i] = flatten(step.observation), step.reward, step.discount == 0

    def run(self, episodes: Episodes) -> None:
        """Run whole episodes from the present states; `pbrl.simulation.native.run_episodes` in plain words."""
        packed, sizes, std, policy, noise, rewards, observations, actions, lengths, diverged = episodes
        n, steps = rewards.shape
        obs, action = np.zeros((n, sizes[0])), np.zeros((n, sizes[-1]), np.float32)
        ended, over = np.zeros(n, np.bool_), np.zeros(n, np.bool_)
        self.observe(obs)
        for t in range(steps):
            observations[:, t] = obs[: len(observations)]
            native.mean_actions(packed, sizes, policy, obs.astype(np.float32), action)
            if len(noise):
                action += std[policy] * noise[:, t]
            actions[:, t] = action[: len(actions)]
            was_over = over.copy()
            self.step(action.astype(np.float64), obs, rewards[:, t], ended, over)
            diverged |= over & ~was_over
            lengths[over & ~was_over] = t
            over |= ended
            lengths[over & ended] = np.minimum(lengths[over & ended], t + 1)
        observations[:, steps] = obs[: len(observations)]
