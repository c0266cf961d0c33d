"""Statistics of a benchmark from few runs: Agarwal et al. 2021, Deep RL at the Edge of the Statistical Precipice.

A benchmark is one array of scores per task, runs along the last axis; scores are returns divided by the task's
maximum. Every task counts the same, however many runs it has. Statistics broadcast over leading axes, which is how a
bootstrap computes all of its resamples at once.

Intervals are 95 % percentile intervals of a bootstrap stratified by task, widened about the estimate for few runs.
Resampling n runs of a task shows only (n - 1) / n of their variance, and a normal quantile ignores that few runs
estimate the variance badly: with five runs on six tasks, plain percentile intervals contain the truth in 88 to 93 of
100 benchmarks. Widening by sqrt(n / (n - 1)) t / z, for n runs of each task, makes the interval of a mean Student's;
where tasks have unequal numbers of runs, the factor is that of the mean over tasks, by Welch and Satterthwaite.
Hesterberg (2015, What Teachers Should Know About the Bootstrap) makes the same correction in the percentiles' levels,
but such intervals cannot leave the range of the sample: too narrow for one task of five runs.
The measured coverage is in docs/report.md; tests/report/test_stats_coverage.py measures it again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from pbrl.types import Float64

Benchmark = Sequence[Float64]  # one array per task [..., runs]
Paired = Sequence[Float64]  # one array per task [2, ..., runs]: two sets of runs with the same seeds, in the same order


@dataclass(frozen=True)
class Estimate:
    """A number, or an array of numbers, with the ends of its 95 % interval; nan where there is no interval."""

    value: Float64
    low: Float64
    high: Float64


def interquartile_mean(benchmark: Benchmark) -> Float64:
    """Mean of the middle half of all runs of all tasks."""
    scores = np.concatenate(benchmark, axis=-1)
    counts = [task.shape[-1] for task in benchmark]
    if len(set(counts)) == 1:
        return np.asarray(stats.trim_mean(scores, 0.25, axis=-1))
    weights = np.concatenate([np.full(count, 1 / (count * len(counts))) for count in counts])
    order = scores.argsort(axis=-1)
    below = np.cumsum(weights[order], axis=-1)  # what weighs as much or less, from 0 to 1
    middle = np.clip(below, 0.25, 0.75) - np.clip(below - weights[order], 0.25, 0.75)
    return np.asarray(2 * (middle * np.take_along_axis(scores, order, axis=-1)).sum(axis=-1))


def optimality_gap(benchmark: Benchmark) -> Float64:
    """How far runs stay below the maximum on average; runs above the maximum do not make up for others."""
    return np.asarray(1.0 - np.mean([np.minimum(task, 1.0).mean(axis=-1) for task in benchmark], axis=0))


def profile(benchmark: Benchmark, thresholds: Float64) -> Float64:
    """The share of all runs that score more than each threshold [..., thresholds]."""
    shares = [[(task > threshold).mean(axis=-1) for threshold in thresholds] for task in benchmark]
    return np.asarray(np.stack(np.mean(shares, axis=0), axis=-1))


def probability_of_improvement(first: Benchmark, second: Benchmark) -> Float64:
    """The probability that a run of the first beats a run of the second on a random task; a tie counts half."""
    tasks = []
    for ours, theirs in zip(first, second, strict=True):
        gap = ours[..., :, None] - theirs[..., None, :]
        tasks.append(((gap > 0) + 0.5 * (gap == 0)).mean(axis=(-2, -1)))
    return np.asarray(np.mean(tasks, axis=0))


def relative_score(benchmark: Paired) -> Float64:
    """The mean score over tasks of the first of two sets of runs, as a share of the second's.

    Runs with the same seed begin alike, so a bootstrap draws both of them or neither.
    """
    ours, theirs = np.mean([task.mean(axis=-1) for task in benchmark], axis=0)
    return np.asarray(np.divide(ours, np.where(theirs > 0, theirs, math.nan)))


def estimate(
    statistic: Callable[..., Float64],
    *benchmarks: Benchmark | Paired,
    resamples: int,
    seed: int,
    bounds: tuple[float, float] = (-math.inf, math.inf),
) -> Estimate:
    """A statistic of one or more benchmarks with its interval; no interval if some task has only one run."""
    value = statistic(*benchmarks)
    tasks = [task for benchmark in benchmarks for task in benchmark]
    if min(task.shape[-1] for task in tasks) < 2:
        return Estimate(value, np.full_like(value, math.nan), np.full_like(value, math.nan))
    rng = np.random.default_rng(seed)

    def resample(task: Float64) -> Float64:
        runs = task.shape[-1]
        return task[..., rng.integers(runs, size=(resamples, runs))]

    resampled = statistic(*([resample(task) for task in benchmark] for benchmark in benchmarks))
    low, high = np.quantile(resampled, (0.025, 0.975), axis=0)
    low, high = (value + (end - value) * _widening(tasks) for end in (low, high))
    return Estimate(value, np.clip(low, *bounds), np.clip(high, *bounds))


def _widening(tasks: Sequence[Float64]) -> float:
    """The factor by which an interval must be wider than the bootstrap's, for few runs."""
    runs = np.array([task.shape[-1] for task in tasks])
    variance = np.array([task.var(axis=-1, ddof=1).sum() for task in tasks]) / runs  # of each task's mean
    if not variance.any():
        return 1.0  # all runs of a task are equal, and so are all resamples
    freedom = variance.sum() ** 2 / (variance**2 / (runs - 1)).sum()  # by Welch and Satterthwaite
    unseen = variance.sum() / (variance * (runs - 1) / runs).sum()
    return math.sqrt(unseen) * float(stats.t.ppf(0.975, freedom) / stats.norm.ppf(0.975))


def standard_error(values: Float64) -> Float64:
    """Standard error of the mean over the first axis, ignoring nan; nan for fewer than two values."""
    count = np.isfinite(values).sum(axis=0)
    spread = np.nansum((values - np.nansum(values, axis=0) / np.maximum(count, 1)) ** 2, axis=0)
    return np.where(count > 1, np.sqrt(spread / np.maximum(count * (count - 1), 1)), math.nan)


def margin_of_mean(values: Float64) -> Float64:
    """Half the width of Student's 95 % interval of the mean over the first axis, ignoring nan; nan for one value.

    For one task, the bootstrap's widened interval of a mean is this one, up to resampling.
    """
    count = np.isfinite(values).sum(axis=0)
    quantile = stats.t.ppf(0.975, np.maximum(count - 1, 1))
    return np.asarray(quantile * standard_error(values))
