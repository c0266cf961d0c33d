"""The simulator as gymnasium environments, for people who bring their own algorithms.

    gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)      # BatchedEnv
    gymnasium.make("pbrl/walker_walk-v0")                       # SingleEnv

Observations, rewards and ends of episodes are dm_control's. The time limit truncates; a task that ends by itself and
physics that diverged (`info["diverged"]`) terminate.
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

from pbrl.simulation import native, tasks
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.worlds import NativeWorlds, PlainWorlds, Worlds
from pbrl.types import Bool, Float64


def _spaces(simulator: Simulator) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """Observation and action space of one environment."""
    low, high, *_ = native.dynamics(tasks.load(simulator.task))
    observations = gymnasium.spaces.Box(-np.inf, np.inf, (simulator.obs_size,), np.float64)
    return observations, gymnasium.spaces.Box(low, high, dtype=np.float64)


class BatchedEnv(gymnasium.vector.VectorEnv[Float64, Float64, Any]):
    """num_envs environments of one task, stepped by a few threads; an ended one begins anew with the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012

    def __init__(
        self, num_envs: int, task: str, threads: int | None = None, max_episode_steps: int | None = None
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
        self._act_size, self._streams = simulator.act_size, list[RandomState]()
        self._obs = np.zeros((num_envs, simulator.obs_size))
        self._elapsed, self._over = np.zeros(num_envs, np.int64), np.ones(num_envs, np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float64, dict[str, Any]]:
        """Begin an episode everywhere. seed: one for all, or one for each; None goes on with the streams there are."""
        super().reset(seed=seed if isinstance(seed, int) else None, options=options)
        if seed is not None or not self._streams:
            seeds = np.random.SeedSequence(seed).spawn(self.num_envs) if seed is None or isinstance(seed, int) else seed
            if len(seeds) != self.num_envs:
                raise ValueError(f"one seed for each of {self.num_envs} environments, please, not {len(seeds)}")
            self._streams = [RandomState(np.random.PCG64(each)) for each in seeds]
        self._over[:] = True
        self._in_threads(np.zeros((self.num_envs, self._act_size)))
        return self._obs.copy(), {}

    def step(self, actions: Float64) -> tuple[Float64, Float64, Bool, Bool, dict[str, Any]]:
        """One control step, or the beginning of a new episode where the last one has ended."""
        if not self._streams:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        rewards, ended, diverged = self._in_threads(np.asarray(actions, np.float64))
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
        """Let the threads go."""
        self._pool.shutdown()

    def _in_threads(self, actions: Float64) -> tuple[Float64, Bool, Bool]:
        """Step the environments that are running, begin a new episode in the others."""
        rewards = np.zeros(self.num_envs)
        ended, diverged = np.zeros(self.num_envs, np.bool_), np.zeros(self.num_envs, np.bool_)
        resting = self._over.copy()  # those that only begin anew count as diverged to Worlds.step, which skips them
        idle = resting.copy()

        def work(worlds: Worlds, share: slice) -> None:
            if resting[share].any():
                worlds.reset(
                    [
                        stream if over else None
                        for stream, over in zip(self._streams[share], resting[share], strict=True)
                    ]
                )
                worlds.observe(self._obs[share])
            worlds.step(actions[share], self._obs[share], rewards[share], ended[share], idle[share])
            diverged[share] = idle[share] & ~resting[share]

        list(self._pool.map(work, self._worlds, self._shares))
        self._elapsed = np.where(resting, 0, self._elapsed + 1)
        self._over[:] = False
        return rewards, ended, diverged


class SingleEnv(gymnasium.Env[Float64, Float64]):
    """One environment of the task."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, task: str, max_episode_steps: int | None = None) -> None:
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
        """Let the thread go."""
        self._batch.close()
