"""NCRS, RSGF and MeZO against steps computed by hand, and what `Search` guarantees with every rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from given_directions import Given
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pbrl.search import NCRS, RSGF, Cosine, Directions, MeZO, Rule, Search

RULES: list[Rule] = [NCRS(step=0.3), RSGF(step=0.1, radius=0.01), MeZO(step=0.1, radius=0.01)]
with_every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def build(rule: Rule, x: Any, seed: int, kind: str = "gaussian") -> Search:
    return Search(x, rule=rule, directions=Directions(kind), rng=np.random.default_rng(seed))


def build_given(rule: Rule, direction: list[float]) -> Search:
    x, rng = np.array([1.0, 2.0]), np.random.default_rng(0)
    return Search(x, rule=rule, directions=Given(directions=[direction]), rng=rng)


def test_ncrs_moves_to_the_candidate_when_it_is_preferred() -> None:
    optimizer = build_given(NCRS(step=0.5), [2.0, -1.0])
    first, second = optimizer.ask()
    assert first.tolist() == [1.0, 2.0]
    assert second.tolist() == [2.0, 1.5]
    optimizer.tell(1)
    assert optimizer.x.tolist() == [2.0, 1.5]
    assert optimizer.iteration == 1


@pytest.mark.parametrize(
    ("scores", "accepted"),
    [
        ([-1.0], False),
        ([0.9, -0.5, -0.3], True),
        ([0.5, -0.25, -0.25], False),
        ([0.0, 0.0], False),
        ([], False),
    ],
)
def test_ncrs_accepts_exactly_when_the_votes_sum_above_zero(scores: list[float], accepted: bool) -> None:
    optimizer = build_given(NCRS(step=0.5), [2.0, -1.0])
    optimizer.ask()
    optimizer.tell(scores)
    assert optimizer.x.tolist() == ([2.0, 1.5] if accepted else [1.0, 2.0])
    assert optimizer.iteration == 1


def test_rsgf_takes_the_step_computed_by_hand() -> None:
    # f(x) = x_0^2 + x_1 at (1, 2), u = (1, -1), mu = 0.5: f(theta) = 3, f(theta + mu u) = f(1.5, 1.5) = 3.75
    # g = (3.75 - 3) / 0.5 * u = (1.5, -1.5); theta - 0.1 g = (0.85, 2.15)
    optimizer = build_given(RSGF(step=0.1, radius=0.5), [1.0, -1.0])
    first, second = optimizer.ask()
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [1.5, 1.5])
    optimizer.tell(3.0 - 3.75)
    np.testing.assert_allclose(optimizer.x, [0.85, 2.15])


def test_mezo_takes_the_step_computed_by_hand() -> None:
    # f(x) = x_0^2 + x_1, u = (1, -1), mu = 0.5: f(1.5, 1.5) = 3.75, f(0.5, 2.5) = 2.75
    # g = (3.75 - 2.75) / 1 * u = (1, -1); theta - 0.1 g = (0.9, 2.1)
    optimizer = build_given(MeZO(step=0.1, radius=0.5), [1.0, -1.0])
    first, second = optimizer.ask()
    assert (first.tolist(), second.tolist()) == ([1.5, 1.5], [0.5, 2.5])
    optimizer.tell(3.75 - 2.75)
    np.testing.assert_allclose(optimizer.x, [0.9, 2.1])


@pytest.mark.parametrize("rule", [RSGF(step=0.1, radius=0.5), MeZO(step=0.1, radius=0.5)])
def test_several_differences_count_as_their_mean(rule: Rule) -> None:
    one, several = (build_given(rule, [1.0, -1.0]) for _ in range(2))
    one.ask()
    one.tell(0.5)
    several.ask()
    several.tell([0.25, 1.0, 0.25])
    np.testing.assert_allclose(one.x, several.x)


def test_the_cosine_step_is_the_papers() -> None:
    step = Cosine(maximum=4e-2, minimum=4e-3, decay=480)
    np.testing.assert_allclose([step(0), step(240), step(480), step(10_000)], [4e-2, 2.2e-2, 4e-3, 4e-3])
    assert all(step(t) > step(t + 1) for t in range(480))


def test_a_schedule_decides_each_step() -> None:
    steps = {0: 1.0, 1: 10.0, 2: 100.0}
    directions, rng = Given(directions=[[1.0, 0.0]] * 3), np.random.default_rng(0)
    optimizer = Search(np.zeros(2), rule=NCRS(step=steps.__getitem__), directions=directions, rng=rng)
    for _ in steps:
        optimizer.ask()
        optimizer.tell(1)
    assert optimizer.x.tolist() == [111.0, 0.0]


@with_every_rule
@pytest.mark.parametrize("kind", ["gaussian", "sphere"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_dtype_stays_what_it_was(rule: Rule, kind: str, dtype: type) -> None:
    search = build(rule, np.zeros((4, 3), dtype), 0, kind)
    first, second = search.ask()
    search.tell(np.ones(4))
    assert first.dtype == second.dtype == search.x.dtype == dtype


@with_every_rule
def test_the_same_seed_gives_the_same_bits(rule: Rule) -> None:
    same, twin = (build(rule, np.ones((3, 7), np.float32), 5) for _ in range(2))
    for search in (same, twin):
        for _ in range(10):
            first, second = search.ask()
            search.tell((first**2).sum(-1) - (second**2).sum(-1))
    assert np.array_equal(same.x, twin.x)
    assert not np.array_equal(same.x, np.ones((3, 7)))


def test_one_rule_serves_several_searches() -> None:
    rule = NCRS(step=lambda t: 1.0 + t)
    ahead, behind = build_given(rule, [1.0, 0.0]), build_given(rule, [1.0, 0.0])
    ahead.iteration = 4
    for search in (ahead, behind):
        search.ask()
        search.tell(1)
    assert (ahead.x.tolist(), behind.x.tolist()) == ([6.0, 2.0], [2.0, 2.0])


@with_every_rule
def test_a_batch_of_one_is_a_run_alone(rule: Rule) -> None:
    alone, batch = build(rule, np.ones(5), 3), build(rule, np.ones((1, 5)), 3)
    for score in (1.0, -1.0, 0.5, 2.0):
        alone.ask()
        alone.tell(score)
        batch.ask()
        batch.tell([score])
    assert np.array_equal(alone.x, batch.x[0])


@with_every_rule
@given(changed=st.integers(0, 3), score=st.floats(-1, 1), seed=st.integers(0, 2**32))
def test_the_runs_of_a_batch_do_not_touch_each_other(rule: Rule, changed: int, score: float, seed: int) -> None:
    base, other = (build(rule, np.ones((4, 3)), seed) for _ in range(2))
    scores = np.full(4, 0.5)
    scores_changed = np.where(np.arange(4) == changed, score, scores)
    for _ in range(3):
        base.ask()
        base.tell(scores)
        other.ask()
        other.tell(scores_changed)
    unchanged = np.arange(4) != changed
    assert np.array_equal(base.x[unchanged], other.x[unchanged])


@pytest.mark.parametrize("kind", ["gaussian", "sphere"])
def test_ask_never_changes_what_it_gave_out(kind: str) -> None:
    search = build(RULES[0], np.ones(4), 0, kind)
    given_out = search.ask()
    copies = [point.copy() for point in given_out]
    for _ in range(5):
        search.tell(1)
        search.ask()
    assert np.array_equal(given_out, copies)


def test_a_direction_on_the_sphere_has_length_one() -> None:
    s = Directions("sphere").draw(np.random.default_rng(0), (100, 6), np.float64)
    np.testing.assert_allclose(np.linalg.norm(s, axis=-1), 1)


@pytest.mark.parametrize(("k", "d"), [(1, 2), (3, 10), (5, 500), (20, 1_000_000)])
def test_the_projected_sphere_has_its_exact_distribution(k: int, d: int) -> None:
    s = Directions("sphere", ambient=d).draw(np.random.default_rng(1), (20_000, k), np.float64)
    # |A s|^2 ~ Beta(k / 2, (d - k) / 2); one coordinate: s_1^2 ~ Beta(1 / 2, (d - 1) / 2), either sign alike
    assert stats.kstest((s**2).sum(-1), stats.beta(k / 2, (d - k) / 2).cdf).pvalue > 1e-3
    assert stats.kstest(s[:, 0] ** 2, stats.beta(1 / 2, (d - 1) / 2).cdf).pvalue > 1e-3
    assert stats.binomtest(int((s[:, 0] > 0).sum()), len(s)).pvalue > 1e-3


def test_the_projected_sphere_is_the_explicit_one_projected() -> None:
    k, d, n = 4, 60, 8_000
    rng = np.random.default_rng(2)
    matrix = np.linalg.qr(rng.standard_normal((d, k)))[0].T  # [k, d], orthonormal rows
    explicit = Directions("sphere").draw(rng, (n, d), np.float64) @ matrix.T
    reduced = Directions("sphere", ambient=d).draw(rng, (n, k), np.float64)
    statistics = (
        lambda s: s[:, 0],
        lambda s: (s**2).sum(-1),
        lambda s: s.max(-1),
        lambda s: s[:, 0] * s[:, 1],
    )
    for statistic in statistics:
        assert stats.ks_2samp(statistic(explicit), statistic(reduced)).pvalue > 1e-3
    np.testing.assert_allclose(np.cov(explicit.T), np.eye(k) / d, atol=5 / d / np.sqrt(n))
    np.testing.assert_allclose(np.cov(reduced.T), np.eye(k) / d, atol=5 / d / np.sqrt(n))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Directions("cube"), "'gaussian' or 'sphere', not 'cube'"),
        (lambda: Directions("sphere", 3).draw(np.random.default_rng(0), (5,), float), "k = 5 .* d = 3"),
        (lambda: build_given(NCRS(step=-0.1), [1, 1]), "step must be positive, not -0.1"),
        (lambda: build_given(NCRS(step=float("nan")), [1, 1]), "step must be positive, not nan"),
        (lambda: build_given(MeZO(step=0.1, radius=0), [1, 1]), "radius must be positive, not 0"),
        (lambda: build(RULES[0], np.zeros(3, int), 0), "float32 or float64"),
        (lambda: build(RULES[0], np.array([np.nan]), 0), "finite"),
        (lambda: Cosine(maximum=1e-3, minimum=1e-2, decay=480), "minimum <= maximum"),
        (lambda: Cosine(maximum=1e-2, minimum=1e-3, decay=0), "at least one iteration, not 0"),
    ],
)
def test_a_wrong_setting_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


@with_every_rule
def test_a_wrong_answer_is_named(rule: Rule) -> None:
    search = build(rule, np.zeros((4, 3)), 0)
    with pytest.raises(RuntimeError, match="without ask"):
        search.tell(np.ones(4))
    search.ask()
    with pytest.raises(ValueError, match="NaN"):
        search.tell([1, 1, np.nan, 1])
    search.ask()
    with pytest.raises(ValueError, match=r"\(3,\) do not fit runs of shape \(4,\)"):
        search.tell(np.ones(3))
