"""The statistics of a benchmark against known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import stats

from pbrl.report.stats import (
    estimate,
    interquartile_mean,
    optimality_gap,
    probability_of_improvement,
    profile,
    relative_score,
    standard_error,
)

HOW = {"resamples": 500, "seed": 0}
SCORES = arrays(np.float64, (3, 4), elements=st.floats(0, 1.25, width=16))


def benchmark(rng: np.random.Generator, tasks: int = 3, runs: int = 5) -> list[np.ndarray]:
    return list(rng.normal(0.5, 0.1, (tasks, runs)))


def test_the_interquartile_mean_is_of_the_middle_half() -> None:
    assert interquartile_mean([np.array([0.0, 4.0, 1.0, 100.0]), np.array([2.0, 3.0, -50.0, 5.0])]) == 2.5  # 1 2 3 4


def test_the_interquartile_mean_is_scipys_trimmed_mean_of_all_runs(rng: np.random.Generator) -> None:
    tasks = [rng.random(5), rng.random(5), rng.random(5)]
    assert interquartile_mean(tasks) == stats.trim_mean(np.concatenate(tasks), 0.25)


def test_every_task_counts_the_same_however_many_runs_it_has() -> None:
    tasks = [np.array([1.0, 0.0]), np.array([2.0] * 6)]  # by weight: 0 in the lowest quarter, 1 in the next, then 2
    assert interquartile_mean(tasks) == pytest.approx((1 + 2) / 2)
    assert optimality_gap([task / 2 for task in tasks]) == pytest.approx((0.75 + 0) / 2)
    np.testing.assert_allclose(profile(tasks, np.array([0.0, 1.5])), [(0.5 + 1) / 2, (0 + 1) / 2])


@given(SCORES)
def test_repeating_the_runs_of_one_task_changes_no_statistic(scores: np.ndarray) -> None:
    once, often = list(scores), [np.tile(scores[0], 3), *scores[1:]]
    for statistic in (interquartile_mean, optimality_gap, lambda tasks: profile(tasks, np.linspace(0, 1, 5))):
        np.testing.assert_allclose(statistic(often), statistic(once), atol=1e-12)
    both = [np.stack([task, task[::-1]]) for task in often]  # as a bootstrap computes it
    np.testing.assert_allclose(interquartile_mean(both), [interquartile_mean(once)] * 2, atol=1e-12)


def test_the_optimality_gap_does_not_reward_what_exceeds_the_maximum() -> None:
    assert optimality_gap([np.array([0.5, 1.0]), np.array([1.5, 0.0])]) == 1 - (0.5 + 1 + 1 + 0) / 4


def test_a_profile_counts_runs_above_each_threshold() -> None:
    shares = profile([np.array([0.1, 0.5]), np.array([0.5, 0.9])], np.array([0.0, 0.1, 0.5, 0.9]))
    np.testing.assert_array_equal(shares, [1.0, 0.75, 0.25, 0.0])


@given(SCORES)
def test_a_profile_never_rises_and_its_area_is_the_mean(scores: np.ndarray) -> None:
    thresholds = np.linspace(0, 1.25, 1251)
    shares = profile(list(scores), thresholds)
    assert (np.diff(shares) <= 0).all()
    assert shares.mean() * 1.25 == pytest.approx(scores.mean(), abs=2e-3)


def test_the_probability_of_improvement_by_hand() -> None:
    first = [np.array([1.0, 3.0]), np.array([5.0, 5.0])]
    second = [np.array([2.0, 2.0, 0.0]), np.array([5.0, 6.0])]
    # Task 1: 1 beats 0; 3 beats all: 4 of 6. Task 2: two ties of four.
    assert probability_of_improvement(first, second) == pytest.approx((4 / 6 + 1 / 4) / 2)


@given(SCORES, SCORES)
def test_the_probability_of_improvement_is_the_rank_test_and_both_ways_make_one(
    first: np.ndarray, second: np.ndarray
) -> None:
    ours = probability_of_improvement(list(first), list(second))
    assert ours + probability_of_improvement(list(second), list(first)) == pytest.approx(1)
    ranks = [stats.mannwhitneyu(x, y).statistic / 16 for x, y in zip(first, second, strict=True)]
    assert ours == pytest.approx(np.mean(ranks))


def test_a_relative_score_is_a_ratio_of_means_over_tasks() -> None:
    pairs = [np.array([[0.2, 0.4], [0.5, 0.3]]), np.array([[0.6], [0.8]])]
    assert relative_score(pairs) == pytest.approx((0.3 + 0.6) / (0.4 + 0.8))
    assert math.isnan(relative_score([np.array([[0.2, 0.4], [0.0, 0.0]])]))  # there is nothing to compare with


def test_the_interval_of_a_relative_score_is_of_seeds_drawn_together(rng: np.random.Generator) -> None:
    scores = [rng.uniform(0.1, 1, size=5) for _ in range(2)]
    half = estimate(relative_score, [np.stack([0.5 * task, task]) for task in scores], **HOW)
    assert (half.value, half.low, half.high) == pytest.approx((0.5, 0.5, 0.5))  # however much the seeds differ
    mixed = estimate(relative_score, [np.stack([0.5 * task[::-1], task]) for task in scores], **HOW)
    assert mixed.value == pytest.approx(0.5)
    assert mixed.low < 0.5 < mixed.high


def test_the_standard_error_is_scipys_over_what_is_there() -> None:
    values = np.array([[1.0, 2.0, 5.0], [2.0, np.nan, np.nan], [4.0, 5.0, np.nan]])
    expected = [stats.sem([1, 2, 4]), stats.sem([2, 5]), np.nan]  # of a single value: none
    np.testing.assert_allclose(standard_error(values), expected)


def test_the_same_seed_gives_the_same_interval_and_another_one_another(rng: np.random.Generator) -> None:
    scores = benchmark(rng)
    first, again = (estimate(interquartile_mean, scores, **HOW) for _ in range(2))
    assert first == again
    assert estimate(interquartile_mean, scores, resamples=500, seed=1).low != first.low


def test_a_widened_interval_of_a_mean_is_students(rng: np.random.Generator) -> None:
    scores = rng.normal(size=40)  # many, so that the bootstrap's own shape is normal
    found = estimate(lambda tasks: tasks[0].mean(axis=-1), [scores], resamples=100_000, seed=0)
    expected = stats.t.interval(0.95, 39, scores.mean(), stats.sem(scores))
    assert (found.low, found.high) == pytest.approx(expected, abs=0.02)


def test_a_widened_interval_of_a_mean_over_tasks_with_unequal_runs_is_welchs(rng: np.random.Generator) -> None:
    tasks = [rng.normal(size=30), 3 * rng.normal(size=60)]
    found = estimate(
        lambda drawn: np.mean([task.mean(axis=-1) for task in drawn], axis=0), tasks, resamples=100_000, seed=0
    )
    welch = stats.ttest_ind(tasks[0], -tasks[1], equal_var=False).confidence_interval()  # of the difference: the sum
    assert (found.low, found.high) == pytest.approx((welch.low / 2, welch.high / 2), abs=0.02)


@settings(max_examples=20)
@given(SCORES, SCORES)
def test_intervals_contain_the_estimate_and_keep_to_their_bounds(first: np.ndarray, second: np.ndarray) -> None:
    found = estimate(probability_of_improvement, list(first), list(second), **HOW, bounds=(0, 1))
    assert 0 <= found.low <= found.value + 1e-9
    assert found.value - 1e-9 <= found.high <= 1


def test_intervals_shrink_as_runs_are_added(rng: np.random.Generator) -> None:
    few, many = (estimate(optimality_gap, benchmark(rng, runs=runs), **HOW) for runs in (4, 40))
    assert many.high - many.low < (few.high - few.low) / 2


def test_one_run_of_a_task_gives_no_interval(rng: np.random.Generator) -> None:
    scores = [rng.random(5), rng.random(1)]
    found = estimate(interquartile_mean, scores, **HOW)
    assert found.value == interquartile_mean(scores)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


def test_an_interval_of_a_profile_is_one_of_each_threshold(rng: np.random.Generator) -> None:
    thresholds = np.linspace(0, 1, 11)
    found = estimate(lambda tasks: profile(tasks, thresholds), benchmark(rng), **HOW, bounds=(0, 1))
    assert found.value.shape == found.low.shape == found.high.shape == (11,)
    assert (found.low <= found.value).all()
    assert (found.value <= found.high).all()
