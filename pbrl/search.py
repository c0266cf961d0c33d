"""Search by comparisons: optimisers that ask for pairs of points and are told which point is better.

Every optimiser minimises some f: R^d -> R through the same two methods:

    first, second = optimizer.ask()    two points to compare
    optimizer.tell(score)              score > 0: the second is better, f(second) < f(first)

A score is a sign, a confidence in [-1, 1], or, for the methods that need function values, the difference
f(first) - f(second) itself. Arrays are [..., d]: leading axes hold independent runs, such as seeds, which share
the random generator and nothing else. No array is changed in place.

`Search` compares two points along one random direction s, then moves along s. What distinguishes one method from
another is its `Rule`: which two points on the line theta + offset * s it compares, and how far it moves.

    NCRS    El Bakkali El Kadi et al. 2026, Algorithms 1 and 2
    RSGF    Ghadimi and Lan 2013
    MeZO    Malladi et al. 2023

    search = Search(theta, rule=NCRS(step=0.1), directions=Directions("gaussian"), rng=rng)

A rule knows neither theta nor s. So the same rule also moves the weights of a network in place, where s is never
stored (`pbrl.finetune.inplace`). The peers of the NCRS paper's Table 1 are in `pbrl.ridge.peers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

Array = NDArray[Any]  # float32 or float64: an optimiser keeps the dtype of the vector it is given
Schedule = Callable[[int], float]  # iteration, from 0 -> step


class Optimizer(Protocol):
    """What every optimiser offers."""

    x: Array  # [..., d] the current iterate

    @property
    def iteration(self) -> int | NDArray[np.int64]:
        """The number of updates made; an array [...] where it differs between runs."""

    def ask(self) -> tuple[Array, Array]:
        """Two points to compare, or P pairs of points [P, ..., d] at once."""

    def tell(self, score: ArrayLike) -> None:
        """Update x with the scores [...] or [P, ...]; positive: the second point is better."""


@dataclass(frozen=True)
class Directions:
    """Random directions of R^d: `gaussian` draws from N(0, I_d), `sphere` uniformly from the unit sphere.

    If f depends on A x alone, with k orthonormal rows in A, then only A s of a direction s matters. A run can
    therefore be simulated in k coordinates: give it vectors of length k, and d as `ambient`. A s is then drawn
    from exactly the distribution that it has in R^d, at the cost of k numbers.
    """

    kind: str
    ambient: int | None = None  # d; None: d is the length of the vectors

    def __post_init__(self) -> None:
        if self.kind not in ("gaussian", "sphere"):
            raise ValueError(f"direction must be 'gaussian' or 'sphere', not {self.kind!r}")

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
        """Draw independent directions of the given shape [..., k]."""
        s: Array = rng.standard_normal(shape, dtype)  # type: ignore[arg-type]
        if self.kind == "sphere":
            length = np.sqrt(squared_norm(s) + self.unseen(rng, shape))
            s /= length[..., None].astype(dtype)
        return s

    def unseen(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array | float:
        """Squared length [...] of the d - k coordinates that are not simulated: chi-squared with d - k."""
        hidden = 0 if self.ambient is None else self.ambient - shape[-1]
        if hidden < 0:
            raise ValueError(
                f"k = {shape[-1]} coordinates are more than the d = {self.ambient} dimensions of the space"
            )
        return rng.chisquare(hidden, shape[:-1]) if hidden else 0.0


@dataclass(frozen=True)
class Cosine:
    """alpha_t = minimum + (maximum - minimum) / 2 * (1 + cos(pi * min(t, decay) / decay)), t from 0."""

    _: KW_ONLY
    maximum: float
    minimum: float
    decay: int  # iterations until the step reaches its minimum

    def __post_init__(self) -> None:
        if not 0 < self.minimum <= self.maximum:
            raise ValueError(f"a cosine step needs 0 < minimum <= maximum: {self.minimum}, {self.maximum}")
        if self.decay < 1:
            raise ValueError(f"a cosine step decays over at least one iteration, not {self.decay}")

    def __call__(self, t: int) -> float:
        """The step of iteration t."""
        swing = (self.maximum - self.minimum) / 2
        return self.minimum + swing * (1 + math.cos(math.pi * min(t, self.decay) / self.decay))


class Rule(Protocol):
    """Which points theta + offset * s are compared in iteration t, from 0, and how far theta then moves along s."""

    def offsets(self, t: int) -> tuple[float | Array, float | Array]:
        """The offsets of the two points to compare."""

    def move(self, t: int, scores: Array) -> Array:
        """The offset to move to [..., 1], given the scores [N, ...]; positive: the second point is better."""


@dataclass(frozen=True, kw_only=True)
class NCRS:
    """Noisy-Comparison Random Search (El Bakkali El Kadi, Bouftini, Zhang, Saadi 2026), Algorithms 1 and 2.

    for t = 1, 2, ...
        s_t ~ N(0, I_d)
        compare theta with theta + alpha_t s_t, N times: R_1, ..., R_N
        S_t = sum of R_n
        theta <- theta + alpha_t s_t  if S_t > 0, else theta

    One answer in {-1, +1} is Algorithm 1; N confidences in [-1, 1] are Algorithm 2. S_t = 0 rejects.
    """

    step: float | Array | Schedule  # alpha_t

    def __post_init__(self) -> None:
        check_positive(step=self.step)

    def offsets(self, t: int) -> tuple[float | Array, float | Array]:
        """theta, theta + alpha_t s."""
        return 0.0, at(self.step, t)

    def move(self, t: int, scores: Array) -> Array:
        """alpha_t if the votes sum to more than zero, else 0."""
        S = scores.sum(axis=0)
        return np.where((S > 0)[..., None], at(self.step, t), 0.0)


@dataclass(frozen=True, kw_only=True)
class RSGF:
    """Randomised stochastic gradient-free method (Ghadimi and Lan 2013): one-sided differences of values.

    u ~ N(0, I_d)
    g = (f(theta + mu u) - f(theta)) / mu * u
    theta <- theta - eta g
    """

    step: float | Array | Schedule  # eta
    radius: float  # mu

    def __post_init__(self) -> None:
        check_positive(step=self.step, radius=self.radius)

    def offsets(self, t: int) -> tuple[float | Array, float | Array]:  # noqa: ARG002
        """theta, theta + mu u."""
        return 0.0, self.radius

    def move(self, t: int, scores: Array) -> Array:
        """-eta times the slope, from f(theta) - f(theta + mu u) or the mean of several such differences."""
        slope = -scores.mean(axis=0)[..., None] / self.radius
        return np.asarray(-at(self.step, t) * slope)


@dataclass(frozen=True, kw_only=True)
class MeZO:
    """Memory-efficient zeroth-order SGD (Malladi et al. 2023): two-sided differences of values.

    u ~ N(0, I_d)
    g = (f(theta + mu u) - f(theta - mu u)) / (2 mu) * u
    theta <- theta - eta g
    """

    step: float | Array | Schedule  # eta
    radius: float  # mu

    def __post_init__(self) -> None:
        check_positive(step=self.step, radius=self.radius)

    def offsets(self, t: int) -> tuple[float | Array, float | Array]:  # noqa: ARG002
        """theta + mu u, theta - mu u."""
        return self.radius, -self.radius

    def move(self, t: int, scores: Array) -> Array:
        """-eta times the slope, from f(theta + mu u) - f(theta - mu u) or the mean of several such differences."""
        slope = scores.mean(axis=0)[..., None] / (2 * self.radius)
        return np.asarray(-at(self.step, t) * slope)


@dataclass(eq=False)
class Search:
    """An optimiser of a flat vector that moves along random directions by a rule."""

    x: Array  # theta [..., d]
    _: KW_ONLY
    rule: Rule
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    s: Array | None = field(default=None, init=False)  # the direction between ask() and tell()

    def __post_init__(self) -> None:
        check(self.x)

    def ask(self) -> tuple[Array, Array]:
        """The rule's two points along a new direction."""
        self.s = self.directions.draw(self.rng, self.x.shape, self.x.dtype)
        first, second = self.rule.offsets(self.iteration)
        return self.x + first * self.s, self.x + second * self.s

    def tell(self, score: ArrayLike) -> None:
        """Move along the direction, given the scores [...] or [N, ...]."""
        s, self.s = asked(self.s), None
        move = self.rule.move(self.iteration, answers(score, self.x))
        self.x = self.x + move.astype(s.dtype) * s
        self.iteration += 1


