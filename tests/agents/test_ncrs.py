"""NCRS: the vote, ties and skips, the schedule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

from agents.ncrs import NCRS
from pbrl.policy import GaussianPolicy
from pbrl.search import Cosine
from pbrl.types import Behaviour, Float32, Int64, Preferences


class FakeBudget:
    """Pays for anything, and remembers what it was asked for."""

    def __init__(self, iteration: int = 0, trajectories: int = 64) -> None:
        self.iteration, self.trajectories_left = iteration, trajectories
        self.asked: list[tuple[Float32, Int64, dict[str, Any]]] = []

    def collect(self, policy: Any, parameters: Float32, assignment: Int64, **how: Any) -> Behaviour:  # noqa: ARG002
        self.asked.append((parameters, assignment, how))
        self.trajectories_left -= len(assignment)
        n = len(assignment)
        return Behaviour(
            policy=assignment, lengths=np.ones(n, int), diverged=np.zeros(n, bool), start=np.zeros((n, 3), int)
        )


def answers(score: list[float], answered: list[bool] | None = None, label: list[float] | None = None) -> Preferences:
    q = (np.array(score, float) + 1) / 2
    return Preferences(
        probability=q,
        score=np.array(score, float),
        label=np.array(label, float) if label else np.round(q),
        answered=np.ones(len(score), bool) if answered is None else np.array(answered),
    )


def make(votes: int = 3, **changes: Any) -> NCRS:
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    settings: dict[str, Any] = {
        "trajectories": 64,
        "step": Cosine(maximum=4e-2, minimum=4e-3, decay=480),
        "votes": votes,
        "feedback": "score",
        "direction": "gaussian",
        "collect": "sampled",
        "common_start": False,
    }
    return NCRS(policy=policy, rng=np.random.default_rng(0), **{**settings, **changes})


@pytest.mark.parametrize(
    ("score", "answered", "accepted"),
    [
        ([0.5, 0.5, -0.9], None, True),
        ([0.5, 0.5, -1.0], None, False),  # S = 0 rejects
        ([1.0, -0.5, -0.6], None, False),
        ([0.1, -1.0, -1.0], [True, False, False], True),  # skipped answers have no vote
        ([-0.1, 1.0, 1.0], [True, False, False], False),
        ([1.0, 1.0, 1.0], [False, False, False], False),  # nobody answered
    ],
)
def test_the_vote(score: list[float], answered: list[bool] | None, accepted: bool) -> None:
    agent, budget = make(), FakeBudget()
    before = agent.parameters.copy()
    pairs = agent.ask(budget)  # type: ignore[arg-type]
    assert pairs is not None
    metrics = agent.tell(pairs, answers(score, answered))
    candidate = budget.asked[0][0][1]
    assert_array_equal(agent.parameters, candidate if accepted else before)
    assert metrics["accepted"] == accepted


def test_hard_labels_vote_by_majority_and_equal_counts_nothing() -> None:
    agent = make(feedback="label")
    pairs = agent.ask(FakeBudget())  # type: ignore[arg-type]
    assert pairs is not None
    # Confident scores against, but two labels of three for the candidate.
    metrics = agent.tell(pairs, answers([-0.9, -0.9, -0.9], label=[1, 1, 0]))
    assert metrics["vote"] == 1.0
    pairs = agent.ask(FakeBudget())  # type: ignore[arg-type]
    assert pairs is not None
    assert agent.tell(pairs, answers([0, 0, 0], label=[0.5, 0.5, 0.5]))["vote"] == 0.0


def test_the_candidate_is_one_gaussian_step_away_and_arms_are_paired_by_index() -> None:
    agent, budget = make(votes=32), FakeBudget(iteration=240)
    pairs = agent.ask(budget)  # type: ignore[arg-type]
    assert pairs is not None
    parameters, arms, how = budget.asked[0]
    assert_array_equal(parameters[0], agent.parameters)
    assert_array_equal(arms, [0] * 32 + [1] * 32)
    assert_array_equal(pairs.first, np.arange(32))
    assert_array_equal(pairs.second, np.arange(32, 64))
    assert how == {"mean_actions": False, "common_start": False, "keep": ()}
    direction = (parameters[1] - parameters[0]) / 0.022  # alpha at the middle of the schedule
    assert np.std(direction) == pytest.approx(1, abs=0.4)
    assert agent.ask(budget) is None  # type: ignore[arg-type]


def test_the_papers_schedule() -> None:
    with initialize_config_module("conf"):
        step = instantiate(compose("agent/ncrs").agent.step)
    assert [step(t) for t in (0, 240, 480, 600)] == pytest.approx([4e-2, 2.2e-2, 4e-3, 4e-3], rel=1e-12)
    assert step(120) == pytest.approx(4e-3 + 1.8e-2 * (1 + np.cos(np.pi / 4)))


def test_few_votes_try_several_candidates_one_after_the_other() -> None:
    agent, budget = make(votes=8), FakeBudget()
    tried = []
    while (pairs := agent.ask(budget)) is not None:  # type: ignore[arg-type]
        agent.tell(pairs, answers([1.0] * 8 if len(tried) % 2 else [-1.0] * 8))
        tried.append(agent.parameters.copy())
    assert len(tried) == 4
    assert_array_equal(tried[1], tried[2])
    assert (tried[1] != tried[3]).all()


@given(votes=st.sampled_from([0, -1, 33, 64]))
def test_votes_that_the_trajectories_cannot_pay_for(votes: int) -> None:
    with pytest.raises(ValueError, match=f"votes must be between 1 and 32, half the trajectories, not {votes}"):
        make(votes=votes)
