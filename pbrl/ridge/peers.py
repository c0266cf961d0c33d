"""The peers of the NCRS paper's Table 1: optimisers that learn from comparisons, one class per algorithm.

All have the ask/tell of `pbrl.search`. Each has one step size, `step`, so that the same grid tunes all of them.
They were designed for answers in {-1, +1}; of a confidence they use the sign.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbrl.search import Array, Directions, answers, asked, check, squared_norm


@dataclass(eq=False)
class GLDSearch:
    """Gradientless descent with binary search (Golovin et al. 2020), Algorithm 1.

    K = log2(R / r)
    for t = 1, 2, ...
        v_i = 2^-i R * a random direction,  i = 0, ..., K
        x <- the best of x, x + v_0, ..., x + v_K, found by successive duels
    """

    x: Array  # [..., d]: between two duels, the winner so far
    _: KW_ONLY
    step: float | Array  # R
    ratio: float  # R / r
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    candidates: list[Array] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        check(self.x, step=self.step)
        if self.ratio < 1:
            raise ValueError(f"ratio R / r must be at least 1, not {self.ratio}")

    def radii(self) -> list[float]:
        """The radii to try, in units of R."""
        K = round(math.log2(self.ratio))
        return [2.0**-i for i in range(K + 1)]

    def ask(self) -> tuple[Array, Array]:
        """(the best so far, the next candidate)."""
        if not self.candidates:
            self.candidates = [
                self.x + radius * self.step * self.directions.draw(self.rng, self.x.shape, self.x.dtype)
                for radius in self.radii()
            ]
        return self.x, self.candidates[0]

    def tell(self, score: ArrayLike) -> None:
        """Keep the winner of the duel."""
        candidate = asked(self.candidates.pop(0) if self.candidates else None)
        (o,) = np.sign(answers(score, self.x))
        self.x = np.where((o > 0)[..., None], candidate, self.x)
        self.iteration += not self.candidates


@dataclass(eq=False, kw_only=True)
class GLDFast(GLDSearch):
    """Gradientless descent with a shrinking search range (Golovin et al. 2020), Algorithm 2.

    K = log2(4 sqrt(Q)),  H = d Q log2(Q)
    for t = 1, 2, ...
        R <- R / 2  every H iterations
        v_i = 2^-i R * a random direction,  i = -K, ..., K
        x <- the best of x, x + v_-K, ..., x + v_K, found by successive duels
    """

    ratio: float = field(default=1.0, init=False)
    condition: float  # Q, a bound on the condition number of f

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.condition <= 1:
            raise ValueError(f"condition Q must exceed 1, not {self.condition}")

    def radii(self) -> list[float]:
        """The radii to try, in units of the initial R."""
        d = self.directions.ambient or self.x.shape[-1]
        K = round(math.log2(4 * math.sqrt(self.condition)))
        H = math.ceil(d * self.condition * math.log2(self.condition))
        R = 2.0 ** -(self.iteration // H)
        return [2.0**-i * R for i in range(-K, K + 1)]


@dataclass(eq=False)
class Saha2021:
    """Dueling convex optimisation, beta-NGD with repeated duels (Saha, Koren, Mansour 2021).

    for t = 1, 2, ...
        u ~ the unit sphere
        n duels of (x + gamma u, x - gamma u), until their frequency leaves 1/2
            by more than sqrt(log(8 n^2 / delta) / (2 n));  o = +1 if x + gamma u lost most, else -1
        x <- x - eta o u

    The runs of a batch decide their duels at different times, so `iteration` is an array [...].
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # eta
    radius: float  # gamma
    failure: float  # delta, the probability that a decided duel is wrong
    directions: Directions
    rng: np.random.Generator
    iteration: NDArray[np.int64] = field(init=False)  # [...]
    u: Array = field(init=False)
    lost: NDArray[np.int64] = field(init=False)  # [...] duels that x + gamma u lost
    duels: NDArray[np.int64] = field(init=False)  # [...] n

    def __post_init__(self) -> None:
        check(self.x, step=self.step, radius=self.radius)
        if not 0 < self.failure < 1:
            raise ValueError(f"failure must lie in (0, 1), not {self.failure}")
        self.u = self.directions.draw(self.rng, self.x.shape, self.x.dtype)
        self.iteration, self.lost, self.duels = (np.zeros(self.x.shape[:-1], np.int64) for _ in range(3))

    def ask(self) -> tuple[Array, Array]:
        """(x + gamma u, x - gamma u), the same pair until the duel is decided."""
        return self.x + self.radius * self.u, self.x - self.radius * self.u

    def tell(self, score: ArrayLike) -> None:
        """Count one answer, and step in the runs where the duel is decided."""
        (o,) = np.sign(answers(score, self.x))
        self.lost += o > 0
        self.duels += 1
        excess = self.lost / self.duels - 0.5
        decided = np.abs(excess) > np.sqrt(np.log(8 * self.duels**2 / self.failure) / (2 * self.duels))
        if decided.any():
            o = np.where(decided, np.sign(excess), 0).astype(self.x.dtype)
            self.x = self.x - self.step * o[..., None] * self.u
            self.u = self.u.copy()
            self.u[decided] = self.directions.draw(self.rng, self.u[decided].shape, self.x.dtype)
            self.lost, self.duels = np.where(decided, 0, self.lost), np.where(decided, 0, self.duels)
            self.iteration = self.iteration + decided


