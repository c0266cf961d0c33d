"""The simulated teacher: known answers, properties, rates, and what it refuses."""

import json
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import binom
from teachers import RATIONAL

from oracles import links
from oracles.teacher import Teacher
from pbrl.types import Question, Reason

IRRATIONAL = {"tau": 1.0, "gamma": 0.9, "eps_mistake": 0.1}


def teacher(seed=0, **traits):
    return RATIONAL(**traits, rng=np.random.default_rng(seed))


def ask(teacher, first, second, mean_return=100.0, episode_steps=None, experts=1):
    """About clips [P, H] of episodes that are no longer, unless said otherwise."""
    first, second = np.atleast_2d(first), np.atleast_2d(second)
    asked = {"mean_return": mean_return, "episode_steps": episode_steps or first.shape[1], "experts": experts}
    return teacher.compare(Question.about_rewards(first, second, **asked))


def sums(*values):
    """One-step clips with these sums [P, 1]."""
    return np.array(values, dtype=float)[:, None]


# Known answers


def test_the_rational_teacher_names_the_better_clip():
    answers = ask(teacher(), sums(1, 2, 3), sums(2, 1, 3))
    assert answers.preferences.probability.tolist() == [1, 0, 0.5]
    assert answers.preferences.score.tolist() == [1, -1, 0]
    assert answers.preferences.label[:2].tolist() == [1, 0]
    assert answers.preferences.answered.all()
    assert answers.first_sum.tolist() == [1, 2, 3]
    assert answers.second_sum.tolist() == [2, 1, 3]
    assert answers.bits.tolist() == [1, 1, 1]


def test_bpref_takes_the_first_on_an_exact_tie():
    preferences = ask(teacher(tie="first"), sums(3, 1), sums(3, 2)).preferences
    assert preferences.probability.tolist() == [0, 1]
    assert preferences.label.tolist() == [0, 1]


@pytest.mark.parametrize("link", [links.logistic, links.probit, links.arctan])
def test_the_link_is_applied_to_the_gap_in_units_of_tau(link):
    preferences = ask(teacher(link=link, tau=4.0), sums(1.0, 7.0), sums(7.0, 1.0)).preferences
    np.testing.assert_array_equal(preferences.probability, link(np.array([1.5, -1.5])))


def test_a_link_can_be_named():
    for name in ("logistic", "probit", "arctan"):
        assert teacher(link=name).link is getattr(links, name)


def test_tau_in_bprefs_unit_grows_with_the_clip():
    first, second = np.zeros((1, 200)), np.full((1, 200), 0.03)  # a gap of 6 over 200 steps
    answers = ask(teacher(tau={"bpref": 0.5}), first, second)
    assert answers.tau == 2.0
    assert answers.preferences.probability == pytest.approx(1 / (1 + np.exp(-3.0)), abs=1e-12)


def test_myopia_weighs_steps_by_gamma_converted_from_50_steps():
    steps = 1000
    gamma = 0.9 ** (50 / steps)
    assert gamma == pytest.approx(0.9947, abs=5e-5)
    early, late = np.zeros((1, steps)), np.zeros((1, steps))
    early[0, 0], late[0, -1] = 1.0, 0.5
    seen = teacher(gamma=0.9).watch(np.concatenate([early, late]))
    assert seen.undiscounted.tolist() == [1.0, 0.5]
    assert seen.myopic == pytest.approx([gamma**999, 0.5], rel=1e-12)
    assert ask(teacher(gamma=0.9), early, late).preferences.label == 1
    assert ask(teacher(), early, late).preferences.label == 0


def test_skip_is_strict_and_uses_the_undiscounted_sums():
    # Mean return 100 over an episode of the clip's length: the threshold is 10.
    answers = ask(teacher(eps_skip=0.1), sums(1, 1, 9, 10), sums(10, 10.5, 9, 2))
    assert answers.preferences.answered.tolist() == [False, True, False, False]
    assert answers.reason.tolist() == [Reason.SKIPPED, Reason.ANSWERED, Reason.SKIPPED, Reason.SKIPPED]
    assert answers.bits.tolist() == [0, 1, 0, 0]


