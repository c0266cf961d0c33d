"""The ridge problem, its oracles, and the reduction of a run to k dimensions."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from oracles.confidence import Confidence
from oracles.uniform_margin import UniformMargin
from pbrl.ridge.problem import Outcome, Ridge, Values, run
from pbrl.search import NCRS, Directions, Search


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


# The problem


@given(z=st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_the_value_is_the_sum_of_one_minus_cosine(z: list[float]) -> None:
    np.testing.assert_allclose(Ridge(len(z)).value(np.array(z)), sum(1 - math.cos(x) for x in z), atol=1e-12)


@given(z=st.lists(st.floats(-3, 3), min_size=2, max_size=4))
def test_the_gradient_norm_is_that_of_the_value(z: list[float]) -> None:
    problem, x = Ridge(len(z)), np.array(z)
    numeric = optimize.approx_fprime(x, lambda point: float(problem.value(point)), 1e-7)
    np.testing.assert_allclose(problem.gradient_norm(x), np.linalg.norm(numeric), atol=1e-5)


@pytest.mark.parametrize("k", [1, 5, 10, 20, 40, 80])
def test_every_run_starts_at_a_gradient_of_norm_one(k: int) -> None:
    assert Ridge(k).gradient_norm(Ridge(k).start()) == pytest.approx(1)


def test_float32_keeps_the_digits_of_small_values() -> None:
    x = rng().standard_normal((1000, 20)) * 0.02
    exact = Ridge(20).value(x)
    np.testing.assert_allclose(Ridge(20).value(x.astype(np.float32)), exact, rtol=1e-6)


@given(seed=st.integers(0, 2**32), scale=st.floats(0, 100))
def test_moves_in_the_kernel_change_nothing(seed: int, scale: float) -> None:
    k, d = 3, 12
    generator = rng(seed)
    matrix = np.linalg.qr(generator.standard_normal((d, k)))[0].T
    x, move = generator.standard_normal((2, d))
    kernel = move - matrix.T @ (matrix @ move)
    problem = Ridge(k, matrix)
    np.testing.assert_allclose(problem.value(x + scale * kernel), problem.value(x), atol=1e-12)
    np.testing.assert_allclose(problem.gradient_norm(x + scale * kernel), problem.gradient_norm(x), atol=1e-12)


def test_a_search_never_notices_the_kernel() -> None:
    """Two searches that differ by a vector of ker(A), under the same draws, decide alike for ever."""
    k, d = 4, 30
    matrix = np.linalg.qr(rng(1).standard_normal((d, k)))[0].T
    problem = Ridge(k, matrix)
    kernel = rng(2).standard_normal(d)
    kernel -= matrix.T @ (matrix @ kernel)
    here, there = (
        Search(problem.start() + shift, rule=NCRS(step=0.05), directions=Directions("gaussian"), rng=rng(3))
        for shift in (0, kernel)
    )
    for _ in range(200):
        for search in (here, there):
            first, second = search.ask()
            search.tell(np.sign(problem.value(first) - problem.value(second)))
    np.testing.assert_allclose(there.x - here.x, kernel, atol=1e-9)


# The oracles


@pytest.mark.parametrize("advantage", [0.05, 0.2, 0.5])
def test_a_uniform_margin_answer_is_right_with_probability_one_half_plus_p(advantage: float) -> None:
    oracle = UniformMargin(p=advantage, rng=rng())
    difference = rng(1).standard_normal(40_000) * 1e-6
    score = oracle.compare(difference)
    assert set(np.unique(score)) <= {-1, 1}
    right = int((score == np.sign(difference)).sum())
    assert stats.binomtest(right, len(score), 0.5 + advantage).pvalue > 1e-3


def test_uniform_margin_votes_add_up() -> None:
    score = UniformMargin(p=0.2, rng=rng()).compare(np.full(20_000, -0.3), votes=9)
    assert score.mean() == pytest.approx(-9 * 0.4, abs=4 * 9 / math.sqrt(20_000))
    assert set(np.unique(score)) <= set(range(-9, 10, 2))


def test_a_confidence_is_the_logistic_score_times_the_votes() -> None:
    oracle = Confidence(link="logistic", scale=0.5, rng=rng())
    score = oracle.compare(np.array([0.3, -0.3, 0.0]), votes=7)
    np.testing.assert_allclose(score, [7 * math.tanh(0.3), -7 * math.tanh(0.3), 0])
    assert Values(rng=rng()).compare(np.array([0.25]), votes=7).tolist() == [0.25]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: UniformMargin(p=0.0, rng=rng()), r"\(0, 1/2\], not 0.0"),
        (lambda: UniformMargin(p=0.6, rng=rng()), r"\(0, 1/2\], not 0.6"),
        (lambda: Confidence(link="probit", scale=-1.0, rng=rng()), "positive, not -1.0"),
        (lambda: Confidence(link="tanh", scale=1.0, rng=rng()), "one of logistic, probit, arctan, not 'tanh'"),
    ],
)
def test_a_wrong_oracle_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


# What the reduction to k dimensions rests on


def explicit(k: int, d: int, step: float, kind: str, seeds: int, seed: int) -> Outcome:
    """A run in R^d with a random A, nothing reduced."""
    matrix = np.linalg.qr(rng(seed).standard_normal((d, k)))[0].T.astype(np.float32)
    problem = Ridge(k, matrix)
    x = np.broadcast_to(problem.start().astype(np.float32), (seeds, d))
    search = Search(x, rule=NCRS(step=step), directions=Directions(kind), rng=rng(seed + 1))
    oracle = UniformMargin(p=0.5, rng=rng(seed + 2))
    return run(search, problem, oracle, votes=1, target=0.1, budget=5_000)


def reduced(k: int, d: int, step: float, kind: str, seeds: int) -> Outcome:
    start = np.broadcast_to(Ridge(k).start(), (seeds, k))
    search = Search(start, rule=NCRS(step=step), directions=Directions(kind, ambient=d), rng=rng(77))
    oracle = UniformMargin(p=0.5, rng=rng(78))
    return run(search, Ridge(k), oracle, votes=1, target=0.1, budget=5_000)


def assert_same_distribution(first: Outcome, second: Outcome) -> None:
    assert stats.ttest_ind(first.pairs, second.pairs, equal_var=False).pvalue > 1e-3
    assert stats.ks_2samp(first.pairs, second.pairs).pvalue > 1e-3


@pytest.mark.parametrize(("kind", "step"), [("sphere", 0.8 / 5), ("gaussian", 0.04 / 5)])
def test_the_explicit_search_in_500_dimensions_costs_what_the_reduced_one_does(kind: str, step: float) -> None:
    assert_same_distribution(explicit(5, 500, step, kind, 40, 0), reduced(5, 500, step, kind, 400))


def test_gaussian_directions_cost_the_same_in_500_and_in_50_000_dimensions() -> None:
    small = explicit(5, 500, 0.2 / 5, "gaussian", 40, 10)
    large = explicit(5, 50_000, 0.2 / 5, "gaussian", 10, 20)
    assert_same_distribution(small, large)
    assert_same_distribution(large, reduced(5, 50_000, 0.2 / 5, "gaussian", 400))


def test_sphere_directions_shrink_the_step_by_the_root_of_d() -> None:
    pairs = {d: reduced(5, d, 0.8 / 5, "sphere", 400).pairs for d in (500, 2_000)}
    assert pairs[2_000].mean() / pairs[500].mean() == pytest.approx(2, rel=0.05)
    restored = reduced(5, 2_000, 2 * 0.8 / 5, "sphere", 400).pairs
    assert restored.mean() == pytest.approx(pairs[500].mean(), rel=0.03)


def test_a_million_dimensions_fit_in_bounded_memory() -> None:
    tracemalloc.start()
    done = reduced(5, 1_000_000, 0.8 / 5 * math.sqrt(1_000_000 / 500), "sphere", 200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.isfinite(done.pairs).all()
    assert peak < 4e6  # bytes; one vector of R^d alone would take 8e6
