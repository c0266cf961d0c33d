"""The steps that an off-policy agent learns from: the last trajectories, each step with a reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from pbrl.types import Behaviour, Bool, Float32, Int64


class Batch(NamedTuple):
    """n steps."""

    obs: torch.Tensor  # [n, obs]
    actions: torch.Tensor  # [n, act]
    rewards: torch.Tensor  # [n]
    next_obs: torch.Tensor  # [n, obs]
    goes_on: torch.Tensor  # [n] 0 where the episode ended by itself; 1 elsewhere, also at the time limit


class Replay:
    """The last `capacity` trajectories. Observations are kept once: that of the next step is the next one."""

    def __init__(self, capacity: int) -> None:
        if capacity < 2:
            raise ValueError(f"buffer_trajectories must be at least 2, not {capacity}")
        self.capacity = capacity
        self.observations: Float32 = np.empty((0, 0, 0), np.float32)  # [capacity, T + 1, obs]
        self.actions: Float32 = np.empty((0, 0, 0), np.float32)  # [capacity, T, act]
        self.rewards: Float32 = np.empty((0, 0), np.float32)  # [capacity, T]
        self.lengths: Int64 = np.empty(0, np.int64)  # [trajectories kept]
        self.number: Int64 = np.empty(0, np.int64)  # [trajectories kept]

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, behaviour: Behaviour, rewards: Float32) -> None:
        """Keep trajectories with their rewards [N, T]; the oldest ones make room."""
        assert behaviour.observations is not None
        assert behaviour.actions is not None
        if not len(self):
            self._make_room(behaviour.observations.shape[1:], behaviour.actions.shape[1:])
        for row in range(len(behaviour)):
            place = len(self) if len(self) < self.capacity else int(self.number.argmin())
            if place == len(self):
                self.lengths, self.number = (np.append(each, 0) for each in (self.lengths, self.number))
            self.observations[place], self.actions[place] = behaviour.observations[row], behaviour.actions[row]
            self.rewards[place] = rewards[row]
            self.lengths[place], self.number[place] = behaviour.lengths[row], behaviour.number[row]

    def _make_room(self, observations: tuple[int, ...], actions: tuple[int, ...]) -> None:
        """Memory is taken when it is written to, not here."""
        self.observations = np.empty((self.capacity, *observations), np.float32)
        self.actions = np.empty((self.capacity, *actions), np.float32)
        self.rewards = np.zeros((self.capacity, actions[0]), np.float32)

    def relabel(self, rewards: Float32) -> None:
        """Give every step that is kept another reward [trajectories kept, T]."""
        self.rewards[: len(self)] = rewards

    def behaviour(self, last: int | None = None) -> Behaviour:
        """The trajectories that are kept, in the order of the arrays; or the last of them, in that of their numbers."""
        rows: Any = slice(0, len(self)) if last is None else np.argsort(self.number)[-last:]
        lengths = self.lengths[rows]
        return Behaviour(
            policy=np.zeros(len(lengths), np.int64),
            lengths=lengths,
            diverged=np.zeros(len(lengths), np.bool_),
            start=np.zeros((len(lengths), 3), np.int64),
            number=self.number[rows],
            observations=self.observations[rows],
            actions=self.actions[rows],
        )

    def states(self) -> Float32:
        """Every state that an action was taken in [n, obs]."""
        return self.observations[: len(self), :-1][self._lived()]

    def _lived(self) -> Bool:
        """[trajectories kept, T] which steps were made before the end."""
        lived: Bool = np.arange(self.rewards.shape[1]) < self.lengths[:, None]
        return lived

    def sample(self, n: int, rng: np.random.Generator) -> Batch:
        """Steps drawn uniformly, with repetition."""
        ends = np.cumsum(self.lengths)
        which = rng.integers(ends[-1], size=n)
        row = np.searchsorted(ends, which, side="right")
        step = which - (ends - self.lengths)[row]
        last, T = step == self.lengths[row] - 1, self.rewards.shape[1]
        ended = last & (self.lengths[row] < T)
        arrays = (
            self.observations[row, step],
            self.actions[row, step],
            self.rewards[row, step],
            self.observations[row, step + 1],
            (~ended).astype(np.float32),
        )
        return Batch(*map(torch.from_numpy, arrays))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        kept = {name: getattr(self, name)[: len(self)].copy() for name in ("observations", "actions", "rewards")}
        return {**kept, "lengths": self.lengths.copy(), "number": self.number.copy()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.lengths, self.number = state["lengths"].copy(), state["number"].copy()
        if len(self):
            self._make_room(state["observations"].shape[1:], state["actions"].shape[1:])
            for name in ("observations", "actions", "rewards"):
                getattr(self, name)[: len(self)] = state[name]