def test_equal_is_strict_and_overrides_confidence_and_mistakes():
    answers = ask(teacher(eps_equal=0.1, eps_mistake=1.0), sums(50, 50, 50), sums(59, 60, 41))
    assert answers.reason.tolist() == [Reason.EQUAL, Reason.MISTAKEN, Reason.EQUAL]
    assert answers.preferences.probability.tolist() == [0.5, 0, 0.5]
    assert answers.preferences.label.tolist() == [0.5, 0, 0.5]
    assert answers.preferences.answered.all()


@pytest.mark.parametrize("mean_return", [0.0, -50.0])
def test_without_success_there_is_no_threshold(mean_return):
    answers = ask(teacher(eps_skip=0.1, eps_equal=0.1), sums(-1, 5), sums(-1, 5), mean_return)
    assert answers.preferences.answered.all()
    assert (answers.reason == Reason.ANSWERED).all()


def test_thresholds_scale_with_the_clips_share_of_the_episode():
    first, second = np.full((1, 50), 0.2), np.full((1, 50), 0.29)  # sums 10 and 14.5
    episode = {"mean_return": 1000.0, "episode_steps": 1000}  # margin 50
    assert ask(teacher(eps_equal=0.1), first, second, **episode).reason == Reason.EQUAL  # 4.5 < 5
    assert ask(teacher(eps_equal=0.08), first, second, **episode).reason == Reason.ANSWERED  # 4.5 > 4
    assert ask(teacher(eps_skip=0.3), first, second, **episode).reason == Reason.SKIPPED  # 14.5 < 15


def test_bpref_compat_multiplies_by_epsilon_twice_from_the_second_round():
    pairs = sums(0, 0, 0), sums(0.5, 5, 20)  # thresholds 10 at first, then 1
    one, two = teacher(eps_skip=0.1, eps_equal=0.1), teacher(eps_skip=0.1, eps_equal=0.1, bpref_compat=True)
    skipped, answered = Reason.SKIPPED, Reason.ANSWERED
    for _ in range(3):
        assert ask(one, *pairs).reason.tolist() == [skipped, skipped, answered]
    assert ask(two, *pairs).reason.tolist() == [skipped, skipped, answered]
    for _ in range(2):
        assert ask(two, *pairs).reason.tolist() == [skipped, answered, answered]
    assert ask(two, sums(50), sums(50.5)).reason == Reason.EQUAL
    assert ask(two, sums(50), sums(51.5)).reason == Reason.ANSWERED


def test_a_clip_is_summed_the_same_in_any_company():
    rewards = np.random.default_rng(0).random((200, 1000))
    seen = teacher(gamma=0.9).watch(rewards)
    alone = [teacher(gamma=0.9).watch(rewards[[row]]) for row in range(200)]
    assert seen.myopic.tolist() == [float(one.myopic[0]) for one in alone]
    assert seen.undiscounted.tolist() == [float(one.undiscounted[0]) for one in alone]
    assert teacher(gamma=0.9).watch(np.asfortranarray(rewards)).myopic.tolist() == seen.myopic.tolist()


def test_watching_first_and_comparing_at_once_agree():
    rng = np.random.default_rng(1)
    rewards, first, second = rng.random((20, 30)), rng.integers(20, size=500), rng.integers(20, size=500)
    at_once = ask(teacher(**IRRATIONAL), rewards[first], rewards[second])
    watcher = teacher(**IRRATIONAL)
    seen = watcher.watch(rewards)
    watched = watcher.compare_seen(seen[first], seen[second], mean_return=100.0, episode_steps=30)
    np.testing.assert_equal(vars(watched.preferences), vars(at_once.preferences))
    np.testing.assert_array_equal(watched.reason, at_once.reason)


