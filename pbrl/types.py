"""The few types that everything speaks: trajectories, pairs of them, and preferences between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pbrl.ledger import Budget
    from pbrl.policy import GaussianPolicy

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Metrics = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the policies did in N trajectories of T control steps: all that an agent may see.

    Fields that nobody asked for are None.
    """

    policy: Int64  # [N] which of the collection's policies acted
    lengths: Int64  # [N] control steps until the episode ended by itself or diverged; T otherwise
    diverged: Bool  # [N] whether the physics became invalid; the reward is 0 from that step on
    start: Int64  # [N, 3] (iteration, trajectory, start stream): what the trajectory's randomness came from
    observations: Float32 | None = None  # [N, T + 1, obs]
    actions: Float32 | None = None  # [N, T, act], as drawn: the environment clips them to its bounds

    def __len__(self) -> int:
        return len(self.policy)


@dataclass(frozen=True, kw_only=True)
class Trajectories(Behaviour):
    """N trajectories with their true rewards, which only the teacher and the evaluation may read."""

    task_rewards: Float64  # [N, T]

    @property
    def returns(self) -> Float64:
        """The undiscounted true return of each trajectory [N]."""
        return np.asarray(self.task_rewards.sum(axis=1))

    def without_rewards(self) -> Behaviour:
        """The same trajectories as an agent receives them: another type, with no rewards in it."""
        return Behaviour(**{field.name: getattr(self, field.name) for field in fields(Behaviour)})


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P comparisons between rows of one collection, over whole trajectories or clips of equal length.

    `experts` independent answers are wanted for each pair; each of them is a bit that the ledger counts.
    """

    behaviour: Behaviour
    first: Int64  # [P] rows
    second: Int64  # [P] rows
    first_step: Int64 | None = None  # [P] where each clip begins; whole trajectories if None
    second_step: Int64 | None = None  # [P]
    clip_steps: int | None = None  # H
    experts: int = 1

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """A teacher's answers to P pairs. Rows are never dropped: an unanswered pair stays in its row."""

    probability: Float64  # [P] that the second is preferred: the soft label, in [0, 1]
    score: Float64  # [P] 2 probability - 1: the signed confidence, in [-1, 1]
    label: Float64  # [P] 0 first, 1 second, 1/2 equal: hard feedback
    answered: Bool  # [P] False: the teacher skipped the pair

    def __len__(self) -> int:
        return len(self.probability)


class Agent(Protocol):
    """Learns a policy from preferences alone."""

    policy: GaussianPolicy  # the architecture

    @property
    def parameters(self) -> Float32:
        """The incumbent, for evaluation [size]."""

    def ask(self, budget: Budget) -> Pairs | None:
        """Collect trajectories within the budget and say what to compare; None when it is used up."""

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:
        """Update once from the answers to what was asked."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
