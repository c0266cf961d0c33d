"""A teacher's temperature: three ways to state it, and how it is solved for.

tau: 1.0                   in units of the clip's return
tau: {bpref: 1.0}          in B-Pref's unit, the return of 50 steps: tau * H / 50 for a clip of H steps
tau: {error_rate: 0.2}     whatever makes the teacher err in that share of its answers
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import exp, inf, log

import numpy as np
from scipy.optimize import brentq

from oracles.links import Link
from pbrl.types import Float64

BPREF_STEPS = 50  # the length of B-Pref's clips


class Temperature:
    """Tells tau for clips of a given length, in units of their return."""

    def __init__(self, tau: float | Mapping[str, float], *, eps_mistake: float) -> None:
        if not isinstance(tau, Mapping):
            self.unit, self.value = "return", tau
        elif len(tau) == 1 and set(tau) <= {"bpref", "error_rate"}:
            ((self.unit, self.value),) = tau.items()
        else:
            raise ValueError(f"tau must be a number, {{bpref: x}} or {{error_rate: x}}, not {dict(tau)}")
        if not 0.0 <= self.value < inf:
            raise ValueError(f"tau must be finite and >= 0 (0: perfectly rational), not {self.value}")
        if self.solved_for and not eps_mistake < self.value < 0.5:
            raise ValueError(
                f"error_rate must be above eps_mistake = {eps_mistake} (mistakes alone err that often) "
                f"and below 1/2 (a coin), not {self.value}"
            )
        self.solution: tuple[float, int] | None = None  # tau, and the clip length that it was solved for

    @property
    def solved_for(self) -> bool:
        """Whether it is to be solved for rather than given."""
        return self.unit == "error_rate"

    def for_clip(self, steps: int) -> float:
        """Tau in units of the return of a clip of so many steps."""
        if self.unit == "return":
            return self.value
        if self.unit == "bpref":
            return self.value * steps / BPREF_STEPS
        if self.solution is None:
            raise RuntimeError("tau: {error_rate: ...} is solved for: calibrate the teacher before asking it")
        tau, solved_steps = self.solution
        if steps != solved_steps:
            raise ValueError(f"tau was calibrated on clips of {solved_steps} steps; these have {steps}")
        return tau

    def solve(self, gaps: Float64, steps: int, *, link: Link, eps_mistake: float) -> float:
        """Find tau for pairs of clips with these gaps [P] (see `solve_temperature`) and keep it.

        Without any pair there is nothing to find: it stays as it was, 1 at first.
        """
        if not self.solved_for:
            raise RuntimeError(f"tau is given, {self.value} in {self.unit} units: there is nothing to calibrate")
        if len(gaps) > 0:
            tau = solve_temperature(gaps, self.value, link=link, eps_mistake=eps_mistake)
        else:
            tau = self.solution[0] if self.solution else 1.0
        self.solution = (tau, steps)
        return tau


def expected_error_rate(gaps: Float64, tau: float, *, link: Link, eps_mistake: float) -> float:
    """The share of wrong labels on pairs with these gaps [P], signed so that > 0 is the true order."""
    wrong = float(np.mean(link(-gaps / tau)))
    return wrong + eps_mistake * (1.0 - 2.0 * wrong)


def solve_temperature(gaps: Float64, error_rate: float, *, link: Link, eps_mistake: float) -> float:
    """The largest tau with that expected error rate.

    Without myopia the rate grows with tau from eps_mistake to 1/2, and there is one solution. A myopic
    teacher is wrong about some pairs however cool it is, and a little noise may even help it: hence the
    largest. Where its myopia alone errs more often than wanted, the best tau is taken, with a warning.
    """

    def excess(log_tau: float) -> float:
        return expected_error_rate(gaps, exp(log_tau), link=link, eps_mistake=eps_mistake) - error_rate

    sizes = np.abs(gaps[gaps != 0.0])
    if len(sizes) == 0:  # the sums differ, but not to this teacher: it tosses coins at any temperature
        return 1.0
    # Wide enough for arctan's heavy tails: at a millionth of the smallest gap it errs once in a million.
    low, high = log(sizes.min()) - log(1e6), log(sizes.max()) + log(1e6)
    grid = np.linspace(low, high, num=8 * int(high - low))
    excesses = np.array([excess(log_tau) for log_tau in grid])
    if excesses.min() >= 0.0:
        best = int(excesses.argmin())
        warnings.warn(
            f"mistakes and myopia alone make this teacher err in {error_rate + excesses[best]:.3f} of its "
            f"answers, more than error_rate = {error_rate}: taking the temperature at which it errs least",
            stacklevel=4,
        )
        return exp(grid[best])
    last = int(np.flatnonzero(excesses < 0.0)[-1])
    if last == len(grid) - 1:  # the wanted rate is within a millionth of 1/2
        return exp(high)
    return exp(brentq(excess, grid[last], grid[last + 1], xtol=1e-12))