def squared_norm(x: Array) -> Array:
    """|x|^2 over the last axis."""
    return np.asarray(np.einsum("...i,...i->...", x, x))


def at(step: float | Array | Schedule, iteration: int) -> float | Array:
    """The step of an iteration."""
    return step(iteration) if callable(step) else step


def answers(score: ArrayLike, x: Array) -> Array:
    """The scores as [N, ...], N answers for each run of x [..., d], in the dtype of x."""
    scores = np.asarray(score, x.dtype)
    if not np.isfinite(scores).all():
        raise ValueError("a score is NaN or infinite: scores are finite, 0 where there is no answer")
    batch = x.shape[:-1]
    if scores.shape[scores.ndim - len(batch) :] != batch:
        raise ValueError(f"scores of shape {scores.shape} do not fit runs of shape {batch}")
    return scores.reshape(-1, *batch)


def asked(pending: Array | None) -> Array:
    """What `ask()` kept for `tell()`; an error if `tell()` comes first."""
    if pending is None:
        raise RuntimeError("tell() without ask(): there is no pair to answer")
    return pending


def check(x: Array, **positive: Any) -> None:
    """Raise ValueError unless x holds finite floats and the named numbers are positive."""
    if x.ndim == 0 or x.dtype not in (np.float32, np.float64) or not np.isfinite(x).all():
        raise ValueError(f"x must be finite float32 or float64 [..., d], not {x.dtype} of shape {x.shape}")
    check_positive(**positive)


def check_positive(**positive: Any) -> None:
    """Raise ValueError, with its name, for a number that is not positive."""
    for name, value in positive.items():
        if not callable(value) and not (np.isfinite(value).all() and np.all(np.asarray(value) > 0)):
            raise ValueError(f"{name} must be positive, not {value}")
