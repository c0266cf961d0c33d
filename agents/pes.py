"""PES: a preference evolution strategy, which asks about many directions rather than often about one.

NCRS spends an iteration's comparisons on one direction. Here every comparison is about a direction of its own, from
an antithetic pair of policies as in evolution strategies (Salimans, Ho, Chen, Sidor, Sutskever 2017, "Evolution
Strategies as a Scalable Alternative to Reinforcement Learning"), with the teacher's answer in place of returns:

    eps_i ~ N(0, I_k)
    one trajectory of theta - sigma L eps_i, one of theta + sigma L eps_i; compare them
    g = mean of the answered score_i eps_i                  (score > 0: the second is preferred)
    a <- min(1, a exp(rate z)),  z = sqrt(P) <g, m> / (|m| rms(score))   (z ~ N(0, 1) if answers ignore m)
    m <- beta m + (1 - beta) g
    theta <- theta + a step_t L m / rms(m)

    theta   the policy's parameters, d of them              sigma   how far apart the compared policies are
    L       lifts k coordinates into R^d: a subspace        beta    momentum
    step_t  the step of iteration t, for each coordinate    a       what the steps are multiplied by, 1 at first
    P       how many were answered

With several votes, a direction has as many trajectories of each arm, and comparisons. Directions are split into groups;
the i-th trajectories of a group all begin in the same state. With linear maps of normalised observations as subspace,
this is ARS (Mania, Guy, Recht 2018, "Simple random search of static linear policies is competitive for reinforcement
learning") with preferences for returns, and a step that is not tuned to the task: answers against the direction of the
last steps say that these were too long, as in the cumulation of CMA-ES (Hansen and Ostermeier 2001).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from agents import subspaces
from agents.pairing import by_index
from pbrl.ledger import Budget
from pbrl.normaliser import Normaliser
from pbrl.policy import LowRank, Policy
from pbrl.types import Behaviour, Float32, Float64, Metrics, join


class PES:
    """Climb along the mean of many random directions, each with the sign and weight that the teacher gave it."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        sigma: float,
        step: Callable[[int], float],
        rate: float,
        momentum: float,
        subspace: subspaces.Kind,
        penalty: float,
        rank: int | None,
        votes: int,
        groups: int | None,
        feedback: Literal["score", "label"],
        collect: Literal["sampled", "mean"],
        normalise: bool,
    ) -> None:
        if sigma <= 0:
            raise ValueError(f"sigma must be positive, not {sigma}")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {momentum}")
        if rate < 0:
            raise ValueError(f"rate must not be negative, not {rate}")
        for name, value in {"rank": rank, "votes": votes, "groups": groups}.items():
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.policy, self.rng, self.sigma, self.step = policy, rng, sigma, step
        self.rate, self.momentum = rate, momentum
        self.rank, self.votes, self.groups, self.feedback = rank, votes, groups or 1, feedback
        self.starting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": groups is not None}
        if normalise and policy.normaliser is None:
            policy.normaliser = Normaliser(policy.obs_size)
        self.parameters: Float32 = policy.initial(rng)
        self.subspace = subspaces.subspace(subspace, policy, self.parameters, penalty=penalty)
        self.m = np.zeros(subspaces.size(self.subspace.shapes), np.float32)
        self.scale = 1.0  # a

    def iterate(self, budget: Budget) -> Metrics:
        """One step of ascent."""
        theta, sigma, L, beta, m = self.parameters, self.sigma, self.subspace, self.momentum, self.m
        P = budget.pairs_left
        n = min(P, budget.trajectories_left // 2)  # trajectories of each sign: with more pairs, some are compared again
        directions = max(1, n // self.votes)

        # eps_i ~ N(0, I_k)
        eps = subspaces.draw(self.rng, L.shapes, directions, self.rank)

        # one trajectory of theta - sigma L eps_i, one of theta + sigma L eps_i; compare them
        change = sigma * L.lift(eps)
        behaviour = self._collect(budget, self._arms(np.concatenate([-change, change])), n, directions)
        minus, plus = (behaviour.number[(behaviour.policy >= directions) == sign] for sign in (False, True))
        pairs = by_index(minus, plus, P)
        answers = budget.compare(pairs)
        if not L.fitted:
            L.fit(theta, behaviour)

        # g = mean of the answered score_i eps_i
        scores = answers.score if self.feedback == "score" else 2 * answers.label - 1
        i, j = (behaviour.policy[behaviour.rows(clips.trajectory)] for clips in (pairs.first, pairs.second))
        arms = np.concatenate([-eps, eps])
        between = (arms[j] - arms[i]) / 2  # eps_i; with more pairs than trajectories, from -eps_i to eps_j
        if not answers.answered.any():
            return {"step": 0.0}
        g: Float32 = (scores[:, None] * between)[answers.answered].mean(axis=0, dtype=np.float32)

        # a <- min(1, a exp(rate z)),  z = sqrt(P) <g, m> / (|m| rms(score))
        z = answers.answered.sum() * float(g @ m) / ((_norm(m) * _norm(scores[answers.answered])) or 1.0)
        self.scale = min(1.0, self.scale * math.exp(self.rate * z))

        # m <- beta m + (1 - beta) g
        m = self.m = np.float32(beta) * m + np.float32(1 - beta) * g

        # theta <- theta + a step_t L m / rms(m)
        step = self.scale * self.step(budget.iteration)
        rms = _norm(m) / math.sqrt(len(m))
        if rms > 0:
            self.parameters = theta + L.lift(np.float32(step / rms) * m)
        return {"step": step, "agreement": z, "gradient_norm": _norm(g), "update_norm": _norm(self.parameters - theta)}

    def _arms(self, changes: Float32) -> Float32 | LowRank:
        """The policies theta + changes [2 * directions, d]; those of low rank share the work of acting."""
        theta = self.parameters
        return theta + changes if self.rank is None else LowRank.around(self.policy, theta, changes, self.rank)

    def _collect(self, budget: Budget, arms: Float32 | LowRank, n: int, directions: int) -> Behaviour:
        """n trajectories of each sign, in groups; of the arms, those with a minus come first."""
        keep = () if self.subspace.fitted else ("observations",)
        direction = np.sort(np.arange(n) % directions)
        return join(
            [
                budget.collect(
                    self.policy, arms, np.concatenate([group, directions + group]), keep=keep, **self.starting
                )
                for group in np.array_split(direction, min(self.groups, n))
            ]
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "parameters": self.parameters,
            "momentum": self.m,
            "scale": self.scale,
            "subspace": self.subspace.state_dict(),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters, self.m, self.scale = state["parameters"], state["momentum"], state["scale"]
        self.subspace.load_state_dict(state["subspace"])
        self.rng.bit_generator.state = state["rng"]


def _norm(x: Float32 | Float64) -> float:
    """|x|, in double precision."""
    return float(np.linalg.norm(x.astype(np.float64)))