@dataclass(eq=False)
class Saha2025:
    """Relative gradient descent, for dueling convex optimisation with general preferences (Saha et al. 2025).

    u ~ the unit sphere
    o = sign(f(x + gamma u) - f(x - gamma u)), one noisy bit
    x <- x - eta o u
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # eta
    radius: float  # gamma
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    u: Array | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check(self.x, step=self.step, radius=self.radius)

    def ask(self) -> tuple[Array, Array]:
        """(x + gamma u, x - gamma u)."""
        self.u = self.directions.draw(self.rng, self.x.shape, self.x.dtype)
        return self.x + self.radius * self.u, self.x - self.radius * self.u

    def tell(self, score: ArrayLike) -> None:
        """Step away from the loser."""
        u, self.u = asked(self.u), None
        (o,) = np.sign(answers(score, self.x))
        self.x = self.x - self.step * o[..., None] * u
        self.iteration += 1


@dataclass(eq=False)
class Wang2025(Saha2025):
    """Sign descent from two noisy evaluations (Wang et al. 2025), here from one noisy comparison.

    u ~ the unit sphere
    x <- x - eta sign(F(x + delta u) - F(x)) u

    The update of Saha2025 from a one-sided pair; delta is the radius.
    """

    def ask(self) -> tuple[Array, Array]:
        """(x + delta u, x)."""
        self.u = self.directions.draw(self.rng, self.x.shape, self.x.dtype)
        return self.x + self.radius * self.u, self.x


@dataclass(eq=False)
class ZORankSGD:
    """Zeroth-order optimisation with an (m, q)-ranking oracle (Tang, Rybin, Chang 2024), Algorithm 1.

    for t = 1, 2, ...
        xi_1, ..., xi_m ~ N(0, I_d);  find the best q of x + mu xi_i, in order
        E = the pairs (i, j) of which the ranking says that i is better than j: q m - q (q + 1) / 2 of them
        g = 1 / |E| * sum over E of (xi_j - xi_i)
        x <- x - eta g

    # Departure: the paper's oracle ranks m points at once. Ours compares two, so q bubble-sort passes find the
    # best q with |E| comparisons, all of them counted. No line search (optional there), because the step is tuned.
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # eta
    radius: float  # mu
    probes: int  # m
    best: int  # q
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    xi: list[Array] = field(default_factory=list, init=False)  # m of [..., d], the best first once ranked
    duels: list[int] = field(default_factory=list, init=False)  # positions i still to compare with i + 1

    def __post_init__(self) -> None:
        check(self.x, step=self.step, radius=self.radius)
        if not 1 <= self.best < self.probes:
            raise ValueError(f"best must lie in [1, probes), not {self.best} of {self.probes} probes")

    def ask(self) -> tuple[Array, Array]:
        """Two neighbours in the ranking so far."""
        m, q = self.probes, self.best
        if not self.duels:
            self.xi = [self.directions.draw(self.rng, self.x.shape, self.x.dtype) for _ in range(m)]
            self.duels = [i for rank in range(q) for i in range(m - 2, rank - 1, -1)]
        i = self.duels[0]
        return self.x + self.radius * self.xi[i], self.x + self.radius * self.xi[i + 1]

    def tell(self, score: ArrayLike) -> None:
        """Swap the two where the second is better; when the ranking is complete, step."""
        asked(self.xi[0] if self.duels else None)
        (o,) = answers(score, self.x)
        swap, i = (o > 0)[..., None], self.duels.pop(0)
        better, worse = self.xi[i], self.xi[i + 1]
        self.xi[i : i + 2] = np.where(swap, worse, better), np.where(swap, better, worse)
        if not self.duels:
            m, q = self.probes, self.best
            edges = q * m - q * (q + 1) / 2
            # Rank r < q is better than m - 1 - r and worse than r others; the rest are worse than q.
            weights = [2 * r - (m - 1) if r < q else q for r in range(m)]
            g = sum(weight / edges * xi for weight, xi in zip(weights, self.xi, strict=True))
            self.x = self.x - self.step * g
            self.iteration += 1


@dataclass(eq=False)
class SCOBO:
    """One-bit gradients: SCOBO (Cai et al. 2022), Sign-OPT (Cheng et al. 2020), ComPO (Chen et al. 2026).

    z_1, ..., z_m ~ N(0, I_d)
    y_i = sign(f(x + r z_i) - f(x)), one noisy bit each
    g = sum of y_i z_i, normalised
    x <- x - eta g

    # Departure: SCOBO also makes g sparse. The gradient of a ridge function is not sparse, so this is left out.
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # eta
    radius: float  # r
    probes: int  # m
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    z: Array | None = field(default=None, init=False)  # [m, ..., d]

    def __post_init__(self) -> None:
        check(self.x, step=self.step, radius=self.radius, probes=self.probes)
        if self.directions.kind != "gaussian":
            raise ValueError(f"SCOBO's directions are gaussian, not {self.directions.kind!r}")

    def ask(self) -> tuple[Array, Array]:
        """(x, x + r z_i) for all m probes."""
        self.z = self.directions.draw(self.rng, (self.probes, *self.x.shape), self.x.dtype)
        return self.x, self.x + self.radius * self.z

    def tell(self, score: ArrayLike) -> None:
        """Step along the normalised sum of the bits [m, ...]."""
        z, self.z = asked(self.z), None
        y = -np.sign(answers(score, self.x))
        g = np.einsum("m...,m...i->...i", y, z)
        # The bits are independent of the coordinates not simulated: there each coordinate of g is N(0, sum of y_i^2).
        unseen = (y**2).sum(axis=0) * self.directions.unseen(self.rng, self.x.shape)
        length = np.sqrt(squared_norm(g) + unseen).astype(self.x.dtype)
        self.x = self.x - self.step * g / np.maximum(length, np.finfo(self.x.dtype).tiny)[..., None]
        self.iteration += 1
