"""The ridge experiment: its problem, the paper's table, lemmas and theorems, and the command."""

from __future__ import annotations

import csv
import functools
import math
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from pbrl.bounds import confidence_bound, moments, uniform_margin_bound
from pbrl.ridge import Cell, Experiment, Track
from pbrl.ridge_problem import Confidence, Ridge, Run, UniformMargin, Values, run
from pbrl.ridge_report import COLUMNS, exponent, interval, verdict, write_csv
from pbrl.search import NCRS, RSGF, Directions

ROOT = Path(__file__).resolve().parent.parent
PAPER = {  # k: (uniform margin comparisons, confidence iterations, confidence comparisons)
    5: (898, 340, 170_000),
    10: (1_780, 695, 695_000),
    20: (3_620, 1_346, 2_691_000),
    40: (7_414, 2_687, 10_748_000),
    80: (14_940, 5_414, 43_312_000),
}
ALL_K = [5, 10, 20, *(pytest.param(k, marks=pytest.mark.slow) for k in (40, 80))]
SPHERE = Directions("sphere", ambient=500)
GAUSSIAN = Directions("gaussian", ambient=500)


@functools.cache
def configured(*overrides: str) -> Experiment:
    with hydra.initialize_config_module("conf", version_base=None):
        config = hydra.compose("ridge", overrides=list(overrides))
    experiment: Experiment = hydra.utils.instantiate(config.experiment, _convert_="all")
    return experiment


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def ncrs(k: int, step: float, directions: Directions, batch: tuple[int, ...], seed: int = 0) -> NCRS:
    x = np.broadcast_to(Ridge(k).start(), (*batch, k))
    return NCRS(x, step=step, directions=directions, rng=rng(seed))


@dataclass
class Abstaining:
    """A random confidence: a sign with probability C rho, right with probability (1 + 1 / C) / 2; else 0.

    Its aligned mean is rho and its second moment C rho: Assumption 1.2 with equality.
    """

    votes: int
    noise: float  # C
    rng: np.random.Generator

    def rho(self, gap: Any) -> Any:
        return np.minimum(np.tanh(np.abs(gap) / 2), 1 / self.noise)

    def __call__(self, difference: Any) -> Any:
        answered = self.rng.binomial(self.votes, np.minimum(self.noise * self.rho(difference), 1))
        right = self.rng.binomial(answered, (1 + 1 / self.noise) / 2)
        return np.sign(difference) * (2 * right - answered)


# The problem


@given(z=st.lists(st.floats(-10, 10), min_size=1, max_size=6))
def test_the_value_is_the_sum_of_one_minus_cosine(z: list[float]) -> None:
    np.testing.assert_allclose(Ridge(len(z)).value(np.array(z)), sum(1 - math.cos(x) for x in z), atol=1e-12)


@given(z=st.lists(st.floats(-3, 3), min_size=2, max_size=4))
def test_the_gradient_norm_is_that_of_the_value(z: list[float]) -> None:
    problem, x = Ridge(len(z)), np.array(z)
    numeric = optimize.approx_fprime(x, lambda point: float(problem.value(point)), 1e-7)
    np.testing.assert_allclose(problem.gradient_norm(x), np.linalg.norm(numeric), atol=1e-5)


@pytest.mark.parametrize("k", PAPER)
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
        NCRS(problem.start() + shift, step=0.05, directions=Directions("gaussian"), rng=rng(3)) for shift in (0, kernel)
    )
    for _ in range(200):
        for search in (here, there):
            first, second = search.ask()
            search.tell(np.sign(problem.value(first) - problem.value(second)))
    np.testing.assert_allclose(there.x - here.x, kernel, atol=1e-9)


# The oracles


@pytest.mark.parametrize("advantage", [0.05, 0.2, 0.5])
def test_a_uniform_margin_answer_is_right_with_probability_one_half_plus_p(advantage: float) -> None:
    oracle = UniformMargin(advantage=advantage, votes=1, rng=rng())
    difference = rng(1).standard_normal(40_000) * 1e-6
    score = oracle(difference)
    assert set(np.unique(score)) <= {-1, 1}
    right = int((score == np.sign(difference)).sum())
    assert stats.binomtest(right, len(score), 0.5 + advantage).pvalue > 1e-3


def test_uniform_margin_votes_add_up() -> None:
    score = UniformMargin(advantage=0.2, votes=9, rng=rng())(np.full(20_000, -0.3))
    assert score.mean() == pytest.approx(-9 * 0.4, abs=4 * 9 / math.sqrt(20_000))
    assert set(np.unique(score)) <= set(range(-9, 10, 2))


