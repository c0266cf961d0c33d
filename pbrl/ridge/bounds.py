"""What the NCRS paper proves: upper bounds on the average gradient norm on f(x) = g(A x), A of rank k.

The paper takes s ~ N(0, I_d). Its proofs use only two moments of the direction,

    m = E |<u, s>| for a unit vector u,    q = E |P s|^2 for the projector P on the k active dimensions,

sqrt(2 / pi) and k for Gaussian directions. With the moments of the unit sphere, the same proofs hold for the sphere.
"""

from __future__ import annotations

import math
from typing import Any

from pbrl.search import Directions

THEOREMS = ("2.2", "3.5")


def bound(theorem: str, oracle: Any, *, votes: int, **run: Any) -> float:
    """The bound of a theorem for a run of NCRS, with the constants of an oracle that meets its assumption."""
    if theorem == "2.2":
        return uniform_margin_bound(advantage=float(oracle.p), **run)
    return confidence_bound(votes=votes, slope=oracle.slope, reach=oracle.reach, noise=oracle.noise, **run)


def moments(directions: Directions, k: int) -> tuple[float, float]:
    """Return (m, q) of a direction."""
    if directions.kind == "gaussian":
        return math.sqrt(2 / math.pi), float(k)
    d = directions.ambient or k
    log_ratio = math.lgamma(d / 2) - math.lgamma((d + 1) / 2)
    return math.exp(log_ratio) / math.sqrt(math.pi), k / d


def uniform_margin_bound(
    *,
    advantage: float,
    step: float,
    iterations: int,
    gap: float,
    directions: Directions,
    k: int,
) -> float:
    """Theorem 2.2 for any constant step: (1 / T) sum of E |grad f(theta_t)| over T iterations of Algorithm 1.

    `gap` is f(theta_1) - inf f. With Gaussian directions and step = alpha_0 / sqrt(k T), the paper's formula.
    """
    m, q = moments(directions, k)
    return (gap / iterations + q * step**2 / 2) / (advantage * step * m)


def confidence_bound(
    *,
    votes: int,
    slope: float,
    reach: float,
    noise: float,
    step: float,
    iterations: int,
    gap: float,
    directions: Directions,
    k: int,
) -> float:
    """Theorem 3.5, as printed: (1 / T) sum of E |grad f(theta_t)| over T iterations of Algorithm 2.

    The oracle's mean grows at least like rho(t) >= slope * t for t <= reach, its second moment is at most
    noise * rho (the paper's c, r, C). For rho(reach), its lower bound slope * reach is used.

    The paper's lemmas give 1 - 2 gamma where its theorem has 1 - gamma. With the number of votes that the paper
    asks for, gamma is negligible and both give the same number.
    """
    m, q = moments(directions, k)
    gamma = math.exp(-votes * slope * reach / (2 * noise + 4 / 3))
    penalty = (2 * noise + 4 / 3) / (math.e * slope * votes)
    descent = gap / iterations + q * (1 + gamma) * step**2 / 2 + penalty
    return 2 * descent / (m * step * (1 - gamma))
