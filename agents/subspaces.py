"""Where a search looks: a linear map L of k coordinates into the d parameters of a policy.

    all     every parameter: L is the identity
    last    the weights and biases of the network's last layer
    linear  of the last layer, only what a linear map of the observation can express

The coordinates are those of matrices, one after the other, a bias being a matrix of one row. So a random direction can
be of low rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, Protocol

import numpy as np

from pbrl.normaliser import Normaliser
from pbrl.policy import Policy
from pbrl.types import Behaviour, Float32

Kind = Literal["all", "last", "linear"]
Shape = tuple[int, int]

_ROWS = 8192  # observations that are enough for the regression of `linear`


class Subspace(Protocol):
    """L, which lifts k coordinates to a change of d parameters."""

    shapes: list[Shape]  # of the matrices that the coordinates are made of
    fitted: bool  # False: `fit` wants the observations of a collection

    def lift(self, coordinates: Float32) -> Float32:
        """L x [..., d] for coordinates x [..., k]."""

    def fit(self, parameters: Float32, behaviour: Behaviour) -> None:
        """Learn L from what the policy with these parameters [d], or others near it, observed."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


def subspace(kind: Kind, policy: Policy, parameters: Float32, *, penalty: float) -> Subspace:
    """The subspace of that name, for a search that begins at these parameters [d]."""
    if kind == "linear":
        return Linear(policy, parameters, penalty=penalty)
    return Part(policy, last_layer=kind == "last")


def size(shapes: Sequence[Shape]) -> int:
    """How many coordinates k such matrices have."""
    return sum(rows * columns for rows, columns in shapes)


def draw(rng: np.random.Generator, shapes: Sequence[Shape], n: int, rank: int | None) -> Float32:
    """n directions [n, k], each number with mean 0 and variance 1.

    Without a rank they are from N(0, I_k). With one, a matrix with more rows and columns than that is a product of two
    Gaussian matrices, divided by the square root of the rank: `pbrl.policy.LowRank.around` finds the two again.
    """
    directions = []
    for rows, columns in shapes:
        if rank is None or rank >= min(rows, columns):
            matrices = rng.standard_normal((n, rows, columns), np.float32)
        else:
            left = rng.standard_normal((n, rows, rank), np.float32)
            right = rng.standard_normal((n, rank, columns), np.float32)
            matrices = left @ right / np.float32(math.sqrt(rank))
        directions.append(matrices.reshape(n, -1))
    return np.concatenate(directions, axis=-1)


class Part:
    """All parameters, or those of the last layer: L is the identity on them."""

    fitted = True

    def __init__(self, policy: Policy, *, last_layer: bool) -> None:
        network, rest = _shapes(policy.sizes), policy.size - size(_shapes(policy.sizes))
        self.shapes = network[-2:] if last_layer else network + [(1, rest)] * (rest > 0)
        self.begin = size(network[:-2]) if last_layer else 0
        self.parameters = policy.size

    def lift(self, coordinates: Float32) -> Float32:
        """The coordinates in their place, and zero elsewhere."""
        lifted = np.zeros((*coordinates.shape[:-1], self.parameters), np.float32)
        lifted[..., self.begin : self.begin + coordinates.shape[-1]] = coordinates
        return lifted

    def fit(self, parameters: Float32, behaviour: Behaviour) -> None:
        """There is nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """There is nothing to save."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to load."""


class Linear:
    """Linear maps of the observation, as far as the last hidden features can express them.

    A ridge regression of the network's inputs x [obs] on its last hidden features h(x) finds B and b with
    x = h(x) B + b, nearly. The map x C + c is then, nearly, the last layer with weights B C and bias b C + c. Hidden
    layers do not move, so one regression is enough: on the observations of the first collection. The directions of
    that collection itself come from a regression on inputs from N(0, I).

    The coordinates are C and c times sqrt(obs + 1). So coordinates from N(0, sigma^2) change an action by about sigma,
    in every task, where observations are normalised.
    """

    def __init__(self, policy: Policy, parameters: Float32, *, penalty: float) -> None:
        if penalty <= 0:
            raise ValueError(f"penalty must be positive, not {penalty}")
        self.policy, self.penalty = policy, penalty
        self.last = Part(policy, last_layer=True)
        self.shapes = [(policy.obs_size, policy.sizes[-1]), (1, policy.sizes[-1])]
        self._regress(parameters, np.random.default_rng(0).standard_normal((_ROWS, policy.obs_size), np.float32))
        self.fitted = False

    def lift(self, coordinates: Float32) -> Float32:
        """The last layer's change B C, b C + c."""
        C, c = _matrices(coordinates / np.float32(math.sqrt(self.policy.obs_size + 1)), self.shapes)
        change = np.concatenate([self.B @ C, self.b @ C + c], axis=-2)
        return self.last.lift(change.reshape(*coordinates.shape[:-1], -1))

    def fit(self, parameters: Float32, behaviour: Behaviour) -> None:
        """Regress on what was observed, normalised as it will be in the next iteration."""
        assert behaviour.observations is not None, "collect with keep=('observations',) to fit the linear subspace"
        lived = np.arange(behaviour.observations.shape[1]) <= behaviour.lengths[:, None]
        x = behaviour.observations[lived]
        if self.policy.normaliser is not None:
            normaliser = Normaliser(self.policy.obs_size)
            normaliser.include(x)
            x = normaliser(x)
        self._regress(parameters, x[:: -(-len(x) // _ROWS)])
        self.fitted = True

    def _regress(self, parameters: Float32, x: Float32) -> None:
        """B [hidden, obs] and b [1, obs] from inputs x [n, obs]."""
        *hidden, _, _ = _matrices(parameters, _shapes(self.policy.sizes))
        relu = self.policy.export(parameters[None]).activation == "relu"
        h = x.astype(np.float64)
        for W, b in zip(hidden[::2], hidden[1::2], strict=True):
            h = np.maximum(h @ W + b, 0) if relu else np.tanh(h @ W + b)
        h_mean, x_mean = h.mean(axis=0, keepdims=True), x.mean(axis=0, keepdims=True, dtype=np.float64)
        h = h - h_mean
        B = np.linalg.solve(h.T @ h / len(h) + self.penalty * np.eye(h.shape[1]), h.T @ (x - x_mean) / len(h))
        self.B, self.b = B.astype(np.float32), (x_mean - h_mean @ B).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """The regression."""
        return {"B": self.B, "b": self.b, "fitted": self.fitted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.B, self.b, self.fitted = state["B"], state["b"], state["fitted"]


def _shapes(sizes: Sequence[int]) -> list[Shape]:
    """W1, b1, W2, b2, ... of a network with layers of these widths."""
    return [shape for inputs, outputs in pairwise(sizes) for shape in ((inputs, outputs), (1, outputs))]


def _matrices(coordinates: Float32, shapes: Sequence[Shape]) -> list[Float32]:
    """Matrices [..., rows, columns] of coordinates [..., k]; more coordinates are left out."""
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    parts = np.split(coordinates, ends, axis=-1)[:-1]
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]
