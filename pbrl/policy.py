"""The Gaussian policy of the paper as one flat parameter vector, so that search agents can add directions to it.

A tanh network gives the mean; the logarithm of the standard deviation is a free vector, part of the parameters:

    parameters = [W1, b1, W2, b2, W3, b3, log_std],   W of shape [inputs, outputs], float32

Collecting uses compiled code (`pbrl.simulation.native`), learning uses torch on the same vector.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from pbrl.normaliser import Normaliser
from pbrl.simulation import native
from pbrl.types import Float32, Int64


class GaussianPolicy:
    """The architecture; the parameters are passed in, so that one object serves any number of policies."""

    def __init__(
        self,
        obs_size: int,
        act_size: int,
        *,
        hidden: Sequence[int],
        hidden_gain: float,
        output_gain: float,
        initial_log_std: float,
    ) -> None:
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden must be one or more positive layer widths, not {list(hidden)}")
        self.sizes = (obs_size, *hidden, act_size)
        self.obs_size, self.act_size = obs_size, act_size
        self.gains = [hidden_gain] * len(hidden) + [output_gain]
        self.initial_log_std = initial_log_std
        self.normaliser: Normaliser | None = None  # of the observations, where a run wants it
        self.size = sum(n * m + m for n, m in self._layer_sizes()) + act_size

    def _layer_sizes(self) -> Iterator[tuple[int, int]]:
        return zip(self.sizes[:-1], self.sizes[1:], strict=True)

    def initial(self, rng: np.random.Generator) -> Float32:
        """Orthogonal weights, zero biases [size]."""
        parts = []
        for (inputs, outputs), gain in zip(self._layer_sizes(), self.gains, strict=True):
            tall = rng.standard_normal((max(inputs, outputs), min(inputs, outputs)))
            q, r = np.linalg.qr(tall)
            q *= np.sign(np.diag(r))  # makes the draw uniform over orthogonal matrices
            weights = gain * (q if inputs >= outputs else q.T)
            parts += [weights.ravel(), np.zeros(outputs)]
        parts.append(np.full(self.act_size, self.initial_log_std))
        return np.concatenate(parts).astype(np.float32)

    def folded(self, parameters: Float32) -> Float32:
        """Parameters [..., size] that do the same to observations as they are: the first layer normalises them."""
        if self.normaliser is None:
            return parameters
        inputs, outputs = self.sizes[:2]
        weights, bias, rest = np.split(parameters, [inputs * outputs, (inputs + 1) * outputs], axis=-1)
        batch = parameters.shape[:-1]
        weights, bias = self.normaliser.fold(weights.reshape(*batch, inputs, outputs), bias)
        return np.concatenate([weights.reshape(*batch, -1), bias, rest], axis=-1)

    def pack(self, parameters: Float32) -> tuple[Float32, Float32]:
        """K parameter vectors [K, size] as the compiled loops read them: layers padded, [K, packed]; std [K, act]."""
        parameters, parts = self.folded(parameters), []
        offset = 0
        for inputs, outputs in self._layer_sizes():
            count = (inputs + 1) * outputs  # the bias is one more row
            layer = parameters[:, offset : offset + count].reshape(-1, inputs + 1, outputs)
            layer = np.pad(layer, ((0, 0), (0, 0), (0, native.padded(outputs) - outputs)))
            parts.append(layer.reshape(len(parameters), -1))
            offset += count
        return np.concatenate(parts, axis=1), np.exp(parameters[:, offset:])

    def mean_actions(self, parameters: Float32, obs: Float32, policy: Int64 | None = None) -> Float32:
        """The mean action [n, act] for observations [n, obs], row i under the policy `policy[i]` of [K, size]."""
        packed, _ = self.pack(np.atleast_2d(parameters))
        out = np.empty((len(obs), self.act_size), np.float32)
        rows = np.zeros(len(obs), np.int64) if policy is None else policy
        native.mean_actions(packed, np.array(self.sizes), rows, np.ascontiguousarray(obs, np.float32), out)
        return out

    def mean(self, parameters: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """The mean action [..., act], differentiable in the parameters [size]."""
        x = obs if self.normaliser is None else torch.from_numpy(self.normaliser(obs.numpy()))
        offset = 0
        for layer, (inputs, outputs) in enumerate(self._layer_sizes()):
            weights = parameters[offset : offset + inputs * outputs].view(inputs, outputs)
            offset += inputs * outputs
            x = x @ weights + parameters[offset : offset + outputs]
            offset += outputs
            if layer < len(self.sizes) - 2:
                x = torch.tanh(x)
        return x

    def log_probability(self, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) [...] of actions as drawn, before any clipping; differentiable in the parameters."""
        log_std = parameters[-self.act_size :]
        standardised = (actions - self.mean(parameters, obs)) * torch.exp(-log_std)
        return -0.5 * (standardised**2).sum(-1) - log_std.sum() - 0.5 * self.act_size * math.log(2 * math.pi)


Policy = GaussianPolicy
