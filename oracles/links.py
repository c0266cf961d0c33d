"""Probabilistic links: from the gap between two clips to the probability that the second is preferred.

The paper's appendix "From Probabilistic Link Functions to Our Confidence-Score Model" states them for a
gap Δ and a temperature τ; here u = Δ / τ has no unit. The score 2 σ(u) - 1 satisfies Assumption 2: its mean
along the true order is at least ρ(|u|), its second moment at most C ρ(|u|), and ρ(t) >= c t for t in [0, r].
In units of return, c becomes c / τ and r becomes r τ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import pi, sqrt

import numpy as np
from scipy.special import erf, expit, ndtr

from pbrl.types import Float64


@dataclass(frozen=True)
class Link:
    """σ: a nondecreasing function from gaps to [0, 1] with σ(-u) = 1 - σ(u); call it on an array."""

    upper_half: Callable[[Float64], Float64]  # σ(u) for u >= 0
    rho: Callable[[Float64], Float64]  # ρ(t) = 2 σ(t) - 1, to full precision near 0
    derivative_at_zero: float  # σ'(0)
    r: float  # ρ(t) >= c t up to here (ρ is concave, so it is enough that it holds at r)
    C: float = 1.0  # the score is deterministic and ρ <= 1, so its square is at most ρ

    @property
    def c(self) -> float:
        """The slope of Assumption 2, as the appendix chooses it: half of ρ'(0)."""
        return self.derivative_at_zero

    def __call__(self, u: Float64) -> Float64:
        """σ(u). The lower half mirrors the upper: 1 - σ(u), and 1 - that, are exact in floating point."""
        upper = self.upper_half(np.abs(u))
        return np.where(np.less(u, 0.0), 1.0 - upper, upper)


logistic = Link(expit, lambda t: np.tanh(t / 2), derivative_at_zero=1 / 4, r=3.8)  # Bradley-Terry
probit = Link(ndtr, lambda t: erf(t / sqrt(2)), derivative_at_zero=1 / sqrt(2 * pi), r=2.4)  # Thurstone
arctan = Link(lambda u: 0.5 + np.arctan(u) / pi, lambda t: np.arctan(t) * (2 / pi), derivative_at_zero=1 / pi, r=2.3)


def by_name(name: str) -> Link:
    """One of the three above."""
    known = {"logistic": logistic, "probit": probit, "arctan": arctan}
    if name not in known:
        raise ValueError(f"link must be one of {', '.join(known)}, not {name!r}")
    return known[name]
