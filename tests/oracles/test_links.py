"""The links against their definitions in the paper's appendix, and its Assumption 2."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import norm

from oracles.links import Link, arctan, logistic, probit

LINKS = {"logistic": logistic, "probit": probit, "arctan": arctan}
every_link = pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
gaps = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("link", "sigma"),
    [
        (logistic, lambda u: 1 / (1 + math.exp(-u))),
        (probit, norm.cdf),
        (arctan, lambda u: 0.5 + math.atan(u) / math.pi),
    ],
    ids=LINKS,
)
def test_values_are_those_of_the_appendix(link, sigma):
    u = np.linspace(-6, 6, 101)
    np.testing.assert_allclose(link(u), [sigma(x) for x in u], rtol=0, atol=1e-15)
    np.testing.assert_allclose(link.rho(u), [2 * sigma(x) - 1 for x in u], rtol=0, atol=4e-16)
    step = 1e-6
    assert (sigma(step) - sigma(-step)) / (2 * step) == pytest.approx(link.derivative_at_zero, rel=1e-8)


@every_link
def test_far_gaps_neither_overflow_nor_leave_the_unit_interval(link):
    u = np.array([-np.inf, -1e300, -1e6, -750.0, 0.0, 750.0, 1e6, 1e300, np.inf])
    q = link(u)
    assert q.shape == u.shape
    assert ((q >= 0) & (q <= 1)).all()
    assert q[0] == 0
    assert q[4] == 0.5
    assert q[-1] == 1


@every_link
@given(u=gaps)
def test_the_mirror_is_exact(link: Link, u: float):
    q, mirrored = link(np.array([u, -u]))
    assert mirrored == 1 - q
    assert q == 1 - mirrored
    assert 2 * mirrored - 1 == -(2 * q - 1)


@every_link
@given(u=gaps, v=gaps)
def test_a_wider_gap_is_never_less_likely(link: Link, u: float, v: float):
    lower, upper = link(np.array(sorted([u, v])))
    assert lower <= upper


@every_link
@given(u=gaps.filter(lambda u: u != 0))
def test_assumption_2_holds(link: Link, u: float):
    score = link.rho(np.float64(u))  # deterministic: its mean is itself
    rho = link.rho(np.float64(abs(u)))
    assert np.sign(u) * score >= rho
    assert score**2 <= link.C * rho


@every_link
def test_rho_grows_at_least_linearly_up_to_r(link):
    assert link.rho(np.float64(0)) == 0
    t = np.concatenate([np.geomspace(1e-300, 1e-3, 1000), np.linspace(1e-3, link.r, 10_000)])
    assert (link.rho(t) >= link.c * t).all()
    # ρ is concave on [0, ∞), so ρ(t) / t falls: that it holds at r proves the rest. r is nearly the largest.
    assert (np.diff(link.rho(np.linspace(0, 2 * link.r, 1000)), n=2) <= 0).all()
    assert link.rho(np.float64(1.1 * link.r)) < link.c * 1.1 * link.r


@every_link
@pytest.mark.parametrize("eps_mistake", [0.1, 0.3])
def test_assumption_2_survives_mistakes(link, eps_mistake):
    """A score turned round with probability eps has mean (1 - 2 eps) rho: C grows to 1 / (1 - 2 eps)."""
    gap = np.linspace(0.01, 20, 500)
    rho = (1 - 2 * eps_mistake) * link.rho(gap)
    mean = (1 - eps_mistake) * (2 * link(gap) - 1) + eps_mistake * (2 * link(-gap) - 1)
    second_moment = (2 * link(gap) - 1) ** 2
    assert (mean >= rho - 1e-15).all()
    assert (second_moment <= rho / (1 - 2 * eps_mistake) + 1e-15).all()
