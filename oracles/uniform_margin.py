"""The uniform-margin oracle of the paper (Assumption 1), for optimisation: right with probability 1/2 + p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pbrl.types import Float64, Int64


class UniformMargin:
    """R(x, y) in {-1, +1} agrees with sign(f(x) - f(y)) with probability 1/2 + p, however small the gap.

    +1 means that y is better (f is minimised). Equal values get a fair coin toss. p may be an array [...], with one
    number for each of several independent runs.
    """

    def __init__(self, *, p: float | Float64, rng: np.random.Generator) -> None:
        if not np.all((np.asarray(p) > 0.0) & (np.asarray(p) <= 0.5)):
            raise ValueError(f"the margin p must be in (0, 1/2], not {p}")
        self.p = p
        self.rng = rng

    def compare(self, difference: NDArray[np.floating], *, votes: int = 1) -> Int64:
        """The sum of so many answers, each in {-1, +1}, to each f(x) - f(y) [...]."""
        difference = np.asarray(difference)
        if np.isnan(difference).any():
            raise ValueError("f(x) - f(y) is NaN: the oracle can only compare numbers")
        equal = difference == 0
        chance = np.where(equal, 0.5, 0.5 + self.p) if equal.any() else 0.5 + self.p
        right = self.rng.binomial(votes, chance, difference.shape)
        return np.where(difference > 0, 1, -1) * (2 * right - votes)
