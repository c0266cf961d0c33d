"""A reward learnt from preferences between clips or whole trajectories.

Christiano et al. 2017, "Deep Reinforcement Learning from Human Preferences", with soft labels:

    remember the answered pairs of the last few iterations
    some Adam steps on batches of them, drawn uniformly, minimising the mean of
        L = -[ q log sig(D) + (1 - q) log sig(-D) ],    D = sum_t r(s_t, a_t) of the second - that of the first

    q  the teacher's probability that the second is better        r  a network
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pbrl.network import mlp
from pbrl.types import Behaviour, Float32, Metrics, Pairs, Preferences


def linear_layers(*networks: nn.Module) -> list[nn.Linear]:
    """Those of the networks, in order."""
    return [layer for network in networks for layer in network.modules() if isinstance(layer, nn.Linear)]


def orthogonal(
    layers: Sequence[nn.Linear], *, hidden_gain: float, output_gain: float, rng: np.random.Generator
) -> None:
    """Give the layers orthogonal weights, the last of them with its own gain, and zero biases."""
    generator = torch.Generator().manual_seed(int(rng.integers(2**63)))
    for layer in layers:
        nn.init.orthogonal_(layer.weight, output_gain if layer is layers[-1] else hidden_gain, generator)
        nn.init.zeros_(layer.bias)


@dataclass(frozen=True)
class Comparisons:
    """The answered pairs of one iteration."""

    inputs: torch.Tensor  # [P, 2, H, obs + act]: first and second
    lengths: torch.Tensor  # [P, 2] steps until the end of each
    q: torch.Tensor  # [P]


class RewardModel:
    """r(s, a), and the comparisons that it learns from."""

    def __init__(
        self,
        *,
        obs_size: int,
        act_size: int,
        rng: np.random.Generator,
        hidden: Sequence[int],
        hidden_gain: float,
        output_gain: float,
        output: Literal["linear", "tanh"],
        learning_rate: float,
        batch_pairs: int,
        gradient_steps: int,
        max_gradient_norm: float,
        buffer_iterations: int,
    ) -> None:
        if min(learning_rate, max_gradient_norm) <= 0:
            raise ValueError(
                f"learning_rate and max_gradient_norm must be positive, not {learning_rate} and {max_gradient_norm}"
            )
        if min(batch_pairs, gradient_steps, buffer_iterations) < 1:
            raise ValueError(
                f"batch_pairs, gradient_steps and buffer_iterations must be at least 1, "
                f"not {batch_pairs}, {gradient_steps} and {buffer_iterations}"
            )
        self.rng, self.batch_pairs, self.output = rng, batch_pairs, output
        self.gradient_steps, self.max_gradient_norm = gradient_steps, max_gradient_norm
        sizes = [obs_size + act_size, *hidden, 1]
        layers: list[nn.Module] = [
            part for n, m in pairwise(sizes) for part in (nn.Linear(n, m), nn.LeakyReLU(inplace=True))
        ]
        layers[-1] = nn.Tanh() if output == "tanh" else nn.Identity()
        self.network = nn.Sequential(*layers)
        orthogonal(linear_layers(self.network), hidden_gain=hidden_gain, output_gain=output_gain, rng=rng)
        self.weights = list(self.network.parameters())
        self.adam = torch.optim.Adam(self.weights, lr=learning_rate)
        self.buffer: deque[Comparisons] = deque(maxlen=buffer_iterations)

    def _r(self, inputs: torch.Tensor) -> torch.Tensor:
        """r(s, a) [n] of inputs [n, obs + act]; differentiable in the weights."""
        layers = [(layer.weight.T, layer.bias) for layer in linear_layers(self.network)]
        r = mlp(inputs, layers, "leaky_relu").squeeze(-1)
        return torch.tanh(r) if self.output == "tanh" else r

    def reward(self, behaviour: Behaviour, pool: Executor) -> Float32:
        """r(s_t, a_t) [N, T]; 0 after a trajectory's end."""
        inputs = _inputs(behaviour)
        rewards = np.zeros(inputs.shape[:2], np.float32)

        def fill(row: int, end: int) -> None:
            with torch.no_grad():
                rewards[row, :end] = self._r(inputs[row, :end])

        list(pool.map(fill, range(len(rewards)), behaviour.lengths))
        return rewards

    def remember(self, behaviour: Behaviour, pairs: Pairs, preferences: Preferences) -> None:
        """Add the answered pairs of an iteration; the oldest iteration is forgotten when the buffer is full."""
        inputs, lengths = [], []
        for clips in (pairs.first, pairs.second):
            obs, actions, lived = behaviour.cut(clips[preferences.answered], pairs.steps)
            inputs.append(np.concatenate([obs, actions], axis=-1))
            lengths.append(lived)
        self.buffer.append(
            Comparisons(
                inputs=torch.from_numpy(np.stack(inputs, axis=1)),
                lengths=torch.from_numpy(np.stack(lengths, axis=1)),
                q=torch.from_numpy(preferences.probability[preferences.answered]).float(),
            )
        )

    def fit(self, pool: Executor) -> Metrics:
        """Some Adam steps; the metrics are those of the last one, and none if nothing is remembered."""
        known = [(each, pair) for each in self.buffer for pair in range(len(each.q))]
        if not known:
            return {}

        def look_at(index: int) -> tuple[torch.Tensor, ...]:
            """A pair's loss, and the gradient of it."""
            comparisons, pair = known[index]
            lived = comparisons.lengths[pair].tolist()
            r = self._r(torch.cat([clip[:end] for clip, end in zip(comparisons.inputs[pair], lived, strict=True)]))
            first, second = torch.split(r, lived)
            D = second.sum() - first.sum()
            L = binary_cross_entropy_with_logits(D, comparisons.q[pair])
            return L.detach(), *torch.autograd.grad(L, self.weights)

        for _ in range(self.gradient_steps):
            batch = self.rng.permutation(len(known))[: self.batch_pairs]
            looks = zip(*pool.map(look_at, batch), strict=True)
            loss, *gradient = (torch.stack(each).mean(0) for each in looks)
            for weights, part in zip(self.weights, gradient, strict=True):
                weights.grad = part
            gradient_norm = nn.utils.clip_grad_norm_(self.weights, self.max_gradient_norm)
            self.adam.step()
        return {"reward_loss": float(loss), "reward_gradient_norm": float(gradient_norm)}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly, but for the generator, which is its owner's."""
        return {
            "network": deepcopy(dict(self.network.state_dict())),
            "adam": deepcopy(self.adam.state_dict()),
            "buffer": [dict(vars(each)) for each in self.buffer],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.network.load_state_dict(state["network"])
        self.adam.load_state_dict(deepcopy(state["adam"]))
        self.buffer = deque((Comparisons(**each) for each in state["buffer"]), maxlen=self.buffer.maxlen)


def _inputs(behaviour: Behaviour) -> torch.Tensor:
    """(s_t, a_t) of all trajectories [N, T, obs + act]."""
    assert behaviour.observations is not None
    assert behaviour.actions is not None
    return torch.from_numpy(np.concatenate([behaviour.observations[:, :-1], behaviour.actions], axis=-1))
