"""Which questions to ask: clips of the last trajectories, and six ways to choose among pairs of them.

Lee, Smith, Dragan, Abbeel 2021, "B-Pref: Benchmarking Preference-Based Reinforcement Learning". Of candidates, drawn
uniformly from the pool, M are asked about:

    Uniform               any of them
    Disagreement          those on which the members of the reward model disagree most
    Entropy               those on which the members are least certain
    Coverage              those farthest from all that were asked about before
    DisagreementCoverage  Disagreement down to a few, then Coverage
    EntropyCoverage       Entropy down to a few, then Coverage

The first round is always uniform, since the reward model knows nothing yet. One of your own is a class with `choose`,
and a YAML in conf/agent.sampler.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from scipy.special import entr, expit

from agents.pairing import at_random
from agents.reward_model import RewardModel
from pbrl.ledger import Budget
from pbrl.types import Behaviour, Clips, Float64, Int64, Pairs, Preferences, join


@dataclass(frozen=True, kw_only=True)
class Round:
    """One round of questions: what a sampler chooses from, and what it can ask the reward model."""

    pool: Behaviour  # the last trajectories
    M: int  # questions to choose
    steps: int | None  # of a clip; None: whole trajectories
    reward_model: RewardModel
    rng: np.random.Generator
    workers: Executor

    @property
    def is_first(self) -> bool:
        """Whether nothing was asked before."""
        return not self.reward_model.buffer

    def draw(self, n: int) -> Pairs:
        """Pairs of clips of two trajectories each, uniformly."""
        first = self.rng.integers(len(self.pool), size=n)
        second = (first + self.rng.integers(1, len(self.pool), size=n)) % len(self.pool)
        return Pairs(first=self.clips(first), second=self.clips(second), steps=self.steps)

    def clips(self, rows: Int64) -> Clips:
        """A clip of each of these trajectories, that begins anywhere: it ends at the latest where the episode does."""
        if self.steps is None:
            return Clips(trajectory=self.pool.number[rows], step=np.zeros(len(rows), np.int64))
        latest = np.maximum(0, self.pool.lengths[rows] - self.steps)
        # Departure: B-Pref never draws the last possible beginning.
        return Clips(trajectory=self.pool.number[rows], step=self.rng.integers(0, latest + 1))

    def probabilities(self, pairs: Pairs) -> Float64:
        """Each member's probability that the second is preferred [members, P]."""
        return np.asarray(expit(self.reward_model.differences(self.pool, pairs, self.workers).astype(np.float64)))

    def disagreement(self, pairs: Pairs) -> Float64:
        """The standard deviation of the members' probabilities [P]."""
        return np.asarray(self.probabilities(pairs).std(axis=0))

    def entropy(self, pairs: Pairs) -> Float64:
        """The mean entropy of the members' probabilities [P]."""
        p = self.probabilities(pairs)
        return np.asarray((entr(p) + entr(1 - p)).mean(axis=0))

    def states(self, pairs: Pairs) -> Float64:
        """The observations of both clips of each pair, in one row [P, 2 H obs]."""
        clips = [self.pool.cut(each, pairs.steps)[0].reshape(len(pairs), -1) for each in (pairs.first, pairs.second)]
        return np.concatenate(clips, axis=1).astype(np.float64)

    def distances_to_asked(self, states: Float64) -> Float64:
        """How far each row of states [P, 2 H obs] is from the nearest pair that was asked about before [P]."""
        nearest = np.full(len(states), np.inf)
        for each in self.reward_model.buffer:
            asked = each.states(self.reward_model.obs_size).numpy().astype(np.float64)
            squares = (states**2).sum(1)[:, None] + (asked**2).sum(1) - 2 * states @ asked.T
            nearest = np.minimum(nearest, np.sqrt(np.maximum(0, squares)).min(axis=1))
        return nearest


class Sampler(Protocol):
    """Chooses the questions of a round."""

    def choose(self, this: Round) -> Pairs:
        """M pairs."""


class Disjoint:
    """Random pairs in which no trajectory is twice, as long as there are any."""

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        pairs = at_random(this.pool, this.M, this.rng)
        first, second = (this.clips(this.pool.rows(each.trajectory)) for each in (pairs.first, pairs.second))
        return Pairs(first=first, second=second, steps=this.steps)


class Uniform:
    """Any M pairs."""

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        return this.draw(this.M)


class Disagreement:
    """The pairs on which the members of the reward model disagree most.

    candidates: pairs that are drawn for each that is asked about.
    """

    def __init__(self, *, candidates: int) -> None:
        self.candidates = _at_least_one("candidates", candidates)

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        if this.is_first:
            return this.draw(this.M)
        drawn = this.draw(self.candidates * this.M)
        return take(drawn, largest(this.disagreement(drawn), this.M))


class Entropy:
    """The pairs on which the members of the reward model are least certain.

    candidates: pairs that are drawn for each that is asked about.
    """

    def __init__(self, *, candidates: int) -> None:
        self.candidates = _at_least_one("candidates", candidates)

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        if this.is_first:
            return this.draw(this.M)
        drawn = this.draw(self.candidates * this.M)
        return take(drawn, largest(this.entropy(drawn), this.M))


class Coverage:
    """The pairs whose states are farthest from all that were asked about, chosen one after the other.

    candidates: pairs that are drawn for each that is asked about.
    """

    def __init__(self, *, candidates: int) -> None:
        self.candidates = _at_least_one("candidates", candidates)

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        if this.is_first:
            return this.draw(this.M)
        return spread(this, this.draw(self.candidates * this.M))


