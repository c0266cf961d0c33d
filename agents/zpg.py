"""ZPG: zeroth-order policy gradient from human feedback.

Zhang and Ying 2025, "Zeroth-Order Policy Gradient for Reinforcement Learning from Human Feedback without Reward
Inference":

    u ~ N(0, I_d)
    trajectories of theta and of theta + mu u, paired by index
    p_n = share of M experts who prefer the perturbed one, trimmed to [1/(2M), 1 - 1/(2M)]
    D = mean over the answered n of logit(p_n)
    theta <- theta + eta (D / mu) u

    theta  the policy's parameters, d of them        mu  smoothing radius
    eta    learning rate                             M   experts asked about each pair
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from scipy.special import logit

from agents.pairing import by_index
from pbrl.ledger import Budget
from pbrl.policy import Policy
from pbrl.search import Directions
from pbrl.types import Float32, Metrics


class ZPG:
    """Climb along a random direction by how much the experts prefer it."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        learning_rate: float,
        smoothing: float,
        experts: int,
        collect: Literal["sampled", "mean"],
        common_start: bool,
    ) -> None:
        if learning_rate <= 0 or smoothing <= 0:
            raise ValueError(f"learning_rate and smoothing must be positive, not {learning_rate} and {smoothing}")
        if experts < 1:
            raise ValueError(f"experts must be at least 1, not {experts}")
        self.policy, self.rng = policy, rng
        self.learning_rate, self.smoothing, self.experts = learning_rate, smoothing, experts
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start, "keep": ()}
        self.parameters: Float32 = policy.initial(rng)

    def iterate(self, budget: Budget) -> Metrics:
        """One step of ascent."""
        theta, eta, mu, M, D = self.parameters, self.learning_rate, self.smoothing, self.experts, 0.0

        # u ~ N(0, I_d)
        u: Float32 = Directions("gaussian").draw(self.rng, theta.shape, theta.dtype)

        # trajectories of theta and of theta + mu u, paired by index
        n = min(budget.pairs_left, budget.trajectories_left // 2)
        arms = np.repeat([0, 1], n)
        perturbed = theta + mu * u  # in single precision, as theta is
        behaviour = budget.collect(self.policy, np.stack([theta, perturbed]), arms, **self.collecting)
        pairs = by_index(behaviour.number[:n], behaviour.number[n:], budget.pairs_left, experts=M)
        answers = budget.compare(pairs)

        # p_n = share of M experts who prefer the perturbed one, trimmed
        p = answers.probability[answers.answered]
        if M == 1 and len(p):
            # Departure: a single trimmed vote is worth logit(1/2) = 0, so the labels are pooled before the logit.
            p, M = answers.label[answers.answered].mean(keepdims=True), len(p)
        p = np.clip(p, 1 / (2 * M), 1 - 1 / (2 * M))

        # D = mean over the answered n of logit(p_n)
        if len(p):
            D = float(logit(p).mean())

        # theta <- theta + eta (D / mu) u
        self.parameters = theta + float(eta * (np.float32(D) / mu)) * u
        return {"preference_logit": D, "update_norm": float(np.linalg.norm(self.parameters - theta))}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"parameters": self.parameters, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters, self.rng.bit_generator.state = state["parameters"], state["rng"]
