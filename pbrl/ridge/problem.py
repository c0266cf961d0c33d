"""The ridge problem of the NCRS paper's last appendix, and how an optimiser is run on it.

    f(x) = sum over i = 1..k of 1 - cos((A x)_i),   A with orthonormal rows, x in R^d

f is 1-smooth and does not change along ker(A). Leading axes of arrays are independent runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from scipy.special import expit

from pbrl.search import Array, Optimizer, squared_norm
from pbrl.types import Bool, Float64


@dataclass(frozen=True)
class Ridge:
    """f(x) = sum of 1 - cos((A x)_i). Without a matrix, x stands for A x in R^k."""

    k: int
    matrix: Array | None = None  # A [k, d], orthonormal rows

    def start(self) -> Float64:
        """x_0 = A^T z_0, with every coordinate of z_0 at arcsin(1 / sqrt(k)): a gradient of norm 1."""
        z = np.full(self.k, math.asin(1 / math.sqrt(self.k)))
        return z if self.matrix is None else np.asarray(self.matrix.T @ z)

    def value(self, x: Array) -> Array:
        """f [...]. 2 sin^2(z / 2) is 1 - cos(z) without cancellation, which matters in float32."""
        return 2 * squared_norm(np.sin(self.active(x) / 2))

    def gradient_norm(self, x: Array) -> Array:
        """|grad f| [...], which is |sin(A x)|."""
        return np.sqrt(squared_norm(np.sin(self.active(x))))

    def active(self, x: Array) -> Array:
        """A x [..., k]."""
        return x if self.matrix is None else x @ self.matrix.T


class ComparisonOracle(Protocol):
    """Compares two points, given the true difference f(first) - f(second). `oracles` has the paper's two."""

    def compare(self, difference: Array, *, votes: int) -> Array:
        """The sum of so many answers for each difference [...]; positive: the second point is better."""


class Values:
    """No comparison: the difference of the function values, for the methods that need it."""

    def __init__(self, *, rng: np.random.Generator) -> None:
        self.rng = rng  # not used, but every oracle gets one

    def compare(self, difference: Array, *, votes: int) -> Array:  # noqa: ARG002
        """The difference itself, whatever the number of votes."""
        return difference


class Labels:
    """Answers in {-1, +1}, as people give them: y is preferred to x with probability 1 / (1 + exp((f(y) - f(x)) / scale)).

    The mean of an answer vanishes with the gap, as for the paper's confidence, but an answer says no less loudly then:
    its second moment is 1.
    """

    def __init__(self, *, scale: float, rng: np.random.Generator) -> None:
        if not scale > 0:
            raise ValueError(f"the scale of the labels must be positive, not {scale}")
        self.scale, self.rng = scale, rng

    def compare(self, difference: Array, *, votes: int) -> Array:
        """The sum of so many answers to each f(x) - f(y) [...]."""
        preferred = self.rng.binomial(votes, expit(np.asarray(difference, np.float64) / self.scale))
        return np.asarray(2 * preferred - votes)


@dataclass(frozen=True)
class Outcome:
    """The result of a batch of runs [...]."""

    iterations: Float64  # [...] updates until the target was reached; NaN: never reached
    pairs: Float64  # [...] pairs compared until then; NaN: never reached
    gradient_norm: Float64  # [rounds + 1, ...] before each round, mean over the seeds (the last axis)
    pairs_per_round: int


def run(
    optimizer: Optimizer,
    problem: Ridge,
    oracle: ComparisonOracle,
    *,
    votes: int,
    target: float,
    budget: int,
    at_least: int = 0,
    enough: Callable[[Bool], Any] = np.all,
) -> Outcome:
    """Optimise until enough runs have reached the target, or each has used its budget of pairs.

    votes: how often the oracle compares each pair. at_least: pairs to compare even if the target is reached earlier.
    enough: whether to stop, given which runs have arrived [...].
    """
    batch = optimizer.x.shape[:-1]
    arrived: Bool = np.zeros(batch, np.bool_)
    iterations, pairs_spent = np.full(batch, np.nan), np.full(batch, np.nan)
    norms: list[Array] = []
    pairs = per_round = 0
    while True:
        norm = problem.gradient_norm(optimizer.x)
        norms.append(np.add.reduce(norm, axis=-1, dtype=np.float64) / norm.shape[-1])
        new = (norm <= target) & ~arrived
        if new.any():
            iterations[new] = np.broadcast_to(optimizer.iteration, batch)[new]
            pairs_spent[new] = pairs
            arrived |= new
        if pairs >= budget or (pairs >= at_least and enough(arrived)):
            return Outcome(iterations, pairs_spent, np.array(norms), per_round)
        first, second = optimizer.ask()
        score = oracle.compare(problem.value(first) - problem.value(second), votes=votes)
        optimizer.tell(score)
        per_round = score.size // arrived.size
        pairs += per_round
