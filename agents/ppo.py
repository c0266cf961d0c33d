"""Proximal policy optimisation with Stable-Baselines3, on whole trajectories that were collected elsewhere.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms":

    A_t <- generalised advantage estimates with lambda, gamma; V(s_T) stands for what the time limit cuts off
    some passes over the steps in minibatches, Adam on actor and critic, minimising the mean of
        L = -min( rho A, clip(rho, 1 - eps, 1 + eps) A ) + c (V - (A + V_old))^2,    rho = pi / pi_old

    V  the critic        c  critic_weight        eps  clip_range

Networks, advantages and loss are SB3's. Ours: the actor is a `GaussianPolicy`, it and the critic have a
learning rate each, the buffer is filled at once, and all randomness is from the generator given.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Executor
from copy import deepcopy
from typing import Any

import numpy as np
import stable_baselines3
import torch
from gymnasium.spaces import Box
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.distributions import DiagGaussianDistribution
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import RolloutBufferSamples

from agents.reward_model import linear_layers, orthogonal
from pbrl.network import mlp
from pbrl.policy import GaussianPolicy
from pbrl.types import Behaviour, Float32, Metrics

# What SB3 calls the metrics of an update, and what we do.
METRICS = {
    "policy_gradient_loss": "policy_loss",
    "value_loss": "value_loss",
    "approx_kl": "kl",
    "clip_fraction": "clip_fraction",
    "explained_variance": "explained_variance",
}


class PPO:
    """Actor and critic. SB3's networks hold the parameters; the policy's flat vector is read off them."""

    def __init__(
        self,
        *,
        policy: GaussianPolicy,
        rng: np.random.Generator,
        actor_learning_rate: float,
        warmup_updates: int,
        critic_hidden: Sequence[int],
        critic_hidden_gain: float,
        critic_output_gain: float,
        critic_learning_rate: float,
        critic_weight: float,
        clip_range: float,
        entropy_bonus: float,
        gae_lambda: float,
        gamma: float,
        passes: int,
        gradient_steps: int,
        max_gradient_norm: float,
        adam_epsilon: float,
    ) -> None:
        for name, count in (
            ("warmup_updates", warmup_updates),
            ("passes", passes),
            ("gradient_steps", gradient_steps),
        ):
            if count < 1:
                raise ValueError(f"{name} must be at least 1, not {count}")
        self.policy, self.rng, self.gradient_steps = policy, rng, gradient_steps
        self.actor_learning_rate, self.warmup_updates = actor_learning_rate, warmup_updates
        no_environment: Any = None
        self.sb3 = _SB3(
            "MlpPolicy",
            no_environment,
            learning_rate=actor_learning_rate,
            n_epochs=passes,
            gamma=gamma,
            gae_lambda=gae_lambda,
            clip_range=clip_range,
            ent_coef=entropy_bonus,
            vf_coef=critic_weight,
            max_grad_norm=float("inf"),  # actor and critic are clipped one by one, below
            policy_kwargs={
                "net_arch": {"pi": list(policy.sizes[1:-1]), "vf": list(critic_hidden)},
                "optimizer_kwargs": {"eps": adam_epsilon},
            },
            device="cpu",
            _init_setup_model=False,
        )
        # Of these spaces, only the sizes matter here.
        self.sb3.observation_space = Box(-np.inf, np.inf, (policy.obs_size,), np.float64)
        self.sb3.action_space = Box(-1.0, 1.0, (policy.act_size,), np.float64)
        self.sb3.n_envs = 1
        self.sb3._setup_model()
        self.sb3.set_logger(Logger(folder=None, output_formats=[]))

        network = self.network = self.sb3.policy
        actor = linear_layers(network.mlp_extractor.policy_net, network.action_net)
        critic = linear_layers(network.mlp_extractor.value_net, network.value_net)
        # Views of SB3's weights in the order and orientation of the policy's vector.
        self.views = [view for layer in actor for view in (layer.weight.data.T, layer.bias.data)]
        self.views.append(network.log_std.data)
        ends = np.cumsum([view.numel() for view in self.views])
        for view, values in zip(self.views, np.split(policy.initial(rng), ends[:-1]), strict=True):
            view.copy_(torch.from_numpy(values).view(view.shape))
        orthogonal(critic, hidden_gain=critic_hidden_gain, output_gain=critic_output_gain, rng=rng)
        critic_weights = [weights for layer in critic for weights in layer.parameters()]
        actor_weights = [network.log_std] + [weights for layer in actor for weights in layer.parameters()]
        network.optimizer = torch.optim.Adam(
            [
                {"params": actor_weights, "lr": actor_learning_rate},
                {"params": critic_weights, "lr": critic_learning_rate},
            ],
            eps=adam_epsilon,
        )

        # The critic's gradient is hundreds of times the actor's: clipped together, the actor would hardly move.
        network.optimizer.register_step_pre_hook(self._clip_gradients)
        self.max_gradient_norm = max_gradient_norm
        self.actor, self.critic = actor, critic
        self.updates = 0  # made so far
        self.pool: Executor | None = None  # on whose threads the networks are evaluated
        network.evaluate_actions = self._evaluate_actions  # type: ignore[method-assign, assignment]

    def _clip_gradients(self, optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            torch.nn.utils.clip_grad_norm_(group["params"], self.max_gradient_norm)

    @property
    def parameters(self) -> Float32:
        """The actor's, as the policy reads them."""
        return torch.cat([view.ravel() for view in self.views]).numpy()

    def update(self, behaviour: Behaviour, rewards: Float32, pool: Executor) -> Metrics:
        """Improve actor and critic on trajectories of the present policy with these rewards [N, T]."""
        assert behaviour.observations is not None
        obs, normaliser = behaviour.observations, self.policy.normaliser
        inputs = obs if normaliser is None else normaliser(obs)  # of SB3's networks
        V, log_pi = self._evaluate(behaviour, inputs, pool)
        self.sb3.rollout_buffer = rollout = Rollout(behaviour, inputs, rewards, V, log_pi, sb3=self.sb3, rng=self.rng)
        self.sb3.batch_size = -(-rollout.steps // self.gradient_steps)
        actor, critic = self.network.optimizer.param_groups
        actor["lr"] = self.actor_learning_rate * min(1.0, (self.updates + 1) / self.warmup_updates)
        self.pool = pool
        self.sb3.train()
        self.updates += 1
        return {
            **{ours: float(self.sb3.logger.name_to_value[f"train/{theirs}"]) for theirs, ours in METRICS.items()},
            "actor_learning_rate": actor["lr"],
            "critic_learning_rate": critic["lr"],
            "log_std": float(self.network.log_std.detach().mean()),
        }

    def _evaluate(self, behaviour: Behaviour, inputs: Float32, pool: Executor) -> tuple[Float32, Float32]:
        """V(s_t) [N, T + 1] and log pi(a_t|s_t) [N, T]."""
        assert behaviour.actions is not None
        self.pool = None  # one trajectory is work for one thread
        actions = behaviour.actions

        def look_at(row: int) -> tuple[Float32, Float32]:
            with torch.no_grad():
                obs, last = torch.tensor(inputs[row]), torch.zeros(1, actions.shape[-1])
                V, log_pi, _ = self._evaluate_actions(obs, torch.cat([torch.tensor(actions[row]), last]))
                return V.squeeze(-1).numpy(), log_pi[:-1].numpy()

        V, log_pi = zip(*pool.map(look_at, range(len(behaviour))), strict=True)
        return np.stack(V), np.stack(log_pi)

    def _evaluate_actions(
        self, obs: torch.Tensor, actions: torch.Tensor, _: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """V(s) [n, 1], log pi(a|s) [n] and the entropy [n], as SB3's own method of that name gives them."""
        mean, V = (
            mlp(obs, [(layer.weight.T, layer.bias) for layer in layers], "tanh", self.pool)
            for layers in (self.actor, self.critic)
        )
        # One of its own for each call: threads must not share it.
        distribution = DiagGaussianDistribution(self.policy.act_size).proba_distribution(mean, self.network.log_std)
        return V, distribution.log_prob(actions), distribution.entropy()

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, but for the generator, which is its owner's."""
        return {
            "network": deepcopy(dict(self.network.state_dict())),
            "adam": deepcopy(self.network.optimizer.state_dict()),
            "updates": self.updates,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.network.load_state_dict(state["network"])
        self.network.optimizer.load_state_dict(deepcopy(state["adam"]))
        self.updates = state["updates"]


class _SB3(stable_baselines3.PPO):
    """With learning rates that are set from outside: SB3 would give actor and critic the same."""

    def _update_learning_rate(self, optimizers: Any) -> None:
        pass


class Rollout(RolloutBuffer):
    """N trajectories until the end of each, with their advantages."""

    def __init__(
        self,
        behaviour: Behaviour,
        inputs: Float32,  # [N, T + 1, obs]
        rewards: Float32,  # [N, T]
        V: Float32,  # [N, T + 1]
        log_pi: Float32,  # [N, T]
        *,
        sb3: stable_baselines3.PPO,
        rng: np.random.Generator,
    ) -> None:
        assert behaviour.actions is not None
        N, T = rewards.shape
        super().__init__(
            T, sb3.observation_space, sb3.action_space, "cpu", gae_lambda=sb3.gae_lambda, gamma=sb3.gamma, n_envs=N
        )
        self.rng, ends, t = rng, behaviour.lengths[:, None], np.arange(T)
        self.before_end = (t < ends).ravel()
        self.steps = int(self.before_end.sum())
        # SB3's arrays have the control steps first.
        self.observations = inputs[:, :-1].swapaxes(0, 1)
        self.actions = behaviour.actions.swapaxes(0, 1)
        self.rewards, self.values, self.log_probs = rewards.T, V[:, :-1].T, log_pi.T
        # To SB3, what follows an early end is another episode: none of it counts towards this one.
        self.episode_starts = (t == ends).T.astype(np.float32)
        self.compute_returns_and_advantage(torch.from_numpy(V[:, -1]), dones=np.zeros(N))
        self.flat = False

    def get(self, batch_size: int | None = None) -> Generator[RolloutBufferSamples, None, None]:
        """All steps in random order, once; in another order the next time."""
        if not self.flat:
            for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
                setattr(self, name, self.swap_and_flatten(getattr(self, name))[self.before_end])
            self.flat = True
        batch_size, order = batch_size or self.steps, self.rng.permutation(self.steps)
        for start in range(0, self.steps, batch_size):
            yield self._get_samples(order[start : start + batch_size])
