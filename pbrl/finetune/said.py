"""Intrinsic dimension by SAID: how few parameters suffice to fine-tune a model.

Aghajanyan, Zettlemoyer and Gupta 2021, Intrinsic Dimensionality Explains the Effectiveness of Language Model
Fine-Tuning; after Li, Farkhoor, Liu and Yosinski 2018, Measuring the Intrinsic Dimension of Objective Landscapes.
Of the D parameters θ only d' numbers are trained, z and one λ for each of the m layers:

    θ_i = θ0_i + λ_layer(i) (P z)_i    for every tensor i
                                       z in R^(d' - m), from 0;  λ in R^m, from 1;  P: R^(d' - m) -> R^D of Fastfood

    repeat  write θ into the model, loss.backward()
            dz = P^T (λ dθ),   dλ_layer = sum over its tensors of <dθ_i, (P z)_i>
            one step of the optimiser on (z, λ)

d90 is the smallest d' with which training reaches 90 % of what training all of θ reaches.

Every tensor of D_i entries has its slice of P with E |P_i z|^2 = |z|^2, as in the public implementations: all tensors
move equally far, even the small one of a new classification head. So E |P z|^2 = T |z|^2 for T tensors.
`pbrl.finetune.d90` computes d90 from such runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pbrl.finetune.fastfood import Fastfood


class Subspace:
    """d' numbers, `z` and `scales` (λ), that replace the D numbers of some parameters of a model.

    subspace.write()          # θ into the model, in place
    loss.backward()           # of the model, as usual
    subspace.pull_back()      # the parameters' gradients become those of z and λ
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        layer_of: Callable[[str], str],  # name of a parameter -> name of its layer
        dimension: int,  # d', of z and λ together
        rng: np.random.Generator,
    ) -> None:
        first = _checked(parameters)
        layers = sorted({layer_of(name) for name in parameters})
        size = sum(parameter.numel() for parameter in parameters.values())
        if not len(layers) < dimension <= size:
            raise ValueError(
                f"d' = {dimension} is not possible for {size} parameters in {len(layers)} layers: "
                f"one number for each layer and at least one more make {len(layers) + 1} <= d' <= {size}"
            )
        self._parameters = list(parameters.values())
        self._layer = [layers.index(layer_of(name)) for name in parameters]
        self._start = [parameter.detach().clone() for parameter in self._parameters]  # θ0
        self._theta: list[Tensor] = []  # as last written, with its graph to z and λ
        self._fastfood = Fastfood(dimension - len(layers), size, rng=rng, dtype=first.dtype, device=first.device)
        self.z = nn.Parameter(first.new_zeros(dimension - len(layers)))
        self.scales = nn.Parameter(first.new_ones(len(layers)))  # λ, layers in the order of their names

    def write(self) -> None:
        """Put θ = θ0 + λ P z into the model."""
        sizes = [start.numel() for start in self._start]
        slices = torch.split(self._fastfood(self.z), sizes)
        factors = [math.sqrt(sum(sizes) / size) for size in sizes]  # a slice has D_i / D of the squared norm
        scales = self.scales.unbind()
        self._theta = [
            start + scales[layer] * factor * move.view_as(start)
            for start, layer, factor, move in zip(self._start, self._layer, factors, slices, strict=True)
        ]
        self._put(self._theta)

    def pull_back(self) -> None:
        """Turn the model's gradients into those of z and λ, and add them there; a missing gradient counts as 0."""
        if not self._theta:
            raise RuntimeError("pull_back() without write(): the gradients belong to no θ")
        theta, self._theta = self._theta, []
        pairs = zip(theta, self._parameters, strict=True)
        known = [(value, parameter.grad) for value, parameter in pairs if parameter.grad is not None]
        if not known:
            raise RuntimeError("pull_back() without gradients: the loss depends on none of the parameters")
        values, gradients = zip(*known, strict=True)
        torch.autograd.backward(values, gradients)
        for parameter in self._parameters:
            parameter.grad = None

    def restore(self) -> None:
        """Put θ0 back, bit for bit."""
        self._put(self._start)

    @torch.no_grad()
    def _put(self, theta: Sequence[Tensor]) -> None:
        for parameter, value in zip(self._parameters, theta, strict=True):
            parameter.copy_(value)


def _checked(parameters: Mapping[str, nn.Parameter]) -> nn.Parameter:
    """Check that all parameters are trainable, with one dtype and device; returns the first."""
    if not parameters:
        raise ValueError("a subspace needs parameters: none were given")
    first = next(iter(parameters.values()))
    for name, parameter in parameters.items():
        if not parameter.requires_grad:
            raise ValueError(f"{name} is frozen (requires_grad is False): leave it out of the subspace")
        if (parameter.dtype, parameter.device) != (first.dtype, first.device):
            raise ValueError(
                f"{name} is {parameter.dtype} on {parameter.device}, others are {first.dtype} on {first.device}: "
                "convert the model to one dtype and one device"
            )
    return first


@dataclass(frozen=True)
class Training:
    """The result of training in a subspace."""

    iterations: list[int]  # at which accuracy was measured; 0 is before the first step
    accuracies: list[float]
    diverged_at: int | None  # the iteration with a loss that was not finite, which ended the training

    @property
    def best(self) -> float:
        """The best measured accuracy."""
        return max(self.accuracies)


def train_in_subspace(
    subspace: Subspace,
    *,
    loss: Callable[[Any], Tensor],  # of a batch
    batches: Iterator[Any],
    accuracy: Callable[[], float],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],  # such as partial(torch.optim.Adam, lr=...)
    iterations: int,
    evaluate_every: int,
    progress: Callable[[int, float], None],  # after each iteration, from 1, with its loss
) -> Training:
    """Train z and λ; the model keeps the last θ. Accuracy is measured at the start, every so often, and at the end.

    A loss that is not finite ends the training without an error, because a sweep of learning rates may have some.
    """
    if iterations < 1 or evaluate_every < 1:
        raise ValueError(f"iterations and evaluate_every must be positive, not {iterations} and {evaluate_every}")
    steps = optimizer([subspace.z, subspace.scales])
    subspace.write()
    measured = {0: accuracy()}
    diverged_at = None
    for iteration in range(1, iterations + 1):
        steps.zero_grad()
        value = loss(next(batches))
        if not math.isfinite(value.item()):
            diverged_at = iteration
            break
        value.backward()  # type: ignore[no-untyped-call]
        subspace.pull_back()
        steps.step()
        subspace.write()
        if iteration % evaluate_every == 0 or iteration == iterations:
            measured[iteration] = accuracy()
        progress(iteration, value.item())
    return Training(list(measured), list(measured.values()), diverged_at)
