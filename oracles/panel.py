"""Several teachers asked about each pair: the M experts of ZPG, or a jury."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from oracles.teacher import Impressions, Teacher, Vote, mean_return_of, pool, rewards_of
from pbrl.types import Answers, Float64, Question


class Panel:
    """M teachers with the same traits, each with a label of its own for every pair.

    With `vote` "mean", the probability is the share of labels that prefer the second clip. With "majority", it is
    what most members say: 0, 1, or 1/2 if votes are tied. Each member's answer is a bit.
    """

    sees: Literal["rewards", "behaviour"] = "rewards"

    def __init__(self, *, teacher: Callable[..., Teacher], members: int, vote: Vote, rng: np.random.Generator) -> None:
        if members < 1:
            raise ValueError(f"a panel needs at least 1 member, not {members}")
        if vote not in ("mean", "majority"):
            raise ValueError(f'vote must be "mean" or "majority", not {vote!r}')
        self.teacher = teacher(rng=rng)
        self.members = members
        self.vote = vote

    @property
    def needs_calibration(self) -> bool:
        """Whether the members' temperature is solved for and nothing is there yet to solve it on."""
        return self.teacher.needs_calibration

    def compare(self, question: Question) -> Answers:
        """Answer P pairs of clips; with several experts, each is a panel of M."""
        seen = self.teacher.watch(rewards_of(question))
        return self.compare_seen(
            seen[question.first],
            seen[question.second],
            mean_return=mean_return_of(question),
            episode_steps=question.episode_steps,
            experts=question.experts,
            iteration=question.iteration,
        )

    def compare_seen(
        self,
        first: Impressions,
        second: Impressions,
        *,
        mean_return: float,
        episode_steps: int,
        experts: int = 1,
        iteration: int | None = None,
    ) -> Answers:
        """Answer P pairs of clips that were watched before."""
        if experts < 1:
            raise ValueError(f"experts must be at least 1, not {experts}")
        judgement = self.teacher.judge(
            first, second, mean_return=mean_return, episode_steps=episode_steps, iteration=iteration
        )
        panels = [
            pool([self.teacher.answer(judgement) for _ in range(self.members)], self.vote) for _ in range(experts)
        ]
        return panels[0] if experts == 1 else pool(panels, "mean")

    def calibrate(self, clips: Float64) -> float:
        """Solve for the members' temperature. The error rate is that of each member: the panel errs less."""
        return self.teacher.calibrate(clips)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return self.teacher.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.teacher.load_state_dict(state)
