"""The uniform-margin oracle of the paper (Assumption 1), for optimisation: right with probability 1/2 + p."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pbrl.types import Float64


class UniformMargin:
    """R(x, y) in {-1, +1} agrees with sign(f(x) - f(y)) with probability 1/2 + p, however small the gap.

    +1 means that y is better (f is minimised). Between equals it tosses a fair coin.
    """

    def __init__(self, *, p: float, rng: np.random.Generator) -> None:
        if not 0.0 < p <= 0.5:
            raise ValueError(f"the margin p must be in (0, 1/2], not {p}")
        self.p = p
        self.rng = rng

    def compare(self, difference: Float64) -> NDArray[np.int8]:
        """Answers of the same shape as f(x) - f(y). One uniform draw each."""
        difference = np.asarray(difference, dtype=np.float64)
        if np.isnan(difference).any():
            raise ValueError("f(x) - f(y) is NaN: the oracle can only compare numbers")
        draw = self.rng.random(difference.shape)
        says_y = np.where(difference == 0, draw < 0.5, (difference > 0) == (draw < 0.5 + self.p))
        return np.where(says_y, 1, -1).astype(np.int8)
