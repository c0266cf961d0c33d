"""d90: the smallest d' with which training in a random subspace reaches 90 % of what full fine-tuning reaches.

Li, Farkhoor, Liu and Yosinski 2018 define it by the accuracy. Where one class is much larger than the other, as in MRPC
with 67 %, 90 % of an accuracy is hardly more than the accuracy of always predicting that class. So d90 is also measured
by the gain over the majority class. The runs come from `pbrl.finetune.said`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from pbrl.report.stats import Benchmark, estimate
from pbrl.types import Float64

SHARE = 0.9  # the 90 in d90


@dataclass(frozen=True)
class D90:
    """A d90 with the ends of its 95 % interval, nan where there is none.

    A number equal to the smallest d' measured means "at most that"; infinity means "more than the largest".
    """

    value: float
    low: float
    high: float
    smallest: int
    largest: int

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "none"
        if math.isnan(self.low):
            return self._text(self.value)
        return f"{self._text(self.value)} ({self._text(self.low)} to {self._text(self.high)})"

    def _text(self, dimension: float) -> str:
        if dimension > self.largest:
            return f"> {self.largest}"
        return f"<= {self.smallest}" if dimension <= self.smallest else f"{dimension:.0f}"


def d90(
    accuracies: Mapping[int, Sequence[float]],  # d' -> best validation accuracy of each run
    *,
    full: Sequence[float],  # best validation accuracy of each run of full fine-tuning
    majority: float,  # share of the largest class
    resamples: int,
    seed: int,
) -> tuple[D90, D90]:
    """d90 of the accuracy, target 0.9 full, and d90 of the gain, target majority + 0.9 (full - majority).

    1. The accuracy at each d' is the mean over its runs; `full` likewise.
    2. Isotonic regression (least squares weighted by the numbers of runs) makes it non-decreasing in d'.
    3. d90 is where the line through the fitted points (log d', accuracy) first reaches the target. If the first point
       is on target: "at most the smallest d'"; if none is: "more than the largest". No extrapolation.
    4. The interval is that of `pbrl.report.stats.estimate` for log d90 within the grid, with runs resampled at each d'
       and for full fine-tuning. There is no interval if one of them has a single run.

    Where full fine-tuning is no better than the majority class there is no gain, and its d90 is nan.
    """
    if not accuracies or not full or not all(len(runs) for runs in accuracies.values()):
        raise ValueError("d90 needs at least one run of full fine-tuning and of every d'")
    dimensions = sorted(accuracies)
    if dimensions[0] < 1:
        raise ValueError(f"d' must be positive, not {dimensions[0]}")
    cells = [np.asarray(accuracies[dimension], np.float64) for dimension in dimensions]
    reference = np.asarray(full, np.float64)
    if not np.isfinite(np.concatenate([*cells, reference, [majority]])).all():
        raise ValueError("d90 of accuracies that are not all finite numbers")
    grid = np.log(dimensions)
    above = float(np.nextafter(grid[-1], math.inf))  # means "more than the largest"

    def dimension(x: float) -> float:
        return dimensions[0] if x <= grid[0] else math.inf if x >= above else min(math.exp(x), dimensions[-1])

    def measure(target: Callable[[Float64], Float64]) -> D90:
        def statistic(cells: Benchmark, reference: Benchmark) -> Float64:
            curves = np.stack([cell.mean(axis=-1) for cell in cells], axis=-1)  # [..., d']
            goals = np.asarray(target(reference[0].mean(axis=-1)))  # [...]
            weights = np.array([cell.shape[-1] for cell in cells], np.float64)
            pairs = zip(curves.reshape(-1, len(grid)), goals.reshape(-1), strict=True)
            found = [_crossing(grid, isotonic_regression(curve, weights=weights).x, goal) for curve, goal in pairs]
            return np.clip(found, grid[0], above).reshape(goals.shape)

        found = estimate(statistic, cells, [reference], resamples=resamples, seed=seed, bounds=(grid[0], above))
        value, low, high = (dimension(float(end)) for end in (found.value, found.low, found.high))
        return D90(value, low, high, smallest=dimensions[0], largest=dimensions[-1])

    no_gain = D90(math.nan, math.nan, math.nan, smallest=dimensions[0], largest=dimensions[-1])
    of_gain = measure(lambda full: majority + SHARE * (full - majority)) if reference.mean() > majority else no_gain
    return measure(lambda full: SHARE * full), of_gain


def _crossing(grid: Float64, fit: Float64, goal: float) -> float:
    """Where the non-decreasing line through (grid, fit) first reaches the goal; infinite where it does not."""
    reached = fit >= goal - 1e-12  # tolerance for the rounding of a mean
    if reached.all() or not reached.any():
        return -math.inf if reached.all() else math.inf
    after = int(reached.argmax())
    share = (goal - fit[after - 1]) / (fit[after] - fit[after - 1])
    return float(grid[after - 1] + min(share, 1.0) * (grid[after] - grid[after - 1]))
