"""Adaptive NCRS: what the theory of NCRS leaves to constants is learnt from the votes.

NCRS (see agents/ncrs.py) with four parts, each of which can be switched off; without them it is NCRS:

    s = sqrt(1 - w^2) z + w path,  z ~ N(0, I_k)            memory: w = 0 is without
    until the vote is decided, a few at a time:
        trajectories of theta and of theta + a alpha_t L s, paired by index
        S = sum of the answered scores, R = how many votes are left of N
        decided if S > R or S <= -R                         curtailed votes: the rest cannot change the sign
        or if |S| >= lead                                   a lead that is enough
    theta <- theta + a alpha_t L s  if S > 0, else theta
    path <- (1 - c) path + sqrt(c (2 - c)) s  if S > 0, else path
    a <- a exp(rate (success - target))                     success: whether S > 0, or the share of votes for it

    theta    the policy's parameters                        L  lifts k coordinates into them: a subspace
    alpha_t  the step of iteration t                        a  what the steps are multiplied by, 1 at first
    path     where accepted directions led, lately          c  how soon it forgets

A vote may end in a later iteration than it began in. What is saved on one candidate is spent on others. The path is of
CMA-ES (Hansen and Ostermeier 2001), the rule for the step is Rechenberg's (1973).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from agents import subspaces
from agents.pairing import by_index
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.types import Float32, Metrics


@dataclass
class Vote:
    """A vote on a candidate, as far as it has come."""

    s: Float32  # [k] the direction
    candidate: Float32  # [d] theta + a alpha_t L s
    S: float = 0.0  # sum of the answered scores
    asked: int = 0
    answered: int = 0


class AdaptiveNCRS:
    """Keep a random step if the vote is for it; learn from the votes how far to step, where, and how long to vote."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        pairs: int,
        step: Callable[[int], float],
        adapt: Literal["acceptance", "votes"] | None,
        target: float,
        rate: float,
        votes: int | None,
        at_a_time: int | None,
        lead: float | None,
        memory: float,
        forgetting: float,
        subspace: subspaces.Kind,
        penalty: float,
        feedback: Literal["score", "label"],
        collect: Literal["sampled", "mean"],
        common_start: bool,
    ) -> None:
        for name, value in {"votes": votes, "at_a_time": at_a_time, "lead": lead}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name, share in {"target": target, "memory": memory, "forgetting": forgetting}.items():
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be between 0 and 1, not {share}")
        if rate < 0:
            raise ValueError(f"rate must not be negative, not {rate}")
        self.policy, self.rng, self.step, self.feedback = policy, rng, step, feedback
        self.adapt, self.target, self.rate = adapt, target, rate
        self.votes = pairs if votes is None else votes
        self.at_a_time = self.votes if at_a_time is None else at_a_time
        self.lead = math.inf if lead is None else lead
        self.memory, self.forgetting = memory, forgetting
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start}
        self.parameters: Float32 = policy.initial(rng)
        self.subspace = subspaces.subspace(subspace, policy, self.parameters, penalty=penalty)
        self.path = np.zeros(subspaces.size(self.subspace.shapes), np.float32)
        self.scale = 1.0  # a
        self.vote: Vote | None = None  # the one that is under way

    def iterate(self, budget: Budget) -> Metrics:
        """Vote on candidates one after the other, a few votes at a time."""
        theta, L, w, c, decided, accepted = self.parameters, self.subspace, self.memory, self.forgetting, 0, 0
        goes = max(1, min(budget.pairs_left // self.at_a_time, budget.trajectories_left // 2))
        for left in range(goes, 0, -1):
            # s = sqrt(1 - w^2) z + w path,  z ~ N(0, I_k)
            if self.vote is None:
                (z,) = subspaces.draw(self.rng, L.shapes, 1, None)
                s: Float32 = np.float32(math.sqrt(1 - w**2)) * z + np.float32(w) * self.path
                alpha = self.scale * self.step(budget.iteration)
                self.vote = Vote(s=s, candidate=theta + L.lift(np.float32(alpha) * s))
            vote = self.vote

            # trajectories of theta and of theta + a alpha_t L s, paired by index
            v = budget.pairs_left // left
            n = min(v, budget.trajectories_left // (2 * left))  # of each arm: with more votes, some vote again
            arms, keep = np.repeat([0, 1], n), () if L.fitted else ("observations",)
            both = np.stack([theta, vote.candidate])
            behaviour = budget.collect(self.policy, both, arms, keep=keep, **self.collecting)
            answers = budget.compare(by_index(behaviour.number[:n], behaviour.number[n:], v))
            if not L.fitted:
                L.fit(theta, behaviour)

            # S = sum of the answered scores, R = how many votes are left of N
            scores = answers.score if self.feedback == "score" else 2 * answers.label - 1
            vote.S += float(scores[answers.answered].sum())
            vote.asked, vote.answered = vote.asked + v, vote.answered + int(answers.answered.sum())
            S, R = vote.S, self.votes - vote.asked

            # decided if S > R or S <= -R or |S| >= lead
            if not (S > R or S <= -R or abs(S) >= self.lead):
                continue
            self.vote = None
            decided += 1

            # theta <- theta + a alpha_t L s  if S > 0, else theta;  path likewise
            if S > 0:
                theta = vote.candidate
                accepted += 1
                self.path = np.float32(1 - c) * self.path + np.float32(math.sqrt(c * (2 - c))) * vote.s

            # a <- a exp(rate (success - target))
            if self.adapt and vote.answered:
                success = float(S > 0) if self.adapt == "acceptance" else (1 + S / vote.answered) / 2
                self.scale *= math.exp(self.rate * (success - self.target))
        self.parameters = theta
        step = self.scale * self.step(budget.iteration)
        return {"candidates": decided, "accepted": accepted / max(1, decided), "vote": S, "step": step}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "parameters": self.parameters,
            "scale": self.scale,
            "path": self.path,
            "vote": self.vote and vars(self.vote).copy(),
            "subspace": self.subspace.state_dict(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters, self.scale, self.path = state["parameters"], state["scale"], state["path"]
        self.vote = state["vote"] and Vote(**state["vote"])
        self.subspace.load_state_dict(state["subspace"])
        self.rng.bit_generator.state = state["rng"]
