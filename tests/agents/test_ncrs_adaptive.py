"""Adaptive NCRS: without its parts it is NCRS; then each part by hand."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from agents.ncrs_adaptive import AdaptiveNCRS
from pbrl.policy import GaussianPolicy
from pbrl.run import checkpoint
from tests.agents.toy import StubBudget, Trial, preferences
from tests.toy_task import ToySimulator

STEP = 0.1
OFF = {"adapt": None, "at_a_time": None, "lead": None, "memory": 0.0}


def make(pairs=8, **changes):
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    given_settings = {
        "step": lambda t: STEP,  # noqa: ARG005
        "target": 0.2,
        "rate": 0.3,
        "votes": None,
        "forgetting": 0.2,
        "subspace": "all",
        "penalty": 1e-3,
        "feedback": "score",
        "collect": "sampled",
        "common_start": False,
        **OFF,
        **changes,
    }
    return AdaptiveNCRS(policy=policy, rng=np.random.default_rng(0), pairs=pairs, **given_settings)


class Voters:
    """A budget whose answers are the next of these scores, as many as are asked for."""

    def __init__(self, *scores):
        self.scores = list(scores)

    def budget(self, pairs=8, iteration=0):
        return StubBudget(self.answer, pairs=pairs, trajectories=2 * pairs, iteration=iteration)

    def answer(self, pairs):
        now, self.scores = self.scores[: len(pairs)], self.scores[len(pairs) :]
        return preferences((np.array(now, float) + 1) / 2)


def candidates(budget):
    """The distinct policies that were compared with the current one, in order."""
    seen = [arms[1] for arms, _, _ in budget.collections]
    return [each for n, each in enumerate(seen) if n == 0 or (each != seen[n - 1]).any()]


# Without its parts


@pytest.mark.parametrize("votes", [None, 1, 3])
@pytest.mark.parametrize("size", [("trajectories=8", "pairs=4"), ("trajectories=7", "pairs=5")])
def test_without_its_parts_it_is_ncrs(votes, size):
    plain = Trial("ncrs", *size, votes=votes)
    same = {
        "subspace": "all",
        "step__maximum": 0.04,
        "step__minimum": 0.004,
        "collect": "sampled",
        "common_start": False,
    }
    adaptive = Trial("ncrs_adaptive", *size, votes=votes, **same, **OFF)
    for trial in (plain, adaptive):
        trial.run(6)
    assert_array_equal(adaptive.agent.parameters, plain.agent.parameters)
    assert (adaptive.agent.parameters != Trial("ncrs", *size).agent.parameters).any()


# Curtailed votes


@pytest.mark.parametrize(
    ("scores", "asked", "accepted"),
    [
        ([1] * 8, 6, True),  # at 4 the rest could still make it a tie, which rejects
        ([-1] * 4, 4, False),  # what follows is about the next candidate
        ([1, 1, 1, 1, -1, -1, -1, -1], 8, False),  # a tie
        ([1, 1, 1, -1, 1, -1, 1, -1], 8, True),  # at 6 it is 2 with two to come: they could still make it a tie
        ([0.5] * 8, 6, True),  # 3 against 2
        ([-0.5] * 8, 6, False),
    ],
)
def test_a_vote_ends_when_the_rest_cannot_change_its_outcome(scores, asked, accepted):
    agent, voters = make(at_a_time=2), Voters(*scores, *[0.0] * 8)
    before = agent.parameters
    budget = voters.budget()
    metrics = agent.iterate(budget)
    first = candidates(budget)[0]
    votes = zip(budget.asked, budget.collections, strict=True)
    assert sum(len(pairs) for pairs, (arms, _, _) in votes if (arms[1] == first).all()) == asked
    assert_array_equal(agent.parameters, first if accepted else before)
    assert metrics["candidates"] == 1


@settings(max_examples=50, deadline=None)
@given(
    scores=st.lists(st.sampled_from([-1.0, -0.5, 0.0, 0.5, 1.0]), min_size=12, max_size=12),
    at_a_time=st.integers(1, 12),
)
def test_curtailing_never_changes_an_outcome(scores, at_a_time):
    agent = make(pairs=12, at_a_time=at_a_time)
    before = agent.parameters
    budget = Voters(*scores, *[0.0] * 12).budget(pairs=12)
    agent.iterate(budget)
    first = candidates(budget)[0]
    decided = agent.vote is None or (agent.vote.candidate != first).any()
    if decided:
        accepted = not (agent.parameters == before).all()
        assert accepted == (sum(scores) > 0)


def test_what_is_saved_buys_more_candidates():
    budget = Voters(*[-1] * 8).budget()
    metrics = make(at_a_time=1).iterate(budget)
    assert len(candidates(budget)) == metrics["candidates"] == 2
    assert budget.pairs_left == 0


def test_a_lead_ends_a_vote():
    agent = make(at_a_time=1, lead=2)
    metrics = agent.iterate(Voters(1, 1, -1, -1, 1, -1, 1, 1).budget())
    assert metrics["candidates"] == 3
    assert metrics["accepted"] == pytest.approx(2 / 3)


def test_a_vote_goes_on_in_the_next_iteration():
    agent, voters = make(pairs=2, votes=6, at_a_time=2), Voters(1, 1, -1, 1, 1, 1)
    before, seen = agent.parameters, []
    for n in range(3):
        budget = voters.budget(pairs=2, iteration=n)
        metrics = agent.iterate(budget)
        seen += candidates(budget)
        assert metrics["candidates"] == (n == 2)
        assert_array_equal(agent.parameters, seen[0] if n == 2 else before)
    assert_array_equal(seen[1], seen[0])
    assert_array_equal(seen[2], seen[0])


def test_skipped_answers_are_asked_but_have_no_vote():
    agent = make(pairs=4)
    before = agent.parameters
    skipped = preferences(np.array([1.0, 1.0, 1.0, 0.4]), [False, False, False, True])
    metrics = agent.iterate(StubBudget(skipped, pairs=4, trajectories=8))
    assert_array_equal(agent.parameters, before)
    assert metrics["candidates"] == 1
    assert metrics["vote"] == pytest.approx(-0.2)


# The step


@pytest.mark.parametrize(
    ("adapt", "scores", "success"),
    [("acceptance", [1, 1, -1, 0], 1.0), ("acceptance", [-1] * 4, 0.0), ("votes", [1, 1, 1, -1], 0.75)],
)
def test_the_step_grows_with_success(adapt, scores, success):
    agent = make(pairs=4, adapt=adapt)
    metrics = agent.iterate(Voters(*scores).budget(pairs=4))
    assert agent.scale == pytest.approx(math.exp(0.3 * (success - 0.2)))
    assert metrics["step"] == pytest.approx(STEP * agent.scale)
    theta, budget = agent.parameters, Voters(*[-1] * 4).budget(pairs=4)
    agent.iterate(budget)
    assert np.std(candidates(budget)[0] - theta) == pytest.approx(metrics["step"], rel=0.4)


def test_at_the_target_rate_of_acceptance_the_step_stays():
    agent = make(pairs=5, votes=1, adapt="acceptance", at_a_time=1)
    agent.iterate(Voters(1, -1, -1, -1, -1).budget(pairs=5))
    assert agent.scale == pytest.approx(1.0)


def test_a_vote_without_answers_does_not_change_the_step():
    agent = make(pairs=4, adapt="votes")
    agent.iterate(StubBudget(preferences(np.ones(4), [False] * 4), pairs=4, trajectories=8))
    assert agent.scale == 1.0


# Memory


def test_directions_lean_where_accepted_ones_led():
    w, c = 0.6, 0.2
    plain, agent = make(pairs=2, votes=1, at_a_time=1), make(pairs=2, votes=1, at_a_time=1, memory=w, forgetting=c)
    steps = {}
    for name, each in (("plain", plain), ("memory", agent)):
        budget = Voters(1, -1).budget(pairs=2)
        each.iterate(budget)
        steps[name] = [(arms[1] - arms[0]).astype(np.float64) / STEP for arms, _, _ in budget.collections]
    z = steps["plain"]  # both agents draw the same numbers
    first = math.sqrt(1 - w**2) * z[0]
    path = math.sqrt(c * (2 - c)) * first
    assert_allclose(steps["memory"][0], first, atol=1e-5)
    assert_allclose(steps["memory"][1], math.sqrt(1 - w**2) * z[1] + w * path, atol=1e-5)
    assert_allclose(agent.path, path, atol=1e-5)  # the second was rejected


def test_the_path_is_as_long_as_a_direction_when_all_are_accepted():
    agent = make(pairs=10, votes=1, at_a_time=1, memory=0.0, forgetting=0.3)
    paths = []
    for n in range(60):
        agent.iterate(Voters(*[1] * 10).budget(pairs=10, iteration=n))
        paths.append(agent.path)
    assert np.mean(np.square(paths[5:])) == pytest.approx(1, abs=0.2)


# The subspace


def test_it_moves_within_the_subspace():
    agent = make(pairs=4, subspace="linear", at_a_time=1, lead=1)
    theta, budget = agent.parameters, Voters(1, 1, -1, 1).budget(pairs=4)
    agent.iterate(budget)
    assert [how["keep"] for _, _, how in budget.collections] == [("observations",), (), (), ()]
    assert np.flatnonzero(agent.parameters - theta).tolist() == list(range(12, 17))  # four weights and a bias


# Resuming


def test_resumed_in_the_middle_of_a_vote_equals_uninterrupted(tmp_path):
    small, changes = ("trajectories=8", "pairs=4"), {"votes": 7, "at_a_time": 1, "lead": None, "subspace": "linear"}
    whole, part = (Trial("ncrs_adaptive", *small, **changes) for _ in range(2))
    expected = whole.run(5)[2:]
    part.run(2)
    assert part.agent.vote is not None
    checkpoint.save(tmp_path, 1, {"agent": part.agent.state_dict(), "ledger": part.ledger.state_dict()})
    _, state = checkpoint.load(tmp_path)
    simulator = ToySimulator(np.random.SeedSequence(0).spawn(3)[0])
    resumed = Trial("ncrs_adaptive", *small, seed=9, simulator=simulator, **changes)
    resumed.agent.load_state_dict(state["agent"])
    resumed.ledger.load_state_dict(state["ledger"])
    resumed.next = 2
    assert json.dumps(resumed.run(3)) == json.dumps(expected)
    assert_array_equal(resumed.agent.parameters, whole.agent.parameters)


# Settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"votes": 0}, "votes must be at least 1, not 0"),
        ({"at_a_time": 0}, "at_a_time must be at least 1, not 0"),
        ({"lead": 0.5}, "lead must be at least 1, not 0.5"),
        ({"target": 1.5}, "target must be between 0 and 1, not 1.5"),
        ({"memory": -0.1}, "memory must be between 0 and 1, not -0.1"),
        ({"forgetting": 2.0}, "forgetting must be between 0 and 1, not 2.0"),
        ({"rate": -1.0}, "rate must not be negative, not -1.0"),
    ],
)
def test_a_wrong_setting_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)
