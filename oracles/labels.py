"""Labels as people give them, for optimisation: one side or the other, with a probability that follows the gap in f."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles import links
from pbrl.types import Int64


class Labels:
    """R(x, y) in {-1, +1}: y is preferred with probability sigma((f(x) - f(y)) / scale), for a link of `oracles.links`.

    The mean of an answer is the paper's confidence, but its second moment is 1 however small the gap, so Assumption 2
    does not hold.
    """

    def __init__(self, *, link: str, scale: float, rng: np.random.Generator) -> None:
        if not scale > 0:
            raise ValueError(f"the scale of the labels must be positive, not {scale}")
        self.sigma, self.scale, self.rng = links.by_name(link), scale, rng

    def compare(self, difference: NDArray[np.floating], *, votes: int = 1) -> Int64:
        """The sum of so many answers, each in {-1, +1}, to each f(x) - f(y) [...]."""
        chance = self.sigma(np.asarray(difference, np.float64) / self.scale)
        return np.asarray(2 * self.rng.binomial(votes, chance) - votes)
