"""NCRS: the vote, ties and skips, the schedule, and which trajectories are compared."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from agents.ncrs import NCRS
from pbrl.policy import GaussianPolicy
from pbrl.run.settings import instantiate
from pbrl.search import Cosine
from tests.agents.toy import StubBudget, preferences, settings_of


def make(pairs=3, **changes):
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    settings = {
        "step": Cosine(maximum=4e-2, minimum=4e-3, decay=480),
        "votes": None,
        "feedback": "score",
        "direction": "gaussian",
        "collect": "sampled",
        "common_start": False,
        **changes,
    }
    return NCRS(policy=policy, rng=np.random.default_rng(0), pairs=pairs, **settings)


def scores(values, answered=None, label=None):
    return preferences((np.array(values, float) + 1) / 2, answered, label)


def budget_of(*answers, pairs=3, **how):
    return StubBudget(*answers, pairs=pairs, trajectories=2 * pairs, **how)


@pytest.mark.parametrize(
    ("score", "answered", "accepted"),
    [
        ([0.5, 0.5, -0.9], None, True),
        ([0.5, 0.5, -1.0], None, False),  # S = 0 rejects
        ([0.0, 0.0, 0.0], None, False),
        ([1.0, -0.5, -0.6], None, False),
        ([0.1, -1.0, -1.0], [True, False, False], True),  # skipped answers have no vote
        ([-0.1, 1.0, 1.0], [True, False, False], False),
        ([1.0, 1.0, 1.0], [False, False, False], False),  # nobody answered
    ],
)
def test_the_vote(score, answered, accepted):
    agent, budget = make(), budget_of(scores(score, answered))
    before = agent.parameters.copy()
    metrics = agent.iterate(budget)
    ((arms, _, _),) = budget.collections
    assert_array_equal(arms[0], before)
    assert_array_equal(agent.parameters, arms[1] if accepted else before)
    assert metrics["accepted"] == accepted
    assert metrics["vote"] == pytest.approx(np.array(score)[np.array(answered or [True] * 3)].sum())


def test_hard_labels_vote_by_majority_and_equal_counts_nothing():
    # Confident scores against, but two labels of three for the candidate.
    against = scores([-0.9, -0.9, -0.9], label=[1, 1, 0])
    assert make(feedback="label").iterate(budget_of(against))["vote"] == 1.0
    assert make(feedback="score").iterate(budget_of(against))["vote"] == pytest.approx(-2.7)
    undecided = scores([0.9, 0.9, 0.9], label=[0.5, 0.5, 0.5])
    assert make(feedback="label").iterate(budget_of(undecided))["vote"] == 0.0


def test_arms_are_paired_by_index():
    agent, budget = make(32), budget_of(scores([1.0] * 32), pairs=32)
    agent.iterate(budget)
    ((_, assignment, how),) = budget.collections
    assert_array_equal(assignment, [0] * 32 + [1] * 32)
    assert how == {"mean_actions": False, "common_start": False, "keep": ()}
    (pairs,) = budget.asked
    assert pairs.steps is None
    assert_array_equal(pairs.first.trajectory, 100 + np.arange(32))  # by number, of which the first is 100
    assert_array_equal(pairs.second.trajectory, 132 + np.arange(32))


def test_how_trajectories_are_collected_is_a_setting():
    agent, budget = make(collect="mean", common_start=True), budget_of(scores([1.0] * 3))
    agent.iterate(budget)
    assert budget.collections[0][2] == {"mean_actions": True, "common_start": True, "keep": ()}


def test_more_votes_than_trajectories_compare_other_pairs_of_the_two_arms():
    agent = make(12)
    budget = StubBudget(scores([1.0] * 12), pairs=12, trajectories=8)
    agent.iterate(budget)
    first, second = (clips.trajectory.tolist() for clips in (budget.asked[0].first, budget.asked[0].second))
    assert first[:4] == [100, 101, 102, 103]
    assert second[:4] == [104, 105, 106, 107]
    assert len({*zip(first, second, strict=True)}) == 12
    assert {*first} == {100, 101, 102, 103}
    assert {*second} == {104, 105, 106, 107}


@pytest.mark.parametrize(("iteration", "alpha"), [(0, 4e-2), (240, 2.2e-2), (480, 4e-3), (600, 4e-3)])
def test_the_candidate_is_one_step_of_the_schedule_away(iteration, alpha):
    """The same seed draws the same direction, so candidates differ by the step alone."""
    directions = []
    for budget in (budget_of(scores([1.0] * 3)), budget_of(scores([1.0] * 3), iteration=iteration)):
        metrics = make(direction="sphere").iterate(budget)
        arms = budget.collections[0][0].astype(np.float64)
        directions.append((arms[1] - arms[0]) / metrics["step"])
    assert metrics["step"] == pytest.approx(alpha)
    assert np.linalg.norm(directions[1]) == pytest.approx(1, rel=1e-4)
    assert_allclose(*directions, atol=1e-5)


def test_directions_are_standard_gaussians():
    agent, drawn = make(), []
    for _ in range(200):
        budget = budget_of(scores([-1.0] * 3))
        agent.iterate(budget)
        arms = budget.collections[0][0]
        drawn.append((arms[1] - arms[0]) / 4e-2)
    values = np.concatenate(drawn)  # 3600 of them: standard errors 0.017 and 0.012
    assert values.mean() == pytest.approx(0, abs=0.07)
    assert values.std() == pytest.approx(1, abs=0.05)


def test_the_papers_schedule():
    step = instantiate(settings_of("ncrs")["agent"]["step"])
    assert [step(t) for t in (0, 240, 480, 600)] == pytest.approx([4e-2, 2.2e-2, 4e-3, 4e-3], rel=1e-12)
    assert step(120) == pytest.approx(4e-3 + 1.8e-2 * (1 + np.cos(np.pi / 4)))


def test_few_votes_try_several_candidates_one_after_the_other():
    answers = [scores([sign] * 8) for sign in (-1.0, 1.0, -1.0, 1.0)]
    agent, budget = make(32, votes=8), budget_of(*answers, pairs=32)
    before = agent.parameters
    assert agent.iterate(budget)["accepted"] == 0.5
    arms = [parameters for parameters, _, _ in budget.collections]
    # Each candidate is compared with what the ones before it have led to.
    expected = [before, before, arms[1][1], arms[1][1]]
    for (incumbent, candidate), theta in zip(arms, expected, strict=True):
        assert_array_equal(incumbent, theta)
        assert (candidate != theta).all()
    assert_array_equal(agent.parameters, arms[3][1])
    assert [len(pairs) for pairs in budget.asked] == [8, 8, 8, 8]
    assert (budget.trajectories_left, budget.pairs_left) == (0, 0)


@given(pairs=st.integers(1, 40), trajectories=st.integers(2, 80), votes=st.none() | st.integers(1, 40))
def test_whatever_the_budget_all_pairs_are_votes(pairs, trajectories, votes):
    if votes is not None and votes > pairs:
        return
    agent = make(pairs, votes=votes)
    budget = StubBudget(lambda asked: scores([-1.0] * len(asked)), pairs=pairs, trajectories=trajectories)
    agent.iterate(budget)
    assert budget.pairs_left == 0
    candidates = 1 if votes is None else pairs // votes
    assert len(budget.asked) == min(candidates, trajectories // 2)


@pytest.mark.parametrize("votes", [0, -1, 33])
def test_votes_that_the_pairs_cannot_pay_for(votes):
    with pytest.raises(ValueError, match=f"votes must be between 1 and 32, the pairs of an iteration, not {votes}"):
        make(32, votes=votes)
