"""The ridge problem of the NCRS paper's last appendix, the oracles that compare its points, and a run on it.

    f(x) = sum over i = 1..k of 1 - cos((A x)_i),   A with orthonormal rows, x in R^d

f is 1-smooth and does not change along ker(A). Everything is batched over leading axes of independent runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from oracles import links, uniform_margin
from pbrl.ridge.bounds import confidence_bound, uniform_margin_bound
from pbrl.search import Array, Optimizer, squared_norm
from pbrl.types import Bool, Float64


@dataclass(frozen=True)
class Ridge:
    """f(x) = sum of 1 - cos((A x)_i). Without a matrix, vectors are taken to be A x, in R^k, already."""

    k: int
    matrix: Array | None = None  # A [k, d], orthonormal rows

    def start(self) -> Float64:
        """x_0 = A^T z_0, with every coordinate of z_0 at arcsin(1 / sqrt(k)): a gradient of norm 1."""
        z = np.full(self.k, math.asin(1 / math.sqrt(self.k)))
        return z if self.matrix is None else np.asarray(self.matrix.T @ z)

    def value(self, x: Array) -> Array:
        """f [...]. 2 sin^2(z / 2) is 1 - cos(z) without its cancellation, which float32 would feel."""
        return 2 * squared_norm(np.sin(self.active(x) / 2))

    def gradient_norm(self, x: Array) -> Array:
        """|grad f| [...], which is |sin(A x)|."""
        return np.sqrt(squared_norm(np.sin(self.active(x))))

    def active(self, x: Array) -> Array:
        """A x [..., k]."""
        return x if self.matrix is None else x @ self.matrix.T


class Oracle(Protocol):
    """Compares two points `votes` times; sees the true difference f(first) - f(second) [...]."""

    votes: int

    def __call__(self, difference: Array) -> Array:
        """Sum the votes [...]; positive: the second point is better."""


class UniformMargin:
    """Each vote is a sign in {-1, +1}, right with probability 1/2 + advantage (Assumption 1.1)."""

    def __init__(self, advantage: float | Float64, votes: int, rng: np.random.Generator) -> None:
        self.oracle, self.votes = uniform_margin.UniformMargin(p=advantage, rng=rng), votes

    def __call__(self, difference: Array) -> Array:
        """Sum the votes."""
        return self.oracle.compare(difference, votes=self.votes)

    def bound(self, **run: Any) -> float:
        """Theorem 2.2's bound for a run of NCRS."""
        return uniform_margin_bound(advantage=float(self.oracle.p), **run)


@dataclass
class Confidence:
    """Each vote is the confidence 2 sigma(difference / scale) - 1 of a link sigma (Assumption 1.2).

    It is deterministic, so all votes on a pair agree: one evaluation that counts `votes` times.
    """

    link: str  # a name in `oracles.links`
    scale: float  # tau
    votes: int
    rng: np.random.Generator

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"the scale of the confidence must be positive, not {self.scale}")
        self.sigma: links.Link = getattr(links, self.link)

    def __call__(self, difference: Array) -> Array:
        """Sum the votes."""
        return self.votes * np.sign(difference) * self.sigma.rho(np.abs(difference) / self.scale)

    def bound(self, **run: Any) -> float:
        """Theorem 3.5's bound for a run of NCRS."""
        slope, reach = self.sigma.c / self.scale, self.sigma.r * self.scale
        return confidence_bound(votes=self.votes, slope=slope, reach=reach, noise=self.sigma.C, **run)


@dataclass
class Values:
    """No teacher: the difference of the function values, for the methods that need it."""

    votes: int
    rng: np.random.Generator

    def __call__(self, difference: Array) -> Array:
        """Pass the difference on."""
        return difference


@dataclass(frozen=True)
class Run:
    """What happened to a batch of runs [...]."""

    iterations: Float64  # [...] updates made before the first iterate on target; NaN: never arrived
    pairs: Float64  # [...] pairs asked for before it; NaN likewise
    gradient_norm: Float64  # [rounds + 1, ...] mean over the seeds, the last axis, before each round
    pairs_per_round: int

    @property
    def spent(self) -> int:
        """Pairs that each run asked for by the end."""
        return (len(self.gradient_norm) - 1) * self.pairs_per_round


def run(
    optimizer: Optimizer,
    problem: Ridge,
    oracle: Oracle,
    *,
    target: float,
    budget: int,
    at_least: int = 0,
    enough: Callable[[Bool], Any] = np.all,
) -> Run:
    """Optimise until enough runs have reached the target, within a budget of pairs for each run."""
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
            return Run(iterations, pairs_spent, np.array(norms), per_round)
        first, second = optimizer.ask()
        score = oracle(problem.value(first) - problem.value(second))
        optimizer.tell(score)
        per_round = score.size // arrived.size
        pairs += per_round
