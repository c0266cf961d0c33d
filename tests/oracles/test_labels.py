"""Labels: their mean is the confidence, their second moment 1."""

import numpy as np
import pytest

from oracles.confidence import Confidence
from oracles.labels import Labels


def make(seed=0, **changes):
    return Labels(**{"link": "logistic", "scale": 0.5, **changes}, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("link", ["logistic", "probit", "arctan"])
@pytest.mark.parametrize("difference", [-1.0, 0.0, 0.02, 0.7])
def test_the_mean_is_the_confidence_and_every_answer_takes_a_side(link, difference):
    n = 40_000
    answers = make(link=link).compare(np.full(n, difference))
    assert set(np.unique(answers)) <= {-1, 1}
    expected = Confidence(link=link, scale=0.5, rng=np.random.default_rng(0)).compare(np.array(difference))
    assert answers.mean() == pytest.approx(float(expected), abs=5 / np.sqrt(n))


def test_votes_add_up():
    total = make().compare(np.full(2_000, 0.3), votes=9)
    assert set(np.unique(total)) <= set(range(-9, 10, 2))
    assert total.mean() == pytest.approx(9 * np.tanh(0.3), abs=5 * 3 / np.sqrt(2_000))


@pytest.mark.parametrize(
    ("changes", "words"), [({"scale": 0.0}, "must be positive, not 0.0"), ({"link": "cosine"}, "not 'cosine'")]
)
def test_wrong_settings_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)
