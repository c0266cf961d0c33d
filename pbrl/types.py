"""The types that everything speaks: behaviour, questions about it, answers to them; and what agents and oracles are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from pbrl.ledger import Budget
    from pbrl.policy import Policy

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
Metrics = Mapping[str, float]


class Fixed(dict[str, Any]):
    """Arrays of a state that will not change any more: all checkpoints share one file with them."""


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """What the policies did in N trajectories of T control steps: all that an agent may see.

    Fields not named in `keep` when it was collected are None. No array can be written to.
    """

    policy: Int64  # [N] which of the collection's policies acted
    lengths: Int64  # [N] control steps until the episode ended by itself or diverged; T otherwise
    diverged: Bool  # [N] whether the physics became invalid; the reward is 0 from that step on
    start: Int64  # [N, 3] (iteration, trajectory, start stream): what the trajectory's randomness came from
    number: Int64  # [N] each trajectory's number, ascending: in the run once it is paid for, in its iteration before
    observations: Float32 | None = None  # [N, T + 1, obs]
    actions: Float32 | None = None  # [N, T, act], as drawn: the environment clips them to its bounds

    def __len__(self) -> int:
        return len(self.policy)

    def take(self, rows: slice | Int64) -> Self:
        """Some of the trajectories."""
        taken: dict[str, Any] = {name: None if each is None else each[rows] for name, each in vars(self).items()}
        return type(self)(**taken)

    def rows(self, trajectories: Int64) -> Int64:
        """Which rows [...] hold the trajectories with these numbers [...]."""
        rows = np.minimum(np.searchsorted(self.number, trajectories), len(self) - 1)
        if missing := sorted({*np.asarray(trajectories)[self.number[rows] != trajectories].tolist()}):
            raise KeyError(f"trajectories {missing} are not here: {self.number[0]} .. {self.number[-1]} are")
        return rows

    def cut(self, clips: Clips, steps: int | None) -> tuple[Float32, Float32, Int64]:
        """Observations [P, H, obs] and actions [P, H, act] of P clips, and how many steps of each were lived [P].

        H is `steps`, or T for whole trajectories.
        """
        assert self.observations is not None, "collect with keep=('observations', 'actions') to learn from clips"
        assert self.actions is not None, "collect with keep=('observations', 'actions') to learn from clips"
        rows = self.rows(clips.trajectory)
        if steps is None:
            return self.observations[rows, :-1], self.actions[rows], self.lengths[rows]
        step = clips.step[:, None] + np.arange(steps)
        lived = np.clip(self.lengths[rows] - clips.step, 0, steps)
        return self.observations[rows[:, None], step], self.actions[rows[:, None], step], lived


@dataclass(frozen=True, kw_only=True)
class Trajectories(Behaviour):
    """N trajectories with their true rewards, which only the teacher and the evaluation may read."""

    task_rewards: Float64  # [N, T]

    @property
    def returns(self) -> Float64:
        """The undiscounted true return of each trajectory [N]."""
        return np.asarray(self.task_rewards.sum(axis=1))

    def without_rewards(self, number: Int64, keep: Sequence[str]) -> Behaviour:
        """The same trajectories as an agent receives them: another type, with no rewards in it."""
        hidden = {"observations", "actions"} - {*keep}
        kept = {field.name: getattr(self, field.name) for field in fields(Behaviour) if field.name not in hidden}
        return Behaviour(**{**kept, "number": number})


AnyBehaviour = TypeVar("AnyBehaviour", bound=Behaviour)


def join(parts: Sequence[AnyBehaviour]) -> AnyBehaviour:
    """Several collections as one, in the order of their trajectories' numbers."""
    parts = sorted(parts, key=lambda part: int(part.number[0]))
    columns = {name: [getattr(part, name) for part in parts] for name in vars(parts[0])}
    joined: dict[str, Any] = {
        name: None if column[0] is None else np.concatenate(column) for name, column in columns.items()
    }
    return type(parts[0])(**joined)


@dataclass(frozen=True, kw_only=True)
class Clips:
    """P clips, all of one length: each begins at a step of a trajectory, which is named by its number in the run."""

    trajectory: Int64  # [P]
    step: Int64  # [P] where the clip begins

    def __post_init__(self) -> None:
        for name in ("trajectory", "step"):
            values = np.asarray(getattr(self, name))
            if values.ndim != 1 or values.dtype.kind not in "iu" or (values < 0).any():
                raise ValueError(f"{name} must be whole numbers >= 0, one for each clip, not {values!r}")
            object.__setattr__(self, name, values.astype(np.int64))
        if len(self.trajectory) != len(self.step):
            raise ValueError(f"there are {len(self.trajectory)} trajectories for {len(self.step)} steps")

    def __len__(self) -> int:
        return len(self.trajectory)

    def __getitem__(self, rows: Any) -> Clips:
        return Clips(trajectory=self.trajectory[rows], step=self.step[rows])


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """P comparisons between clips of H steps, or between whole trajectories.

    `experts` independent answers are wanted for each pair; the ledger counts each of them.
    """

    first: Clips
    second: Clips
    steps: int | None = None  # H; None: whole trajectories
    experts: int = 1

    def __post_init__(self) -> None:
        if len(self.first) != len(self.second) or len(self.first) == 0:
            raise ValueError(f"a pair is two clips: got {len(self.first)} first and {len(self.second)} second ones")
        if self.steps is None and (self.first.step.any() or self.second.step.any()):
            raise ValueError("whole trajectories begin at step 0: give `steps`, the length of the clips")
        for name in ("steps", "experts"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | np.integer) or value < 1):
                raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def whole(cls, first: Int64, second: Int64, *, experts: int = 1) -> Pairs:
        """Compare whole trajectories, by number [P]."""
        one, other = (Clips(trajectory=each, step=np.zeros(len(each), np.int64)) for each in (first, second))
        return cls(first=one, second=other, experts=experts)


