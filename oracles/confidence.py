"""The confidence oracle of the paper (Assumption 2), for optimisation: a link applied to the gap in f."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles import links
from pbrl.types import Float64


class Confidence:
    """R(x, y) = 2 sigma((f(x) - f(y)) / scale) - 1 in [-1, 1], for a link sigma of `oracles.links`.

    Positive means that y is better (f is minimised). The score is deterministic, so all votes on a pair agree.
    """

    def __init__(self, *, link: str, scale: float, rng: np.random.Generator) -> None:
        if not scale > 0:
            raise ValueError(f"the scale of the confidence must be positive, not {scale}")
        self.sigma, self.scale, self.rng = links.by_name(link), scale, rng  # rng: not used, but every oracle gets one

    def compare(self, difference: NDArray[np.floating], *, votes: int = 1) -> Float64:
        """The sum of so many equal scores for each f(x) - f(y) [...]."""
        return np.asarray(votes * np.sign(difference) * self.sigma.rho(np.abs(difference) / self.scale))

    @property
    def slope(self) -> float:
        """c of Assumption 2, in units of f: rho(t) >= c t for t <= r."""
        return self.sigma.c / self.scale

    @property
    def reach(self) -> float:
        """r of Assumption 2, in units of f."""
        return self.sigma.r * self.scale

    @property
    def noise(self) -> float:
        """C of Assumption 2: the second moment of the score is at most C rho."""
        return self.sigma.C