# Properties

clips = arrays(np.float64, (6, 4), elements=st.floats(-1e3, 1e3, width=32))
traits = st.fixed_dictionaries(
    {
        "link": st.sampled_from([links.logistic, links.probit, links.arctan]),
        "tau": st.sampled_from([0.0, 1e-3, 1.0, {"bpref": 50.0}, 1e6]),
        "gamma": st.sampled_from([1.0, 0.9]),
        "eps_mistake": st.sampled_from([0.0, 0.3, 1.0]),
        "eps_skip": st.sampled_from([0.0, 0.1, 1.0]),
        "eps_equal": st.sampled_from([0.0, 0.1, 1.0]),
    }
)


@given(first=clips, second=clips, traits=traits, seed=st.integers(0, 2**32))
def test_swapping_the_clips_mirrors_the_answer(first, second, traits, seed):
    one, other = teacher(seed, **traits), teacher(seed, **traits)
    here, there = ask(one, first, second), ask(other, second, first)
    np.testing.assert_array_equal(there.preferences.probability, 1 - here.preferences.probability)
    np.testing.assert_array_equal(there.preferences.score, -here.preferences.score)
    np.testing.assert_array_equal(there.preferences.answered, here.preferences.answered)
    np.testing.assert_array_equal(there.reason, here.reason)
    apart = one.watch(first).myopic != one.watch(second).myopic
    apart |= here.preferences.label == 0.5
    np.testing.assert_array_equal(there.preferences.label[apart], 1 - here.preferences.label[apart])


@given(first=clips, second=clips, traits=traits, seed=st.integers(0, 2**32))
def test_what_comes_back_is_in_range_and_skipped_rows_say_nothing(first, second, traits, seed):
    answers = ask(teacher(seed, **traits), first, second)
    preferences = answers.preferences
    assert ((preferences.probability >= 0) & (preferences.probability <= 1)).all()
    assert (np.abs(preferences.score) <= 1).all()
    np.testing.assert_array_equal(preferences.score, 2 * preferences.probability - 1)
    assert np.isin(preferences.label, [0, 0.5, 1]).all()
    np.testing.assert_array_equal(preferences.answered, answers.reason != Reason.SKIPPED)
    silent = ~preferences.answered | (answers.reason == Reason.EQUAL)
    assert (preferences.probability[silent] == 0.5).all()
    assert (preferences.score[silent] == 0).all()
    assert (preferences.label[silent] == 0.5).all()


@given(gaps=arrays(np.float64, 50, elements=st.floats(-1e6, 1e6)), traits=traits)
def test_a_wider_gap_is_never_less_likely(gaps, traits):
    untouched = {"eps_mistake": 0.0, "eps_skip": 0.0, "eps_equal": 0.0}
    gaps = np.sort(gaps)[:, None]
    q = ask(teacher(**(traits | untouched)), np.zeros_like(gaps), gaps).preferences.probability
    assert (np.diff(q) >= 0).all()


def test_no_trait_moves_the_stream():
    def state_after(**traits):
        one = teacher(**traits)
        ask(one, sums(1, 2, 3), sums(3, 2, 1))
        return one.state_dict()["rng"]

    assert state_after() == state_after(**IRRATIONAL) == state_after(eps_skip=1.0, eps_equal=1.0)


# Rates: 10^5 draws lie within the exact binomial interval at one in a million

DRAWS = 100_000


def assert_rate(hits, probability, draws=DRAWS):
    low, high = binom.interval(1 - 1e-6, draws, probability)
    assert low <= hits <= high, f"{hits} of {draws}, expected {probability}"


@pytest.mark.parametrize("link", [links.logistic, links.probit, links.arctan])
@pytest.mark.parametrize("gap", [-2.0, -0.1, 0.0, 0.5, 3.0])
def test_labels_are_drawn_with_probability_q(link, gap):
    first = np.zeros((DRAWS, 1))
    preferences = ask(teacher(link=link, tau=1.0), first, first + gap).preferences
    q = float(link(np.array(gap)))
    assert (preferences.probability == q).all()
    assert_rate((preferences.label == 1).sum(), q)
    assert np.isin(preferences.label, [0, 1]).all()


