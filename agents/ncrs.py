"""NCRS with confidence-weighted vote.

El Bakkali El Kadi, Bouftini, Zhang, Saadi 2026, "Noisy Pairwise-Comparison Random Search for Smooth Nonconvex
Optimization", Algorithm 2 (and Algorithm 1: one vote, hard labels), applied to policies as in its section 4.2:

    s ~ N(0, I_d)
    N trajectories of theta, N of theta + alpha_t s, paired by index
    S = sum of the answered scores                       (score > 0: the candidate is preferred)
    theta <- theta + alpha_t s  if S > 0, else theta     (S = 0 rejects)

    theta    the policy's parameters, d of them
    alpha_t  the step of iteration t
    N        votes; an iteration's trajectories pay for one candidate of 32 votes, or 32 of one vote, one by one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from pbrl import search
from pbrl.ledger import Budget
from pbrl.policy import GaussianPolicy
from pbrl.types import Float32, Metrics, Pairs, Preferences


class NCRS:
    """Keep a random step of the policy if the teacher's vote is for it."""

    def __init__(
        self,
        *,
        policy: GaussianPolicy,
        rng: np.random.Generator,
        trajectories: int,
        step: Callable[[int], float],
        votes: int,
        feedback: Literal["score", "label"],
        direction: Literal["gaussian", "sphere"],
        collect: Literal["sampled", "mean"],
        common_start: bool,
    ) -> None:
        if not 1 <= votes <= trajectories // 2:
            raise ValueError(f"votes must be between 1 and {trajectories // 2}, half the trajectories, not {votes}")
        self.policy, self.schedule, self.votes, self.feedback = policy, step, votes, feedback
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start, "keep": ()}
        directions = search.Directions(direction)
        self.search = search.NCRS(policy.initial(rng), step=step(0), directions=directions, rng=rng)
        self.tried = self.accepted = 0  # in this iteration

    @property
    def parameters(self) -> Float32:
        """theta."""
        return self.search.x

    def ask(self, budget: Budget) -> Pairs | None:
        """theta against theta + alpha_t s, N trajectories each."""
        N = self.votes
        if budget.trajectories_left < 2 * N:
            self.tried = self.accepted = 0
            return None
        self.search.step = self.schedule(budget.iteration)  # alpha_t
        theta, candidate = self.search.ask()
        arms = np.repeat([0, 1], N)
        behaviour = budget.collect(self.policy, np.stack([theta, candidate]), arms, **self.collecting)
        return Pairs(behaviour=behaviour, first=np.arange(N), second=N + np.arange(N))

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:  # noqa: ARG002
        """Accept the candidate if S > 0."""
        scores = preferences.score if self.feedback == "score" else 2 * preferences.label - 1
        S = scores[preferences.answered].sum()
        self.search.tell(S)
        self.tried += 1
        self.accepted += bool(S > 0)
        return {"accepted": self.accepted / self.tried, "vote": float(S), "step": float(self.search.step)}  # type: ignore[arg-type]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"search": self.search.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.search.load_state_dict(state["search"])
