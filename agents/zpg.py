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

from pbrl import search
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
        self.policy, self.pairs, self.experts = policy, trajectories // 2, experts
        self.collecting: dict[str, Any] = {"mean_actions": collect == "mean", "common_start": common_start, "keep": ()}
        # The step of RSGF, with D where it has a difference of values.
        self.search = search.RSGF(
            policy.initial(rng),
            step=learning_rate,
            radius=smoothing,
            directions=search.Directions("gaussian"),
            rng=rng,
        )

    @property
    def parameters(self) -> Float32:
        """theta."""
        return self.search.x

    def ask(self, budget: Budget) -> Pairs | None:
        """theta against theta + mu u, each pair put to M experts."""
        N = self.pairs
        if budget.trajectories_left < 2 * N:
            return None
        theta, perturbed = self.search.ask()
        arms = np.repeat([0, 1], N)
        behaviour = budget.collect(self.policy, np.stack([theta, perturbed]), arms, **self.collecting)
        return Pairs(behaviour=behaviour, first=np.arange(N), second=N + np.arange(N), experts=self.experts)

    def tell(self, pairs: Pairs, preferences: Preferences) -> Metrics:  # noqa: ARG002
        """One step of ascent: theta + eta (D / mu) u."""
        answered, theta, D = preferences.answered, self.search.x, 0.0
        p, M = preferences.probability[answered], self.experts  # with several experts, their share
        if M == 1 and len(p):
            # Departure: a single trimmed vote is worth logit(1/2) = 0, so the labels are pooled before the logit.
            p, M = preferences.label[answered].mean(keepdims=True), len(p)
        if len(p):
            D = float(logit(np.clip(p, 1 / (2 * M), 1 - 1 / (2 * M))).mean())
        self.search.tell(D)
        return {"preference_logit": D, "update_norm": float(np.linalg.norm(self.search.x - theta))}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"search": self.search.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.search.load_state_dict(state["search"])