def test_a_confidence_is_the_logistic_score_times_the_votes() -> None:
    oracle = Confidence(link="logistic", scale=0.5, votes=7, rng=rng())
    np.testing.assert_allclose(oracle(np.array([0.3, -0.3, 0.0])), [7 * math.tanh(0.3), -7 * math.tanh(0.3), 0])
    assert Values(votes=1, rng=rng())(np.array([0.25])).tolist() == [0.25]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: UniformMargin(advantage=0.0, votes=1, rng=rng()), r"\(0, 1/2\], not 0.0"),
        (lambda: UniformMargin(advantage=0.6, votes=1, rng=rng()), r"\(0, 1/2\], not 0.6"),
        (lambda: Confidence(link="probit", scale=-1.0, votes=1, rng=rng()), "positive, not -1.0"),
    ],
)
def test_a_wrong_oracle_is_named(wrong: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrong()


# The lemmas and theorems


@pytest.mark.parametrize("directions", [SPHERE, GAUSSIAN], ids=["sphere", "gaussian"])
@pytest.mark.parametrize("k", [3, 40])
def test_the_moments_of_a_direction(directions: Directions, k: int) -> None:
    s = directions.draw(rng(), (20_000, k), np.float64)
    mean_projection, mean_square = moments(directions, k)
    for sample, expected in ((np.abs(s[:, 0]), mean_projection), ((s**2).sum(-1), mean_square)):
        assert abs(sample.mean() - expected) < 4 * stats.sem(sample)


def test_theorem_2_2_is_the_papers_formula() -> None:
    k, T, p, alpha_0, gap = 7, 300, 0.1, 1.3, 0.4
    paper = 1 / p * math.sqrt(math.pi / 2) * (gap / alpha_0 + alpha_0 / 2) * math.sqrt(k / T)
    step = alpha_0 / math.sqrt(k * T)
    bound = uniform_margin_bound(advantage=p, step=step, iterations=T, gap=gap, directions=GAUSSIAN, k=k)
    assert bound == pytest.approx(paper)


def test_theorem_3_5_is_the_papers_formula() -> None:
    k, T, N, alpha, gap, C, c, r = 7, 300, 12, 0.05, 0.4, 1.5, 0.25, 0.8
    gamma = math.exp(-N * c * r / (2 * C + 4 / 3))
    inside = gap / T + k / 2 * (1 + gamma) * alpha**2 + (2 * C + 4 / 3) / (math.e * c * N)
    run_settings: dict[str, Any] = {
        "step": alpha,
        "iterations": T,
        "gap": gap,
        "directions": GAUSSIAN,
        "k": k,
    }
    bound = confidence_bound(votes=N, slope=c, reach=r, noise=C, **run_settings)
    assert bound == pytest.approx(math.sqrt(2 * math.pi) / (alpha * (1 - gamma)) * inside)


def one_step(oracle: Any, k: int, step: float, seed: int) -> tuple[Any, Any, float]:
    """Descent f(theta) - f(theta_next) and Delta_t 1_{Y_t} of many steps from one theta, and its |grad f|."""
    theta = rng(seed).uniform(-1, 1, k) * rng(seed + 1).uniform(0.05, 1)
    problem = Ridge(k)
    search = NCRS(np.broadcast_to(theta, (40_000, k)), step=step, directions=GAUSSIAN, rng=rng(seed + 2))
    first, second = search.ask()
    difference = problem.value(first) - problem.value(second)
    search.tell(oracle(difference))
    improvement = np.where(difference > 0, -difference, 0)
    return problem.value(first) - problem.value(search.x), improvement, float(problem.gradient_norm(theta))


@pytest.mark.parametrize("step", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("advantage", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("k", [2, 20])
def test_lemma_2_1_one_step_with_a_uniform_margin(k: int, advantage: float, step: float) -> None:
    oracle = UniformMargin(advantage=advantage, votes=1, rng=rng(9))
    for seed in range(3):
        descent, _, gradient = one_step(oracle, k, step, seed)
        least = advantage * step * math.sqrt(2 / math.pi) * gradient - k * step**2 / 2
        assert least <= descent.mean() + 3 * stats.sem(descent)


@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("votes", [1, 10, 300])
@pytest.mark.parametrize("step", [0.01, 0.1])
@pytest.mark.parametrize("k", [2, 20])
def test_lemma_3_1_to_proposition_3_4_one_step_with_confidences(k: int, step: float, votes: int, noise: float) -> None:
    oracle = Abstaining(votes=votes, noise=noise, rng=rng(9))
    slope, reach = 0.25, 3.8 / noise  # min(tanh(t / 2), 1 / C) >= t / 4 up to there
    gamma = math.exp(-votes * slope * reach / (2 * noise + 4 / 3))
    penalty = (2 * noise + 4 / 3) / (math.e * slope * votes)
    for seed in range(3):
        descent, improvement, gradient = one_step(oracle, k, step, seed)
        smooth = k * step**2 / 2
        most = -step / math.sqrt(2 * math.pi) * gradient + smooth  # Lemma 3.1
        assert improvement.mean() - 3 * stats.sem(improvement) <= most
        error = -descent - improvement  # Delta_t (1_X - 1_Y), Lemma 3.3
        most = gamma * (step * math.sqrt(2 / math.pi) * gradient + smooth) + penalty
        assert abs(error.mean()) - 3 * stats.sem(error) <= most
        least = step / math.sqrt(2 * math.pi) * (1 - gamma) * gradient - (1 + gamma) * smooth - penalty
        assert least <= descent.mean() + 3 * stats.sem(descent)  # Proposition 3.4


@pytest.mark.parametrize("noise", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("votes", [1, 5, 25, 125])
@pytest.mark.parametrize("gap", [0.01, 0.1, 0.5])
def test_lemma_3_2_the_vote_errs_no_more_often_than_bernstein_says(gap: float, votes: int, noise: float) -> None:
    oracle = Abstaining(votes=votes, noise=noise, rng=rng())
    bound = math.exp(-votes * oracle.rho(gap) / (2 * noise + 4 / 3))
    for difference in (gap, -gap):
        accepted = oracle(np.full(20_000, difference)) > 0
        errors = int((accepted != (difference > 0)).sum())
        surely_at_least = stats.binomtest(errors, 20_000).proportion_ci(0.999).low
        assert surely_at_least <= bound


def average_gradient(oracle: Any, k: int, step: float, directions: Directions, iterations: int) -> float:
    search = ncrs(k, step, directions, (40,))
    done = run(search, Ridge(k), oracle, target=1e-12, budget=iterations)
    return float(done.gradient_norm[:iterations].mean())


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("directions", [SPHERE, GAUSSIAN], ids=["sphere", "gaussian"])
def test_theorem_2_2_holds(k: int, directions: Directions) -> None:
    gap = float(Ridge(k).value(Ridge(k).start()))
    scale = math.sqrt(500) if directions is SPHERE else 1  # a sphere's step is sqrt(d) shorter
    for advantage in (0.1, 0.2, 0.5):
        for alpha_0 in (0.5, 1, 3):
            for iterations in (50, 500):
                step = alpha_0 / math.sqrt(k * iterations) * scale
                oracle = UniformMargin(advantage=advantage, votes=1, rng=rng())
                measured = average_gradient(oracle, k, step, directions, iterations)
                settings: dict[str, Any] = {"step": step, "iterations": iterations, "gap": gap}
                assert measured <= oracle.bound(directions=directions, k=k, **settings)


@pytest.mark.parametrize("k", ALL_K)
def test_theorem_3_5_holds(k: int) -> None:
    gap = float(Ridge(k).value(Ridge(k).start()))
    for noise in (1.0, 2.0):
        for votes in (3, 30, 300, 100 * k):
            for step in (0.05 / k, 0.2 / k, 0.8 / k):
                oracle = Abstaining(votes=votes, noise=noise, rng=rng())
                measured = average_gradient(oracle, k, step, GAUSSIAN, 400)
                settings: dict[str, Any] = {"step": step, "iterations": 400, "gap": gap}
                assert measured <= confidence_bound(
                    votes=votes,
                    slope=0.25,
                    reach=3.8 / noise,
                    noise=noise,
                    directions=GAUSSIAN,
                    k=k,
                    **settings,
                )


@pytest.mark.parametrize("k", ALL_K)
def test_the_two_point_theorem_holds_for_rsgf(k: int) -> None:
    """Theorem E.2: the mean of |grad h|^2 is at most 16 L (k + 2) gap / T + L^2 k (k + 2) mu^2."""
    problem, radius, iterations = Ridge(k), 0.01, 300
    start = np.broadcast_to(problem.start(), (40, k))
    search = RSGF(start, step=1 / (4 * (k + 2)), radius=radius, directions=GAUSSIAN, rng=rng())
    squares = []
    for _ in range(iterations):
        squares.append(problem.gradient_norm(search.x) ** 2)
        first, second = search.ask()
        search.tell(problem.value(first) - problem.value(second))
    gap = float(problem.value(problem.start()))
    assert np.mean(squares) <= 16 * (k + 2) * gap / iterations + k * (k + 2) * radius**2


# The paper's table


@pytest.fixture(scope="module")
def table() -> Any:
    experiment = configured("experiment.only=[ncrs]")
    cells: dict[tuple[str, int], Cell] = {}

    def measured(oracle: str, k: int) -> Cell:
        if (oracle, k) not in cells:
            cells[oracle, k] = experiment.measure(Track("ncrs", oracle, "sphere"), k)
        return cells[oracle, k]

    return measured


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("oracle", ["uniform_margin", "confidence"])
def test_every_cell_of_the_papers_table_is_reproduced(table: Any, oracle: str, k: int) -> None:
    cell = table(oracle, k)
    paper_iterations = PAPER[k][0] if oracle == "uniform_margin" else PAPER[k][1]
    paper_comparisons = PAPER[k][0] if oracle == "uniform_margin" else PAPER[k][2]
    assert cell.paper == paper_comparisons
    iterations = cell.run.iterations
    assert len(iterations) == 200
    assert paper_iterations == pytest.approx(iterations.mean(), rel=0.05)
    assert paper_comparisons == pytest.approx(cell.comparisons.mean(), rel=0.05)
    # The 95 % prediction interval of a mean of five further seeds
    width = stats.t.ppf(0.975, 199) * iterations.std(ddof=1) * math.sqrt(1 / 5 + 1 / 200)
    assert abs(paper_iterations - iterations.mean()) <= width
    assert cell.average is not None
    assert cell.average <= cell.bound


@pytest.mark.slow
def test_the_exponents_are_one_and_two(table: Any) -> None:
    assert exponent([table("uniform_margin", k) for k in PAPER]) == pytest.approx(1, abs=0.05)
    assert exponent([table("confidence", k) for k in PAPER]) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("k", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_gaussian_directions_do_not_give_the_papers_table(k: int) -> None:
    experiment = configured("experiment.only=[ncrs]", "experiment.optimizers.ncrs.budget=4000")
    exact = experiment.measure(Track("ncrs", "confidence", "gaussian"), k)
    noisy = experiment.measure(Track("ncrs", "uniform_margin", "gaussian"), k)
    late = np.nan_to_num(exact.run.iterations, nan=4_000)  # those who never arrive count with the budget only
    assert interval(late)[1] > 1.5 * PAPER[k][1]
    assert np.isnan(noisy.comparisons).all()


# What the reduction to k dimensions rests on


def explicit(k: int, d: int, step: float, kind: str, seeds: int, seed: int) -> Run:
    """A run in R^d with a random A, nothing reduced."""
    matrix = np.linalg.qr(rng(seed).standard_normal((d, k)))[0].T.astype(np.float32)
    problem = Ridge(k, matrix)
    x = np.broadcast_to(problem.start().astype(np.float32), (seeds, d))
    search = NCRS(x, step=step, directions=Directions(kind), rng=rng(seed + 1))
    oracle = UniformMargin(advantage=0.5, votes=1, rng=rng(seed + 2))
    return run(search, problem, oracle, target=0.1, budget=5_000)


def reduced(k: int, d: int, step: float, kind: str, seeds: int) -> Run:
    search = ncrs(k, step, Directions(kind, ambient=d), (seeds,), seed=77)
    oracle = UniformMargin(advantage=0.5, votes=1, rng=rng(78))
    return run(search, Ridge(k), oracle, target=0.1, budget=5_000)


def assert_same_distribution(first: Run, second: Run) -> None:
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


# The command


@pytest.mark.parametrize("track", configured().tracks(), ids=lambda t: f"{t.optimizer}-{t.oracle}-{t.direction}")
def test_every_entry_of_the_configuration_runs(track: Track) -> None:
    experiment = configured()
    optimizer, oracle = experiment.build(track, 5, step=0.1, batch=(3, 4), purpose="test")
    done = run(optimizer, Ridge(5), oracle, target=1e-12, budget=60)
    assert done.gradient_norm.shape == (1 + math.ceil(60 / done.pairs_per_round), 3)
    assert np.isfinite(done.gradient_norm).all()
    assert optimizer.x.dtype == np.float32


def test_tuning_picks_the_step_with_which_all_arrive_first() -> None:
    experiment = configured("experiment.tuning.grid=[0.001,1.6,1000]")
    assert experiment.size(Track("saha_2025", "uniform_margin", "sphere"), 10) == 1.6


def test_the_same_seed_gives_the_same_table(tmp_path: Path) -> None:
    def rows(name: str, *overrides: str) -> str:
        experiment = configured(*overrides)
        cells = [
            experiment.measure(Track(*names), 5)
            for names in (("ncrs", "uniform_margin", "sphere"), ("saha_2025", "confidence", "sphere"))
        ]
        write_csv(cells, tmp_path / name)
        return (tmp_path / name).read_text()

    once = rows("once.csv")
    assert rows("twice.csv") == once
    assert rows("other.csv", "experiment.seed=1") != once
    assert rows("alone.csv", "experiment.only=[saha_2025,ncrs]") == once  # a stream belongs to its own name


def test_a_reading_that_never_arrives_does_not_reproduce_the_paper() -> None:
    def cell(k: int, pairs: list[float]) -> Cell:
        done = Run(np.array(pairs), np.array(pairs), np.ones(3), 1)
        return Cell(
            track=Track("ncrs", "uniform_margin", "sphere"),
            k=k,
            size=0.8,
            votes=1,
            run=done,
            paper=100 * k,
            average=None,
            bound=None,
            success=None,
        )

    good = [cell(1, [98.0, 104.0]), cell(2, [202.0, 204.0])]
    assert "reproduces the paper: every number within 1.5%" in verdict(good)
    assert "does not reproduce" in verdict([*good, cell(4, [400.0, math.nan])])
    assert "does not reproduce" in verdict([*good, cell(4, [300.0, 310.0])])


def test_the_interval_is_students() -> None:
    mean, low, high = interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert mean == 2.5
    assert high - mean == pytest.approx(mean - low) == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert all(math.isnan(number) for number in interval(np.array([1.0, np.nan])))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("experiment.only=[ncrs,adam]", "unknown optimizer {'adam'}; known are ncrs, "),
        ("experiment.optimizers.ncrs.active=[501]", r"\[1, d = 500\], not 501"),
        ("+experiment.optimizers.ncrs.oracles=[human]", "known are uniform_margin, confidence, values"),
        ("+experiment.optimizers.ncrs.colour=red", "ncrs has missing or unknown settings: colour"),
        ("~experiment.optimizers.ncrs.optimizer", "ncrs has missing or unknown settings: optimizer"),
        ("experiment.optimizers.ncrs.directions={sphere: 1}", "two seeds or more"),
        ("experiment.target=-1", "positive, not -1"),
        ("experiment.precision=float16", "float32 or float64, not 'float16'"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        configured(override)


def test_a_users_optimizer_joins_the_table_from_any_folder(tmp_path: Path) -> None:
    """One class, one entry: the command runs in a foreign folder, writes there, and lists the newcomer."""
    (tmp_path / "mine.py").write_text(
        "from pbrl.peers import Saha2025\n\n\nclass Mine(Saha2025):\n    '''An optimiser of one's own.'''\n"
    )
    entry = "{optimizer:{_target_:mine.Mine,_partial_:true,radius:0.02},directions:{sphere:5},active:[5,10]}"
    overrides = [
        f"+experiment.optimizers.mine={entry}",
        "experiment.only=[mine,mezo,ncrs]",
        "experiment.unless_said.active=[5]",
        "experiment.optimizers.ncrs.active=[5]",
        "experiment.optimizers.ncrs.budget=2000",
        "experiment.optimizers.ncrs.directions={sphere: 5}",
        "experiment.noise.budget=200",
        "processes=1",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pbrl.ridge", *overrides],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mine, sphere" in done.stdout
    assert "reproduce" in done.stdout
    folder = tmp_path / "runs" / "ridge"
    with (folder / "table.csv").open() as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    assert ",".join(COLUMNS) == (
        "optimizer,oracle,direction,k,iterations_mean,iterations_low,iterations_high,comparisons_mean,paper"
    )
    assert {(row["optimizer"], row["oracle"], row["k"]) for row in rows} == {
        ("ncrs", "uniform_margin", "5"),
        ("ncrs", "confidence", "5"),
        ("mezo", "values", "5"),
        *(("mine", oracle, k) for oracle in ("uniform_margin", "confidence") for k in ("5", "10")),
    }
    ours = next(row for row in rows if row["optimizer"] == "ncrs" and row["oracle"] == "confidence")
    assert float(ours["comparisons_mean"]) == pytest.approx(500 * float(ours["iterations_mean"]))
    assert ours["paper"] == "170000"
    figures = {"comparisons_against_k", "gradient_norm", "success_against_noise"}
    assert {path.name for path in folder.iterdir()} == {"table.csv"} | {
        f"{figure}.{ending}" for figure in figures for ending in ("png", "svg")
    }
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "runs", "__pycache__"}
