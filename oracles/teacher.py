"""The simulated teacher: B-Pref's irrationalities with the paper's confidence scores.

Lee et al. 2021, "B-Pref: Benchmarking Preference-Based Reinforcement Learning". For two clips of H steps with
true rewards r1, r2, in this order:

    1. U = sum_t r[t]                                  the undiscounted sums
    2. skip unless max(U1, U2) > margin * eps_skip     (only if that threshold is > 0)
    3. equal if |U1 - U2| < margin * eps_equal
    4. S = sum_t gamma^(H - 1 - t) r[t]                what a myopic teacher remembers
    5. q = link((S2 - S1) / tau)                       probability that the second is preferred
    6. B ~ Bernoulli(q)                                the label
    7. with probability eps_mistake: B <- 1 - B, q <- 1 - q
    8. equal overrides: q = B = 1/2

where margin = R H / T, and R the mean true return of the last trajectories, as many as an iteration has. A skipped
pair stays in its row with q = B = 1/2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from oracles import links
from oracles.links import Link
from oracles.temperature import BPREF_STEPS, Temperature
from pbrl.types import Answers, Bool, Float64, Int64, Preferences, Question, Reason


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """What a teacher remembers of K clips: their sums."""

    undiscounted: Float64  # [K] U: sums of the true rewards
    myopic: Float64  # [K] S: the same with early steps fading; what the teacher judges by
    steps: int  # H, the length of every clip

    def __len__(self) -> int:
        return len(self.undiscounted)

    def __getitem__(self, rows: Int64) -> Impressions:
        return Impressions(undiscounted=self.undiscounted[rows], myopic=self.myopic[rows], steps=self.steps)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the teacher thinks of P pairs before it answers: steps 1 to 5, in which nothing is random."""

    first_sum: Float64  # [P] U1
    second_sum: Float64  # [P] U2
    skipped: Bool  # [P]
    equal: Bool  # [P]
    gap: Float64  # [P] S2 - S1
    probability: Float64  # [P] q of step 5
    tau: float

    @property
    def true_gaps(self) -> Float64:
        """The gaps of the pairs that are judged and have a better clip, signed so that > 0 is the true order."""
        truth = np.sign(self.second_sum - self.first_sum)
        gaps: Float64 = (truth * self.gap)[~self.skipped & ~self.equal & (truth != 0.0)]
        return gaps


Vote = Literal["mean", "majority"]