@dataclass(frozen=True, kw_only=True)
class Preferences:
    """A teacher's answers to P pairs. Rows are never dropped: an unanswered pair stays in its row."""

    probability: Float64  # [P] that the second is preferred: the soft label, in [0, 1]
    score: Float64  # [P] 2 probability - 1: the signed confidence, in [-1, 1]
    label: Float64  # [P] 0 first, 1 second, 1/2 equal: hard feedback
    answered: Bool  # [P] False: the teacher skipped the pair

    def __len__(self) -> int:
        return len(self.probability)


class Reason(IntEnum):
    """Why a pair was answered as it was."""

    ANSWERED = 0  # as the teacher judged
    SKIPPED = 1  # both clips were too poor to be compared
    EQUAL = 2  # the clips were too close to be told apart
    MISTAKEN = 3  # the wrong way round


@dataclass(frozen=True, kw_only=True)
class Film:
    """What happened in K clips, for an oracle that looks at behaviour: enough to replay them in the simulator."""

    trajectories: Behaviour  # with actions, one row for each clip
    step: Int64  # [K] where each clip begins


@dataclass(frozen=True, kw_only=True)
class Question:
    """P pairs as an oracle receives them: each clip once, and which two of them make a pair."""

    first: Int64  # [P] rows of the clips
    second: Int64  # [P]
    steps: int  # H, the length of every clip
    episode_steps: int  # T, the length of a trajectory
    experts: int = 1  # independent answers wanted for each pair
    iteration: int | None = None  # of the run; None outside of one
    rewards: Float64 | None = None  # [K, H] true rewards of the clips, for an oracle that sees rewards
    mean_return: float | None = None  # mean true return of the last trajectories, for the same
    film: Film | None = None  # for an oracle that sees behaviour

    def __len__(self) -> int:
        return len(self.first)

    @classmethod
    def about_rewards(
        cls, first: Float64, second: Float64, *, mean_return: float, episode_steps: int, experts: int = 1
    ) -> Question:
        """Ask about P pairs of clips, given by their true rewards [P, H]."""
        first, second = np.asarray(first), np.asarray(second)
        if first.ndim != 2 or first.shape != second.shape:
            raise ValueError(
                f"a pair is two clips of equal length: rewards must be [pairs, steps], "
                f"not {list(first.shape)} and {list(second.shape)}"
            )
        return cls(
            first=np.arange(len(first)),
            second=len(first) + np.arange(len(second)),
            steps=first.shape[1],
            episode_steps=episode_steps,
            experts=experts,
            rewards=np.concatenate([first, second]),
            mean_return=mean_return,
        )


@dataclass(frozen=True, kw_only=True)
class Answers:
    """An oracle's answers to P pairs, with the truth beside them: for the ledger, the log and the audit.

    Where nobody knows the truth, as with a person, the sums are NaN.
    """

    preferences: Preferences
    reason: NDArray[np.uint8]  # [P] Reason
    first_sum: Float64  # [P] undiscounted true sums
    second_sum: Float64  # [P]
    bits: Int64  # [P] answers drawn: one for each expert that did not skip
    tau: float  # temperature in units of the clip's return

    def __len__(self) -> int:
        return len(self.preferences)

    @property
    def decided(self) -> Bool:
        """[P] where the label takes a side and the true sums have one: it is right or wrong."""
        known = np.isfinite(self.first_sum) & np.isfinite(self.second_sum)
        decided: Bool = known & (self.preferences.label != 0.5) & (self.first_sum != self.second_sum)
        return decided

    @property
    def wrong(self) -> Bool:
        """[P] where the label contradicts the order of the true sums."""
        says_second, is_second = self.preferences.label == 1.0, self.second_sum > self.first_sum
        wrong: Bool = self.decided & (says_second != is_second)
        return wrong


@runtime_checkable
class Oracle(Protocol):
    """Compares clips. During training, only the ledger calls it.

    An oracle may also have `needs_calibration` and `calibrate(rewards [K, H])`: if the first is true, the second is
    called with the rewards of trajectories that nobody paid for, as long as the first is true.
    """

    sees: Literal["rewards", "behaviour"]  # a simulated teacher judges rewards, a person looks at what happened

    def compare(self, question: Question) -> Answers:
        """Answer P pairs.

        With several experts the probability is the share of their independent labels that prefer the second.
        """

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


@runtime_checkable
class Agent(Protocol):
    """Learns a policy from preferences alone."""

    policy: Policy  # the architecture

    @property
    def parameters(self) -> Float32:
        """The current policy's parameters, for evaluation [size]."""

    def iterate(self, budget: Budget) -> Metrics:
        """One iteration of the paper, top to bottom: collect, compare, learn."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
