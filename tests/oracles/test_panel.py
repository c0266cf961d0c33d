"""Panels: what becomes of the labels of M teachers, and how many bits they are."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import binom
from teachers import RATIONAL

from oracles.panel import Panel
from pbrl.types import Question, Reason


def panel(members=5, vote="mean", seed=0, **traits):
    return Panel(teacher=partial(RATIONAL, **traits), members=members, vote=vote, rng=np.random.default_rng(seed))


def ask(oracle, first, second, **question):
    clips = np.array(first, dtype=float)[:, None], np.array(second, dtype=float)[:, None]
    return oracle.compare(Question.about_rewards(*clips, mean_return=10.0, episode_steps=1, **question))


def test_the_rational_panel_is_unanimous():
    answers = ask(panel(), [1, 2], [2, 1])
    assert answers.preferences.probability.tolist() == [1, 0]
    assert answers.preferences.score.tolist() == [1, -1]
    assert answers.preferences.label.tolist() == [1, 0]
    assert answers.bits.tolist() == [5, 5]


def test_shares_follow_the_binomial_distribution():
    pairs, members, q = 100_000, 10, 1 / (1 + np.exp(-0.5))
    answers = ask(panel(members=members, tau=1.0), np.zeros(pairs), np.full(pairs, 0.5))
    votes = np.rint(answers.preferences.probability * members).astype(int)
    counts = np.bincount(votes, minlength=members + 1)
    low, high = binom.interval(1 - 1e-6, pairs, binom.pmf(np.arange(members + 1), members, q))
    assert ((low <= counts) & (counts <= high)).all()
    assert answers.bits.sum() == members * pairs


@pytest.mark.parametrize("members", [4, 5])
def test_the_majority_decides_and_level_votes_are_equal(members):
    pairs = 1000
    mean = ask(panel(members, "mean", tau=1.0), np.zeros(pairs), np.full(pairs, 0.3)).preferences
    majority = ask(panel(members, "majority", tau=1.0), np.zeros(pairs), np.full(pairs, 0.3)).preferences
    side = np.where(mean.probability > 0.5, 1.0, np.where(mean.probability < 0.5, 0.0, 0.5))
    assert (side == 0.5).any() == (members == 4)
    for label in (majority.probability, majority.label, mean.label):
        np.testing.assert_array_equal(label, side)
    np.testing.assert_array_equal(majority.score, 2 * side - 1)


def test_a_panel_of_one_gives_its_label_as_the_share():
    preferences = ask(panel(1, tau=1.0), np.zeros(100), np.ones(100)).preferences
    np.testing.assert_array_equal(preferences.probability, preferences.label)


def test_equal_labels_count_one_half_and_skips_no_bits():
    answers = ask(panel(eps_equal=0.1, eps_skip=0.2), [5.0, 1.0], [5.5, 1.5])
    assert answers.reason.tolist() == [Reason.EQUAL, Reason.SKIPPED]
    assert answers.preferences.probability.tolist() == [0.5, 0.5]
    assert answers.preferences.answered.tolist() == [True, False]
    assert answers.bits.tolist() == [5, 0]


def test_a_panel_is_mistaken_where_most_of_its_members_are():
    answers = ask(panel(eps_mistake=1.0), [1], [2])
    assert answers.reason.tolist() == [Reason.MISTAKEN]
    assert answers.preferences.probability.tolist() == [0]
    pairs = 100_000
    for members, more_than_half in ((2, 0.3**2), (3, 3 * 0.3**2 * 0.7 + 0.3**3)):
        answers = ask(panel(members, eps_mistake=0.3), np.zeros(pairs), np.ones(pairs))
        mistaken = answers.reason == Reason.MISTAKEN
        np.testing.assert_array_equal(mistaken, answers.preferences.label == 0)
        low, high = binom.interval(1 - 1e-6, pairs, more_than_half)
        assert low <= mistaken.sum() <= high


def test_swapping_mirrors_the_score_exactly():
    gaps = np.random.default_rng(2).normal(size=1000)
    here = ask(panel(7, tau=1.0, eps_mistake=0.2), np.zeros(1000), gaps).preferences
    there = ask(panel(7, tau=1.0, eps_mistake=0.2), gaps, np.zeros(1000)).preferences
    np.testing.assert_array_equal(there.score, -here.score)
    np.testing.assert_allclose(there.probability, 1 - here.probability, rtol=0, atol=2e-16)


def test_a_teacher_asked_as_many_experts_is_a_panel():
    gaps = np.random.default_rng(2).normal(size=1000)
    experts = ask(RATIONAL(tau=1.0, rng=np.random.default_rng(0)), np.zeros(1000), gaps, experts=5)
    members = ask(panel(5, tau=1.0), np.zeros(1000), gaps)
    np.testing.assert_equal(vars(experts.preferences), vars(members.preferences))
    assert (experts.bits == 5).all()


def test_experts_of_a_panel_are_panels():
    answers = ask(panel(3, "majority", tau=1.0), np.zeros(1000), np.full(1000, 0.3), experts=2)
    assert set(answers.preferences.probability) == {0, 0.5, 1}  # two panels, each with one voice
    assert (answers.bits == 6).all()


def test_one_question_to_a_panel_is_one_round_of_labelling():
    one = panel(eps_equal=0.1, bpref_compat=True)
    assert ask(one, [5], [5.5]).reason == Reason.EQUAL  # threshold 1
    assert ask(one, [5], [5.5]).reason == Reason.ANSWERED  # threshold 0.1
    assert one.state_dict()["rounds"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"members": 0}, "at least 1 member, not 0"),
        ({"members": -3}, "at least 1 member, not -3"),
        ({"vote": "median"}, '"mean" or "majority", not \'median\''),
        ({"eps_mistake": 2.0}, "eps_mistake must be in"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        panel(**settings)


def test_no_experts_are_refused():
    with pytest.raises(ValueError, match="experts must be at least 1, not 0"):
        ask(panel(), [1], [2], experts=0)
