"""The peers of Table 1: each update against a step computed by hand, and each on a convex toy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from given_directions import Given
from scipy import stats

from pbrl.ridge.peers import SCOBO, GLDFast, GLDSearch, Saha2021, Saha2025, Wang2025, ZORankSGD
from pbrl.search import NCRS, RSGF, Directions, MeZO, Search

X = np.array([1.0, 2.0])


def make(optimizer: type, x: Any, directions: Directions, **settings: Any) -> Any:
    rng = np.random.default_rng(0)
    if optimizer in (NCRS, RSGF, MeZO):
        return Search(x, rule=optimizer(**settings), directions=directions, rng=rng)
    return optimizer(x, directions=directions, rng=rng, **settings)


def build(optimizer: type, directions: list[Any], **settings: Any) -> Any:
    return make(optimizer, X, Given(directions=directions), **settings)


def test_gld_search_keeps_the_winner_of_successive_duels() -> None:
    optimizer = build(GLDSearch, [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], step=4.0, ratio=4)
    # R = 4, r = 1: radii 4, 2, 1, all around the x of the iteration's start
    asked = []
    for score in (-1, 1, -1):
        first, second = optimizer.ask()
        asked.append((first.tolist(), second.tolist()))
        assert optimizer.iteration == 0
        optimizer.tell(score)
    assert asked == [([1.0, 2.0], [5.0, 2.0]), ([1.0, 2.0], [1.0, 4.0]), ([1.0, 4.0], [2.0, 3.0])]
    assert optimizer.x.tolist() == [1.0, 4.0]
    assert optimizer.iteration == 1


def test_gld_fast_searches_around_a_radius_that_halves() -> None:
    optimizer = build(GLDFast, [], step=1.0, condition=4)
    # Q = 4, d = 2: K = log2(8) = 3, H = 2 * 4 * 2 = 16 iterations
    assert optimizer.radii() == [8, 4, 2, 1, 1 / 2, 1 / 4, 1 / 8]
    middle = {}
    for iteration in (15, 16, 31, 32):
        optimizer.iteration = iteration
        middle[iteration] = optimizer.radii()[3]
    assert middle == {15: 1, 16: 1 / 2, 31: 1 / 2, 32: 1 / 4}


def test_saha_2021_repeats_a_duel_until_its_frequency_is_clear() -> None:
    optimizer = build(Saha2021, [[1.0, 0.0], [0.0, 1.0]], step=0.5, radius=0.1, failure=0.1)
    # Always the same answer: 1/2 > sqrt(log(80 n^2) / (2 n)) first holds at n = 21, log(35280) / 42 = 0.2493.
    for n in range(1, 22):
        np.testing.assert_allclose(optimizer.ask(), ([1.1, 2.0], [0.9, 2.0]))
        assert optimizer.iteration == 0
        optimizer.tell(1)  # the second is better: o = +1
        np.testing.assert_allclose(optimizer.x, [0.5, 2.0] if n == 21 else X)
    assert optimizer.iteration == 1
    np.testing.assert_allclose(optimizer.ask()[0], [0.5, 2.1])


def test_saha_2021_lets_every_run_decide_for_itself() -> None:
    directions, rng = Directions("sphere"), np.random.default_rng(0)
    optimizer = Saha2021(np.zeros((2, 3)), step=1.0, radius=0.1, failure=0.1, directions=directions, rng=rng)
    u = optimizer.u.copy()
    for n in range(21):
        optimizer.ask()
        optimizer.tell([-1, (-1) ** n])  # the second run sees a coin
    np.testing.assert_allclose(optimizer.x, [u[0], [0, 0, 0]])  # o = -1: towards u
    assert optimizer.iteration.tolist() == [1, 0]
    assert not np.array_equal(optimizer.u[0], u[0])
    assert np.array_equal(optimizer.u[1], u[1])


@pytest.mark.parametrize(("score", "moved"), [(1, [0.5, 2.0]), (-0.3, [1.5, 2.0]), (0, [1.0, 2.0])])
def test_saha_2025_steps_away_from_the_loser(score: float, moved: list[float]) -> None:
    optimizer = build(Saha2025, [[1.0, 0.0]], step=0.5, radius=0.1)
    np.testing.assert_allclose(optimizer.ask(), ([1.1, 2.0], [0.9, 2.0]))
    optimizer.tell(score)
    np.testing.assert_allclose(optimizer.x, moved)


@pytest.mark.parametrize(("score", "moved"), [(1, [0.5, 2.0]), (-0.3, [1.5, 2.0])])
def test_wang_2025_follows_the_sign_of_a_one_sided_difference(score: float, moved: list[float]) -> None:
    optimizer = build(Wang2025, [[1.0, 0.0]], step=0.5, radius=0.1)
    np.testing.assert_allclose(optimizer.ask(), ([1.1, 2.0], [1.0, 2.0]))
    optimizer.tell(score)
    np.testing.assert_allclose(optimizer.x, moved)


@pytest.mark.parametrize(("probes", "best"), [(2, 1), (4, 1), (4, 3), (5, 2)])
def test_zo_rank_sgd_sums_over_what_the_ranking_says(probes: int, best: int) -> None:
    rng = np.random.default_rng(0)
    xi = rng.standard_normal((probes, 2))
    values = rng.permutation(probes)  # f(x + mu xi_i), the smaller the better
    optimizer = build(ZORankSGD, list(xi), step=0.1, radius=0.5, probes=probes, best=best)
    comparisons = 0
    while optimizer.iteration == 0:
        drawn = [np.abs(xi - (point - X) / 0.5).sum(-1).argmin() for point in optimizer.ask()]
        optimizer.tell(np.sign(values[drawn[0]] - values[drawn[1]]))
        comparisons += 1
    order = np.argsort(values)
    edges = [(order[a], order[b]) for a, b in itertools.combinations(range(probes), 2) if a < best]
    gradient = sum(xi[worse] - xi[better] for better, worse in edges) / len(edges)
    np.testing.assert_allclose(optimizer.x, X - 0.1 * gradient)
    assert comparisons == len(edges) == best * probes - best * (best + 1) / 2


def test_scobo_steps_along_the_normalised_sum_of_bits() -> None:
    optimizer = build(SCOBO, [[[3.0, 0.0], [0.0, 4.0]]], step=10.0, radius=0.5, probes=2)
    first, second = optimizer.ask()
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [[2.5, 2.0], [1.0, 4.0]]
    optimizer.tell([0.2, -0.9])  # y = (-1, +1): g = (-3, 4) / 5
    np.testing.assert_allclose(optimizer.x, [1.0 + 6.0, 2.0 - 8.0])


def test_scobo_in_the_coordinates_one_sees_is_scobo_in_the_whole_space() -> None:
    k, d, n = 3, 40, 6_000
    rng = np.random.default_rng(0)
    settings: dict[str, Any] = {"step": 1.0, "radius": 0.1, "probes": 5, "rng": rng}
    whole = SCOBO(np.zeros((n, d)), directions=Directions("gaussian"), **settings)
    seen = SCOBO(np.zeros((n, k)), directions=Directions("gaussian", ambient=d), **settings)
    for optimizer in (whole, seen):
        _, second = optimizer.ask()
        optimizer.tell(-second[..., 0])  # f(x) = x_0
    for statistic in (lambda x: x[:, 0], lambda x: (x[:, :k] ** 2).sum(-1)):
        assert stats.ks_2samp(statistic(whole.x), statistic(seen.x)).pvalue > 1e-3
    np.testing.assert_allclose(np.linalg.norm(whole.x, axis=-1), 1)


TOYS: dict[type, dict[str, Any]] = {
    NCRS: {"step": 0.05},
    RSGF: {"step": 0.1, "radius": 1e-3},
    MeZO: {"step": 0.1, "radius": 1e-3},
    GLDSearch: {"step": 0.5, "ratio": 16},
    GLDFast: {"step": 0.2, "condition": 2},
    Saha2021: {"step": 0.05, "radius": 0.01, "failure": 0.1},
    Saha2025: {"step": 0.05, "radius": 0.01},
    Wang2025: {"step": 0.05, "radius": 1e-3},
    ZORankSGD: {"step": 0.03, "radius": 1e-3, "probes": 4, "best": 2},
    SCOBO: {"step": 0.05, "radius": 1e-3, "probes": 5},
}


@pytest.mark.parametrize("optimizer", TOYS)
def test_each_reaches_the_target_on_a_convex_toy(optimizer: type) -> None:
    kind = "gaussian" if optimizer in (RSGF, MeZO, ZORankSGD, SCOBO) else "sphere"
    search = make(optimizer, np.full((8, 5), 1 / np.sqrt(5)), Directions(kind), **TOYS[optimizer])
    reached = np.zeros(8, bool)
    for _ in range(6_000):
        first, second = search.ask()
        difference = ((first**2).sum(-1) - (second**2).sum(-1)) / 2
        search.tell(difference if optimizer in (RSGF, MeZO) else np.sign(difference))
        reached |= np.linalg.norm(search.x, axis=-1) <= 0.1
        if reached.all():
            break
    assert reached.all()


@pytest.mark.parametrize("optimizer", TOYS)
def test_float32_stays_float32(optimizer: type) -> None:
    directions = Directions("gaussian", ambient=30)
    search = make(optimizer, np.ones((2, 3), np.float32), directions, **TOYS[optimizer])
    for _ in range(40):
        first, second = search.ask()
        search.tell(np.sign((first**2).sum(-1) - (second**2).sum(-1)))
    assert first.dtype == second.dtype == search.x.dtype == np.float32
    assert np.all(search.iteration > 0)


@pytest.mark.parametrize(
    ("optimizer", "settings", "words"),
    [
        (GLDSearch, {"step": 1.0, "ratio": 0.5}, "at least 1, not 0.5"),
        (GLDFast, {"step": 1.0, "condition": 1}, "exceed 1, not 1"),
        (Saha2021, {"step": 1.0, "radius": 0.1, "failure": 1.5}, r"\(0, 1\), not 1.5"),
        (Saha2025, {"step": -1.0, "radius": 0.1}, "step must be positive, not -1.0"),
        (ZORankSGD, {"step": 1.0, "radius": 0.1, "probes": 3, "best": 3}, "not 3 of 3"),
        (SCOBO, {"step": 1.0, "radius": 0.1, "probes": 0}, "probes must be positive, not 0"),
    ],
)
def test_a_wrong_setting_is_named(optimizer: type, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build(optimizer, [[1.0, 0.0]], **settings)


def test_scobo_refuses_the_sphere() -> None:
    directions, rng = Directions("sphere"), np.random.default_rng(0)
    with pytest.raises(ValueError, match="gaussian, not 'sphere'"):
        SCOBO(X, step=1.0, radius=0.1, probes=2, directions=directions, rng=rng)


@pytest.mark.parametrize("optimizer", [optimizer for optimizer in TOYS if optimizer is not Saha2021])
def test_tell_needs_ask(optimizer: type) -> None:
    with pytest.raises(RuntimeError, match="without ask"):
        build(optimizer, [], **TOYS[optimizer]).tell(1.0)