@pytest.mark.parametrize("eps_mistake", [0.01, 0.1, 0.5, 1.0])
def test_mistakes_turn_label_and_confidence_round_at_their_rate(eps_mistake):
    first = np.zeros((DRAWS, 1))
    answers = ask(teacher(eps_mistake=eps_mistake), first, first + 1)
    mistaken = answers.reason == Reason.MISTAKEN
    assert_rate(mistaken.sum(), eps_mistake)
    np.testing.assert_array_equal(answers.preferences.label, np.where(mistaken, 0, 1))
    np.testing.assert_array_equal(answers.preferences.probability, np.where(mistaken, 0, 1))


def test_a_noisy_mistaken_teacher_errs_at_the_combined_rate():
    first = np.zeros((DRAWS, 1))
    preferences = ask(teacher(tau=1.0, eps_mistake=0.1), first, first + 1).preferences
    wrong = 1 / (1 + np.exp(1))
    assert_rate((preferences.label == 0).sum(), 0.9 * wrong + 0.1 * (1 - wrong))


def test_skips_and_ties_come_at_the_rate_of_the_rewards():
    rng = np.random.default_rng(3)
    first, second = rng.random((2, DRAWS, 1))
    answers = ask(teacher(eps_skip=0.3), first, second, mean_return=1.0)
    assert_rate((answers.reason == Reason.SKIPPED).sum(), 0.3**2)  # both below 0.3
    answers = ask(teacher(eps_equal=0.2), first, second, mean_return=1.0)
    assert_rate((answers.reason == Reason.EQUAL).sum(), 1 - 0.8**2)  # |U1 - U2| < 0.2


def test_mistakes_are_independent_of_labels_and_of_each_other():
    first = np.zeros((DRAWS, 1))
    answers = ask(teacher(tau=1.0, eps_mistake=0.5), first, first)
    mistaken, label = answers.reason == Reason.MISTAKEN, answers.preferences.label == 1
    assert_rate((mistaken & label).sum(), 0.25)
    assert_rate((mistaken[1:] & mistaken[:-1]).sum(), 0.25, DRAWS - 1)


# State


def test_a_restored_teacher_continues_exactly():
    rng = np.random.default_rng(5)
    first, second = rng.normal(size=(2, 3, 100, 8))
    traits = IRRATIONAL | {"eps_equal": 0.3, "bpref_compat": True}
    through = teacher(seed=1, **traits)
    ask(through, first[0], second[0])
    state = json.loads(json.dumps(through.state_dict()))
    restored = teacher(seed=2, **traits)
    restored.load_state_dict(state)
    for k in (1, 2):
        expected, actual = ask(through, first[k], second[k]), ask(restored, first[k], second[k])
        np.testing.assert_equal(vars(actual.preferences), vars(expected.preferences))


# What it refuses


