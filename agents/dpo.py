"""Iterative DPO: a policy fitted to preferences between its own trajectories, without a reward.

Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward Model"; Guo et al.
2024, "Direct Language Model Alignment from Online AI Feedback", for asking about the present policy's behaviour:

    pi_ref <- pi
    trajectories of pi, paired at random
    a few Adam steps on batches of the answered pairs, minimising the mean of
        L = -[ q log sig(D) + (1 - q) log sig(-D) ],    D = beta ( LR(second) - LR(first) )

    q      the teacher's probability that the second is better: a soft label
    LR     log pi(tau) - log pi_ref(tau): a sum over the trajectory's steps, or their mean; the dynamics cancel
    theta  the parameters of pi        beta  how dearly leaving pi_ref is bought
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from agents.pairing import at_random
from pbrl.ledger import Budget
from pbrl.policy import Policy, log_probability_and_score
from pbrl.threads import workers
from pbrl.types import Behaviour, Float32, Int64, Metrics, Pairs, Preferences

Steps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # observations [n, obs], actions [n, act] and weights [n]


class DPO:
    """Make the trajectories that were preferred more likely than the reference does, and the others less."""

    def __init__(
        self,
        *,
        policy: Policy,
        rng: np.random.Generator,
        beta: float,
        log_ratio: Literal["sum", "mean"],
        learning_rate: float,
        batch_pairs: int,
        gradient_steps: int,
        max_gradient_norm: float,
    ) -> None:
        if min(beta, learning_rate, max_gradient_norm) <= 0:
            raise ValueError(
                f"beta, learning_rate and max_gradient_norm must be positive, "
                f"not {beta}, {learning_rate} and {max_gradient_norm}"
            )
        if min(batch_pairs, gradient_steps) < 1:
            raise ValueError(
                f"batch_pairs and gradient_steps must be at least 1, not {batch_pairs} and {gradient_steps}"
            )
        self.policy, self.rng = policy, rng
        self.beta, self.batch_pairs = beta, batch_pairs
        self.log_ratio = log_ratio
        self.gradient_steps, self.max_gradient_norm = gradient_steps, max_gradient_norm
        self.theta = torch.from_numpy(policy.initial(rng)).requires_grad_()
        self.adam = torch.optim.Adam([self.theta], lr=learning_rate)

    @property
    def parameters(self) -> Float32:
        """A copy of theta."""
        return np.array(self.theta.detach().numpy())

    def iterate(self, budget: Budget) -> Metrics:
        """Compare trajectories of pi, and learn from the answers."""
        # trajectories of pi, paired at random
        arms = np.zeros(budget.trajectories_left, np.int64)
        keep = ("observations", "actions")
        behaviour = budget.collect(
            self.policy, self.parameters[None], arms, mean_actions=False, common_start=False, keep=keep
        )
        pairs = at_random(behaviour, budget.pairs_left, self.rng)
        return self.learn(behaviour, pairs, budget.compare(pairs))

    def learn(self, behaviour: Behaviour, pairs: Pairs, preferences: Preferences) -> Metrics:
        """A few Adam steps on the answered pairs of clips or trajectories; the metrics are those of the last step."""
        answered = np.flatnonzero(preferences.answered)
        if len(answered) == 0:
            return {}
        steps = self._lived_steps(behaviour, pairs, answered)
        log_ref: dict[int, torch.Tensor] = {}

        def log_pi(pair: int) -> torch.Tensor:
            """log pi(a_t|s_t) for the steps of the first clip and then of the second."""
            obs, actions, _ = steps[pair]
            return self.policy.log_probability(self.theta, obs, actions)

        def look_at(pair: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            """A pair's loss, the gradient of it, and how far pi is from pi_ref."""
            obs, actions, weights = steps[pair]
            log_pi_t, score = log_probability_and_score(self.policy, self.theta, obs, actions, weights)
            # pi_ref <- pi: before the first Adam step they are the same
            log_ratio = log_pi_t - log_ref.setdefault(pair, log_pi_t)
            D = self.beta * (weights @ log_ratio)
            q = torch.tensor(preferences.probability[pair], dtype=torch.float32)
            L = binary_cross_entropy_with_logits(D, q)
            gradient = (torch.sigmoid(D) - q) * self.beta * score  # dL/dD times dD/dtheta
            return L, gradient, _kl(log_ratio)

        batches = [self.rng.permutation(answered)[: self.batch_pairs].tolist() for _ in range(self.gradient_steps)]
        with workers() as pool:
            later = [pair for pair in steps if pair not in batches[0]]
            log_ref |= zip(later, pool.map(torch.no_grad()(log_pi), later), strict=True)
            # a few Adam steps on batches of the answered pairs, minimising the mean of L
            for batch in batches:
                looks = zip(*pool.map(look_at, batch), strict=True)
                loss, self.theta.grad, kl = (torch.stack(each).mean(0) for each in looks)
                gradient_norm = torch.nn.utils.clip_grad_norm_([self.theta], self.max_gradient_norm)
                self.adam.step()
        return {
            "loss": float(loss),  # log 2 at the first step
            "kl": float(kl),  # of pi_ref from pi, per control step
            "gradient_norm": float(gradient_norm),
            "log_std": float(self.theta.detach()[-self.policy.act_size :].mean()),
        }

    def _lived_steps(self, behaviour: Behaviour, pairs: Pairs, which: Int64) -> dict[int, Steps]:
        """For each of these pairs: (s_t, a_t) of both clips until their ends, first clip first, and what weights them.

        LR(second) - LR(first) is the sum of weight times log-ratio over all of them.
        """
        sides = [behaviour.cut(clips[which], pairs.steps) for clips in (pairs.first, pairs.second)]
        found = {}
        for row, pair in enumerate(which.tolist()):
            lived = [int(lengths[row]) for _, _, lengths in sides]
            obs = np.concatenate([obs[row, :end] for (obs, _, _), end in zip(sides, lived, strict=True)])
            actions = np.concatenate([actions[row, :end] for (_, actions, _), end in zip(sides, lived, strict=True)])
            size = [1.0 if self.log_ratio == "sum" else 1 / max(1, end) for end in lived]
            weights = np.repeat(np.array([-size[0], size[1]], np.float32), lived)
            found[pair] = (torch.from_numpy(obs), torch.from_numpy(actions), torch.from_numpy(weights))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {
            "parameters": self.parameters,
            "adam": deepcopy(self.adam.state_dict()),
            "rng": self.rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.theta.data = torch.from_numpy(state["parameters"].copy())
        self.adam.load_state_dict(deepcopy(state["adam"]))
        self.rng.bit_generator.state = state["rng"]


def _kl(log_ratio: torch.Tensor) -> torch.Tensor:
    """An estimate of the divergence of pi_ref from pi, per control step, that is never negative."""
    return (log_ratio.exp() - 1 - log_ratio).mean()
