"""The curve of the teacher's agreement: known answers, the audit's, and logs that are damaged."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

from pbrl.audit import agreement as audited
from pbrl.report import agreement
from pbrl.report.__main__ import main
from pbrl.report.runs import load
from pbrl.run.preference_log import PreferenceLog, answers_of, read
from pbrl.types import Answers, Preferences, Reason


def write_log(run: Path, gaps: list[float], right: list[bool], *, undecided: int = 0) -> None:
    """A log in which the second clip is always the better one; those not decided come last."""
    count = len(gaps) + undecided
    label = np.array([*map(float, right), *[0.5] * undecided])
    answers = Answers(
        preferences=Preferences(probability=label, score=label - 0.5, label=label, answered=np.ones(count, np.bool_)),
        reason=np.full(count, Reason.ANSWERED, np.uint8),
        first_sum=np.zeros(count),
        second_sum=np.array([*gaps, *[1.0] * undecided]),
        bits=np.ones(count, np.int64),
        tau=1.0,
    )
    log = PreferenceLog(run / "preferences")
    where = {"first": np.arange(count), "second": np.arange(count), "first_step": 0, "second_step": 0}
    log.append(answers, iteration=0, clip_steps=1, episode_steps=1, mean_return=0.0, experts=1, **where)  # type: ignore[arg-type]
    log.close()


def test_shares_are_means_over_runs_in_bins_of_the_gap(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, [1.0], seed=seed) for seed in range(3)]
    write_log(runs[0], [1, 2, 30, 40], [True, False, True, True], undecided=5)
    write_log(runs[1], [1, 2, 30, 40], [True, True, True, True])
    logs = [agreement.decided(load(run)) for run in runs]  # the third has no log
    assert [len(gap) for gap, _ in logs] == [4, 4, 0]
    at, mean, low, high, _ = agreement.curve(logs[:2], bins=2)
    np.testing.assert_array_equal(at, [1.5, 35])
    np.testing.assert_array_equal(mean, [0.75, 1.0])
    np.testing.assert_array_equal(low, [0.0, 1.0])  # 0.75 - 12.7 * 0.25, as far as a share goes
    np.testing.assert_array_equal(high, [1.0, 1.0])


def test_equal_gaps_are_in_one_bin() -> None:
    at, mean, *_ = agreement.curve([(np.ones(7), np.array([True, False, False, False, False, False, False]))], bins=4)
    np.testing.assert_array_equal(at, [1])
    np.testing.assert_allclose(mean, [1 / 7])


def test_it_is_what_the_audit_says_of_one_run(tmp_path: Path) -> None:
    run, rng = write_run(tmp_path, [1.0]), np.random.default_rng(0)
    write_log(run, rng.random(100).tolist(), (rng.random(100) < 0.7).tolist())
    at, mean, *_ = agreement.curve([agreement.decided(load(run))], bins=5)
    shares = audited(answers_of(read(run / "preferences")), 5)
    np.testing.assert_allclose(at, [share.at for share in shares])
    np.testing.assert_allclose(mean, [share.share for share in shares])


def test_a_damaged_log_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sound, damaged = (write_run(tmp_path / "runs", [1.0, 2.0], seed=seed) for seed in range(2))
    write_log(sound, [1.0, 2.0], [True, False])
    write_log(damaged, [1.0, 2.0], [True, True])
    (part,) = (damaged / "preferences").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:100])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pbrl.report", "--resamples", "20", "runs"])
    main()
    page = (tmp_path / "report" / "index.html").read_text()
    assert "seed_1/preferences cannot be read" in page
    assert "teacher&#x27;s agreement" in page
    assert capsys.readouterr().err == ""
    assert len(agreement.decided(load(damaged))[0]) == 0
