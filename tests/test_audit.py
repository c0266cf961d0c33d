"""The audit: its numbers against answers that are known, and the command as a user types it."""

import csv
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from teachers import RATIONAL

from oracles import links
from pbrl.audit import agreement, ask, audit_run, audit_teacher, calibration, command, rates, share, write
from pbrl.run.preference_log import PreferenceLog
from pbrl.types import Answers, Preferences, Question, Reason
from tests.fake_simulator import FakeSimulator

ROOT = Path(__file__).parents[1]
TEACHER = partial(RATIONAL, tau=20.0, eps_mistake=0.1)


class OnePolicy:
    """The fake simulator's policy: one number, its reward per step."""

    def initial(self, rng):
        return rng.normal(size=1).astype(np.float32)


def answers_to(oracle, pairs=40_000):
    how = {"trajectories": 64, "pairs": pairs, "rng": np.random.default_rng(1)}
    return ask(oracle, FakeSimulator(), OnePolicy(), **how)


def by_hand():
    """Six pairs: skipped, equal, mistaken, right, wrong by noise, and a coin tossed on a true tie."""
    probability = np.array([0.5, 0.5, 0.2, 0.9, 0.9, 0.5])
    return Answers(
        preferences=Preferences(
            probability=probability,
            score=2 * probability - 1,
            label=np.array([0.5, 0.5, 0, 1, 1, 1]),
            answered=np.array([False, True, True, True, True, True]),
        ),
        reason=np.array(
            [
                Reason.SKIPPED,
                Reason.EQUAL,
                Reason.MISTAKEN,
                Reason.ANSWERED,
                Reason.ANSWERED,
                Reason.ANSWERED,
            ],
            dtype=np.uint8,
        ),
        first_sum=np.array([0.0, 1, 1, 1, 5, 3]),
        second_sum=np.array([0.0, 2, 3, 5, 2, 3]),
        bits=np.array([0, 1, 1, 1, 1, 1]),
        tau=1.0,
    )


def test_rates_by_hand():
    skipped, equal, mistaken, wrong = rates(by_hand())
    assert (skipped.share, skipped.count) == (1 / 6, 6)
    assert (equal.share, equal.count) == (1 / 5, 5)
    assert (mistaken.share, mistaken.count) == (1 / 4, 4)
    assert (wrong.share, wrong.count) == (2 / 3, 3)


def test_curves_by_hand():
    near, middle, far = agreement(by_hand(), 3)
    assert [(each.at, each.share) for each in (near, middle, far)] == [(2, 0), (3, 0), (4, 1)]
    curve = {(each.figure, round(each.at, 9)): each.share for each in calibration(by_hand(), 10)}
    assert curve == {
        ("second named", 0.2): 0,
        ("second named", 0.9): 1,
        ("second better", 0.2): 1,
        ("second better", 0.9): 0.5,
    }


def test_intervals_are_wilsons():
    each = share("mistaken", np.arange(100) < 10)
    assert (each.low, each.high) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert (share("none", np.array([], dtype=bool)).low, share("none", np.array([], dtype=bool)).high) == (
        0,
        1,
    )


def test_the_realised_rates_are_the_configured_ones():
    answers = answers_to(TEACHER(rng=np.random.default_rng(0)))
    _, _, mistaken, wrong = rates(answers)
    assert abs(mistaken.share - 0.1) < 5 * np.sqrt(0.1 * 0.9 / mistaken.count)
    q = links.logistic(np.abs(answers.second_sum - answers.first_sum) / 20.0)
    expected = (0.9 * (1 - q) + 0.1 * q).mean()
    assert abs(wrong.share - expected) < 5 * np.sqrt(0.25 / wrong.count)
    curve = agreement(answers, 10)
    assert all(one.share - 0.03 < other.share for one, other in pairwise(curve))
    for each in calibration(answers, 10):
        if each.figure == "second named":  # what it states is what it does, mistakes included
            assert abs(each.share - each.at) < 0.05


def test_pairs_are_of_two_trajectories_and_a_solved_temperature_is_used():
    oracle = TEACHER(tau={"error_rate": 0.3}, rng=np.random.default_rng(0))
    answers = answers_to(oracle)
    assert (answers.first_sum != answers.second_sum).all()
    assert answers.tau == oracle.temperature.solution[0]
    assert rates(answers)[3].share == pytest.approx(0.3, abs=0.03)  # calibrated on other trajectories


def test_the_numbers_are_written_and_drawn(tmp_path, capsys):
    write(by_hand(), tmp_path, title="by hand", bins=10)
    with (tmp_path / "audit.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["figure"] for row in rows[:4]] == [each.figure for each in rates(by_hand())]
    assert float(rows[2]["share"]) == 0.25
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "audit.svg").read_bytes()
    assert "mistaken, of all judged" in capsys.readouterr().out
    write(by_hand(), tmp_path, title="by hand", bins=10)
    assert (tmp_path / "audit.svg").read_bytes() == picture


def test_a_teacher_that_only_skips_can_be_audited(tmp_path, capsys):
    oracle = TEACHER(eps_skip=1.0, rng=np.random.default_rng(0))
    clips = np.ones((2, 5))
    answers = oracle.compare(Question.about_rewards(clips, clips, mean_return=5.0, episode_steps=5))
    write(answers, tmp_path, title="silent", bins=10)
    assert "none" in capsys.readouterr().out


def configuration(*overrides):
    with initialize_config_module("conf"):
        return compose("audit", list(overrides))


def test_a_teacher_is_audited_in_an_environment(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    size = ["env=cheetah_run", "env.steps=20", "trajectories=4", "pairs=200"]
    audit_teacher(configuration("oracle=mistake", "oracle.tau={error_rate: 0.3}", *size), "mistake")
    assert "oracle=mistake env=cheetah_run" in capsys.readouterr().out
    folder = tmp_path / "runs" / "audit" / "cheetah_run" / "mistake"
    assert {path.name for path in folder.iterdir()} == {"audit.csv", "audit.png", "audit.svg"}


def test_a_run_without_a_log_is_an_error():
    with pytest.raises(SystemExit, match="nowhere/preferences holds no comparisons"):
        audit_run(configuration("run=nowhere"))


def test_a_finished_run_is_audited_from_any_folder(tmp_path):
    run = tmp_path / "runs" / "seed_0"
    log = PreferenceLog(run / "preferences")
    rows = {"first": np.arange(6), "second": np.arange(6), "first_step": 0, "second_step": 0}
    question = {"clip_steps": 5, "episode_steps": 5, "mean_return": 1.0, "experts": 1}
    log.append(by_hand(), iteration=0, **rows, **question)
    log.close()
    command = [sys.executable, "-m", "pbrl.audit", "run=runs/seed_0"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "mistaken, of all judged" in result.stdout
    assert {path.name for path in (run / "audit").iterdir()} == {"audit.csv", "audit.png", "audit.svg"}
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.parametrize("argument", ["oracel=rational", "run=${nope}", "bins=${", "oracle.eps_mistake=7"])
def test_nonsense_is_answered_with_a_sentence(argument, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pbrl.audit", "env=pendulum_swingup", "env.steps=2", argument])
    with pytest.raises(SystemExit, match=r"^pbrl\.audit: "):
        command()
