"""A task that is solved in seconds: each step's reward is how close the action is to a target."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from pbrl.policy import LowRank, Policy
from pbrl.types import Float32, Int64, Trajectories

OBS, ACT, STEPS = 3, 2, 20
TARGET = np.array([0.8, -0.6])


class ToySimulator:
    """Stands in for `pbrl.simulation.simulator.Simulator`: two actions, three observations drawn anew at each step.

    `collected` is what it returned, true rewards included.
    """

    task, obs_size, act_size = "toy", OBS, ACT
    action_bounds = (np.full(ACT, -1.0), np.full(ACT, 1.0))

    def __init__(self, seed: int | np.random.SeedSequence, steps: int = STEPS) -> None:
        self.steps = steps
        self.collected: list[Trajectories] = []
        self._seed = seed if isinstance(seed, np.random.SeedSequence) else np.random.SeedSequence(seed)

    def collect(
        self,
        policy: Policy,
        parameters: Float32 | LowRank,
        assignment: Int64,
        *,
        iteration: int,
        first_trajectory: int = 0,
        mean_actions: bool = False,
        common_start: bool = False,  # noqa: ARG002
        keep: Collection[str] = (),
    ) -> Trajectories:
        n, steps, parameters = len(assignment), self.steps, np.asarray(parameters)
        observations = np.empty((n, steps + 1, OBS), np.float32)
        noise = np.empty((n, steps, ACT), np.float32)
        for row in range(n):
            key = (*self._seed.spawn_key, iteration, first_trajectory + row)
            stream = np.random.default_rng(np.random.SeedSequence(self._seed.entropy, spawn_key=key))
            observations[row] = stream.standard_normal((steps + 1, OBS))
            noise[row] = stream.standard_normal((steps, ACT))
        flat = observations[:, :-1].reshape(-1, OBS)
        actions = policy.mean_actions(parameters, flat, np.repeat(assignment, steps)).reshape(n, steps, ACT)
        if not mean_actions:
            for k in np.unique(assignment):
                drawn = (torch.from_numpy(each[assignment == k]) for each in (observations[:, :-1], noise))
                actions[assignment == k] = policy.sample(torch.tensor(parameters[k]), *drawn)[0]
        number = first_trajectory + np.arange(n)
        self.collected.append(
            Trajectories(
                policy=np.array(assignment),
                lengths=np.full(n, steps),
                diverged=np.zeros(n, np.bool_),
                start=np.stack([np.full(n, iteration), number, number], axis=1),
                number=number,
                observations=observations if "observations" in keep else None,
                actions=actions if "actions" in keep else None,
                task_rewards=np.exp(-((actions.astype(np.float64) - TARGET) ** 2).sum(axis=2)),
            )
        )
        return self.collected[-1]
