"""Do 95 % intervals cover the truth in 95 of 100 benchmarks? Simulated, with the five runs a task that people have.

The truth is the statistic of the populations that the runs are drawn from, here of many thousand runs.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pbrl.report.stats import estimate, interquartile_mean, optimality_gap, probability_of_improvement, relative_score

Population = Callable[..., np.ndarray]
TASKS, RUNS = 6, 5
MANY = 4000


def normal(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Tasks of different difficulty, all with the same spread."""
    return np.linspace(0.2, 0.8, TASKS)[:, None] + 0.08 * rng.standard_normal(size)


def unequal(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Hard tasks spread ten times as far as easy ones."""
    return np.linspace(0.2, 0.8, TASKS)[:, None] + np.linspace(0.02, 0.2, TASKS)[:, None] * rng.standard_normal(size)


def skewed(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Scores between 0 and 1, skewed where they come near either."""
    middle = np.linspace(0.15, 0.9, TASKS)[:, None]
    return rng.beta(12 * middle, 12 * (1 - middle), size)


def failing(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    """Three runs of ten learn nothing."""
    middle = np.linspace(0.3, 0.8, TASKS)[:, None]
    return np.where(rng.random(size) < 0.7, rng.beta(40 * middle, 40 * (1 - middle), size), rng.beta(3, 30, size))


def coverage(
    population: Population, statistic: Callable[..., np.ndarray], arms: int, benchmarks: int, more: int = 0
) -> float:
    """The share of simulated benchmarks whose interval holds the truth; a second arm is 0.05 better.

    more: that many further runs of every other task.
    """
    rng = np.random.default_rng(0)
    shifts = [0.05 * arm for arm in reversed(range(arms))]
    truth = statistic(*(list(population(rng, (TASKS, MANY)) + shift) for shift in shifts))
    held = 0
    for _ in range(benchmarks):
        whole = [population(rng, (TASKS, RUNS + more)) + shift for shift in shifts]
        drawn = [[task[: RUNS + more * (t % 2)] for t, task in enumerate(each)] for each in whole]
        found = estimate(statistic, *drawn, resamples=1000, seed=0)
        held += bool(found.low <= truth <= found.high)
    return held / benchmarks


STATISTICS = [(interquartile_mean, 1), (optimality_gap, 1), (probability_of_improvement, 2)]


def test_intervals_cover() -> None:
    assert 0.93 <= coverage(skewed, interquartile_mean, 1, 1000) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 5], ids=["equal", "unequal"])  # runs that every other task has beyond the others
@pytest.mark.parametrize("population", [normal, unequal, skewed, failing])
@pytest.mark.parametrize(("statistic", "arms"), STATISTICS)
def test_intervals_cover_whatever_the_scores_look_like(
    population: Population, statistic: Callable[..., np.ndarray], arms: int, more: int
) -> None:
    assert 0.93 <= coverage(population, statistic, arms, 2000, more) <= (0.98 if more else 0.97)


def paired_coverage(population: Population, runs: int, benchmarks: int) -> float:
    """The share of simulated benchmarks whose interval of a relative score holds the truth.

    Half of what a seed adds to a score is common to both sets of runs; the first is worth 0.8 of the second.
    """
    rng = np.random.default_rng(0)

    def draw(runs: int) -> list[np.ndarray]:
        seeds, first, second = (population(rng, (TASKS, runs)) for _ in range(3))
        return list(np.stack([0.8 * (seeds + first) / 2, (seeds + second) / 2], axis=1))

    held = 0
    for _ in range(benchmarks):
        found = estimate(relative_score, draw(runs), resamples=1000, seed=0)
        held += bool(found.low <= 0.8 <= found.high)
    return held / benchmarks


@pytest.mark.slow
@pytest.mark.parametrize("population", [normal, unequal, skewed, failing])
@pytest.mark.parametrize("runs", [3, 5])
def test_intervals_of_relative_scores_cover(population: Population, runs: int) -> None:
    assert 0.93 <= paired_coverage(population, runs, 2000) <= 0.98