@pytest.mark.parametrize("epsilon", ["eps_mistake", "eps_skip", "eps_equal"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_epsilons_are_probabilities(epsilon, value):
    with pytest.raises(ValueError, match=rf"{epsilon} must be in \[0, 1\], not {value}"):
        teacher(**{epsilon: value})


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        ({"tau": -1.0}, r"tau must be finite and >= 0 .*, not -1.0"),
        ({"tau": float("nan")}, r"tau must be finite and >= 0 .*, not nan"),
        ({"tau": {"bpref": -2.0}}, r"not -2.0"),
        (
            {"tau": {"boltzmann": 1.0}},
            r"tau must be a number, {bpref: x} or {error_rate: x}, not .*boltzmann",
        ),
        ({"tau": {"bpref": 1.0, "error_rate": 0.2}}, r"tau must be a number"),
        ({"tau": {"error_rate": 0.5}}, r"below 1/2 \(a coin\), not 0.5"),
        ({"tau": {"error_rate": 0.1}, "eps_mistake": 0.1}, r"above eps_mistake = 0.1 .*, not 0.1"),
        ({"link": "linear"}, r"link must be logistic, probit, arctan .*, not 'linear'"),
        ({"link": "np"}, r"link must be logistic, probit, arctan .*, not 'np'"),
        ({"gamma": 0.0}, r"gamma must be in \(0, 1\] .*, not 0.0"),
        ({"gamma": 1.1}, r"not 1.1"),
        ({"tie": "second"}, r"tie must be \"equal\" or \"first\", not 'second'"),
    ],
)
def test_bad_traits_are_named(traits, message):
    with pytest.raises(ValueError, match=message):
        teacher(**traits)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (np.zeros((2, 5)), np.zeros((2, 4)), r"two clips of equal length: .*not \[2, 5\] and \[2, 4\]"),
        (np.zeros((3, 5)), np.zeros((2, 5)), r"two clips of equal length: .*not \[3, 5\] and \[2, 5\]"),
        (np.zeros(5), np.zeros(5), r"\[pairs, steps\], not \[5\] and \[5\]"),
    ],
)
def test_rewards_that_are_no_pairs_make_no_question(first, second, message):
    with pytest.raises(ValueError, match=message):
        Question.about_rewards(first, second, mean_return=0.0, episode_steps=10)


def question_about(rewards, **changes):
    """One pair, of the first two clips."""
    asked = {"first": np.array([0]), "second": np.array([1]), "steps": 5, "episode_steps": 10, "mean_return": 0.0}
    return Question(**{**asked, "rewards": rewards, **changes})


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (question_about(np.zeros((0, 5))), r"at least one of each, not \(0, 5\)"),
        (question_about(np.zeros((2, 0))), r"at least one of each, not \(2, 0\)"),
        (question_about(np.zeros(5)), r"\[clips, steps\] .*not \(5,\)"),
        (question_about([[1.0, 2.0], [3.0]]), "all of one length"),
        (question_about(np.array([[0.0, 1.0], [np.nan, 1.0]])), "clip 1 sum to nan: all must be finite"),
        (question_about(np.array([[np.inf, 1.0], [0.0, 1.0]])), "clip 0 sum to inf"),
        (question_about(None), "judges by rewards: this question has none"),
        (question_about(np.zeros((2, 5)), mean_return=None), "scale with the mean return: this question has none"),
        (question_about(np.zeros((2, 5)), mean_return=float("nan")), "mean_return must be finite, not nan"),
        (question_about(np.zeros((2, 5)), episode_steps=4), "clips of 5 steps are longer than the episode's 4"),
        (question_about(np.zeros((2, 5)), experts=0), "experts must be at least 1, not 0"),
        (question_about(np.zeros((2, 5)), first=np.array([], int), second=np.array([], int)), "ask about at least one"),
        (question_about(np.zeros((2, 5)), second=np.array([1, 1])), "1 clips of 5 steps and 2 of 5"),
    ],
)
def test_bad_questions_are_refused_before_anything_is_drawn(question, message):
    one = teacher()
    before = one.state_dict()
    with pytest.raises(ValueError, match=message):
        one.compare(question)
    assert one.state_dict() == before


def test_watched_clips_of_two_lengths_are_no_pair():
    one = teacher()
    with pytest.raises(ValueError, match="2 clips of 5 steps and 2 of 4"):
        one.compare_seen(one.watch(np.zeros((2, 5))), one.watch(np.zeros((2, 4))), mean_return=0.0, episode_steps=10)


def test_every_trait_must_be_given():
    for name in RATIONAL.keywords:
        rest = {key: value for key, value in RATIONAL.keywords.items() if key != name}
        with pytest.raises(TypeError, match=name):
            partial(Teacher, rng=np.random.default_rng(0))(**rest)
