"""Soft actor-critic, on steps that were collected elsewhere.

Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications":

    s, a, r, s' <- steps of the buffer;    a' ~ pi(s')
    y <- r + gamma ( min_i Q'_i(s', a') - alpha log pi(a'|s') ),    or r where the episode ended by itself
    Q_1, Q_2:  Adam on the mean of (Q_1(s, a) - y)^2 + (Q_2(s, a) - y)^2
    pi:        Adam on the mean of alpha log pi(a|s) - min_i Q_i(s, a),    a ~ pi(s)
    log alpha: Adam on the mean of -alpha ( log pi(a|s) + H )
    Q'_i <- Q'_i + tau (Q_i - Q'_i), every few updates

    Q, Q'  the critics and their slow copies        alpha  the temperature        H  the entropy to have: -|A|

The first trajectories are made by random actions. A trajectory is collected as a whole, then learnt from.

Actions are counted in units of the task's bounds: the entropy is that of actions in [-1, 1], whatever the bounds.
Losses and temperature are those of Stable-Baselines3's SAC. Networks and buffer are ours: trajectories come whole from
the budget, and the policy, whose log-std is squashed rather than clipped, must run in the compiled simulator.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from agents.replay import Batch, Replay
from pbrl.ledger import Budget
from pbrl.network import mlp
from pbrl.policy import Network, SquashedGaussianPolicy
from pbrl.types import Behaviour, Float32, Metrics

UNIFORM_STD = math.pi / math.sqrt(12)  # of atanh(u) for u uniform in [-1, 1]


class SAC:
    """An actor, two critics with slow copies, and a learnt temperature, each a flat vector; and a buffer of steps."""

    def __init__(
        self,
        *,
        policy: SquashedGaussianPolicy,
        rng: np.random.Generator,
        actor_learning_rate: float,
        critic_learning_rate: float,
        critic_hidden: Sequence[int],
        critic_hidden_gain: float,
        critic_output_gain: float,
        initial_temperature: float,
        temperature_learning_rate: float,
        gamma: float,
        target_tau: float,
        target_every: int,
        batch_size: int,
        buffer_trajectories: int,
        random_trajectories: int,
        updates_per_step: float,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("updates_per_step", updates_per_step),
            ("actor_learning_rate", actor_learning_rate),
            ("critic_learning_rate", critic_learning_rate),
            ("temperature_learning_rate", temperature_learning_rate),
            ("initial_temperature", initial_temperature),
            ("target_tau", target_tau),
            ("target_every", target_every),
        ):
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        self.policy, self.rng = policy, rng
        self.gamma, self.target_tau, self.target_every = gamma, target_tau, target_every
        self.critic_learning_rate = critic_learning_rate
        self.batch_size, self.updates_per_step = batch_size, updates_per_step
        self.random_trajectories = random_trajectories
        self.replay = Replay(buffer_trajectories)
        self.critic = Network(
            (policy.obs_size + policy.act_size, *critic_hidden, 1),
            "relu",
            hidden_gain=critic_hidden_gain,
            output_gain=critic_output_gain,
        )
        self.target_entropy = -float(policy.act_size)
        self.log_scale = float(np.log(policy.scale).sum())
        self.theta = torch.from_numpy(policy.initial(rng)).requires_grad_()
        self.log_alpha = torch.tensor(math.log(initial_temperature)).requires_grad_()
        self.actor_adam = torch.optim.Adam([self.theta], lr=actor_learning_rate)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=temperature_learning_rate)
        self.reset_critics()
        self.updates = 0

    def reset_critics(self) -> None:
        """Begin with new critics, slow copies of them, and a new optimiser."""
        initial = [torch.from_numpy(self.critic.initial(self.rng).astype(np.float32)) for _ in range(2)]
        self.Q = [each.clone().requires_grad_() for each in initial]
        self.Q_target = [each.clone() for each in initial]
        self.critic_adam = torch.optim.Adam(self.Q, lr=self.critic_learning_rate)

    @property
    def parameters(self) -> Float32:
        """A copy of the actor's."""
        return np.array(self.theta.detach().numpy())

    @property
    def alpha(self) -> float:
        """The temperature."""
        return math.exp(self.log_alpha.item())

    def collect(self, budget: Budget, n: int) -> Behaviour:
        """The next n trajectories, to be added to the buffer with their rewards."""
        begins = self.replay.added < self.random_trajectories
        parameters = random_actions(self.policy) if begins else self.parameters
        arms, keep = np.zeros(n, np.int64), ("observations", "actions")
        return budget.collect(self.policy, parameters[None], arms, mean_actions=False, common_start=False, keep=keep)

    def learn(self, steps: int) -> Metrics:
        """As many updates as so many collected steps are worth; the metrics are those of the last."""
        metrics: Metrics = {}
        if self.replay.lived().any():
            for _ in range(round(self.updates_per_step * steps)):
                metrics = self.update(self.replay.sample(self.batch_size, self.rng))
        return metrics

    def update(self, batch: Batch) -> Metrics:
        """One step of critics, actor and temperature."""
        # a' ~ pi(s');  y <- r + gamma ( min_i Q'_i(s', a') - alpha log pi(a'|s') ), or r where the episode ended
        with torch.no_grad():
            next_actions, next_log_pi = self._act(batch.next_obs)
            next_value = self._smaller_Q(self.Q_target, batch.next_obs, next_actions) - self.alpha * next_log_pi
            y = batch.rewards + batch.goes_on * self.gamma * next_value

        # Q_1, Q_2: Adam on the mean of (Q_1(s, a) - y)^2 + (Q_2(s, a) - y)^2
        both = [self._Q(parameters, batch.obs, batch.actions) for parameters in self.Q]
        critic_loss = torch.stack([((Q - y) ** 2).mean() for Q in both]).sum()
        _step(self.critic_adam, critic_loss, self.Q)

        # pi: Adam on the mean of alpha log pi(a|s) - min_i Q_i(s, a), a ~ pi(s)
        actions, log_pi = self._act(batch.obs)
        fixed = [parameters.detach() for parameters in self.Q]
        actor_loss = (self.alpha * log_pi - self._smaller_Q(fixed, batch.obs, actions)).mean()
        _step(self.actor_adam, actor_loss, [self.theta])

        # log alpha: Adam on the mean of -alpha ( log pi(a|s) + H )
        entropy = -log_pi.detach().mean()
        _step(self.alpha_adam, self.log_alpha.exp() * (entropy - self.target_entropy), [self.log_alpha])

        # Q'_i <- Q'_i + tau (Q_i - Q'_i), every few updates
        if self.updates % self.target_every == 0:
            for slow, fast in zip(self.Q_target, self.Q, strict=True):
                slow.lerp_(fast.detach(), self.target_tau)
        self.updates += 1
        return {
            "critic_loss": float(critic_loss.detach()),
            "actor_loss": float(actor_loss.detach()),
            "entropy": float(entropy),
            "temperature": self.alpha,
        }

    def _act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions [n, act] of pi, and log pi [n] of them in units of the bounds."""
        noise = torch.from_numpy(self.rng.standard_normal((len(obs), self.policy.act_size), np.float32))
        actions, log_pi = self.policy.sample(self.theta, obs, noise)
        return actions, log_pi + self.log_scale

    def _Q(self, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:  # noqa: N802
        """Q(s, a) [n] of a critic."""
        normaliser = self.policy.normaliser
        seen = obs if normaliser is None else torch.from_numpy(normaliser(obs.numpy()))
        centre, scale = (torch.as_tensor(each, dtype=obs.dtype) for each in (self.policy.centre, self.policy.scale))
        inputs = torch.cat([seen, (actions - centre) / scale], dim=-1)
        return mlp(inputs, list(self.critic.layers(parameters)), "relu").squeeze(-1)

    def _smaller_Q(  # noqa: N802
        self, critics: Sequence[torch.Tensor], obs: torch.Tensor, actions: torch.Tensor
    ) -> torch.Tensor:
        """The smaller of the critics' Q(s, a) [n]."""
        first, second = (self._Q(parameters, obs, actions) for parameters in critics)
        return torch.minimum(first, second)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, but for the generator, which is its owner's."""
        adams = {"actor_adam": self.actor_adam, "critic_adam": self.critic_adam, "alpha_adam": self.alpha_adam}
        return {
            "theta": self.theta.detach().clone(),
            "log_alpha": self.log_alpha.detach().clone(),
            "Q": [each.detach().clone() for each in self.Q],
            "Q_target": [each.clone() for each in self.Q_target],
            "updates": self.updates,
            "replay": self.replay.state_dict(),
            **{name: deepcopy(adam.state_dict()) for name, adam in adams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.theta.data, self.log_alpha.data = state["theta"].clone(), state["log_alpha"].clone()
        for name in ("Q", "Q_target"):
            for ours, saved in zip(getattr(self, name), state[name], strict=True):
                ours.data = saved.clone()
        self.updates = state["updates"]
        self.replay.load_state_dict(state["replay"])
        for name in ("actor_adam", "critic_adam", "alpha_adam"):
            getattr(self, name).load_state_dict(deepcopy(state[name]))


def random_actions(policy: SquashedGaussianPolicy) -> Float32:
    """Parameters with which the policy acts at random, close to uniformly within the bounds, whatever it observes.

    Departure: not exactly uniform, but a squashed Gaussian with the standard deviation that a uniform action has before
    it is squashed, so that the budget sees a policy like any other.
    """
    low, high = policy.log_std_bounds
    parameters = np.zeros(policy.size, np.float32)
    parameters[-policy.act_size :] = math.atanh(2 * (math.log(UNIFORM_STD) - low) / (high - low) - 1)
    return parameters


def _step(adam: torch.optim.Adam, loss: Any, parameters: Sequence[torch.Tensor]) -> None:
    """One step of Adam on the loss."""
    for each, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        each.grad = gradient
    adam.step()
