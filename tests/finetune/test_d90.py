"""d90 of measured accuracies, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pbrl.finetune.d90 import D90, d90

HOW: dict[str, Any] = {"resamples": 200, "seed": 0}


def test_it_is_interpolated_in_the_logarithm_of_the_dimension() -> None:
    # Targets 0.9 * 0.8 = 0.72 and 0.6 + 0.9 * 0.2 = 0.78; from 0.6 at 10 to 0.8 at 1000 in log10 d' of 1 to 3.
    of_accuracy, of_gain = d90({10: [0.6], 1000: [0.8]}, full=[0.8], majority=0.6, **HOW)
    assert of_accuracy.value == pytest.approx(10 ** (1 + 2 * 0.12 / 0.2))
    assert of_gain.value == pytest.approx(10 ** (1 + 2 * 0.18 / 0.2))
    assert math.isnan(of_accuracy.low)  # one run has no interval
    assert str(of_accuracy) == "158"


def test_a_grid_point_on_target_is_the_answer() -> None:
    of_accuracy, _ = d90({10: [0.5], 100: [0.72], 1000: [0.8]}, full=[0.8], majority=0.5, **HOW)
    assert of_accuracy.value == pytest.approx(100)
    of_accuracy, _ = d90({10: [0.5], 100: [0.6], 1000: [0.72]}, full=[0.8], majority=0.5, **HOW)
    assert of_accuracy.value == pytest.approx(1000)
    assert str(of_accuracy) == "1000"


def test_a_grid_that_does_not_bracket_says_so() -> None:
    of_accuracy, of_gain = d90({10: [0.75], 1000: [0.76]}, full=[0.8], majority=0.6, **HOW)
    assert (of_accuracy.value, str(of_accuracy)) == (10, "<= 10")
    assert (of_gain.value, str(of_gain)) == (math.inf, "> 1000")


def test_a_dip_is_smoothed_by_isotonic_regression() -> None:
    # 0.8 and 0.6 at 100 and 1000 pool to 0.7, below the target of 0.72: it is passed between 1000 and 10000.
    accuracies = {10: [0.5], 100: [0.8], 1000: [0.6], 10000: [0.8]}
    of_accuracy, _ = d90(accuracies, full=[0.8], majority=0.5, **HOW)
    assert of_accuracy.value == pytest.approx(10 ** (3 + 0.02 / 0.1))
    # With three runs at 100 and one at 1000 they pool to 0.75, reached between 10 and 100.
    accuracies[100] = [0.8, 0.8, 0.8]
    of_accuracy, _ = d90(accuracies, full=[0.8], majority=0.5, **HOW)
    assert of_accuracy.value == pytest.approx(10 ** (1 + 0.22 / 0.25))


def test_the_order_of_the_measurements_does_not_matter() -> None:
    accuracies = {10: [0.6, 0.62], 100: [0.7, 0.75], 1000: [0.8, 0.79]}
    backwards = dict(reversed(accuracies.items()))
    assert d90(accuracies, full=[0.8, 0.81], majority=0.5, **HOW) == d90(
        backwards, full=[0.8, 0.81], majority=0.5, **HOW
    )


def test_no_gain_has_no_d90() -> None:
    of_accuracy, of_gain = d90({10: [0.5], 100: [0.7]}, full=[0.66], majority=0.67, **HOW)
    assert str(of_gain) == "none"
    assert 10 < of_accuracy.value < 100


def test_runs_that_agree_have_an_interval_of_no_width() -> None:
    of_accuracy, _ = d90({10: [0.6] * 3, 1000: [0.8] * 3}, full=[0.8] * 3, majority=0.5, **HOW)
    assert of_accuracy.low == pytest.approx(of_accuracy.value)
    assert of_accuracy.high == pytest.approx(of_accuracy.value)
    assert str(of_accuracy) == "158 (158 to 158)"


def test_an_interval_can_end_beyond_the_grid_and_the_seed_decides_it() -> None:
    accuracies = {10: [0.5, 0.52, 0.51], 100: [0.6, 0.7, 0.65], 1000: [0.70, 0.74, 0.73]}
    first, same, other = (
        d90(accuracies, full=[0.8, 0.78, 0.82], majority=0.5, resamples=200, seed=seed)[0] for seed in (0, 0, 1)
    )
    assert first == same != other
    assert first.value == other.value
    assert 10 < first.low < first.value < 1000 < first.high == math.inf
    assert str(first).endswith("to > 1000)")


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    # Accuracy 0.5 + 0.1 log10 d' with noise, full 0.8 and majority 0: the target 0.72 is reached at 10^2.2.
    grid, hits, trials = (10, 30, 100, 300, 1000), 0, 100
    rng = np.random.default_rng(0)
    for trial in range(trials):
        accuracies = {d: list(0.5 + 0.1 * math.log10(d) + 0.01 * rng.standard_normal(5)) for d in grid}
        full = list(0.8 + 0.01 * rng.standard_normal(5))
        found, _ = d90(accuracies, full=full, majority=0.0, resamples=80, seed=trial)
        hits += found.low <= 10**2.2 <= found.high
    assert hits / trials >= 0.88  # 0.95 less three standard errors


@settings(max_examples=50)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=6), st.floats(0.1, 1), st.floats(0, 1))
def test_it_never_leaves_the_grid_and_more_is_asked_of_the_gain(
    curve: list[float], full: float, majority: float
) -> None:
    accuracies = {10 * 3**i: [accuracy] for i, accuracy in enumerate(curve)}
    of_accuracy, of_gain = d90(accuracies, full=[full], majority=majority, **HOW)
    for found in (of_accuracy, of_gain):
        assert math.isnan(found.value) or found.value == math.inf or 10 <= found.value <= max(accuracies)
    assert math.isnan(of_gain.value) == (full <= majority)
    assert not of_gain.value < of_accuracy.value * (1 - 1e-9)


@pytest.mark.parametrize(
    ("accuracies", "full", "words"),
    [
        ({}, [0.8], "at least one run"),
        ({10: []}, [0.8], "at least one run"),
        ({10: [0.5]}, [], "at least one run"),
        ({0: [0.5]}, [0.8], "d' must be positive, not 0"),
        ({10: [math.nan]}, [0.8], "finite"),
    ],
)
def test_what_cannot_be_measured_is_refused(accuracies: Any, full: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        d90(accuracies, full=full, majority=0.5, **HOW)


def test_ends_are_said_in_words() -> None:
    assert str(D90(50.4, 10, math.inf, smallest=10, largest=100)) == "50 (<= 10 to > 100)"
