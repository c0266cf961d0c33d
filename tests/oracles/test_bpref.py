"""B-Pref's labelling, written again from the words of the specification, pair by pair in plain Python.

Nothing is shared with `oracles` but the presets' numbers and the meaning of the draws: v decides the mistake,
u the label, which follows the teacher's inclination iff u is below its confidence in it.
"""

import math

import numpy as np
import pytest
from teachers import PRESETS, preset

from pbrl.run.settings import build
from pbrl.types import Question

SOME, MANY = 10_000, 100_000  # pairs
STEPS = 5
EPISODE_STEPS = 20
MEAN_RETURN = 10.0
REASONS = ["ANSWERED", "SKIPPED", "EQUAL", "MISTAKEN"]

LINKS = {
    "logistic": lambda u: 1 / (1 + math.exp(-u)) if u >= 0 else math.exp(u) / (1 + math.exp(u)),
    "probit": lambda u: math.erfc(-u / math.sqrt(2)) / 2,
    "arctan": lambda u: 0.5 + math.atan(u) / math.pi,
}


def bpref_answer(r1, r2, u, v, traits, first_round):
    """(probability, label, answered, why) of one pair."""
    eps_skip, eps_equal = traits["eps_skip"], traits["eps_equal"]
    margin = MEAN_RETURN * STEPS / EPISODE_STEPS
    threshold_skip, threshold_equal = margin * eps_skip, margin * eps_equal
    if traits["bpref_compat"] and not first_round:
        threshold_skip, threshold_equal = threshold_skip * eps_skip, threshold_equal * eps_equal
    u1, u2 = sum(r1), sum(r2)
    if threshold_skip > 0 and not max(u1, u2) > threshold_skip:
        return 0.5, 0.5, False, "SKIPPED"
    if abs(u1 - u2) < threshold_equal:
        return 0.5, 0.5, True, "EQUAL"
    gamma = traits["gamma"] ** (50 / STEPS)
    s1 = s2 = 0.0
    for t in range(STEPS):
        s1 = gamma * s1 + r1[t]
        s2 = gamma * s2 + r2[t]
    if traits["tau"] > 0:
        q = LINKS[traits["link"]]((s2 - s1) / traits["tau"])
    elif s1 == s2:
        q = 0.5 if traits["tie"] == "equal" else 0.0
    else:
        q = 1.0 if s1 < s2 else 0.0
    inclination, confidence = (1, q) if s1 <= s2 else (0, 1 - q)
    label = inclination if u < confidence else 1 - inclination
    if v < traits["eps_mistake"]:
        return 1 - q, 1 - label, True, "MISTAKEN"
    return q, label, True, "ANSWERED"


def assert_agrees(traits, rounds, pairs):
    # Multiples of 1/8, so that sums are exact and ties and thresholds are met.
    rng = np.random.default_rng(11)
    first, second = rng.integers(-2, 6, size=(2, pairs, STEPS)) / 8
    teacher = build(traits, rng=np.random.default_rng(7))
    draws = np.random.default_rng(7)
    question = Question.about_rewards(first, second, mean_return=MEAN_RETURN, episode_steps=EPISODE_STEPS)
    for labelling_round in range(rounds):
        answers = teacher.compare(question)
        u, v = draws.random((2, pairs)).tolist()
        expected = [
            bpref_answer(*pair, traits, labelling_round == 0)
            for pair in zip(first.tolist(), second.tolist(), u, v, strict=True)
        ]
        probability, label, answered, why = zip(*expected, strict=True)
        np.testing.assert_allclose(answers.preferences.probability, probability, rtol=0, atol=1e-14)
        np.testing.assert_array_equal(answers.preferences.label, label)
        np.testing.assert_array_equal(answers.preferences.answered, answered)
        assert [REASONS[code] for code in answers.reason] == list(why)
    return set(why)


def single_teachers():
    settings = {name: preset(name) for name in PRESETS if name != "replay"}
    return {name: traits for name, traits in settings.items() if traits["_target_"] == "oracles.teacher.Teacher"}


@pytest.mark.parametrize("pairs", [SOME, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("traits", single_teachers().values(), ids=single_teachers())
def test_every_preset_labels_as_specified(traits, pairs):
    assert_agrees(traits, rounds=1, pairs=pairs)


def test_all_irrationalities_at_once_with_bprefs_slips():
    traits = preset("irrational") | {"eps_skip": 0.4, "eps_equal": 0.4, "bpref_compat": True, "tie": "first"}
    assert assert_agrees(traits, rounds=2, pairs=SOME) == set(REASONS)
