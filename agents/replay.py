"""The steps that an off-policy agent learns from: the last trajectories, each step with a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pbrl.types import Behaviour, Bool, Fixed, Float32

BLOCK = 20  # trajectories that a checkpoint stores together


class Batch(NamedTuple):
    """n steps."""

    obs: torch.Tensor  # [n, obs]
    actions: torch.Tensor  # [n, act]
    rewards: torch.Tensor  # [n]
    next_obs: torch.Tensor  # [n, obs]
    goes_on: torch.Tensor  # [n] 0 where the episode ended by itself; 1 elsewhere, also at the time limit


class Replay:
    """The last `capacity` trajectories, in rows that are used again in turn.

    An observation is kept once: that of the next step is the next one. Memory is taken as rows are filled.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"buffer_trajectories must be at least 1, not {capacity}")
        self.capacity = capacity
        self.added = 0  # trajectories, since the run began
        self.lengths = np.zeros(capacity, np.int64)
        self.observations: Float32 = np.empty((capacity, 0, 0), np.float32)  # [capacity, T + 1, obs]
        self.actions: Float32 = np.empty((capacity, 0, 0), np.float32)  # [capacity, T, act]
        self.rewards: Float32 = np.empty((capacity, 0), np.float32)  # [capacity, T]

    def __len__(self) -> int:
        return min(self.added, self.capacity)

    def add(self, behaviour: Behaviour, rewards: Float32) -> None:
        """Keep trajectories with their rewards [N, T]; the oldest ones make room."""
        assert behaviour.observations is not None
        assert behaviour.actions is not None
        if self.added == 0:
            self._make_room(behaviour.observations.shape[1:], behaviour.actions.shape[1:])
        for row in range(len(behaviour)):
            place = self.added % self.capacity
            self.observations[place], self.actions[place] = behaviour.observations[row], behaviour.actions[row]
            self.rewards[place], self.lengths[place] = rewards[row], behaviour.lengths[row]
            self.added += 1

    def _make_room(self, observations: tuple[int, ...], actions: tuple[int, ...]) -> None:
        self.observations = np.empty((self.capacity, *observations), np.float32)
        self.actions = np.empty((self.capacity, *actions), np.float32)
        self.rewards = np.zeros((self.capacity, actions[0]), np.float32)

    def relabel(self, rewards: Float32) -> None:
        """Give every step that is kept another reward [rows, T]."""
        self.rewards[: len(self)] = rewards

    def last(self, n: int) -> Float32:
        """The rewards of the last n trajectories [n, T], in the order in which they were added."""
        return self.rewards[np.arange(self.added - n, self.added) % self.capacity]

    def behaviour(self) -> Behaviour:
        """All trajectories that are kept, row by row, without copying them."""
        n = len(self)
        return Behaviour(
            policy=np.zeros(n, np.int64),
            lengths=self.lengths[:n],
            diverged=np.zeros(n, np.bool_),
            start=np.zeros((n, 3), np.int64),
            number=np.arange(n),
            observations=self.observations[:n],
            actions=self.actions[:n],
        )

    def lived(self) -> Bool:
        """Which steps were made before their trajectory's end [rows, T]."""
        return np.asarray(np.arange(self.rewards.shape[1]) < self.lengths[: len(self), None])

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """Steps drawn uniformly, with repetition."""
        lengths = self.lengths[: len(self)]
        ends = np.cumsum(lengths)
        which = rng.integers(ends[-1], size=n)
        row = np.searchsorted(ends, which, side="right")
        step = which - (ends - lengths)[row]
        ended = (step == lengths[row] - 1) & (lengths[row] < self.rewards.shape[1])
        arrays = (
            self.observations[row, step],
            self.actions[row, step],
            self.rewards[row, step],
            self.observations[row, step + 1],
            (~ended).astype(np.float32),
        )
        return Batch(*map(torch.from_numpy, arrays))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly. What was observed and done is written once, in blocks of rows.

        Save it before more is added: blocks are not copied.
        """
        n = len(self)
        rows = [slice(begin, min(begin + BLOCK, n)) for begin in range(0, n, BLOCK)]
        return {
            "added": self.added,
            "lengths": self.lengths[:n].copy(),
            "rewards": self.rewards[:n].copy(),
            "blocks": [Fixed(observations=self.observations[each], actions=self.actions[each]) for each in rows],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.added = state["added"]
        n = len(self)
        self.lengths[:n] = state["lengths"]
        for number, block in enumerate(state["blocks"]):
            if number == 0:
                self._make_room(block["observations"].shape[1:], block["actions"].shape[1:])
            rows = slice(number * BLOCK, number * BLOCK + len(block["actions"]))
            self.observations[rows], self.actions[rows] = block["observations"], block["actions"]
        self.rewards[:n] = state["rewards"]
