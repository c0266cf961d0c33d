"""DM Control in batches: N trajectories of a task in one call, for one or several policies at once.

Trajectories are split into small chunks, and threads take the next chunk as they become free: there is no barrier
between control steps, and drawing initial states runs beside the physics of other chunks. The result is the same,
bit for bit, for any number of threads: each trajectory has its own random streams, named by (seed, iteration,
trajectory), and the arithmetic of a trajectory does not depend on which others share its chunk.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from pbrl.policy import LowRank, Policy
from pbrl.simulation import native as compiled
from pbrl.simulation import tasks
from pbrl.simulation.packing import pack
from pbrl.simulation.tasks import Task
from pbrl.simulation.worlds import NativeWorlds, PlainWorlds, Worlds, begin_episode, flatten
from pbrl.threads import cores
from pbrl.types import Behaviour, Float32, Float64, Int64, Trajectories

log = logging.getLogger(__name__)

_START, _NOISE = 0, 1  # what a trajectory's two streams are for
_CHUNK = compiled.ROWS  # trajectories: enough for the policy's speed, few enough to keep all threads busy to the end
_DEFAULT_STEPS = 1000  # for the few tasks of the suite without a time limit


class Simulator:
    """N trajectories of one task, collected in one call.

    task: a name of the suite, such as walker_walk, or a task of your own (`tasks.Task`). seed: the source of all of
    this simulator's randomness. threads: None for one per core. steps: control steps of an episode, None for the
    task's own (1000). native: None for the compiled loops if the task has them, False for dm_control's environments.
    """

    def __init__(
        self,
        task: str | Task,
        *,
        seed: int | np.random.SeedSequence,
        threads: int | None = None,
        steps: int | None = None,
        native: bool | None = None,
    ) -> None:
        environment = tasks.load(task)
        name = task if isinstance(task, str) else task.name
        if threads is not None and threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        limit = environment._step_limit
        self.steps = steps if steps is not None else round(limit) if np.isfinite(limit) else _DEFAULT_STEPS
        if not 1 <= self.steps <= limit:
            raise ValueError(f"steps must be between 1 and {limit:.0f}, the length of {name}, not {steps}")
        self.native = native if native is not None else tasks.native(task) is not None
        if self.native and tasks.native(task) is None:
            raise ValueError(f"{name} has no compiled observation and reward, see pbrl/simulation/tasks")
        self.task, self._task = name, task
        self.threads = threads or cores()
        self.obs_size = len(flatten(environment.reset().observation))
        self.dynamics = compiled.dynamics(environment)
        self.act_size = len(self.dynamics.low)
        self._seed = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)
        self._chunk = _CHUNK if self.native else 1
        self._workers: list[Worlds] = []

    @property
    def action_bounds(self) -> tuple[Float64, Float64]:
        """The lowest and highest actions [act] that the task takes."""
        return self.dynamics.low.copy(), self.dynamics.high.copy()

    def environment(self) -> Any:
        """A new dm_control environment of the task."""
        return tasks.load(self._task)

    def collect(
        self,
        policy: Policy,
        parameters: Float32 | LowRank,
        assignment: Int64,
        *,
        iteration: int,
        first_trajectory: int = 0,
        mean_actions: bool = False,
        common_start: bool = False,
        keep: Collection[str] = (),
    ) -> Trajectories:
        """Collect trajectory i under the policy with `parameters[assignment[i]]`.

        parameters: [K, size], or a `LowRank`. assignment: [N], in any order. iteration and first_trajectory name the
        random streams: row i is trajectory `first_trajectory + i` of that iteration. common_start: the i-th trajectory
        of every policy begins in the same state. keep: "observations", "actions", or both; rewards are always kept.
        The arrays returned are read-only.
        """
        if not isinstance(parameters, LowRank):
            parameters = np.atleast_2d(np.asarray(parameters, np.float32))
        assignment = np.array(assignment, np.int64)
        self._check(policy, parameters, assignment, keep)
        n, trajectory = len(assignment), first_trajectory + np.arange(len(assignment))
        start = trajectory.copy()
        if common_start:
            for k in np.unique(assignment):
                start[assignment == k] = first_trajectory + np.arange(np.sum(assignment == k))

        arms = assignment
        if not isinstance(parameters, LowRank):
            acting, arms = np.unique(assignment, return_inverse=True)  # no others need to be packed
            parameters = parameters[acting] if len(acting) < len(parameters) else parameters
        policies = pack(policy, parameters)
        rewards = np.zeros((n, self.steps))
        observations = np.zeros((n if "observations" in keep else 0, self.steps + 1, self.obs_size), np.float32)
        actions = np.zeros((n if "actions" in keep else 0, self.steps, self.act_size), np.float32)
        lengths, diverged = np.full(n, self.steps), np.zeros(n, np.bool_)

        def run_chunk(worlds: Worlds, rows: Int64) -> None:
            worlds.reset([np.random.RandomState(self._bits(iteration, start[row], _START)) for row in rows])
            noise = [] if mean_actions else [self._noise(iteration, trajectory[row]) for row in rows]
            chunk = compiled.Episodes(
                policy=arms[rows],
                noise=np.stack(noise) if noise else np.empty((0, self.steps, self.act_size), np.float32),
                rewards=rewards[rows],
                observations=observations[rows] if len(observations) else observations,
                actions=actions[rows] if len(actions) else actions,
                lengths=lengths[rows],
                diverged=diverged[rows],
            )
            worlds.run(policies, chunk)
            rewards[rows], lengths[rows], diverged[rows] = chunk.rewards, chunk.lengths, chunk.diverged
            if len(observations):
                observations[rows] = chunk.observations
            if len(actions):
                actions[rows] = chunk.actions

        self._in_threads(run_chunk, self._chunks(assignment, together=isinstance(parameters, LowRank)))
        if diverged.any():
            log.warning(
                "%s: the physics diverged in %d of %d trajectories of iteration %d (rows %s, after %s steps); "
                "they get no reward from there on",
                self.task, diverged.sum(), n, iteration, np.flatnonzero(diverged), lengths[diverged],
            )  # fmt: skip
        collected = Trajectories(
            policy=assignment,
            lengths=lengths,
            diverged=diverged,
            number=trajectory,
            start=np.stack([np.full(n, iteration), trajectory, start], axis=1),
            observations=observations if "observations" in keep else None,
            actions=actions if "actions" in keep else None,
            task_rewards=rewards,
        )
        for array in vars(collected).values():
            if array is not None:
                array.setflags(write=False)
        return collected

    def replay(self, behaviour: Behaviour, row: int, environment: Any = None) -> Iterator[Any]:
        """dm_control's physics at the start of a trajectory and after each of its control steps, bit for bit.

        For rendering. The behaviour must have been collected, with its actions, by a simulator of the same seed. It
        happens in the given `environment()`, which can be used again and again; in a new one by default.
        """
        if behaviour.actions is None:
            raise ValueError("this collection did not keep its actions: collect with keep=('actions',) to replay it")
        environment = environment or self.environment()
        physics, (low, high) = environment.physics, self.action_bounds
        iteration, _, start = behaviour.start[row]
        begin_episode(environment, physics, np.random.RandomState(self._bits(iteration, start, _START)))
        yield physics
        for action in behaviour.actions[row, : behaviour.lengths[row]]:
            environment.task.before_step(np.clip(action.astype(np.float64), low, high), physics)
            physics.step(environment._n_sub_steps)
            yield physics

    def _bits(self, iteration: int, trajectory: int, purpose: int) -> np.random.BitGenerator:
        """The random stream of that name."""
        key = (*self._seed.spawn_key, int(iteration), int(trajectory), purpose)
        return np.random.PCG64(np.random.SeedSequence(self._seed.entropy, spawn_key=key))

    def _noise(self, iteration: int, trajectory: int) -> Float32:
        """A trajectory's action noise [T, act]."""
        generator = np.random.Generator(self._bits(iteration, trajectory, _NOISE))
        return generator.standard_normal((self.steps, self.act_size), np.float32)

    def _chunks(self, assignment: Int64, *, together: bool) -> list[Int64]:
        """Rows for a thread to run together: of one policy, or of all that share their weights.

        The weights of one policy stay in a core's cache from step to step; those of several do not.
        """
        order = np.argsort(assignment, kind="stable")
        groups = [order] if together else np.split(order, np.flatnonzero(np.diff(assignment[order])) + 1)
        size = min(self._chunk, -(-len(order) // self.threads))
        return [group[i : i + size] for group in groups for i in range(0, len(group), size)]

    def _in_threads(self, run_chunk: Any, chunks: list[Int64]) -> None:
        """Let each thread, with its own worlds, take the next chunk until none is left."""
        threads = min(self.threads, len(chunks))
        while len(self._workers) < threads:
            self._workers.append((NativeWorlds if self.native else PlainWorlds)(self._task, self._chunk))
        waiting, lock = iter(chunks), threading.Lock()

        def work(worlds: Worlds) -> None:
            while True:
                with lock:
                    rows = next(waiting, None)
                if rows is None:
                    return
                run_chunk(worlds, rows)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(work, self._workers[:threads]))

    def _check(self, policy: Policy, parameters: Float32 | LowRank, assignment: Int64, keep: Collection[str]) -> None:
        """Refuse arguments that do not fit the task or each other."""
        if (policy.obs_size, policy.act_size) != (self.obs_size, self.act_size):
            raise ValueError(
                f"the policy maps {policy.obs_size} observations to {policy.act_size} actions, "
                f"but {self.task} has {self.obs_size} and {self.act_size}"
            )
        if isinstance(parameters, LowRank):
            _check_low_rank(policy, parameters)
        elif parameters.shape[1:] != (policy.size,):
            raise ValueError(f"parameters must have shape [K, {policy.size}], not {list(parameters.shape)}")
        elif not np.isfinite(parameters).all():
            bad = np.flatnonzero(~np.isfinite(parameters).all(axis=1))
            raise ValueError(f"the parameters of policy {bad.tolist()} contain NaN or infinity")
        if assignment.ndim != 1 or len(assignment) == 0:
            raise ValueError(f"assignment must name a policy for each trajectory, not have shape {assignment.shape}")
        if assignment.min() < 0 or assignment.max() >= len(parameters):
            raise ValueError(
                f"assignment must lie in 0..{len(parameters) - 1}, not {assignment.min()}..{assignment.max()}"
            )
        if unknown := set(keep) - {"observations", "actions"}:
            raise ValueError(f"keep takes 'observations' and 'actions', not {sorted(unknown)}")


def _check_low_rank(policy: Policy, parameters: LowRank) -> None:
    """Refuse changes that do not fit the policy's layers or each other."""
    K, layers = len(parameters), list(pairwise(policy.sizes))
    ranks = [change.U.shape[-1] for change in parameters.layers]
    expected = [[policy.size], [K, policy.size - sum((inputs + 1) * outputs for inputs, outputs in layers)]]
    for (inputs, outputs), rank in zip(layers, ranks, strict=False):
        expected += [[K, inputs, rank], [K, rank, outputs], [K, outputs]]
    arrays = [parameters.base, parameters.log_std, *(array for change in parameters.layers for array in change)]
    shapes = [list(array.shape) for array in arrays]
    if len(ranks) != len(layers) or shapes != expected:
        raise ValueError(f"base, log-std, and U, V and bias of each layer must have shapes {expected}, not {shapes}")
    if not all(np.isfinite(array).all() for array in arrays):
        raise ValueError("the policies' base or changes contain NaN or infinity")
