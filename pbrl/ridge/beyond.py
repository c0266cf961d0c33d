"""Beyond the paper: the optimisers behind `agents/pes.py` and `agents/ncrs_adaptive.py`, on functions.

Both have the ask/tell of `pbrl.search`, and minimise.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbrl.search import Array, Directions, answers, asked, check, squared_norm


@dataclass(eq=False)
class PES:
    """Preference evolution strategy: one comparison, or vote, on each of P directions.

    eps_1, ..., eps_P ~ N(0, I_d)
    score_i of (x - sigma eps_i, x + sigma eps_i)           (score > 0: the second is better)
    g = mean of score_i eps_i
    m <- beta m + (1 - beta) g
    x <- x + eta m / rms(m)

    rms(m) = |m| / sqrt(d): eta is the step of each coordinate. So what happens in k directions that matter does not
    depend on the number of those that do not, but for the fluctuations of |m|.
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # eta
    radius: float  # sigma
    probes: int  # P
    momentum: float  # beta
    directions: Directions
    rng: np.random.Generator
    iteration: int = field(default=0, init=False)
    eps: Array | None = field(default=None, init=False)  # [P, ..., d]
    m: Array = field(init=False)  # [..., d]
    unseen: Array = field(init=False)  # [...] |m|^2 in the coordinates that are not simulated

    def __post_init__(self) -> None:
        check(self.x, step=self.step, radius=self.radius, probes=self.probes)
        if self.directions.kind != "gaussian":
            raise ValueError(f"the directions of PES are gaussian, not {self.directions.kind!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be at least 0 and below 1, not {self.momentum}")
        self.m, self.unseen = np.zeros_like(self.x), np.zeros(self.x.shape[:-1])

    def ask(self) -> tuple[Array, Array]:
        """(x - sigma eps_i, x + sigma eps_i) for all P directions."""
        self.eps = self.directions.draw(self.rng, (self.probes, *self.x.shape), self.x.dtype)
        return self.x - self.radius * self.eps, self.x + self.radius * self.eps

    def tell(self, score: ArrayLike) -> None:
        """Step along the momentum of the scores [P, ...]."""
        eps, self.eps = asked(self.eps), None
        scores, beta = answers(score, self.x), self.momentum
        g = np.einsum("p...,p...i->...i", scores, eps) / self.probes
        self.m = beta * self.m + (1 - beta) * g
        self.unseen = self._unseen((1 - beta) * np.sqrt((scores**2).sum(axis=0)) / self.probes)
        d = self.directions.ambient or self.x.shape[-1]
        rms = np.sqrt((squared_norm(self.m) + self.unseen) / d).astype(self.x.dtype)
        self.x = self.x + self.step * self.m / np.maximum(rms, np.finfo(self.x.dtype).tiny)[..., None]
        self.iteration += 1

    def _unseen(self, new: Array) -> Array:
        """|beta m + N(0, new^2 I)|^2 [...] in the coordinates that are not simulated, of which only |m| matters.

        The scores do not depend on these coordinates, so what is new there is Gaussian: along the old m, and across it.
        """
        hidden = (self.directions.ambient or self.x.shape[-1]) - self.x.shape[-1]
        if hidden == 0:
            return self.unseen
        along = self.momentum * np.sqrt(self.unseen) + new * self.rng.standard_normal(new.shape)
        across = new**2 * self.rng.chisquare(hidden - 1, new.shape) if hidden > 1 else 0.0
        return np.asarray(along**2 + across)


@dataclass(eq=False)
class AdaptiveNCRS:
    """NCRS whose step follows Rechenberg's rule, and whose votes end when one side leads by enough.

    s ~ N(0, I_d)
    compare x with x + a alpha s until |S| >= lead, or N times;  S = sum of the scores
    x <- x + a alpha s  if S > 0, else x
    a <- a exp(rate (success - target)),  success = 1 if S > 0, else 0

    Votes end at different times in the runs of a batch, so `iteration` is an array [...].
    """

    x: Array  # [..., d]
    _: KW_ONLY
    step: float | Array  # alpha
    votes: int  # N
    lead: float
    target: float
    rate: float
    directions: Directions
    rng: np.random.Generator
    iteration: NDArray[np.int64] = field(init=False)  # [...]
    s: Array = field(init=False)
    S: Array = field(init=False)  # [...] of the vote under way
    asked: NDArray[np.int64] = field(init=False)  # [...] comparisons in it
    scale: Array = field(init=False)  # [...] a

    def __post_init__(self) -> None:
        check(self.x, step=self.step, votes=self.votes, lead=self.lead)
        if self.rate < 0 or not 0 <= self.target <= 1:
            raise ValueError(f"rate must not be negative, and target be a share, not {self.rate} and {self.target}")
        batch = self.x.shape[:-1]
        self.s = self.directions.draw(self.rng, self.x.shape, self.x.dtype)
        self.iteration, self.asked = np.zeros(batch, np.int64), np.zeros(batch, np.int64)
        self.S, self.scale = np.zeros(batch, self.x.dtype), np.ones(batch, self.x.dtype)

    def ask(self) -> tuple[Array, Array]:
        """(x, x + a alpha s), the same pair until the vote is decided."""
        return self.x, self.x + self.scale[..., None] * self.step * self.s

    def tell(self, score: ArrayLike) -> None:
        """Count one answer, and decide in the runs where the vote has ended."""
        (o,) = answers(score, self.x)
        self.S, self.asked = self.S + o, self.asked + 1
        decided = (np.abs(self.S) >= self.lead) | (self.asked >= self.votes)
        if not decided.any():
            return
        accepted = decided & (self.S > 0)
        self.x = np.where(accepted[..., None], self.ask()[1], self.x)
        factor = np.exp(self.rate * (accepted - self.target)).astype(self.x.dtype)
        self.scale = np.where(decided, self.scale * factor, self.scale)
        self.s = self.s.copy()
        self.s[decided] = self.directions.draw(self.rng, self.s[decided].shape, self.x.dtype)
        self.S, self.asked = np.where(decided, 0, self.S), np.where(decided, 0, self.asked)
        self.iteration = self.iteration + decided