class DisagreementCoverage:
    """Of the pairs on which the members disagree most, those that are farthest from all that were asked about.

    candidates: pairs that are drawn for each that is asked about; shortlist: how many of them remain.
    """

    def __init__(self, *, candidates: int, shortlist: int) -> None:
        self.candidates, self.shortlist = _shortlist(candidates, shortlist)

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        if this.is_first:
            return this.draw(this.M)
        drawn = this.draw(self.candidates * this.M)
        return spread(this, take(drawn, largest(this.disagreement(drawn), self.shortlist * this.M)))


class EntropyCoverage:
    """Of the pairs on which the members are least certain, those that are farthest from all that were asked about.

    candidates: pairs that are drawn for each that is asked about; shortlist: how many of them remain.
    """

    def __init__(self, *, candidates: int, shortlist: int) -> None:
        self.candidates, self.shortlist = _shortlist(candidates, shortlist)

    def choose(self, this: Round) -> Pairs:
        """M pairs."""
        if this.is_first:
            return this.draw(this.M)
        drawn = this.draw(self.candidates * this.M)
        return spread(this, take(drawn, largest(this.entropy(drawn), self.shortlist * this.M)))


def take(pairs: Pairs, rows: Int64) -> Pairs:
    """Some of the pairs."""
    return Pairs(first=pairs.first[rows], second=pairs.second[rows], steps=pairs.steps, experts=pairs.experts)


def largest(values: Float64, n: int) -> Int64:
    """Where the n largest values are, the largest first; the earlier of equal ones first."""
    return np.argsort(-values, kind="stable")[:n]


def spread(this: Round, pairs: Pairs) -> Pairs:
    """M of the pairs, chosen greedily: always the one farthest from all that were asked or chosen (k-center)."""
    states = this.states(pairs)
    distance, chosen = this.distances_to_asked(states), []
    for _ in range(min(this.M, len(pairs))):
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, np.sqrt(((states - states[chosen[-1]]) ** 2).sum(axis=1)))
    return take(pairs, np.array(chosen))


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value


def _shortlist(candidates: int, shortlist: int) -> tuple[int, int]:
    if not 1 <= shortlist <= candidates:
        raise ValueError(f"shortlist must be between 1 and candidates, which is {candidates}, not {shortlist}")
    return candidates, shortlist


class Questions:
    """Rounds of questions about the last trajectories: how many, about what, chosen by whom.

    clip_steps: of a clip; None: whole trajectories. Clips are never longer than trajectories.
    pool: how many of the last trajectories, of whatever iteration, may be asked about; None: those just collected.
    questions: M of a round; None: all that the iteration has. questions_in_all: in the run; None: no limit.
    schedule: what becomes of M in iteration t of T: constant, falling as (T - t) / T, or rising as T / (T - t + 1).
    """

    def __init__(
        self,
        *,
        sampler: Sampler,
        clip_steps: int | None,
        pool: int | None,
        questions: int | None,
        questions_in_all: int | None,
        schedule: Literal["constant", "falling", "rising"],
        iterations: int | None,
        rng: np.random.Generator,
    ) -> None:
        for name, value, minimum in (
            ("clip_steps", clip_steps, 1),
            ("pool", pool, 2),
            ("questions", questions, 1),
            ("questions_in_all", questions_in_all, 1),
        ):
            if value is not None and value < minimum:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        if schedule != "constant" and iterations is None:
            raise ValueError(f"schedule={schedule} needs the number of iterations of the run")
        self.sampler, self.clip_steps, self.pool_size = sampler, clip_steps, pool
        self.per_round, self.in_all = questions, questions_in_all
        self.schedule, self.iterations, self.rng = schedule, iterations, rng
        self.asked = 0
        self.pool: Behaviour | None = None

    def look_at(self, behaviour: Behaviour) -> None:
        """Add trajectories to the pool; the oldest are forgotten when it is full."""
        known = [behaviour] if self.pool is None or self.pool_size is None else [self.pool, behaviour]
        self.pool = behaviour if len(known) == 1 else join(known)
        if self.pool_size is not None and len(self.pool) > self.pool_size:
            self.pool = self.pool.take(slice(-self.pool_size, None))

    def number(self, budget: Budget) -> int:
        """M: how many questions this round has."""
        M, t, T = self.per_round or budget.pairs_left, budget.iteration, self.iterations or 0
        if self.schedule == "falling":
            M = max(1, round(M * (T - t) / T))
        elif self.schedule == "rising":
            M = round(M * T / (T - t + 1))
        left = budget.pairs_left if self.in_all is None else min(budget.pairs_left, self.in_all - self.asked)
        return min(M, left)

    def ask(
        self, budget: Budget, reward_model: RewardModel, workers: Executor
    ) -> tuple[Behaviour, Pairs, Preferences] | None:
        """One round: choose, ask, and let the reward model remember the answers.

        Returns what was asked about, the questions and the answers; None if no question is left.
        """
        assert self.pool is not None, "look at some trajectories first"
        assert self.pool.actions is not None
        if (M := self.number(budget)) == 0:
            return None
        steps = None if self.clip_steps is None else min(self.clip_steps, self.pool.actions.shape[1])
        this = Round(pool=self.pool, M=M, steps=steps, reward_model=reward_model, rng=self.rng, workers=workers)
        pairs = self.sampler.choose(this)
        preferences = budget.compare(pairs)
        self.asked += len(pairs)
        reward_model.remember(self.pool, pairs, preferences)
        return self.pool, pairs, preferences

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        kept = self.pool_size is not None and self.pool is not None
        return {"asked": self.asked, "pool": dict(vars(self.pool)) if kept else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.asked = state["asked"]
        self.pool = None if state["pool"] is None else Behaviour(**state["pool"])