class Teacher:
    """One teacher with its own random stream.

    `link` is the name of a link in `oracles.links`, or a `Link` of your own. `tau` is stated in one of three ways (see
    `oracles.temperature`), `gamma` per step of a 50-step clip as in B-Pref. `tie` is what a teacher with tau = 0
    thinks of S1 = S2: "equal" (q = 1/2) or "first" (q = 0, as in B-Pref). `bpref_compat` multiplies the thresholds
    by their epsilon twice from the second round of labelling on, as B-Pref's PEBBLE script does by mistake; a round
    is one call of `compare`.
    """

    sees: Literal["rewards", "behaviour"] = "rewards"

    def __init__(
        self,
        *,
        link: Literal["logistic", "probit", "arctan"] | Link,
        tau: float | Mapping[str, float],
        gamma: float,
        eps_mistake: float,
        eps_skip: float,
        eps_equal: float,
        tie: Literal["equal", "first"],
        bpref_compat: bool,
        rng: np.random.Generator,
    ) -> None:
        for name, epsilon in (("mistake", eps_mistake), ("skip", eps_skip), ("equal", eps_equal)):
            if not 0.0 <= epsilon <= 1.0:
                raise ValueError(f"eps_{name} must be in [0, 1], not {epsilon}")
        if not 0.0 < gamma <= 1.0:
            raise ValueError(f"gamma must be in (0, 1] (1: no myopia), not {gamma}")
        if tie not in ("equal", "first"):
            raise ValueError(f'tie must be "equal" or "first", not {tie!r}')
        found = getattr(links, link, None) if isinstance(link, str) else link
        if not isinstance(found, Link):
            raise ValueError(f"link must be logistic, probit, arctan or an oracles.links.Link, not {link!r}")
        self.link = found
        self.temperature = Temperature(tau, link=self.link, eps_mistake=eps_mistake)
        self.gamma = gamma
        self.eps_mistake = eps_mistake
        self.eps_skip = eps_skip
        self.eps_equal = eps_equal
        self.tie = tie
        self.bpref_compat = bpref_compat
        self.rng = rng
        self.rounds = 0  # of labelling so far
        self._uncharged: Float64 | None = None  # [K, T] what it was calibrated on, for questions about shorter clips

    @property
    def needs_calibration(self) -> bool:
        """Whether the temperature is solved for and no questions of earlier iterations are there to solve it on."""
        return self.temperature.needs_calibration

    def watch(self, clips: Float64) -> Impressions:
        """Steps 1 and 4 for the rewards [K, H] of K clips. A row's sums do not depend on the other rows."""
        try:
            clips = np.ascontiguousarray(clips, dtype=np.float64)
        except ValueError as error:
            raise ValueError(f"clips must be numbers [clips, steps], all of one length: {error}") from error
        if clips.ndim != 2 or 0 in clips.shape:
            raise ValueError(f"rewards must be [clips, steps] with at least one of each, not {clips.shape}")
        steps = clips.shape[1]
        undiscounted = clips.sum(axis=1)
        if not np.isfinite(undiscounted).all():
            row = int(np.flatnonzero(~np.isfinite(undiscounted))[0])
            raise ValueError(f"the rewards of clip {row} sum to {undiscounted[row]}: all must be finite")
        if self.gamma == 1.0:
            return Impressions(undiscounted=undiscounted, myopic=undiscounted, steps=steps)
        gamma = self.gamma ** (BPREF_STEPS / steps)
        weights = gamma ** np.arange(steps - 1.0, -1.0, -1.0)  # [H], 1 at the last step
        return Impressions(undiscounted=undiscounted, myopic=np.einsum("kh,h->k", clips, weights), steps=steps)

    def compare(self, question: Question) -> Answers:
        """Answer P pairs of clips; for several experts, this teacher answers several times."""
        seen = self.watch(rewards_of(question))
        return self.compare_seen(
            seen[question.first],
            seen[question.second],
            mean_return=mean_return_of(question),
            episode_steps=question.episode_steps,
            experts=question.experts,
            iteration=question.iteration,
        )

    def compare_seen(
        self,
        first: Impressions,
        second: Impressions,
        *,
        mean_return: float,
        episode_steps: int,
        experts: int = 1,
        iteration: int | None = None,
    ) -> Answers:
        """Answer P pairs of clips that were watched before."""
        if experts < 1:
            raise ValueError(f"experts must be at least 1, not {experts}")
        judgement = self.judge(first, second, mean_return=mean_return, episode_steps=episode_steps, iteration=iteration)
        if experts == 1:
            return self.answer(judgement)
        return pool([self.answer(judgement) for _ in range(experts)], "mean")

    def judge(
        self,
        first: Impressions,
        second: Impressions,
        *,
        mean_return: float,
        episode_steps: int,
        iteration: int | None = None,
    ) -> Judgement:
        """Steps 1 to 5 of one round of labelling: all that is not random."""
        if len(first) != len(second) or first.steps != second.steps:
            raise ValueError(
                f"a pair is two clips of equal length: got {len(first)} clips of {first.steps} steps "
                f"and {len(second)} of {second.steps}"
            )
        if len(first) == 0:
            raise ValueError("there are no pairs to compare: ask about at least one")
        if not np.isfinite(mean_return):
            raise ValueError(f"mean_return must be finite, not {mean_return}")
        if episode_steps < first.steps:
            raise ValueError(f"clips of {first.steps} steps are longer than the episode's {episode_steps}")
        self._prepare_temperature(iteration, first.steps)
        tau = self.temperature.for_clip(first.steps)
        margin = mean_return * first.steps / episode_steps
        judgement = self._judge(first, second, margin=margin, tau=tau)
        if iteration is not None:
            self.temperature.add(judgement.true_gaps, first.steps)
        self.rounds += 1
        return judgement

    def _prepare_temperature(self, iteration: int | None, steps: int) -> None:
        """Solve for the temperature if a new iteration begins, or if it was calibrated on clips of another length."""
        self.temperature.begin_iteration(iteration)
        if self.temperature.solved_on_questions:
            self._uncharged = None
        elif self._uncharged is not None and not self.temperature.is_solved_for(steps):
            self._solve_on(cut(self._uncharged, steps))

    def _judge(self, first: Impressions, second: Impressions, *, margin: float, tau: float) -> Judgement:
        twice = self.bpref_compat and self.rounds > 0
        skip_threshold = margin * self.eps_skip * (self.eps_skip if twice else 1.0)
        equal_threshold = margin * self.eps_equal * (self.eps_equal if twice else 1.0)
        best = np.maximum(first.undiscounted, second.undiscounted)
        gap = second.myopic - first.myopic
        return Judgement(
            first_sum=first.undiscounted,
            second_sum=second.undiscounted,
            skipped=(best <= skip_threshold) & (skip_threshold > 0.0),
            equal=np.abs(first.undiscounted - second.undiscounted) < equal_threshold,
            gap=gap,
            probability=self._probability(gap, tau),
            tau=tau,
        )

    def _probability(self, gap: Float64, tau: float) -> Float64:
        if tau > 0.0:
            with np.errstate(over="ignore"):  # a gap that overflows in units of tau: the link is 0 or 1
                return self.link(gap / tau)
        return np.where(gap == 0.0, 0.5 if self.tie == "equal" else 0.0, np.where(gap > 0.0, 1.0, 0.0))

    def answer(self, judgement: Judgement) -> Answers:
        """Steps 6 to 8 for one expert.

        Draws `rng.random((2, P))`, for the labels and for the mistakes, whether they are needed or not, so that
        a teacher's traits do not change which numbers it draws. The first draw decides whether the teacher says
        what it thinks, not which clip it names: for the same draws, swapping two clips swaps the label, as it
        turns q into 1 - q. Only where S1 = S2 is the label a plain coin toss.
        """
        q = judgement.probability
        label_draw, mistake_draw = self.rng.random((2, len(q)))
        label = np.where(judgement.gap >= 0.0, label_draw < q, label_draw >= 1.0 - q).astype(np.float64)
        mistaken = mistake_draw < self.eps_mistake
        q = np.where(mistaken, 1.0 - q, q)
        label = np.where(mistaken, 1.0 - label, label)
        unjudged = judgement.equal | judgement.skipped
        q = np.where(unjudged, 0.5, q)
        reason = np.where(mistaken, Reason.MISTAKEN, Reason.ANSWERED)
        reason = np.where(judgement.equal, Reason.EQUAL, reason)
        return Answers(
            preferences=Preferences(
                probability=q,
                score=2.0 * q - 1.0,
                label=np.where(unjudged, 0.5, label),
                answered=~judgement.skipped,
            ),
            reason=np.where(judgement.skipped, Reason.SKIPPED, reason).astype(np.uint8),
            first_sum=judgement.first_sum,
            second_sum=judgement.second_sum,
            bits=(~judgement.skipped).astype(np.int64),
            tau=judgement.tau,
        )

    def calibrate(self, clips: Float64) -> float:
        """Solve for the temperature at which the teacher errs in the wanted share of its answers; return it.

        For use before the first question; later, the teacher solves for it on the pairs that it was asked about.
        All pairs of the given clips [K, H] count that it neither skips nor finds equal. An error is a label
        that contradicts the order of the undiscounted sums, whether from noise, a mistake or myopia.
        """
        tau = self._solve_on(clips)
        self._uncharged = np.asarray(clips)
        return tau

    def _solve_on(self, clips: Float64) -> float:
        seen = self.watch(clips)
        i, j = np.triu_indices(len(seen), k=1)
        pairs = self._judge(seen[i], seen[j], margin=float(seen.undiscounted.mean()), tau=0.0)
        return self.temperature.solve(pairs.true_gaps, seen.steps)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly; plain numbers, fit for JSON."""
        return {
            "rng": self.rng.bit_generator.state,
            "rounds": self.rounds,
            "temperature": self.temperature.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.rng.bit_generator.state = state["rng"]
        self.rounds = state["rounds"]
        self.temperature.load_state_dict(state["temperature"])
        self._uncharged = None


def rewards_of(question: Question) -> Float64:
    """The true rewards of the clips [K, H]."""
    if question.rewards is None:
        raise ValueError("a simulated teacher judges by rewards: this question has none")
    return question.rewards


def mean_return_of(question: Question) -> float:
    """The mean return that the thresholds scale with."""
    if question.mean_return is None:
        raise ValueError("a simulated teacher's thresholds scale with the mean return: this question has none")
    return question.mean_return


def cut(trajectories: Float64, steps: int) -> Float64:
    """One clip of each trajectory [K, T], beginning at evenly spaced steps from the first to the last: [K, steps]."""
    if trajectories.shape[1] < steps:
        raise ValueError(
            f"tau was calibrated on clips of {trajectories.shape[1]} steps; these have {steps}, which is more"
        )
    begin = np.linspace(0, trajectories.shape[1] - steps, num=len(trajectories)).round().astype(np.int64)
    clips: Float64 = trajectories[np.arange(len(trajectories))[:, None], begin[:, None] + np.arange(steps)]
    return clips


def pool(answers: Sequence[Answers], vote: Vote) -> Answers:
    """One answer per pair from several: the share of labels for the second clip, or what the majority says.

    Labels "equal" count one half. The hard label is the majority's, 1/2 when the votes are tied; the reason is
    "mistaken" where most of the answers were.
    """
    votes = np.sum([each.preferences.label for each in answers], axis=0)  # [P], for the second clip
    members = len(answers)
    label = 0.5 + 0.5 * np.sign(2 * votes - members)
    mistakes = np.sum([each.reason == Reason.MISTAKEN for each in answers], axis=0)
    one = answers[0]  # skipping and calling equal are not random: all agree on them
    unjudged = (one.reason == Reason.SKIPPED) | (one.reason == Reason.EQUAL)
    reason = np.where(2 * mistakes > members, Reason.MISTAKEN, Reason.ANSWERED)
    return Answers(
        preferences=Preferences(
            probability=label if vote == "majority" else votes / members,
            score=2 * label - 1 if vote == "majority" else (2 * votes - members) / members,
            label=label,
            answered=one.preferences.answered,
        ),
        reason=np.where(unjudged, one.reason, reason).astype(np.uint8),
        first_sum=one.first_sum,
        second_sum=one.second_sum,
        bits=np.sum([each.bits for each in answers], axis=0),
        tau=one.tau,
    )
