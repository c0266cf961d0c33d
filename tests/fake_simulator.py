"""A simulator without physics: policy k earns about `parameters[k, 0]` per step, reproducibly."""

from types import SimpleNamespace

import numpy as np

from pbrl.types import Trajectories

POLICY = SimpleNamespace(normaliser=None)  # all that the ledger asks of one


class FakeSimulator:
    """`calls` is what it was asked for, `collected` what it returned, true rewards included."""

    obs_size, act_size = 3, 2

    def __init__(self, *, steps=20, noise=1.0, seed=0):
        self.steps, self.noise, self.seed = steps, noise, seed
        self.calls, self.collected = [], []

    @property
    def rewards(self):
        """The true rewards of all trajectories so far, by number [N, T]."""
        return np.concatenate([each.task_rewards for each in self.collected])

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, mean_actions, common_start, keep):
        del policy
        self.calls.append((iteration, first_trajectory, len(assignment), mean_actions, common_start, tuple(keep)))
        n, t = first_trajectory + np.arange(len(assignment)), np.arange(self.steps + 1)
        rewards = np.stack(
            [
                parameters[k, 0] + self.noise * np.random.default_rng([self.seed, iteration, row]).normal(size=t[-1])
                for k, row in zip(assignment, n, strict=True)
            ]
        )
        happened = (1000 * iteration + n[:, None, None] + t[:, None] / 100).astype(np.float32)  # the same nowhere else
        self.collected.append(
            Trajectories(
                policy=np.array(assignment),
                lengths=np.full(len(n), self.steps),
                diverged=np.zeros(len(n), dtype=bool),
                start=np.stack([np.full_like(n, iteration), n, n], axis=1),
                number=n,
                observations=np.repeat(happened, 3, axis=2) if "observations" in keep else None,
                actions=np.repeat(happened[:, :-1], 2, axis=2) if "actions" in keep else None,
                task_rewards=rewards,
            )
        )
        return self.collected[-1]
