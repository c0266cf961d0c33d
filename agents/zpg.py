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

from pbrl.ledger import Budget
from pbrl.policy import GaussianPolicy
from pbrl.types import Float32, Metrics, Pairs, Preferences


class ZPG:
    """Climb along a random direction by how much the experts prefer it."""

    def __init__(
        self,
        *,
        policy: GaussianPolicy,
        rng: np.random.Generator,
        trajectories: int,
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
        self.policy, self.rng, self.parameters = policy, rng, policy.initial(rng)
        self.pairs, self.learning_rate, self.smoothing, self.experts = (
            trajectories // 2,
            learning_rate,
            smoothing,
            experts,
        )
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start, "keep": ()}
        self.direction: Float32 = np.zeros_like(self.parameters)

    def ask(self, budget: Budget) -> Pairs | None:
        """theta against theta + mu u, each pair put to M experts."""
        if budget.trajectories_left < 2 * self.pairs:
            return None
        theta, mu, N = self.parameters, np.float32(self.smoothing), self.pairs
        u = self.direction = self.rng.standard_normal(theta.shape, np.float32)
        arms = np.repeat([0, 1], N)
        behaviour = budget.collect(self.policy, np.stack([theta, theta + mu * u]), arms, **self.collecting)
        return Pairs(behaviour=behaviour, first=np.arange(N), second=N + np.arange(N), experts=self.experts)

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:  # noqa: ARG002
        """One step of ascent."""
        answered = preferences.answered
        if not answered.any():
            return {"preference_logit": 0.0, "update_norm": 0.0}
        p, M = preferences.probability[answered], self.experts  # with several experts, their share
        if M == 1:
            # Departure: a single trimmed vote is worth logit(1/2) = 0, so the labels are pooled before the logit.
            p, M = preferences.label[answered].mean(keepdims=True), int(answered.sum())
        D = logit(np.clip(p, 1 / (2 * M), 1 - 1 / (2 * M))).mean()
        u, eta, mu = self.direction, self.learning_rate, self.smoothing
        update = np.float32(eta * D / mu) * u
        self.parameters = self.parameters + update
        return {"preference_logit": float(D), "update_norm": float(np.linalg.norm(update))}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"parameters": self.parameters, "rng": self.rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.parameters, self.rng.bit_generator.state = state["parameters"], state["rng"]
