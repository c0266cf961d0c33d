"""A task that is solved in seconds: each step's reward is how close the action is to a target."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from pbrl.policy import GaussianPolicy
from pbrl.types import Float32, Int64, Trajectories

TARGET = np.array([0.8, -0.6])


class ToySimulator:
    """Stands in for `pbrl.simulation.simulator.Simulator`: two actions, three observations drawn anew at each step."""

    task, obs_size, act_size = "toy", 3, 2

    def __init__(self, seed: int | np.random.SeedSequence, steps: int = 20) -> None:
        self.steps = steps
        self._seed = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)

    def collect(
        self,
        policy: GaussianPolicy,
        parameters: Float32,
        assignment: Int64,
        *,
        iteration: int,
        first_trajectory: int = 0,
        mean_actions: bool = False,
        common_start: bool = False,  # noqa: ARG002
        keep: Collection[str] = (),
    ) -> Trajectories:
        n, steps = len(assignment), self.steps
        observations = np.empty((n, steps + 1, 3), np.float32)
        noise = np.empty((n, steps, 2), np.float32)
        for row in range(n):
            key = (*self._seed.spawn_key, iteration, first_trajectory + row)
            stream = np.random.default_rng(np.random.SeedSequence(self._seed.entropy, spawn_key=key))
            observations[row] = stream.standard_normal((steps + 1, 3))
            noise[row] = stream.standard_normal((steps, 2))
        flat = observations[:, :-1].reshape(-1, 3)
        actions = policy.mean_actions(parameters, flat, np.repeat(assignment, steps)).reshape(n, steps, 2)
        if not mean_actions:
            actions = actions + np.exp(parameters[assignment, None, -2:]) * noise
        rewards = np.exp(-((actions.astype(np.float64) - TARGET) ** 2).sum(axis=2))
        return Trajectories(
            policy=np.asarray(assignment),
            lengths=np.full(n, steps),
            diverged=np.zeros(n, np.bool_),
            start=np.stack([np.full(n, iteration), first_trajectory + np.arange(n), np.arange(n)], axis=1),
            observations=observations if "observations" in keep else None,
            actions=actions if "actions" in keep else None,
            task_rewards=rewards,
        )
