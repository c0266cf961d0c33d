"""What an oracle is, and what it gives back: the preferences, and beside them what no agent ever sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from pbrl.types import Bool, Float64, Int64, Preferences

Vote = Literal["mean", "majority"]


class Reason(IntEnum):
    """Why a pair was answered as it was."""

    ANSWERED = 0  # as the teacher judged
    SKIPPED = 1  # both clips were too poor to be compared
    EQUAL = 2  # the clips were too close to be told apart
    MISTAKEN = 3  # the wrong way round


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """What an oracle keeps of K clips that it has watched."""

    undiscounted: Float64  # [K] U: sums of the true rewards
    myopic: Float64  # [K] S: the same with early steps fading; what the teacher judges by
    steps: int  # H, the length of every clip

    def __len__(self) -> int:
        return len(self.undiscounted)

    def __getitem__(self, rows: Int64) -> Impressions:
        return Impressions(undiscounted=self.undiscounted[rows], myopic=self.myopic[rows], steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """An oracle's answers to P pairs, with the truth beside them: for the ledger, the log and the audit."""

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
        decided: Bool = (self.preferences.label != 0.5) & (self.first_sum != self.second_sum)
        return decided

    @property
    def wrong(self) -> Bool:
        """[P] where the label contradicts the order of the true sums."""
        says_second, is_second = self.preferences.label == 1.0, self.second_sum > self.first_sum
        wrong: Bool = self.decided & (says_second != is_second)
        return wrong


class Oracle(Protocol):
    """Compares clips by their true rewards. The ledger is the only one to call it during training."""

    @property
    def needs_calibration(self) -> bool:
        """Whether `calibrate` has to choose the temperature before the first comparison."""

    def watch(self, clips: Float64) -> Impressions:
        """Look at the rewards [K, H] of K clips; each clip once, however many pairs it is in."""

    def compare(
        self,
        first: Float64 | Impressions,
        second: Float64 | Impressions,
        *,
        mean_return: float,
        episode_steps: int,
        experts: int = 1,
    ) -> Answers:
        """Answer P pairs of clips, given as rewards [P, H] or as watched before.

        `mean_return` is the mean true return of this iteration's trajectories, each `episode_steps` long.
        With several experts the probability is the share of their independent labels that prefer the second.
        """

    def calibrate(self, clips: Float64) -> float:
        """Choose the temperature on the rewards [K, H] of clips that nobody paid for, and return it."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


def pool(answers: Sequence[Answers], vote: Vote) -> Answers:
    """One answer per pair from several: the share of labels for the second clip, or what the majority says.

    Labels "equal" count one half. The hard label is the majority's, 1/2 when the votes are level; the pool is
    mistaken where most of its members were.
    """
    votes = np.sum([each.preferences.label for each in answers], axis=0)  # [P], for the second clip
    members = len(answers)
    label = 0.5 + 0.5 * np.sign(2 * votes - members)
    mistakes = np.sum([each.reason == Reason.MISTAKEN for each in answers], axis=0)
    one = answers[0]  # whether to skip and whether the clips are equal is not left to chance: all agree on it
    unjudged = (one.reason == Reason.SKIPPED) | (one.reason == Reason.EQUAL)
    reason = np.where(2 * mistakes > members, Reason.MISTAKEN, Reason.ANSWERED)
    return Answers(
        preferences=Preferences(
            probability=label if vote == "majority" else votes / members,
            score=2 * label - 1 if vote == "majority" else (2 * votes - members) / members,
            label=label,
            answered=one.preferences.answered,
        ),
        reason=np.where(unjudged, one.reason, reason).astype(np.uint8),
        first_sum=one.first_sum,
        second_sum=one.second_sum,
        bits=np.sum([each.bits for each in answers], axis=0),
        tau=one.tau,
    )
