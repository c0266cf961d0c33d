"""The contract of an oracle, over every preset in `conf/oracle`."""

import json

import numpy as np
import pytest
from teachers import PRESETS, preset

from pbrl.run.settings import build
from pbrl.types import Question

SPECIFIED = {  # link, tau, gamma, eps_mistake, eps_skip, eps_equal
    "rational": ("logistic", 0, 1, 0, 0, 0),
    "stochastic": ("logistic", 1, 1, 0, 0, 0),
    "probit": ("probit", 1, 1, 0, 0, 0),
    "arctan": ("arctan", 1, 1, 0, 0, 0),
    "mistake": ("logistic", 0, 1, 0.1, 0, 0),
    "skip": ("logistic", 0, 1, 0, 0.1, 0),
    "equal": ("logistic", 0, 1, 0, 0, 0.1),
    "myopic": ("logistic", 0, 0.9, 0, 0, 0),
    "irrational": ("logistic", 1, 0.9, 0.1, 0, 0),
}
every_preset = pytest.mark.parametrize("name", PRESETS)


def oracle(name, log, seed=0):
    """The oracle; one that answers from a log gets one."""
    settings = preset(name, *([f"oracle.log={log}"] if name == "replay" else []))
    return build(settings, rng=np.random.default_rng(seed))


def test_every_preset_of_a_single_teacher_is_specified():
    assert {*SPECIFIED, "panel", "replay"} == {*PRESETS}


@pytest.mark.parametrize("name", SPECIFIED)
def test_presets_have_the_specified_numbers(name):
    settings = preset(name)
    names = ("link", "tau", "gamma", "eps_mistake", "eps_skip", "eps_equal")
    assert tuple(settings[key] for key in names) == SPECIFIED[name]
    assert settings["tie"] == "equal"
    assert settings["bpref_compat"] is False


def test_the_panel_is_of_ten_irrational_teachers():
    settings = preset("panel")
    assert (settings["members"], settings["vote"]) == (10, "mean")
    assert settings["teacher"] == {**preset("irrational"), "_partial_": True}


@every_preset
def test_answers_and_continues_from_its_state(name, recorded_log):
    log, rewards, first, second = recorded_log
    one = oracle(name, log)
    assert one.sees == "rewards"
    for experts in (1, 4):
        asked = {"mean_return": 10.0, "episode_steps": rewards.shape[1], "experts": experts}
        question = Question.about_rewards(rewards[first], rewards[second], **asked)
        before = json.loads(json.dumps(one.state_dict()))
        answers = one.compare(question)
        preferences = answers.preferences
        assert len(answers) == len(first)
        assert preferences.answered.any()
        assert ((preferences.probability >= 0) & (preferences.probability <= 1)).all()
        assert preferences.score == pytest.approx(2 * preferences.probability - 1, abs=1e-15)
        assert (preferences.probability[~preferences.answered] == 0.5).all()
        np.testing.assert_array_equal(answers.first_sum, rewards.sum(axis=1)[first])
        assert (answers.bits[preferences.answered] >= experts).all()
        again = oracle(name, log, seed=99)
        again.load_state_dict(before)
        repeated = again.compare(question)
        np.testing.assert_equal(vars(repeated.preferences), vars(preferences))


@every_preset
def test_a_clip_shown_once_and_a_clip_shown_in_every_pair_are_the_same(name, recorded_log):
    log, rewards, first, second = recorded_log
    asked = {"mean_return": 10.0, "episode_steps": rewards.shape[1]}
    shown_once = Question(first=first, second=second, steps=rewards.shape[1], rewards=rewards, **asked)
    in_every_pair = Question.about_rewards(rewards[first], rewards[second], **asked)
    one, other = (oracle(name, log).compare(question) for question in (shown_once, in_every_pair))
    np.testing.assert_equal(vars(one.preferences), vars(other.preferences))


@every_preset
def test_no_preset_needs_calibration(name, recorded_log):
    assert getattr(oracle(name, recorded_log[0]), "needs_calibration", False) is False


@every_preset
def test_a_question_without_rewards_is_refused(name, recorded_log):
    one = oracle(name, recorded_log[0])
    before = one.state_dict()
    with pytest.raises(ValueError, match="judges by rewards: this question has none"):
        one.compare(Question(first=np.array([0]), second=np.array([1]), steps=5, episode_steps=5))
    assert one.state_dict() == before
