"""A teacher's temperature: three ways to state it, and how it is solved for.

tau: 1.0                   in units of the clip's return
tau: {bpref: 1.0}          in B-Pref's unit, the return of 50 steps: tau * H / 50 for a clip of H steps
tau: {error_rate: 0.2}     solved for, so that the teacher errs in that share of its answers

The last is solved for when an iteration's first question is put, on the gaps of the pairs of the iteration before.
Until there are such pairs, it is solved for on trajectories that nobody pays for (`Teacher.calibrate`).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from math import exp, inf, log
from typing import Any

import numpy as np
from scipy.optimize import brentq

from oracles.links import Link
from pbrl.types import Float64

BPREF_STEPS = 50  # the length of B-Pref's clips


class Temperature:
    """Tells tau for clips of a given length, in units of their return."""

    def __init__(self, tau: float | Mapping[str, float], *, link: Link, eps_mistake: float) -> None:
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
        self.link = link
        self.eps_mistake = eps_mistake
        self.solution: tuple[float, int] | None = None  # tau, and the clip length that it was solved for
        self.solved_on_questions = False  # rather than on trajectories that nobody pays for
        self.iteration: int | None = None  # the present one
        self.gaps: list[float] = []  # of its pairs, signed so that > 0 is the true order
        self.gap_steps = 0  # clip length of these pairs
        self._warned = False

    @property
    def solved_for(self) -> bool:
        """Whether it is solved for rather than given."""
        return self.unit == "error_rate"

    @property
    def needs_calibration(self) -> bool:
        """Whether it is solved for, and no pairs that the teacher was asked about are there to solve it on."""
        return self.solved_for and not self.solved_on_questions and not self.gaps

    def for_clip(self, steps: int) -> float:
        """Tau in units of the return of a clip of so many steps.

        A solved tau is converted in proportion to the length if it was solved for clips of another.
        """
        if self.unit == "return":
            return self.value
        if self.unit == "bpref":
            return self.value * steps / BPREF_STEPS
        if self.solution is None:
            raise RuntimeError("tau: {error_rate: ...} is solved for: calibrate the teacher before asking it")
        tau, solved_steps = self.solution
        return tau * (steps / solved_steps)

    def is_solved_for(self, steps: int) -> bool:
        """Whether it was solved for on clips of so many steps."""
        return self.solution is not None and self.solution[1] == steps

    def solve(self, gaps: Float64, steps: int) -> float:
        """Find tau for pairs of clips with these gaps [P] (see `solve_temperature`) and keep it.

        Without any pair there is nothing to find: it stays as it was, 1 at first.
        """
        if not self.solved_for:
            raise RuntimeError(f"tau is given, {self.value} in {self.unit} units: there is nothing to calibrate")
        if len(gaps) == 0:
            tau = self.for_clip(steps) if self.solution else 1.0
        else:
            tau = solve_temperature(gaps, self.value, link=self.link, eps_mistake=self.eps_mistake)
            self._warn_of(expected_error_rate(gaps, tau, link=self.link, eps_mistake=self.eps_mistake))
        self.solution = (tau, steps)
        return tau

    def _warn_of(self, error_rate: float) -> None:
        """Say once if the teacher errs more often than wanted at any temperature."""
        if error_rate > self.value + 1e-6 and not self._warned:
            self._warned = True
            warnings.warn(
                f"mistakes and myopia alone make this teacher err in {error_rate:.3f} of its answers, more than "
                f"error_rate = {self.value}: taking the temperature at which it errs least",
                stacklevel=4,
            )

    def begin_iteration(self, iteration: int | None) -> None:
        """If this iteration is a new one, solve for tau on the pairs of the last. None: nothing is solved."""
        if iteration is None or iteration == self.iteration:
            return
        if self.gaps:
            self.solve(np.array(self.gaps), self.gap_steps)
            self.solved_on_questions = True
        self.iteration, self.gaps, self.gap_steps = iteration, [], 0

    def add(self, gaps: Float64, steps: int) -> None:
        """Keep the gaps of pairs [P] that were asked about in the present iteration.

        Where its clips are of several lengths, gaps are converted to that of the first, in proportion.
        """
        if self.solved_for and len(gaps) > 0:
            self.gap_steps = self.gap_steps or steps
            self.gaps += (gaps * (self.gap_steps / steps)).tolist()

    def state_dict(self) -> dict[str, Any] | None:
        """Everything needed to continue exactly; None if tau is given."""
        if not self.solved_for:
            return None
        return {
            "solution": self.solution,
            "solved_on_questions": self.solved_on_questions,
            "iteration": self.iteration,
            "gaps": [*self.gaps],
            "gap_steps": self.gap_steps,
        }

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from `state_dict()`."""
        if state is None:
            return
        self.solution = None if state["solution"] is None else (state["solution"][0], state["solution"][1])
        self.solved_on_questions = state["solved_on_questions"]
        self.iteration = state["iteration"]
        self.gaps = [*state["gaps"]]
        self.gap_steps = state["gap_steps"]


def expected_error_rate(gaps: Float64, tau: float, *, link: Link, eps_mistake: float) -> float:
    """The share of wrong labels on pairs with these gaps [P], signed so that > 0 is the true order."""
    wrong = float(np.mean(link(-gaps / tau)))
    return wrong + eps_mistake * (1.0 - 2.0 * wrong)


def solve_temperature(gaps: Float64, error_rate: float, *, link: Link, eps_mistake: float) -> float:
    """The largest tau with that expected error rate.

    Without myopia the rate grows with tau from eps_mistake to 1/2, and there is one solution. A myopic
    teacher is wrong about some pairs even at tau = 0, and a little noise may even help it: hence the
    largest. Where no tau gives a rate as low as wanted, the tau with the lowest rate is taken.
    """

    def excess(log_tau: float) -> float:
        return expected_error_rate(gaps, exp(log_tau), link=link, eps_mistake=eps_mistake) - error_rate

    sizes = np.abs(gaps[gaps != 0.0])
    if len(sizes) == 0:  # to this myopic teacher all pairs are ties: it tosses coins at any temperature
        return 1.0
    # Wide enough for arctan's heavy tails: at a millionth of the smallest gap it errs once in a million.
    low, high = log(sizes.min()) - log(1e6), log(sizes.max()) + log(1e6)
    grid = np.linspace(low, high, num=8 * int(high - low))
    excesses = np.array([excess(log_tau) for log_tau in grid])
    if excesses.min() >= 0.0:
        return exp(grid[int(excesses.argmin())])
    last = int(np.flatnonzero(excesses < 0.0)[-1])
    if last == len(grid) - 1:  # the wanted rate is within a millionth of 1/2
        return exp(high)
    return exp(brentq(excess, grid[last], grid[last + 1], xtol=1e-12))
