"""The simulator as gymnasium environments, for people who bring their own algorithms.

    gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)      # BatchedEnv
    gymnasium.make("pbrl/walker_walk-v0")                       # SingleEnv; render_mode="rgb_array" or "human"

Observations, rewards and ends of episodes are dm_control's. The time limit truncates. A task that ends by itself
terminates, and so does physics that diverged (`info["diverged"]`).
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from numpy.random import RandomState

from pbrl.simulation import gl, video
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.tasks import Task
from pbrl.simulation.worlds import NativeWorlds, PlainWorlds, Worlds
from pbrl.types import Bool, Float64, Int64

_WINDOW_SECONDS = 5.0  # that a window may take to close


def _spaces(simulator: Simulator) -> tuple[gymnasium.spaces.Box, gymnasium.spaces.Box]:
    """Observation and action space of one environment."""
    low, high = simulator.action_bounds
    observations = gymnasium.spaces.Box(-np.inf, np.inf, (simulator.obs_size,), np.float64)
    return observations, gymnasium.spaces.Box(low, high, dtype=np.float64)


class _Threads:
    """Threads that each have one piece of work, and wait until it is to be done again. The caller is one of them.

    They must not keep alive whoever waits for them: nothing else would ever stop them.
    """

    def __init__(self, *works: Callable[[], None]) -> None:
        self._own, *others = works
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._again: list[SimpleQueue[bool]] = [SimpleQueue() for _ in others]
        for again, work in zip(self._again, others, strict=True):
            Thread(target=_whenever_asked, args=(again, work, self._done), daemon=True).start()
        self._working = 0  # threads
        self.stop = weakref.finalize(self, _stop, self._again)

    def run(self) -> None:
        """Do all work once. Every thread is done when this returns or raises."""
        if not self.stop.alive:
            raise gymnasium.error.ClosedEnvironmentError("these environments were closed: make new ones")
        self._wait()  # where an interrupted run did not
        for again in self._again:
            again.put(True)
        self._working = len(self._again)
        try:
            self._own()
        finally:
            errors = self._wait()
        for error in errors:
            raise error

    def _wait(self) -> list[BaseException]:
        """Wait for the threads that are at work; what went wrong in them."""
        errors = []
        while self._working > 0:
            if (error := self._done.get()) is not None:
                errors.append(error)
            self._working -= 1
        return errors


def _whenever_asked(
    again: SimpleQueue[bool], work: Callable[[], None], done: SimpleQueue[BaseException | None]
) -> None:
    """A thread's life."""
    while again.get():
        try:
            work()
        except BaseException as error:  # the caller raises it
            done.put(error)
        else:
            done.put(None)


def _stop(threads: list[SimpleQueue[bool]]) -> None:
    for again in threads:
        again.put(False)


class _Arrays(NamedTuple):
    """The present of some environments, row by row."""

    actions: Float64  # [n, act] to apply
    obs: Float64  # [n, obs]
    rewards: Float64  # [n]
    elapsed: Int64  # [n] control steps since the episode began
    ended: Bool  # [n] whether the task itself has ended the episode
    diverged: Bool  # [n]
    resetting: Bool  # [n] whether the next step begins an episode


def _step(worlds: Worlds, streams: Sequence[RandomState], arrays: _Arrays) -> None:
    """One control step of the environments that are running; the others begin a new episode."""
    actions, obs, rewards, elapsed, ended, diverged, resetting = arrays
    if resetting.any():
        worlds.reset([stream if begins else None for stream, begins in zip(streams, resetting, strict=True)])
        worlds.observe(obs)
    elapsed += 1
    elapsed[resetting] = 0
    ended[:] = False
    diverged[:] = resetting  # `Worlds.step` skips these, and adds those that diverge
    worlds.step(actions, obs, rewards, ended, diverged)
    diverged &= ~resetting


