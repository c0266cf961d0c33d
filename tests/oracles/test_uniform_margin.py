"""The uniform-margin oracle: right with probability 1/2 + p, whatever the gap."""

import numpy as np
import pytest
from scipy.stats import binom

from oracles.uniform_margin import UniformMargin

DRAWS = 100_000


@pytest.mark.parametrize("p", [0.01, 0.2, 0.49])
@pytest.mark.parametrize("difference", [-1e9, -1e-300, 1e-300, 3.0])
def test_agrees_with_the_sign_at_its_rate(p, difference):
    answers = UniformMargin(p=p, rng=np.random.default_rng(0)).compare(np.full(DRAWS, difference))
    low, high = binom.interval(1 - 1e-6, DRAWS, 0.5 + p)
    assert low <= (answers == np.sign(difference)).sum() <= high
    assert set(answers.tolist()) == {-1, 1}


def test_is_never_wrong_at_one_half_and_tosses_coins_between_equals():
    oracle = UniformMargin(p=0.5, rng=np.random.default_rng(0))
    difference = np.random.default_rng(1).normal(size=(1000, 3))
    np.testing.assert_array_equal(oracle.compare(difference), np.sign(difference))
    low, high = binom.interval(1 - 1e-6, DRAWS, 0.5)
    assert low <= (oracle.compare(np.zeros(DRAWS)) == 1).sum() <= high


def test_swapping_mirrors_the_answer():
    difference = np.random.default_rng(1).normal(size=1000)
    here = UniformMargin(p=0.2, rng=np.random.default_rng(3)).compare(difference)
    there = UniformMargin(p=0.2, rng=np.random.default_rng(3)).compare(-difference)
    np.testing.assert_array_equal(there, -here)


@pytest.mark.parametrize("p", [0.0, -0.1, 0.6, float("nan")])
def test_margins_outside_the_definition_are_refused(p):
    with pytest.raises(ValueError, match=rf"\(0, 1/2\], not {p}"):
        UniformMargin(p=p, rng=np.random.default_rng(0))


def test_nan_is_refused():
    with pytest.raises(ValueError, match="NaN"):
        UniformMargin(p=0.2, rng=np.random.default_rng(0)).compare(np.array([1.0, np.nan]))
