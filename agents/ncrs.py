"""NCRS with confidence-weighted vote.

El Bakkali El Kadi, Bouftini, Zhang, Saadi 2026, "Noisy Pairwise-Comparison Random Search for Smooth Nonconvex
Optimization", Algorithm 2 (and Algorithm 1: one vote, hard labels), applied to policies as in its section 4.2:

    s ~ N(0, I_d)
    N trajectories of theta, N of theta + alpha_t s, paired by index
    S = sum of the answered scores                       (score > 0: the candidate is preferred)
    theta <- theta + alpha_t s  if S > 0, else theta     (S = 0 rejects)

    theta    the policy's parameters, d of them
    alpha_t  the step of iteration t
    N        votes: an iteration's comparisons are for one candidate, or for several, tried one after the other
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from agents.pairing import by_index
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.search import Directions
from pbrl.types import Float32, Metrics


class NCRS:
    """Keep a random step of the policy if the teacher's vote is for it."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        pairs: int,
        step: Callable[[int], float],
        votes: int | None,
        feedback: Literal["score", "label"],
        direction: Literal["gaussian", "sphere"],
        collect: Literal["sampled", "mean"],
        common_start: bool,
    ) -> None:
        if votes is not None and not 1 <= votes <= pairs:
            raise ValueError(f"votes must be between 1 and {pairs}, the pairs of an iteration, not {votes}")
        self.policy, self.rng, self.step, self.feedback = policy, rng, step, feedback
        self.candidates = 1 if votes is None else pairs // votes  # in an iteration
        self.directions = Directions(direction)
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start, "keep": ()}
        self.parameters: Float32 = policy.initial(rng)

    def iterate(self, budget: Budget) -> Metrics:
        """Try the candidates one after the other."""
        theta, alpha, accepted = self.parameters, self.step(budget.iteration), 0
        candidates = min(self.candidates, budget.pairs_left, budget.trajectories_left // 2)
        for left in range(candidates, 0, -1):
            # s ~ N(0, I_d)
            s: Float32 = self.directions.draw(self.rng, theta.shape, theta.dtype)
            candidate: Float32 = theta + alpha * s  # in single precision, as theta is

            # N trajectories of theta, N of theta + alpha_t s, paired by index
            N = budget.pairs_left // left
            n = min(N, budget.trajectories_left // (2 * left))  # of each arm: with more votes, some vote again
            arms = np.repeat([0, 1], n)
            behaviour = budget.collect(self.policy, np.stack([theta, candidate]), arms, **self.collecting)
            answers = budget.compare(by_index(behaviour.number[:n], behaviour.number[n:], N))

            # S = sum of the answered scores
            scores = answers.score if self.feedback == "score" else 2 * answers.label - 1
            S = scores[answers.answered].sum()

            # theta <- theta + alpha_t s  if S > 0, else theta
            if S > 0:
                theta = candidate
                accepted += 1
        self.parameters = theta
        return {"accepted": accepted / candidates, "vote": float(S), "step": alpha}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"parameters": self.parameters, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters, self.rng.bit_generator.state = state["parameters"], state["rng"]