class BatchedEnv(gymnasium.vector.VectorEnv[Float64, Float64, Any]):
    """num_envs environments of one task, stepped by a few threads. An ended episode is reset by the next step."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": ["rgb_array"]}  # noqa: RUF012

    def __init__(
        self,
        num_envs: int,
        task: str | Task,
        threads: int | None = None,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        width: int = 480,  # of pictures, in pixels
        height: int = 360,
        camera: str | None = None,  # by name or number; None: the task's first
    ) -> None:
        simulator = Simulator(task, seed=0, threads=threads, steps=max_episode_steps)
        environment = simulator.environment()
        self.metadata = {**self.metadata, "render_fps": round(1 / environment.control_timestep())}
        self.render_mode, self._size = render_mode, (width, height)
        if render_mode is not None:
            gl.switch_on()
            model = environment.physics.model
            names = [model.id2name(number, "camera") for number in range(model.ncam)]
            self._camera = video.camera_number(names, camera)
        self.num_envs, self.steps = num_envs, simulator.steps
        self.single_observation_space, self.single_action_space = _spaces(simulator)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._arrays = _Arrays(
            actions=np.zeros((num_envs, simulator.act_size)),
            obs=np.zeros((num_envs, simulator.obs_size)),
            rewards=np.zeros(num_envs),
            elapsed=np.zeros(num_envs, np.int64),
            ended=np.zeros(num_envs, np.bool_),
            diverged=np.zeros(num_envs, np.bool_),
            resetting=np.ones(num_envs, np.bool_),
        )
        shares = np.array_split(np.arange(num_envs), min(simulator.threads, num_envs))
        self._shares = [slice(share[0], share[-1] + 1) for share in shares]
        make: type[NativeWorlds | PlainWorlds] = NativeWorlds if simulator.native else PlainWorlds
        self._worlds: list[Worlds] = [make(task, len(share)) for share in shares]
        self._streams: list[list[RandomState]] = [[] for _ in shares]  # one stream for each, after reset
        views = [_Arrays(*[array[share] for array in self._arrays]) for share in self._shares]  # type: ignore[arg-type]
        self._threads = _Threads(*map(partial, repeat(_step), self._worlds, self._streams, views))

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
        for streams, share in zip(self._streams, self._shares, strict=True):
            streams[:] = [
                RandomState(np.random.PCG64(each)) if each is not None or not streams else streams[i]
                for i, each in enumerate(seeds[share])
            ]
        self._arrays.resetting[:] = True
        self._threads.run()
        self._arrays.resetting[:] = False
        return self._arrays.obs.copy(), {}

    def step(self, actions: Float64) -> tuple[Float64, Float64, Bool, Bool, dict[str, Any]]:
        """One control step [num_envs, act]; an environment whose episode has ended begins a new one instead."""
        if not self._streams[0]:
            raise gymnasium.error.ResetNeeded("call reset() before step()")
        now = self._arrays
        now.actions[:] = self._checked(actions)
        self._threads.run()
        truncated = now.elapsed >= self.steps
        terminated = (now.ended | now.diverged) & ~truncated
        np.logical_or(terminated, truncated, out=now.resetting)
        info = {"diverged": now.diverged.copy()} if now.diverged.any() else {}
        return now.obs.copy(), now.rewards.copy(), terminated, truncated, info

    def begin_ended(self) -> Float64:
        """Begin an episode now, rather than by the next step, where one has ended; the observations [num_envs, obs]."""
        now = self._arrays
        if now.resetting.all():
            self._threads.run()  # which begins them all, and steps none
        else:
            before = now.obs.copy()
            for worlds, streams, share in zip(self._worlds, self._streams, self._shares, strict=True):
                ended = now.resetting[share]
                worlds.reset([stream if over else None for stream, over in zip(streams, ended, strict=True)])
                worlds.observe(now.obs[share])
            now.obs[~now.resetting] = before[~now.resetting]
        now.elapsed[now.resetting] = 0
        now.resetting[:] = False
        return now.obs.copy()

    def physics(self) -> list[Any]:
        """dm_control's physics of each environment, as it is now."""
        return [physics for worlds in self._worlds for physics in worlds.physics]

    def render(self) -> tuple[Any, ...] | None:
        """A picture [height, width, 3] of each environment."""
        if self.render_mode is None:
            return None
        return tuple(np.asarray(video.picture(each, self._camera, self._size)) for each in self.physics())

    def close_extras(self, **kwargs: Any) -> None:  # noqa: ARG002
        """Stop the threads, and let go of OpenGL: when Python ends, it is too late for OSMesa."""
        self._threads.stop()
        for each in self.physics():
            if each._contexts is not None:
                each._free_rendering_contexts()

    def _checked(self, actions: Any) -> Any:
        """The actions, if they are fit for compiled code, which checks nothing."""
        given, shape = np.asarray(actions), self._arrays.actions.shape
        if given.shape != shape:
            raise ValueError(f"actions must have shape {shape}, (environments, actions of each), not {given.shape}")
        if given.dtype.kind not in "fiu":
            raise ValueError(f"actions must be real numbers, not {given.dtype}")
        if not np.isfinite(given).all():
            bad = np.flatnonzero(~np.isfinite(given).all(axis=1))
            raise ValueError(f"the actions of environment {bad.tolist()} contain NaN or infinity")
        return given


class SingleEnv(gymnasium.Env[Float64, Float64]):
    """One environment of the task."""

    metadata = {"render_modes": ["rgb_array", "human"]}  # noqa: RUF012

    def __init__(
        self,
        task: str | Task,
        max_episode_steps: int | None = None,
        render_mode: str | None = None,
        **pictures: Any,  # width, height and camera
    ) -> None:
        drawing = "rgb_array" if render_mode == "rgb_array" else None
        self._batch = BatchedEnv(1, task, 1, max_episode_steps, render_mode=drawing, **pictures)
        self.metadata = {**self.metadata, "render_fps": self._batch.metadata["render_fps"]}
        self.render_mode = render_mode
        before = {*threading.enumerate()}
        self._window = window(self._batch.physics()[0]) if render_mode == "human" else None
        self._window_threads = {*threading.enumerate()} - before
        self.observation_space = self._batch.single_observation_space
        self.action_space = self._batch.single_action_space

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Float64, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed, options=options)
        obs, info = self._batch.reset(seed=seed)
        if self._window is not None:
            self._window.sync()
        return obs[0], info

    def step(self, action: Float64) -> tuple[Float64, float, bool, bool, dict[str, Any]]:
        """One control step."""
        obs, rewards, terminated, truncated, info = self._batch.step(np.asarray(action)[None])
        if self._window is not None:
            self._window.sync()
        return obs[0], float(rewards[0]), bool(terminated[0]), bool(truncated[0]), info

    def render(self) -> Any:
        """A picture [height, width, 3]; with render_mode="human" the window shows every step by itself."""
        pictures = self._batch.render()
        return None if pictures is None else pictures[0]

    def close(self) -> None:
        """Stop the thread, and close the window."""
        self._batch.close()
        if self._window is not None:
            self._window.close()
            for thread in self._window_threads:  # if Python ends before they do, it crashes
                thread.join(_WINDOW_SECONDS)


def window(physics: Any) -> Any:
    """MuJoCo's own viewer, which shows the physics whenever `sync` is called."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise gymnasium.error.Error(
            'render_mode="human" opens a window, but there is no display here: use render_mode="rgb_array"'
        )
    import mujoco.viewer  # it loads GLFW, which others do not need

    return mujoco.viewer.launch_passive(physics.model.ptr, physics.data.ptr, show_left_ui=False, show_right_ui=False)
