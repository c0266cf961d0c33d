"""The survival regression: equal to ordinary least squares without censoring, right with it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from pbrl.finetune import trend
from pbrl.types import Float64


def draw(
    rng: np.random.Generator, *, settings: int, runs: int, exponent: float, between: float, within: float
) -> tuple[Float64, Float64, Float64]:
    """k, iterations and the setting's number of each run."""
    setting = np.repeat(np.arange(settings), runs)
    k = np.exp(np.linspace(3, 7.5, settings))[setting]
    noise = between * rng.standard_normal(settings)[setting] + within * rng.standard_normal(len(setting))
    return k, 20 * k**exponent * np.exp(noise), setting.astype(float)


@pytest.mark.parametrize(("between", "within"), [(0.3, 0.2), (1.0, 0.05)])
def test_without_censoring_it_is_the_regression_of_the_settings_means(between: float, within: float) -> None:
    rng = np.random.default_rng(0)
    k, taken, setting = draw(rng, settings=12, runs=4, exponent=0.5, between=between, within=within)
    found = trend.fit(k, taken, np.ones(48), setting)
    means = stats.linregress(np.log(k[::4]), np.log(taken).reshape(12, 4).mean(1))
    half = stats.t.ppf(0.975, 10) * means.stderr
    assert found.exponent == pytest.approx(means.slope, abs=1e-3)
    assert (found.low, found.high) == pytest.approx((means.slope - half, means.slope + half), abs=5e-3)
    assert found.intercept == pytest.approx(means.intercept, abs=1e-2)
    assert (found.settings, found.runs, found.censored) == (12, 48, 0)
    shuffled = np.random.default_rng(1).permutation(48)  # the order of the runs is of no account
    assert trend.fit(k[shuffled], taken[shuffled], np.ones(48), setting[shuffled]).exponent == pytest.approx(
        found.exponent, abs=1e-3
    )


def test_a_censored_run_counts_as_scipy_counts_it() -> None:
    """With k paired so that it explains nothing and settings that do not differ, what remains is scipy's own fit."""
    rng = np.random.default_rng(2)
    times = 5 + 0.4 * rng.standard_normal(100)
    seen = times < 5.1
    x = np.concatenate([times, times, times])
    arrived = np.concatenate([seen, seen, seen])
    k = np.repeat([10.0, 100.0, 1000.0], 100)
    found = trend.fit(k, np.exp(np.where(arrived, x, 5.1)), arrived, np.arange(300.0))
    data = stats.CensoredData(uncensored=times[seen], right=np.full((~seen).sum(), 5.1))
    mean, deviation = stats.norm.fit(data)
    assert found.exponent == pytest.approx(0, abs=1e-3)
    assert found.intercept == pytest.approx(mean, abs=5e-3)
    assert math.hypot(found.between, found.within) == pytest.approx(deviation, abs=5e-3)


def test_censoring_does_not_flatten_the_trend() -> None:
    k, taken, setting = draw(np.random.default_rng(3), settings=24, runs=5, exponent=1.0, between=0.2, within=0.3)
    budget = float(np.quantile(taken, 0.7))  # most runs with large k never arrive
    assert (taken < budget).reshape(24, 5).sum(1).min() == 0  # in some settings none
    found = trend.fit(k, np.minimum(taken, budget), taken < budget, setting)
    assert found.censored == 36
    assert found.low < 1 < found.high
    flat = trend.fit(k, np.minimum(taken, budget), np.ones(120), setting)  # censored runs as if they had arrived
    assert flat.high < found.exponent


@pytest.mark.slow
def test_the_interval_covers_what_it_claims() -> None:
    rng, covered = np.random.default_rng(4), 0
    for _ in range(300):
        k, taken, setting = draw(rng, settings=12, runs=3, exponent=0.5, between=0.3, within=0.3)
        budget = float(np.quantile(taken, 0.8))
        found = trend.fit(k, np.minimum(taken, budget), taken < budget, setting)
        covered += found.low < 0.5 < found.high
    assert 0.91 < covered / 300 < 0.985


def test_too_little_to_fit_is_said() -> None:
    with pytest.raises(ValueError, match="at least three different k"):
        trend.fit(np.array([2.0, 2, 4]), np.ones(3), np.ones(3), np.arange(3.0))
