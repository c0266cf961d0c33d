"""A simulator without physics: policy k earns about `parameters[k, 0]` per step, reproducibly."""

from types import SimpleNamespace

import numpy as np

from pbrl.types import Trajectories

POLICY = SimpleNamespace(normaliser=None)  # all that the ledger asks of one


class FakeSimulator:
    obs_size, act_size = 3, 2

    def __init__(self, *, steps=20, noise=1.0, seed=0):
        self.steps, self.noise, self.seed = steps, noise, seed
        self.calls = []

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, mean_actions, common_start, keep):
        del policy
        self.calls.append((iteration, first_trajectory, len(assignment), mean_actions, common_start, tuple(keep)))
        numbers = first_trajectory + np.arange(len(assignment))
        rewards = np.stack(
            [
                parameters[k, 0] + self.noise * np.random.default_rng([self.seed, iteration, n]).normal(size=self.steps)
                for k, n in zip(assignment, numbers, strict=True)
            ]
        )
        return Trajectories(
            policy=np.asarray(assignment),
            lengths=np.full(len(assignment), self.steps),
            diverged=np.zeros(len(assignment), dtype=bool),
            start=np.stack([np.full_like(numbers, iteration), numbers, numbers], axis=1),
            observations=np.zeros((len(assignment), self.steps + 1, 3), np.float32) if "observations" in keep else None,
            actions=np.zeros((len(assignment), self.steps, 2), np.float32) if "actions" in keep else None,
            task_rewards=rewards,
        )
