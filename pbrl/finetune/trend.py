"""How iterations grow with the intrinsic dimension: a survival regression over settings and runs.

    log T_ij = a + b log k_i + u_i + e_ij,    u_i ~ N(0, between^2) of a setting, e_ij ~ N(0, within^2) of a run

A run that used all its iterations before it arrived is censored: all that is known of it is T_ij > budget, and it
contributes the probability of that (Tobin 1958; a log-normal accelerated failure time). Runs of one setting share u_i,
so that five seeds do not count as five settings. The likelihood is exact in the runs that arrived, and integrates the
censored ones over what is then known of u_i by Gauss-Hermite quadrature. The interval of b is Wald's with Student's t
of n - 2 degrees of freedom and the same correction n / (n - 2) that ordinary least squares has: without censoring, and
with as many runs in every setting, it is the interval of the regression of the settings' means.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special, stats

from pbrl.types import Float64

NODES, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)  # for integrals over a standard normal
SMALLEST = 1e-3  # deviation of log T: less is no more than rounding


@dataclass(frozen=True)
class Trend:
    """The fit, with the 95 % interval of the exponent b."""

    intercept: float  # a
    exponent: float  # b
    low: float
    high: float
    between: float  # deviation of settings, in log T
    within: float  # deviation of runs
    settings: int
    runs: int
    censored: int

    @property
    def width(self) -> float:
        """Of the interval."""
        return self.high - self.low


def fit(k: Float64, taken: Float64, arrived: Float64, setting: Float64) -> Trend:
    """Fit to runs [n]: k of their setting, iterations taken, whether they arrived (else censored), setting's number."""
    order = np.argsort(setting, kind="stable")
    x, y, seen = np.log(k)[order], np.log(taken)[order], np.asarray(arrived, bool)[order]
    begins = np.unique(setting[order], return_index=True)[1]  # of each setting's runs
    if len({float(each) for each in x}) < 3 or not seen.any():
        raise ValueError("a trend needs at least three different k, and runs that arrived")
    centre, n = float(x[begins].mean()), len(begins)
    start = np.polyfit(x - centre, y, 1)
    spread = max(float(np.std(y - np.polyval(start, x - centre))), 10 * SMALLEST)
    smallest = math.log(SMALLEST)

    group = np.repeat(np.arange(n), np.diff([*begins, len(x)]))  # the setting of each run
    seen_in = np.add.reduceat(seen.astype(float), begins)  # runs that arrived, by setting

    def cost(parameters: Float64) -> float:
        a, b, log_between, log_within = parameters  # a at the mean of log k
        sigma, omega = np.exp(2 * np.maximum([log_between, log_within], smallest))  # variances between and within
        rest = y - a - b * (x - centre)
        # Given those that arrived, u of a setting is normal; their own likelihood is that of a multivariate normal.
        total, squares = (np.add.reduceat(np.where(seen, each, 0.0), begins) for each in (rest, rest**2))
        variance = 1 / (1 / sigma + seen_in / omega)
        mean = variance * total / omega
        arrived_part = -0.5 * (
            seen_in * math.log(omega) + np.log(1 + seen_in * sigma / omega) + squares / omega - mean**2 / variance
        )
        # Of the others, the probability that they take longer, over what is known of u: [n, nodes].
        u = mean[:, None] + np.sqrt(variance)[:, None] * NODES
        longer = special.log_ndtr((u[group[~seen]] - rest[~seen, None]) / math.sqrt(omega))
        summed = np.zeros((n, len(NODES)))
        np.add.at(summed, group[~seen], longer)
        return -float((arrived_part + special.logsumexp(summed, b=WEIGHTS, axis=1)).sum())

    def minimise(function: Callable[[Float64], float], first: Float64) -> optimize.OptimizeResult:
        """By Nelder and Mead, twice: a second start frees a simplex that has collapsed too early."""
        tight = {"maxiter": 8000, "maxfev": 8000, "xatol": 1e-6, "fatol": 1e-9}
        found = optimize.minimize(function, first, method="Nelder-Mead", options=tight)
        return optimize.minimize(function, found.x, method="Nelder-Mead", options=tight)

    found = minimise(cost, np.array([start[1], start[0], math.log(0.7 * spread), math.log(0.7 * spread)]))
    a, b, log_between, log_within = found.x

    def profile(slope: float) -> float:
        """The likelihood with b held."""
        held = np.array([found.x[0], *np.maximum(found.x[2:], smallest + 1)])
        return float(minimise(lambda rest: cost(np.array([rest[0], slope, *rest[1:]])), held).fun)

    step = max(0.3 * spread / (float(np.std(x)) * math.sqrt(n)), 1e-4)
    curvature = (profile(b + step) + profile(b - step) - 2 * found.fun) / step**2
    error = math.sqrt(n / (n - 2) / curvature) if curvature > 0 else math.inf
    half = float(stats.t.ppf(0.975, n - 2)) * error
    return Trend(
        intercept=float(a - b * centre),
        exponent=float(b),
        low=float(b - half),
        high=float(b + half),
        between=math.exp(log_between),
        within=math.exp(log_within),
        settings=n,
        runs=len(y),
        censored=int((~seen).sum()),
    )
