"""PES and adaptive NCRS on functions: steps by hand, and the coordinates that are not simulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from given_directions import Given
from scipy import stats

from oracles.uniform_margin import UniformMargin
from pbrl.ridge.beyond import PES, AdaptiveNCRS
from pbrl.ridge.problem import Ridge, run
from pbrl.search import NCRS, Directions, Search

X = np.array([1.0, 2.0])


def pes(x: Any, directions: Directions, **changes: Any) -> PES:
    settings = {"step": 0.1, "radius": 0.5, "probes": 2, "momentum": 0.0, **changes}
    return PES(x, directions=directions, rng=np.random.default_rng(0), **settings)


def adaptive(x: Any, directions: Directions, **changes: Any) -> AdaptiveNCRS:
    settings = {"step": 0.1, "votes": 5, "lead": 2, "target": 0.2, "rate": 0.5, **changes}
    return AdaptiveNCRS(x, directions=directions, rng=np.random.default_rng(0), **settings)


# PES


def test_pes_takes_the_step_computed_by_hand() -> None:
    directions = Given(directions=[[[3.0, 0.0], [0.0, 4.0]], [[0.0, 2.0], [0.0, 2.0]]])
    optimizer = pes(X, directions, momentum=0.5)
    first, second = optimizer.ask()
    assert first.tolist() == [[-0.5, 2.0], [1.0, 0.0]]
    assert second.tolist() == [[2.5, 2.0], [1.0, 4.0]]
    optimizer.tell([1.0, -0.5])  # g = (3, -2) / 2, m = (0.75, -0.5), rms(m) = sqrt(0.8125 / 2)
    rms = np.sqrt(0.8125 / 2)
    np.testing.assert_allclose(optimizer.x, X + 0.1 * np.array([0.75, -0.5]) / rms)
    before = optimizer.x
    optimizer.ask()
    optimizer.tell([1.0, 0.0])  # g = (0, 1), m = (0.375, -0.25 + 0.5)
    m = np.array([0.375, 0.25])
    np.testing.assert_allclose(optimizer.x, before + 0.1 * m / np.sqrt((m**2).mean()))
    assert optimizer.iteration == 2


def test_pes_stays_where_nobody_takes_a_side() -> None:
    optimizer = pes(X, Directions("gaussian"))
    optimizer.ask()
    optimizer.tell([0.0, 0.0])
    np.testing.assert_array_equal(optimizer.x, X)


@pytest.mark.parametrize("momentum", [0.0, 0.7])
def test_pes_in_the_coordinates_one_sees_is_pes_in_the_whole_space(momentum: float) -> None:
    k, d, n = 3, 40, 6_000
    whole = pes(np.zeros((n, d)), Directions("gaussian"), momentum=momentum, probes=4)
    seen = pes(np.zeros((n, k)), Directions("gaussian", ambient=d), momentum=momentum, probes=4)
    for optimizer in (whole, seen):
        for _ in range(3):
            first, second = optimizer.ask()
            optimizer.tell(np.tanh(first[..., 0] - second[..., 0]))  # f(x) = x_0
    for statistic in (lambda x: x[:, 0], lambda x: (x[:, :k] ** 2).sum(-1)):
        assert stats.ks_2samp(statistic(whole.x), statistic(seen.x)).pvalue > 1e-3


def test_what_pes_does_where_it_matters_does_not_depend_on_how_many_dimensions_do_not() -> None:
    final = []
    for d in (200, 100_000):
        optimizer = pes(np.ones((400, 5)), Directions("gaussian", ambient=d), step=0.02, probes=8, momentum=0.5)
        for _ in range(60):
            first, second = optimizer.ask()
            optimizer.tell(np.sign((first**2).sum(-1) - (second**2).sum(-1)))
        final.append(np.linalg.norm(optimizer.x, axis=-1))
    few, many = (values.mean() for values in final)
    assert few < 0.7 * np.sqrt(5)
    assert few == pytest.approx(many, rel=0.1)


@pytest.mark.parametrize("dimension", [500, 1_000_000])
def test_pes_needs_comparisons_in_proportion_to_k_whatever_d(dimension: int) -> None:
    rng, comparisons = np.random.default_rng(0), []
    for k in (5, 20, 80):
        start = np.broadcast_to(Ridge(k).start(), (40, k))
        optimizer = pes(start, Directions("gaussian", ambient=dimension), step=0.2 / k, radius=0.5, probes=8)
        oracle = UniformMargin(p=0.4, rng=rng)
        outcome = run(optimizer, Ridge(k), oracle, votes=1, target=0.1, budget=5_000)
        comparisons.append(outcome.pairs.mean())  # NaN if one has not arrived
    assert comparisons[0] == pytest.approx(128, rel=0.15)  # 126 and 129 in docs/search.md
    slope = np.polyfit(np.log([5, 20, 80]), np.log(comparisons), 1)[0]
    assert slope == pytest.approx(1, abs=0.07)


# Adaptive NCRS


def test_adaptive_ncrs_with_one_vote_and_a_fixed_step_is_ncrs() -> None:
    directions, x = Directions("sphere", ambient=30), np.ones((6, 4), np.float32)
    search = Search(x, rule=NCRS(step=0.1), directions=directions, rng=np.random.default_rng(0))
    optimizer = adaptive(x, directions, votes=1, rate=0.0)
    answers = np.random.default_rng(1)
    for _ in range(20):
        (one, other), (same_one, same_other) = search.ask(), optimizer.ask()
        np.testing.assert_array_equal(one, same_one)
        np.testing.assert_array_equal(other, same_other)
        score = answers.choice([-1.0, 1.0], 6)
        search.tell(score)
        optimizer.tell(score)
        np.testing.assert_array_equal(search.x, optimizer.x)
    assert optimizer.iteration.tolist() == [20] * 6


def test_adaptive_ncrs_votes_until_one_side_leads_by_enough() -> None:
    directions = Given(directions=[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
    optimizer = adaptive(X, directions)
    for score in (1, -1, 1, 1):
        np.testing.assert_allclose(optimizer.ask(), ([1.0, 2.0], [1.1, 2.0]))
        optimizer.tell(score)
    grown = np.exp(0.5 * 0.8)
    np.testing.assert_allclose(optimizer.x, [1.1, 2.0])
    np.testing.assert_allclose(optimizer.scale, grown)
    for score in (1, -1, -1, 1, -1):  # five votes at most: -1 rejects
        np.testing.assert_allclose(optimizer.ask(), ([1.1, 2.0], [1.1, 2.0 + 0.1 * grown]))
        optimizer.tell(score)
    np.testing.assert_allclose(optimizer.x, [1.1, 2.0])
    np.testing.assert_allclose(optimizer.scale, grown * np.exp(0.5 * -0.2))
    assert optimizer.iteration == 2


def test_adaptive_ncrs_lets_every_run_decide_for_itself() -> None:
    optimizer = adaptive(np.zeros((2, 3)), Directions("gaussian"))
    s = optimizer.s.copy()
    for scores in ([1, 1], [1, -1]):
        optimizer.ask()
        optimizer.tell(scores)
    np.testing.assert_allclose(optimizer.x, [0.1 * s[0], [0, 0, 0]])
    assert optimizer.iteration.tolist() == [1, 0]
    assert (optimizer.s[0] != s[0]).all()
    np.testing.assert_array_equal(optimizer.s[1], s[1])


# Both


@pytest.mark.parametrize("make", [pes, adaptive])
def test_each_reaches_the_target_on_a_convex_toy_in_float32(make: Any) -> None:
    start = np.full((8, 5), 1 / np.sqrt(5), np.float32)
    optimizer = make(start, Directions("gaussian"), step=0.02)
    reached = np.zeros(8, bool)
    for _ in range(3_000):
        first, second = optimizer.ask()
        optimizer.tell(np.sign((first**2).sum(-1) - (second**2).sum(-1)))
        reached |= np.linalg.norm(optimizer.x, axis=-1) <= 0.1
        if reached.all():
            break
    assert reached.all()
    assert optimizer.x.dtype == first.dtype == second.dtype == np.float32


@pytest.mark.parametrize(
    ("make", "changes", "words"),
    [
        (pes, {"step": 0.0}, "step must be positive, not 0.0"),
        (pes, {"probes": 0}, "probes must be positive, not 0"),
        (pes, {"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        (adaptive, {"lead": 0}, "lead must be positive, not 0"),
        (adaptive, {"target": 2.0}, "target be a share, not 0.5 and 2.0"),
        (adaptive, {"rate": -1.0}, "rate must not be negative, and target be a share, not -1.0 and 0.2"),
    ],
)
def test_a_wrong_setting_is_named(make: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(X, Directions("gaussian"), **changes)


def test_pes_refuses_the_sphere() -> None:
    with pytest.raises(ValueError, match="gaussian, not 'sphere'"):
        pes(X, Directions("sphere"))


def test_tell_needs_ask() -> None:
    with pytest.raises(RuntimeError, match="without ask"):
        pes(X, Directions("gaussian")).tell([1.0, 1.0])
