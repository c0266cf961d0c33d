"""The simulator as gymnasium environments, for people who bring their own algorithms.

    gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)      # BatchedEnv
    gymnasium.make("pbrl/walker_walk-v0")                       # SingleEnv

Observations, rewards and ends of episodes are dm_control's. The time limit truncates. A task that ends by itself
terminates, and so does physics that diverged (`info["diverged"]`).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.random import RandomState

from pbrl.simulation.simulator import Simulator
from pbrl.simulation.tasks import Task
from pbrl.simulation.worlds import NativeWorlds, PlainWorlds, Worlds
from pbrl.types import Bool, Float64


def _spaces(simulator: Simulator) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """Observation and action space of one environment."""
    low, high = simulator.action_bounds
    observations = gymnasium.spaces.Box(-np.inf, np.inf, (simulator.obs_size,), np.float64)
    return observations, gymnasium.spaces.Box(low, high, dtype=np.float64)


class BatchedEnv(gymnasium.vector.VectorEnv[Float64, Float64, Any]):
    """num_envs environments of one task, stepped by a few threads. An ended episode is reset by the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012

    def __init__(
        self, num_envs: int, task: str | Task, threads: int | None = None, max_episode_steps: int | None = None
    ) -> None:
        simulator = Simulator(task, seed=0, threads=threads, steps=max_episode_steps)
        self.num_envs, self.steps = num_envs, simulator.steps
        self.single_observation_space, self.single_action_space = _spaces(simulator)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        shares = np.array_split(np.arange(num_envs), min(simulator.threads, num_envs))
        self._shares = [slice(share[0], share[-1] + 1) for share in shares]
        make: type[NativeWorlds | PlainWorlds] = NativeWorlds if simulator.native else PlainWorlds
        self._worlds: list[Worlds] = [make(task, share.stop - share.start) for share in self._shares]
        self._pool = ThreadPoolExecutor(len(self._shares))
        self._act_size, self._streams = simulator.act_size, list[RandomState]()  # one stream for each, after reset
        self._obs = np.zeros((num_envs, simulator.obs_size))
        self._elapsed, self._over = np.zeros(num_envs, np.int64), np.ones(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float64, dict[str, Any]]:
        """Begin an episode in every environment.

        seed: environment i gets seed + i; or one seed for each. None continues the environment's random stream.
        """
        if seed is None:
            seeds: list[int | None] = [None] * self.num_envs
        elif isinstance(seed, int | np.integer):
            seeds = [int(seed) + i for i in range(self.num_envs)]
        else:
            seeds = list(seed)
        if len(seeds) != self.num_envs:
            raise ValueError(
                f"seed must be one number, or one for each of {self.num_envs} environments, not {len(seeds)}"
            )
        super().reset(seed=seeds[0], options=options)
        self._streams = [
            RandomState(np.random.PCG64(each)) if each is not None or not self._streams else self._streams[i]
            for i, each in enumerate(seeds)
        ]
        self._over[:] = True
        self._in_threads(np.zeros((self.num_envs, self._act_size)))
        return self._obs.copy(), {}

    def step(self, actions: Float64) -> tuple[Float64, Float64, Bool, Bool, dict[str, Any]]:
        """One control step [num_envs, act]; an environment whose episode has ended begins a new one instead."""
        if not self._streams:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        rewards, ended, diverged = self._in_threads(self._checked(actions))
        truncated = self._elapsed >= self.steps
        terminated = (ended | diverged) & ~truncated
        self._over = terminated | truncated
        return (
            self._obs.copy(),
            rewards,
            terminated,
            truncated,
            {"diverged": diverged} if diverged.any() else {},
        )

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop the threads."""
        self._pool.shutdown()

    def _checked(self, actions: Any) -> Float64:
        """The actions as compiled code reads them, which checks nothing."""
        given, shape = np.asarray(actions), (self.num_envs, self._act_size)
        if given.shape != shape:
            raise ValueError(f"actions must have shape {shape}, (environments, actions of each), not {given.shape}")
        if given.dtype.kind not in "fiu":
            raise ValueError(f"actions must be real numbers, not {given.dtype}")
        if not np.isfinite(given).all():
            bad = np.flatnonzero(~np.isfinite(given).all(axis=1))
            raise ValueError(f"the actions of environment {bad.tolist()} contain NaN or infinity")
        return np.ascontiguousarray(given, np.float64)

    def _in_threads(self, actions: Float64) -> tuple[Float64, Bool, Bool]:
        """Step the environments that are running, begin a new episode in the others."""
        rewards = np.zeros(self.num_envs)
        ended, diverged = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        resetting = self._over.copy()
        skipped = resetting.copy()  # Worlds.step skips those that are being reset, and adds those that diverge

        def work(worlds: Worlds, share: slice) -> None:
            if resetting[share].any():
                worlds.reset(
                    [
                        stream if over else None
                        for stream, over in zip(self._streams[share], resetting[share], strict=True)
                    ]
                )
                worlds.observe(self._obs[share])
            worlds.step(actions[share], self._obs[share], rewards[share], ended[share], skipped[share])
            diverged[share] = skipped[share] & ~resetting[share]

        list(self._pool.map(work, self._worlds, self._shares))
        self._elapsed = np.where(resetting, 0, self._elapsed + 1)
        self._over[:] = False
        return rewards, ended, diverged


class SingleEnv(gymnasium.Env[Float64, Float64]):
    """One environment of the task."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, task: str | Task, max_episode_steps: int | None = None) -> None:
        self._batch = BatchedEnv(1, task, threads=1, max_episode_steps=max_episode_steps)
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float64, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        obs, info = self._batch.reset(seed=seed)
        return obs[0], info

    def step(self, action: Float64) -> tuple[Float64, float, bool, bool, dict[str, Any]]:
        """One control step."""
        obs, rewards, terminated, truncated, info = self._batch.step(np.asarray(action)[None])
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def close(self) -> None:
        """Stop the thread."""
        self._batch.close()
