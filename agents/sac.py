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
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch

from agents.replay import Batch, Replay
from pbrl.ledger import Budget
from pbrl.policy import Network, SquashedGaussianPolicy
from pbrl.types import Behaviour, Float32, Metrics

Map = Callable[..., Iterable[Any]]  # map, or a pool's

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
        self.centre, self.scale = (torch.as_tensor(each, dtype=torch.float32) for each in (policy.centre, policy.scale))
        self.log_scale = float(np.log(policy.scale).sum())
        self.theta = torch.from_numpy(policy.initial(rng)).requires_grad_()
        self.log_alpha = torch.tensor(math.log(initial_temperature)).requires_grad_()
        self.actor_adam = torch.optim.Adam([self.theta], lr=actor_learning_rate, fused=True)
        self.alpha_adam = torch.optim.Adam([self.log_alpha], lr=temperature_learning_rate)
        self.reset_critics()
        self.updates = 0

    def reset_critics(self) -> None:
        """Begin with new critics, slow copies of them, and a new optimiser."""
        initial = [torch.from_numpy(self.critic.initial(self.rng).astype(np.float32)) for _ in range(2)]
        self.Q = [each.clone().requires_grad_() for each in initial]
        self.Q_target = [each.clone() for each in initial]
        self.critic_adams = [torch.optim.Adam([each], lr=self.critic_learning_rate, fused=True) for each in self.Q]

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

    def learn(self, steps: int, each: Map = map) -> Metrics:
        """As many updates as so many collected steps are worth; the metrics are those of the last.

        each: `map`, or that of a pool whose threads then share an update's work; the results are the same.
        """
        metrics: Metrics = {}
        if self.replay.lived().any():
            for _ in range(round(self.updates_per_step * steps)):
                metrics = self.update(self.replay.sample(self.batch_size, self.rng), each)
        return metrics

    def update(self, batch: Batch, each: Map = map) -> Metrics:
        """One step of critics, actor and temperature."""
        n, theta = len(batch.obs), self.theta.detach()
        obs, next_obs = self._normalised(batch.obs), self._normalised(batch.next_obs)

        # a' ~ pi(s'), and a ~ pi(s) for the actor's loss below
        noise = torch.from_numpy(self.rng.standard_normal((2, n, self.policy.act_size), np.float32))
        actor = self.policy.network

        def act(obs: torch.Tensor, noise: torch.Tensor) -> tuple[Any, ...]:
            """Actions of pi, log pi of them in units of the bounds, and the pass through its network."""
            outputs, passed = actor.forward(theta, obs)
            actions, log_pi = self.policy.sample_from(outputs.requires_grad_(), noise)
            return actions, log_pi + self.log_scale, outputs, passed

        (next_actions, next_log_pi, *_), (actions, log_pi, outputs, passed) = each(act, (next_obs, obs), noise)
        next_actions, next_log_pi = next_actions.detach(), next_log_pi.detach()

        # y <- r + gamma ( min_i Q'_i(s', a') - alpha log pi(a'|s') ), or r where the episode ended
        next_seen = self._seen(next_obs, next_actions)
        Q_next = each(lambda Q: self.critic.forward(Q, next_seen)[0][:, 0], self.Q_target)
        y = batch.rewards + batch.goes_on * self.gamma * (torch.minimum(*Q_next) - self.alpha * next_log_pi)

        # Q_1, Q_2: Adam on the mean of (Q_1(s, a) - y)^2 + (Q_2(s, a) - y)^2
        given, seen = self._seen(obs, batch.actions), self._seen(obs, actions.detach())

        def fit(critic: torch.Tensor, adam: torch.optim.Adam) -> tuple[torch.Tensor, Any]:
            """Let a critic learn; its loss, and what it then says of the actor's actions."""
            Q, passed = self.critic.forward(critic.detach(), given)
            error = Q - y[:, None]
            _step(adam, critic, self.critic.gradient(critic.detach(), passed, error * (2 / n)))
            return (error**2).mean(), self.critic.forward(critic.detach(), seen)

        critic_losses, ((Q_1, passed_1), (Q_2, passed_2)) = zip(*each(fit, self.Q, self.critic_adams), strict=True)

        # pi: Adam on the mean of alpha log pi(a|s) - min_i Q_i(s, a)
        actor_loss = (self.alpha * log_pi.detach() - torch.minimum(Q_1, Q_2)[:, 0]).mean()
        smaller = (Q_1 < Q_2).float() / n, (Q_1 >= Q_2).float() / n
        critics = [critic.detach() for critic in self.Q]
        first, second = each(self.critic.input_gradient, critics, (passed_1, passed_2), smaller)
        slope = (first + second)[:, -self.policy.act_size :] / self.scale  # of min_i Q_i in the actions
        (d_outputs,) = torch.autograd.grad((self.alpha * log_pi.mean(), actions), outputs, (None, -slope))
        _step(self.actor_adam, self.theta, actor.gradient(theta, passed, d_outputs))

        # log alpha: Adam on the mean of -alpha ( log pi(a|s) + H )
        entropy = -log_pi.detach().mean()
        loss = self.log_alpha.exp() * (entropy - self.target_entropy)
        _step(self.alpha_adam, self.log_alpha, *torch.autograd.grad(loss, self.log_alpha))

        # Q'_i <- Q'_i + tau (Q_i - Q'_i), every few updates
        if self.updates % self.target_every == 0:
            for slow, fast in zip(self.Q_target, self.Q, strict=True):
                slow.lerp_(fast.detach(), self.target_tau)
        self.updates += 1
        return {
            "critic_loss": float(sum(critic_losses)),
            "actor_loss": float(actor_loss),
            "entropy": float(entropy),
            "temperature": self.alpha,
        }

    def _normalised(self, obs: torch.Tensor) -> torch.Tensor:
        """Observations as the networks take them."""
        normaliser = self.policy.normaliser
        return obs if normaliser is None else torch.from_numpy(normaliser(obs.numpy()))

    def _seen(self, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """What the critics see of (s, a) [n, obs + act]: actions are in units of the bounds."""
        return torch.cat([obs, (actions - self.centre) / self.scale], dim=-1)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, but for the generator, which is its owner's."""
        return {
            "theta": self.theta.detach().clone(),
            "log_alpha": self.log_alpha.detach().clone(),
            "Q": [each.detach().clone() for each in self.Q],
            "Q_target": [each.clone() for each in self.Q_target],
            "updates": self.updates,
            "replay": self.replay.state_dict(),
            "adams": [deepcopy(adam.state_dict()) for adam in self._adams()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.theta.data, self.log_alpha.data = state["theta"].clone(), state["log_alpha"].clone()
        for name in ("Q", "Q_target"):
            for ours, saved in zip(getattr(self, name), state[name], strict=True):
                ours.data = saved.clone()
        self.updates = state["updates"]
        self.replay.load_state_dict(state["replay"])
        for adam, saved in zip(self._adams(), state["adams"], strict=True):
            adam.load_state_dict(deepcopy(saved))

    def _adams(self) -> list[torch.optim.Adam]:
        return [self.actor_adam, *self.critic_adams, self.alpha_adam]


def random_actions(policy: SquashedGaussianPolicy) -> Float32:
    """Parameters with which the policy acts at random, close to uniformly within the bounds, whatever it observes.

    Departure: not exactly uniform, but a squashed Gaussian with the standard deviation that a uniform action has before
    it is squashed, so that the budget sees a policy like any other.
    """
    low, high = policy.log_std_bounds
    parameters = np.zeros(policy.size, np.float32)
    parameters[-policy.act_size :] = math.atanh(2 * (math.log(UNIFORM_STD) - low) / (high - low) - 1)
    return parameters


def _step(adam: torch.optim.Adam, parameters: torch.Tensor, gradient: torch.Tensor) -> None:
    """One step of Adam.

    Weights behind a unit that is never active get no gradient, and their moments fade to numbers below 1e-38, with
    which processors are slow. They are taken for 0: beside Adam's epsilon they move no weight.
    """
    parameters.grad = gradient
    torch.set_flush_denormal(True)  # of this thread
    try:
        adam.step()
    finally:
        torch.set_flush_denormal(False)
