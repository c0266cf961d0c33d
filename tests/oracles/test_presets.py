"""The contract of an oracle, over every preset in `conf/oracle`."""

import json
from pathlib import Path

import numpy as np
import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

PRESETS = sorted((Path(__file__).parents[2] / "conf" / "oracle").glob("*.yaml"))
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
every_preset = pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)


def preset(path, log, seed=0):
    """The oracle; one that answers from a log gets one."""
    settings = OmegaConf.load(path)
    if OmegaConf.is_missing(settings, "log"):
        settings.log = str(log)
    return instantiate(settings, rng=np.random.default_rng(seed))


@pytest.mark.parametrize("name", SPECIFIED)
def test_presets_have_the_specified_numbers(name):
    settings = OmegaConf.load(PRESETS[0].with_name(f"{name}.yaml"))
    names = ("tau", "gamma", "eps_mistake", "eps_skip", "eps_equal")
    assert (settings.link.path.rpartition(".")[2], *(settings[key] for key in names)) == SPECIFIED[name]
    assert settings.tie == "equal"
    assert settings.bpref_compat is False


@every_preset
def test_answers_and_continues_from_its_state(path, recorded_log):
    log, rewards, first, second = recorded_log
    oracle = preset(path, log)
    seen = oracle.watch(rewards)
    question = {"mean_return": 10.0, "episode_steps": rewards.shape[1]}
    for experts in (1, 4):
        before = json.loads(json.dumps(oracle.state_dict()))
        answers = oracle.compare(seen[first], seen[second], **question, experts=experts)
        preferences = answers.preferences
        assert len(answers) == len(first)
        assert preferences.answered.any()
        assert ((preferences.probability >= 0) & (preferences.probability <= 1)).all()
        assert preferences.score == pytest.approx(2 * preferences.probability - 1, abs=1e-15)
        assert (preferences.probability[~preferences.answered] == 0.5).all()
        np.testing.assert_array_equal(answers.first_sum, rewards.sum(axis=1)[first])
        assert (answers.bits[preferences.answered] >= experts).all()
        again = preset(path, log, seed=99)
        again.load_state_dict(before)
        repeated = again.compare(seen[first], seen[second], **question, experts=experts)
        np.testing.assert_equal(vars(repeated.preferences), vars(preferences))


@every_preset
def test_asks_for_calibration_only_when_it_is_to_be_solved_for(path, recorded_log):
    assert preset(path, recorded_log[0]).needs_calibration is False
