"""Policies as one flat parameter vector, so that search agents can add directions to it.

Two kinds, both a fully connected network with parameters [W1, b1, W2, b2, ...], W of shape [inputs, outputs], float32:

    GaussianPolicy          the network gives the mean; the log-std is a free vector at the end of the parameters:
                            action = mean + std * noise, which the environment clips to its bounds
    SquashedGaussianPolicy  the network gives mean and log-std; the action is squashed into the task's bounds:
                            action = centre + scale * tanh(mean + std * noise)

Learning uses torch on the flat vector. The simulator collects with compiled code, from what `export` gives it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.nn.functional import softplus

from pbrl.network import Activation, backward, forward, mlp, mlp_with_gradient
from pbrl.normaliser import Normaliser
from pbrl.types import Float32, Float64, Int64


class Weights(NamedTuple):
    """K policies as plain arrays: all that is needed to act. They take observations as they are."""

    layers: list[tuple[Float32, Float32]]  # weights [K, inputs, outputs] and bias [K, outputs] of each layer
    activation: Activation  # of the hidden layers
    std: Float32 | None  # [K, act]; None: squashed, and the last `act` outputs give it
    log_std_bounds: tuple[float, float] | None = None  # log_std = low + (high - low) / 2 * (tanh(output) + 1)
    centre_and_scale: tuple[Float64, Float64] | None = None  # [act] each: action = centre + scale * tanh(x)


class Change(NamedTuple):
    """What each of K policies adds to one layer: U V to the weights, and something to the bias. The rank may be 0."""

    U: Float32  # [K, inputs, rank]
    V: Float32  # [K, rank, outputs]
    bias: Float32  # [K, outputs]


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """K policies that differ from one by matrices of low rank: together they act nearly as fast as one alone.

    `collect` takes it in place of parameters [K, size], and a search makes it from its directions with `around`.
    `np.asarray` of it is the parameters.
    """

    base: Float32  # [size] the parameters of the one
    layers: Sequence[Change]
    log_std: Float32  # [K, act] what is added to a free log-std; [K, 0] where the policy has none

    def __len__(self) -> int:
        return len(self.log_std)

    @classmethod
    def around(cls, policy: Policy, base: Float32, change: Float32, rank: int) -> LowRank:
        """The K policies base [size] + change [K, size], where each matrix of weights changes by at most that rank.

        A matrix that is narrower than the rank may change in any way, and so may biases and the log-std.
        """
        layers, rest = [], change
        for layer, (inputs, outputs) in enumerate(pairwise(policy.sizes)):
            weights, bias, rest = np.split(rest, [inputs * outputs, (inputs + 1) * outputs], axis=1)
            weights = weights.reshape(-1, inputs, outputs)
            U, V = _factors(weights, rank)
            error, largest = float(abs(U @ V - weights).max()), float(abs(weights).max())
            if error > 1e-4 * largest:
                raise ValueError(
                    f"the weights of layer {layer} change by up to {largest:.3g}, of which rank {rank} "
                    f"leaves {error:.3g}: their change has a higher rank"
                )
            layers.append(Change(U, V, bias))
        return cls(base=base, layers=layers, log_std=rest)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        parts = [part.reshape(len(self), -1) for U, V, bias in self.layers for part in (U @ V, bias)]
        return (self.base + np.concatenate([*parts, self.log_std], axis=1)).astype(dtype or np.float32)

    def folded(self, normaliser: Normaliser | None) -> list[Change]:
        """The changes to layers into the first of which the normaliser is folded."""
        if normaliser is None:
            return [*self.layers]
        (U, V, bias), *others = self.layers
        U, along = normaliser.fold(U, np.zeros((len(U), U.shape[2]), np.float32))
        return [Change(U, V, bias + (along[:, None] @ V)[:, 0]), *others]


def _factors(matrices: Float32, rank: int) -> tuple[Float32, Float32]:
    """U [K, rows, rank] and V [K, rank, columns], whose products are the matrices [K, rows, columns] of that rank.

    A matrix of rank 1 is any of its columns times any of its rows, divided by the number where they cross. Taking away
    such a product, at the largest number, leaves a matrix of one rank less.
    """
    K, rows, columns = matrices.shape
    if not matrices.any():
        return np.zeros((K, rows, 0), np.float32), np.zeros((K, 0, columns), np.float32)
    if columns <= rank:
        return matrices, np.tile(np.eye(columns, dtype=np.float32), (K, 1, 1))
    if rows <= rank:
        return np.tile(np.eye(rows, dtype=np.float32), (K, 1, 1)), matrices
    U, V = np.zeros((K, rows, rank), np.float32), np.zeros((K, rank, columns), np.float32)
    left, k = matrices, np.arange(K)
    for r in range(rank):
        i, j = np.unravel_index(abs(left).reshape(K, -1).argmax(axis=1), (rows, columns))
        crossing = left[k, i, j][:, None]
        V[:, r] = left[k, i]
        np.divide(left[k, :, j], crossing, out=U[:, :, r], where=crossing != 0)
        if r < rank - 1:
            left = left - U[:, :, r, None] * V[:, r, None]
    return U, V


@runtime_checkable
class Policy(Protocol):
    """An architecture. Parameters are passed in, so that one object serves any number of policies."""

    obs_size: int
    act_size: int
    size: int  # of the parameter vector
    sizes: tuple[int, ...]  # widths of the network's layers, from observations to outputs
    normaliser: Normaliser | None  # of the observations, if the run normalises them

    def initial(self, rng: np.random.Generator) -> Float32:
        """Parameters to begin with [size]."""

    def folded(self, parameters: Float32) -> Float32:
        """Parameters [..., size] whose first layer normalises: they take observations as they are."""

    def export(self, parameters: Float32) -> Weights:
        """K parameter vectors [K, size] as plain arrays, the normaliser folded in."""

    def mean_actions(self, parameters: Float32, obs: Float32, which: Int64 | None = None) -> Float32:
        """Action without noise [n, act] for observations [n, obs], row i under parameters `which[i]` of [K, size]."""

    def mean(self, parameters: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """The action without noise [..., act], differentiable in the parameters [size]."""

    def sample(
        self, parameters: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The action [..., act] for standard normal noise [..., act], and its log-probability [...].

        Both are differentiable in the parameters (the reparametrisation trick).
        """

    def log_probability(self, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) [...] of actions as collected; differentiable in the parameters."""


class Network:
    """A fully connected network whose parameters are one flat vector."""

    def __init__(
        self, sizes: tuple[int, ...], activation: Activation, *, hidden_gain: float, output_gain: float
    ) -> None:
        if len(sizes) < 3 or min(sizes[1:-1]) < 1:
            raise ValueError(f"hidden must be one or more positive layer widths, not {list(sizes[1:-1])}")
        if activation not in ("tanh", "relu"):
            raise ValueError(f"activation must be tanh or relu, not {activation}")
        self.sizes, self.activation = sizes, activation
        self.shapes = list(pairwise(sizes))
        self.gains = [hidden_gain] * (len(sizes) - 2) + [output_gain]
        parts = [count for inputs, outputs in self.shapes for count in (inputs * outputs, outputs)]
        self.ends = np.cumsum(parts).tolist()  # of the weights and biases in a vector of parameters
        self.size = self.ends[-1]

    def initial(self, rng: np.random.Generator) -> Float64:
        """Orthogonal weights, zero biases [size]."""
        parts = []
        for (inputs, outputs), gain in zip(self.shapes, self.gains, strict=True):
            tall = rng.standard_normal((max(inputs, outputs), min(inputs, outputs)))
            q, r = np.linalg.qr(tall)
            q *= np.sign(np.diag(r))  # makes the draw uniform over orthogonal matrices
            weights = gain * (q if inputs >= outputs else q.T)
            parts += [weights.ravel(), np.zeros(outputs)]
        return np.concatenate(parts)

    def layers(self, parameters: Any) -> Iterator[tuple[Any, Any]]:
        """Weights [..., inputs, outputs] and bias [..., outputs] of each layer, of arrays or tensors [..., size]."""
        split = torch.tensor_split if isinstance(parameters, torch.Tensor) else np.split
        pieces: Any = split(parameters, self.ends, -1)  # the last is not the network's
        for (inputs, outputs), weights, bias in zip(self.shapes, pieces[:-1:2], pieces[1::2], strict=True):
            yield weights.reshape(*parameters.shape[:-1], inputs, outputs), bias

    def folded(self, parameters: Float32, normaliser: Normaliser | None) -> Float32:
        """Parameters [..., size] whose first layer normalises; what follows the network's parameters stays."""
        if normaliser is None:
            return parameters
        weights, bias = normaliser.fold(*next(self.layers(parameters)))
        rest = parameters[..., weights.shape[-2] * weights.shape[-1] + bias.shape[-1] :]
        return np.concatenate([weights.reshape(*parameters.shape[:-1], -1), bias, rest], axis=-1)

    def outputs(self, parameters: Any, x: Any) -> Any:
        """The outputs [..., out] for inputs [..., in], of arrays or tensors; parameters [size]."""
        if isinstance(x, torch.Tensor) and x.dtype == torch.float32:
            rows = mlp(x.reshape(-1, x.shape[-1]), list(self.layers(parameters)), self.activation)
            return rows.reshape(*x.shape[:-1], -1)
        tanh, relu = (torch.tanh, torch.relu) if isinstance(x, torch.Tensor) else (np.tanh, lambda x: np.maximum(x, 0))
        for layer, (weights, bias) in enumerate(self.layers(parameters)):
            x = x @ weights + bias
            if layer < len(self.shapes) - 1:
                x = tanh(x) if self.activation == "tanh" else relu(x)
        return x

    def forward(self, parameters: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The outputs [n, out] for inputs [n, in] without a graph, and what its gradients are made of."""
        return forward(x, list(self.layers(parameters)), self.activation)

    def gradient(self, parameters: torch.Tensor, passed: Sequence[torch.Tensor], d_out: torch.Tensor) -> torch.Tensor:
        """The gradient of the parameters [size] from that of the outputs [n, out]. passed: see `forward`."""
        gradient = torch.zeros(self.size)
        sums = [each for layer in self.layers(gradient) for each in layer]
        backward(d_out, passed, list(self.layers(parameters)), self.activation, sums)
        return gradient

    def input_gradient(
        self, parameters: torch.Tensor, passed: Sequence[torch.Tensor], d_out: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of the inputs [n, in] from that of the outputs [n, out]. passed: see `forward`."""
        layers = list(self.layers(parameters))
        d: torch.Tensor = backward(d_out, passed, layers, self.activation) @ layers[0][0].T
        return d


class GaussianPolicy:
    """The paper's: a tanh network gives the mean; the log-std is a free vector, part of the parameters."""

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
        self.obs_size, self.act_size = obs_size, act_size
        self.sizes = (obs_size, *hidden, act_size)
        self.network = Network(self.sizes, "tanh", hidden_gain=hidden_gain, output_gain=output_gain)
        self.size = self.network.size + act_size
        self.initial_log_std = initial_log_std
        self.normaliser: Normaliser | None = None

    def initial(self, rng: np.random.Generator) -> Float32:
        """Orthogonal weights, zero biases, the initial log-std [size]."""
        log_std = np.full(self.act_size, self.initial_log_std)
        return np.concatenate([self.network.initial(rng), log_std]).astype(np.float32)

    def folded(self, parameters: Float32) -> Float32:
        """Parameters [..., size] whose first layer normalises: they take observations as they are."""
        return self.network.folded(parameters, self.normaliser)

    def export(self, parameters: Float32) -> Weights:
        """K parameter vectors [K, size] as plain arrays, the normaliser folded in."""
        parameters = self.folded(parameters)
        std = np.exp(parameters[:, self.network.size :])
        return Weights(layers=list(self.network.layers(parameters)), activation="tanh", std=std)

    def mean_actions(self, parameters: Float32, obs: Float32, which: Int64 | None = None) -> Float32:
        """The mean action [n, act] for observations [n, obs]; row i under parameters `which[i]` of [K, size]."""
        return _rows_of_network(self.network, self.folded(parameters), obs, which)

    def mean(self, parameters: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """The mean action [..., act], differentiable in the parameters [size]."""
        outputs: torch.Tensor = self.network.outputs(parameters, _normalised(self.normaliser, obs))
        return outputs

    def sample(
        self, parameters: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The action [..., act] for standard normal noise [..., act], and its log-probability [...]."""
        log_std = parameters[-self.act_size :]
        action = self.mean(parameters, obs) + torch.exp(log_std) * noise
        return action, _gaussian_log_probability(noise, log_std)

    def log_probability(self, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) [...] of actions as drawn, before any clipping; differentiable in the parameters."""
        log_std = parameters[-self.act_size :]
        return _gaussian_log_probability((actions - self.mean(parameters, obs)) * torch.exp(-log_std), log_std)


class SquashedGaussianPolicy:
    """SAC's: a network gives mean and log-std of a Gaussian that tanh squashes into the bounds of the actions.

    log_std_bounds: the log-std is low + (high - low) / 2 * (tanh(output) + 1), as in B-Pref.
    action_bounds: low and high [act] of the task's actions; -1 and 1 if None, or where a task has no bounds.
    """

    def __init__(
        self,
        obs_size: int,
        act_size: int,
        *,
        hidden: Sequence[int],
        activation: Activation,
        hidden_gain: float,
        output_gain: float,
        log_std_bounds: tuple[float, float],
        action_bounds: tuple[Float64, Float64] | None = None,
    ) -> None:
        low, high = (float(bound) for bound in log_std_bounds)
        if not low < high:
            raise ValueError(f"log_std_bounds must be two numbers, the lower first, not {list(log_std_bounds)}")
        self.obs_size, self.act_size = obs_size, act_size
        self.sizes = (obs_size, *hidden, 2 * act_size)
        self.network = Network(self.sizes, activation, hidden_gain=hidden_gain, output_gain=output_gain)
        self.size = self.network.size
        self.log_std_bounds = (low, high)
        self.centre, self.scale = _centre_and_scale(action_bounds, act_size)
        self.normaliser: Normaliser | None = None

    def initial(self, rng: np.random.Generator) -> Float32:
        """Orthogonal weights, zero biases [size]."""
        return self.network.initial(rng).astype(np.float32)

    def folded(self, parameters: Float32) -> Float32:
        """Parameters [..., size] whose first layer normalises: they take observations as they are."""
        return self.network.folded(parameters, self.normaliser)

    def export(self, parameters: Float32) -> Weights:
        """K parameter vectors [K, size] as plain arrays, the normaliser folded in."""
        return Weights(
            layers=list(self.network.layers(self.folded(parameters))),
            activation=self.network.activation,
            std=None,
            log_std_bounds=self.log_std_bounds,
            centre_and_scale=(self.centre, self.scale),
        )

    def mean_actions(self, parameters: Float32, obs: Float32, which: Int64 | None = None) -> Float32:
        """The squashed mean [n, act] for observations [n, obs]; row i under parameters `which[i]` of [K, size]."""
        mean = _rows_of_network(self.network, self.folded(parameters), obs, which)[:, : self.act_size]
        return (self.centre + self.scale * np.tanh(mean)).astype(np.float32)

    def mean(self, parameters: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """The squashed mean [..., act], differentiable in the parameters [size]."""
        return self._squashed(self._mean_and_log_std(self._outputs(parameters, obs))[0])

    def sample(
        self, parameters: torch.Tensor, obs: torch.Tensor, noise: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The action [..., act] for standard normal noise [..., act], and its log-probability [...]."""
        return self.sample_from(self._outputs(parameters, obs), noise)

    def sample_from(self, outputs: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `sample`, from the network's outputs [..., 2 act]."""
        mean, log_std = self._mean_and_log_std(outputs)
        x = mean + torch.exp(log_std) * noise
        return self._squashed(x), _gaussian_log_probability(noise, log_std) - self._log_slope(x)

    def log_probability(self, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        """log pi(a|s) [...] of actions within the bounds; differentiable in the parameters.

        An action that was rounded to a bound counts as the nearest number inside.
        """
        centre, scale = (torch.as_tensor(each, dtype=actions.dtype) for each in (self.centre, self.scale))
        inside = 1 - torch.finfo(actions.dtype).eps
        x = torch.atanh(((actions - centre) / scale).clamp(-inside, inside))
        mean, log_std = self._mean_and_log_std(self._outputs(parameters, obs))
        return _gaussian_log_probability((x - mean) * torch.exp(-log_std), log_std) - self._log_slope(x)

    def _outputs(self, parameters: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        """The network's outputs [..., 2 act]."""
        outputs: torch.Tensor = self.network.outputs(parameters, _normalised(self.normaliser, obs))
        return outputs

    def _mean_and_log_std(self, outputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and log-std [..., act] of the Gaussian before squashing."""
        mean, raw = outputs[..., : self.act_size], outputs[..., self.act_size :]
        low, high = self.log_std_bounds
        return mean, low + 0.5 * (high - low) * (torch.tanh(raw) + 1)

    def _squashed(self, x: torch.Tensor) -> torch.Tensor:
        """centre + scale * tanh(x)."""
        centre, scale = (torch.as_tensor(each, dtype=x.dtype) for each in (self.centre, self.scale))
        return centre + scale * torch.tanh(x)

    def _log_slope(self, x: torch.Tensor) -> torch.Tensor:
        """The log of the derivative of `_squashed` at x, summed over the actions [...].

        log(1 - tanh(x)^2) = 2 (log 2 - x - softplus(-2x)), which is exact where 1 - tanh(x)^2 rounds to 0.
        """
        slope = 2 * (math.log(2) - x - softplus(-2 * x)) + torch.as_tensor(np.log(self.scale), dtype=x.dtype)
        return slope.sum(-1)


def log_probability_and_score(
    policy: Policy, parameters: torch.Tensor, obs: torch.Tensor, actions: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """log pi(a|s) [n], and the gradient [size] of the sum of weights [n] times it.

    Observations [n, obs] and actions [n, act] are as for `Policy.log_probability`.
    """
    if not isinstance(policy, GaussianPolicy):
        parameters = parameters.detach().requires_grad_()
        log_pi = policy.log_probability(parameters, obs, actions)
        return log_pi.detach(), torch.autograd.grad((weights * log_pi).sum(), [parameters])[0]
    parameters = parameters.detach()
    log_std, actions = parameters[-policy.act_size :, None], actions.T.contiguous()  # [act, 1] and [act, n]
    score_of_log_std = torch.zeros(policy.act_size)
    z = torch.empty_like(actions)

    def gradient_of(mean: torch.Tensor, rows: slice) -> torch.Tensor:
        """Of a mean action m [act, rows]: weight (a - m) / std^2."""
        z[:, rows] = (actions[:, rows] - mean) * torch.exp(-log_std)
        score_of_log_std.add_(((z[:, rows] ** 2 - 1) * weights[rows]).sum(1))
        return z[:, rows] * (weights[rows] * torch.exp(-log_std))

    layers = list(policy.network.layers(parameters))
    inputs = _normalised(policy.normaliser, obs)
    _, gradients = mlp_with_gradient(inputs, layers, policy.network.activation, gradient_of)
    score = torch.cat([*(each.reshape(-1) for each in gradients), score_of_log_std])
    return _gaussian_log_probability(z.T, log_std[:, 0]), score


def _gaussian_log_probability(standardised: torch.Tensor, log_std: torch.Tensor) -> torch.Tensor:
    """log N [...] of (x - mean) / std [..., act]."""
    act_size = standardised.shape[-1]
    return -0.5 * (standardised**2).sum(-1) - log_std.sum(-1) - 0.5 * act_size * math.log(2 * math.pi)


def _normalised(normaliser: Normaliser | None, obs: torch.Tensor) -> torch.Tensor:
    """The observations as the network takes them."""
    return obs if normaliser is None else torch.from_numpy(normaliser(obs.numpy()))


def _rows_of_network(network: Network, parameters: Float32, obs: Float32, which: Int64 | None) -> Float32:
    """The network's outputs [n, out] in NumPy, row i under parameters `which[i]` of [K, size]."""
    parameters, obs = np.atleast_2d(parameters), np.asarray(obs, np.float32)
    which = np.zeros(len(obs), np.int64) if which is None else np.asarray(which)
    outputs = np.empty((len(obs), network.sizes[-1]), np.float32)
    for k in np.unique(which):
        outputs[which == k] = network.outputs(parameters[k], obs[which == k])
    return outputs


def _centre_and_scale(bounds: tuple[Float64, Float64] | None, act_size: int) -> tuple[Float64, Float64]:
    """Centre and half width [act] of the bounds."""
    if bounds is None:
        return np.zeros(act_size), np.ones(act_size)
    low, high = (np.broadcast_to(np.asarray(bound, np.float64), act_size) for bound in bounds)
    if not (low < high).all():
        raise ValueError(f"action_bounds must be low < high, not {low.tolist()} and {high.tolist()}")
    bounded = np.isfinite(low) & np.isfinite(high)
    low, high = np.where(bounded, low, -1.0), np.where(bounded, high, 1.0)
    return (low + high) / 2, (high - low) / 2
