"""Every lemma and theorem of the paper, in simulation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from oracles.confidence import Confidence
from oracles.uniform_margin import UniformMargin
from pbrl.ridge.bounds import bound, confidence_bound, moments, uniform_margin_bound
from pbrl.ridge.problem import Ridge, run
from pbrl.search import NCRS, RSGF, Directions, Search

ALL_K = [5, 10, 20, *(pytest.param(k, marks=pytest.mark.slow) for k in (40, 80))]
SPHERE = Directions("sphere", ambient=500)
GAUSSIAN = Directions("gaussian", ambient=500)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@dataclass
class Abstaining:
    """A random confidence: a sign with probability C rho, right with probability (1 + 1 / C) / 2; else 0.

    Its aligned mean is rho and its second moment C rho: Assumption 1.2 with equality.
    """

    noise: float  # C
    rng: np.random.Generator

    def rho(self, gap: Any) -> Any:
        return np.minimum(np.tanh(np.abs(gap) / 2), 1 / self.noise)

    def compare(self, difference: Any, *, votes: int) -> Any:
        answered = self.rng.binomial(votes, np.minimum(self.noise * self.rho(difference), 1))
        right = self.rng.binomial(answered, (1 + 1 / self.noise) / 2)
        return np.sign(difference) * (2 * right - answered)


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


def test_the_bound_of_an_oracle_uses_its_own_constants() -> None:
    settings: dict[str, Any] = {"step": 0.1, "iterations": 50, "gap": 0.4, "directions": SPHERE, "k": 7}
    oracle = Confidence(link="logistic", scale=2.0, rng=rng())  # rho(t) = tanh(t / 4) >= t / 8 up to 7.6
    expected = confidence_bound(votes=9, slope=0.125, reach=7.6, noise=1.0, **settings)
    assert bound("3.5", oracle, votes=9, **settings) == expected
    margin = UniformMargin(p=0.3, rng=rng())
    assert bound("2.2", margin, votes=1, **settings) == uniform_margin_bound(advantage=0.3, **settings)


def one_step(oracle: Any, votes: int, k: int, step: float, seed: int) -> tuple[Any, Any, float]:
    """Descent f(theta) - f(theta_next) and Delta_t 1_{Y_t} of many steps from one theta, and its |grad f|."""
    theta = rng(seed).uniform(-1, 1, k) * rng(seed + 1).uniform(0.05, 1)
    problem = Ridge(k)
    x = np.broadcast_to(theta, (40_000, k))
    search = Search(x, rule=NCRS(step=step), directions=GAUSSIAN, rng=rng(seed + 2))
    first, second = search.ask()
    difference = problem.value(first) - problem.value(second)
    search.tell(oracle.compare(difference, votes=votes))
    improvement = np.where(difference > 0, -difference, 0)
    return problem.value(first) - problem.value(search.x), improvement, float(problem.gradient_norm(theta))


@pytest.mark.parametrize("step", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("advantage", [0.05, 0.2, 0.5])
@pytest.mark.parametrize("k", [2, 20])
def test_lemma_2_1_one_step_with_a_uniform_margin(k: int, advantage: float, step: float) -> None:
    oracle = UniformMargin(p=advantage, rng=rng(9))
    for seed in range(3):
        descent, _, gradient = one_step(oracle, 1, k, step, seed)
        least = advantage * step * math.sqrt(2 / math.pi) * gradient - k * step**2 / 2
        assert least <= descent.mean() + 3 * stats.sem(descent)


@pytest.mark.parametrize("noise", [1.0, 2.0])
@pytest.mark.parametrize("votes", [1, 10, 300])
@pytest.mark.parametrize("step", [0.01, 0.1])
@pytest.mark.parametrize("k", [2, 20])
def test_lemma_3_1_to_proposition_3_4_one_step_with_confidences(k: int, step: float, votes: int, noise: float) -> None:
    oracle = Abstaining(noise=noise, rng=rng(9))
    slope, reach = 0.25, 3.8 / noise  # min(tanh(t / 2), 1 / C) >= t / 4 up to there
    gamma = math.exp(-votes * slope * reach / (2 * noise + 4 / 3))
    penalty = (2 * noise + 4 / 3) / (math.e * slope * votes)
    for seed in range(3):
        descent, improvement, gradient = one_step(oracle, votes, k, step, seed)
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
    oracle = Abstaining(noise=noise, rng=rng())
    bound = math.exp(-votes * oracle.rho(gap) / (2 * noise + 4 / 3))
    for difference in (gap, -gap):
        accepted = oracle.compare(np.full(20_000, difference), votes=votes) > 0
        errors = int((accepted != (difference > 0)).sum())
        surely_at_least = stats.binomtest(errors, 20_000).proportion_ci(0.999).low
        assert surely_at_least <= bound


def average_gradient(oracle: Any, votes: int, k: int, step: float, directions: Directions, iterations: int) -> float:
    start = np.broadcast_to(Ridge(k).start(), (40, k))
    search = Search(start, rule=NCRS(step=step), directions=directions, rng=rng())
    outcome = run(search, Ridge(k), oracle, votes=votes, target=1e-12, budget=iterations)
    return float(outcome.gradient_norm[:iterations].mean())


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("directions", [SPHERE, GAUSSIAN], ids=["sphere", "gaussian"])
def test_theorem_2_2_holds(k: int, directions: Directions) -> None:
    gap = float(Ridge(k).value(Ridge(k).start()))
    scale = math.sqrt(500) if directions is SPHERE else 1  # a sphere's step is sqrt(d) shorter
    for advantage in (0.1, 0.2, 0.5):
        for alpha_0 in (0.5, 1, 3):
            for iterations in (50, 500):
                step = alpha_0 / math.sqrt(k * iterations) * scale
                oracle = UniformMargin(p=advantage, rng=rng())
                measured = average_gradient(oracle, 1, k, step, directions, iterations)
                settings: dict[str, Any] = {"step": step, "iterations": iterations, "gap": gap}
                assert measured <= bound("2.2", oracle, votes=1, directions=directions, k=k, **settings)


@pytest.mark.parametrize("k", ALL_K)
def test_theorem_3_5_holds(k: int) -> None:
    gap = float(Ridge(k).value(Ridge(k).start()))
    for noise in (1.0, 2.0):
        for votes in (3, 30, 300, 100 * k):
            for step in (0.05 / k, 0.2 / k, 0.8 / k):
                oracle = Abstaining(noise=noise, rng=rng())
                measured = average_gradient(oracle, votes, k, step, GAUSSIAN, 400)
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
    rule = RSGF(step=1 / (4 * (k + 2)), radius=radius)
    search = Search(start, rule=rule, directions=GAUSSIAN, rng=rng())
    squares = []
    for _ in range(iterations):
        squares.append(problem.gradient_norm(search.x) ** 2)
        first, second = search.ask()
        search.tell(problem.value(first) - problem.value(second))
    gap = float(problem.value(problem.start()))
    assert np.mean(squares) <= 16 * (k + 2) * gap / iterations + k * (k + 2) * radius**2
