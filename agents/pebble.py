"""PEBBLE: off-policy learning of a reward and a policy, after a start without questions.

Lee, Smith, Abbeel 2021, "PEBBLE: Feedback-Efficient Interactive Reinforcement Learning via Relabeling Experience and
Unsupervised Pre-training":

    trajectories one after the other, each followed by SAC's updates       (agents.sac)
        at first on the entropy of states: the distance to the k-th nearest other state of the buffer,
        divided by its standard deviation
    after the first few trajectories of every iteration:
        ask about clips of the last trajectories                           (agents.samplers)
        fit r to the preferences                                           (agents.reward_model)
        give every step of the buffer its new reward r(s, a)
        the first time, begin with new critics (actor and temperature stay) and update them a little
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import Any, Literal

import numpy as np
import torch

from agents.reward_model import RewardModel
from agents.sac import SAC
from agents.samplers import Questions, Sampler
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.threads import workers
from pbrl.types import Float32, Metrics

_BLOCK = 500  # states that a thread compares with all others at a time


class PEBBLE:
    """Explore, learn what the teacher rewards, and learn from all that was ever done as if it had been rewarded so."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        reward_model: Callable[..., RewardModel],
        sac: Callable[..., SAC],
        sampler: Sampler,
        clip_steps: int | None,
        pool: int | None,
        questions: int | None,
        questions_in_all: int | None,
        schedule: Literal["constant", "falling", "rising"],
        unsupervised_trajectories: int,
        neighbours: int,
        updates_after_reset: int,
        iterations: int | None = None,
    ) -> None:
        for name, value in (("unsupervised_trajectories", unsupervised_trajectories), ("neighbours", neighbours)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.policy, self.rng, self.pool = policy, rng, pool
        self.unsupervised_trajectories, self.neighbours = unsupervised_trajectories, neighbours
        self.updates_after_reset = updates_after_reset
        self.reward_model = reward_model(obs_size=policy.obs_size, act_size=policy.act_size, rng=rng)
        self.sac = sac(policy=policy, rng=rng)
        self.questions = Questions(
            sampler=sampler,
            clip_steps=clip_steps,
            pool=pool,
            questions=questions,
            questions_in_all=questions_in_all,
            schedule=schedule,
            iterations=iterations,
            rng=rng,
        )

    @property
    def parameters(self) -> Float32:
        """The actor's."""
        return self.sac.parameters

    def iterate(self, budget: Budget) -> Metrics:
        """Collect and learn by turns; in between, ask and learn what is rewarded."""
        replay, wanted = self.sac.replay, budget.trajectories_left
        with workers() as pool:
            # trajectories one after the other, each followed by SAC's updates
            metrics = self._explore(budget, min(self.unsupervised_trajectories, wanted), pool)

            # ask about clips of the last trajectories
            taught = self.reward_model.pairs > 0
            asked = self.questions.ask(budget, self.reward_model, pool)
            if asked is not None and self.reward_model.pairs:
                # fit r to the preferences
                metrics |= self.reward_model.fit(pool)
                metrics |= self.reward_model.accuracy(*asked, pool)

                # give every step of the buffer its new reward r(s, a)
                replay.relabel(self.reward_model.reward(replay.behaviour(), pool))

                # the first time, begin with new critics (actor and temperature stay) and update them a little
                if not taught:
                    self.sac.reset_critics()
                    for _ in range(self.updates_after_reset):
                        self.sac.update(replay.sample(self.sac.batch_size, self.rng), pool.map)

            metrics |= self._explore(budget, budget.trajectories_left, pool)
            if self.reward_model.pairs and wanted <= replay.capacity:
                budget.note(reward=replay.last(wanted).sum(axis=1))
        return metrics

    def _explore(self, budget: Budget, trajectories: int, pool: Executor) -> dict[str, float]:
        """Trajectories one after the other, each followed by SAC's updates."""
        replay, metrics = self.sac.replay, {}
        for _ in range(trajectories):
            behaviour = self.sac.collect(budget, 1)
            self.questions.look_at(behaviour)
            rewards = self.reward_model.reward(behaviour, pool)  # means nothing until there are answers
            replay.add(behaviour, rewards)
            if self.reward_model.pairs == 0:
                # at first on the entropy of states; then, as long as the teacher skips all, there is nothing to learn
                if replay.added > self.unsupervised_trajectories:
                    continue
                self._reward_entropy(pool)
            metrics = dict(self.sac.learn(int(behaviour.lengths.sum()), pool.map))
        return metrics

    def _reward_entropy(self, pool: Executor) -> None:
        """Give every step of the buffer the entropy of its state."""
        replay = self.sac.replay
        lived = replay.lived()
        distance = neighbour_distance(replay.observations[: len(replay), :-1][lived], self.neighbours, pool)
        rewards = np.zeros(lived.shape, np.float32)
        # Departure: B-Pref's standard deviation runs over the batches of all updates; here it is the buffer's own,
        # all of which is computed anew after every trajectory.
        rewards[lived] = distance / (distance.std() + np.float32(1e-8)) if len(distance) else distance
        replay.relabel(rewards)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "reward_model": self.reward_model.state_dict(),
            "sac": self.sac.state_dict(),
            "questions": self.questions.state_dict(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.reward_model.load_state_dict(state["reward_model"])
        self.sac.load_state_dict(state["sac"])
        self.questions.load_state_dict(state["questions"])
        self.rng.bit_generator.state = state["rng"]


def neighbour_distance(states: Float32, k: int, pool: Executor) -> Float32:
    """How far (L2) each state [n, obs] is from the k-th nearest other one [n]; from the farthest if there are fewer."""
    if len(states) < 2:
        return np.zeros(len(states), np.float32)
    every, k = torch.from_numpy(states), min(k, len(states) - 1)

    def look_at(begin: int) -> torch.Tensor:
        exactly = "donot_use_mm_for_euclid_dist"  # a matrix product would lose the small distances
        distances = torch.cdist(every[begin : begin + _BLOCK], every, compute_mode=exactly)
        return distances.kthvalue(k + 1, dim=1).values  # the nearest of all is the state itself

    return torch.cat(list(pool.map(look_at, range(0, len(states), _BLOCK)))).numpy()
