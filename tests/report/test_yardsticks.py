"""Yardsticks in a report: marked, shown, never ranked, and what returns are divided by."""

from __future__ import annotations

import csv
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

from pbrl.report.__main__ import main
from pbrl.report.runs import RecordedRun, find
from pbrl.report.tables import Bootstrap, at_steps, normalised, returns


@pytest.fixture
def runs_folder(tmp_path: Path) -> Path:
    """ncrs below zpg below a yardstick, which asked nothing, and got only as far as walker_walk."""
    for seed in range(2):
        for agent, height in {"ncrs": 300.0, "zpg": 400.0, "sac_true": 800.0}.items():
            for task in ("walker_walk", "cheetah_run")[: 1 if agent == "sac_true" else 2]:
                curve = np.linspace(0, height + 10 * seed, 20).tolist()
                write_run(tmp_path, curve, agent=agent, task=task, seed=seed)
    for path in tmp_path.glob("*/sac_true/*/*/metrics.jsonl"):
        lines = path.read_text().splitlines()
        path.write_text("".join(line.replace('"pairs_asked": ', '"pairs_asked": 0, "was": ') + "\n" for line in lines))
    return tmp_path


def test_a_yardstick_is_marked_and_never_the_best(runs_folder: Path) -> None:
    runs, left_out = find([runs_folder])
    assert not left_out
    assert {run.agent for run in runs} == {"ncrs", "zpg", "sac_true (yardstick)"}
    table = returns(runs, "irrational", "final_return", "", Bootstrap(50, 0))
    assert {table.columns[column] for _, column in table.best} == {"zpg"}
    walker = table.rows[[row[0] for row in table.rows].index("walker_walk")]
    assert "≈" not in walker[table.columns.index("sac_true (yardstick)")]


def test_returns_are_divided_by_the_yardsticks_at_as_many_steps(runs_folder: Path) -> None:
    runs, _ = find([runs_folder])
    yardstick = [run for run in runs if run.yardstick]
    found = {(row["task"], row["agent"]): row for row in normalised(runs, "", yardstick, Bootstrap(50, 0)).records}
    # All curves are straight lines of the same length: heights decide. 300 and 310 to the mean of 800 and 810.
    assert found["walker_walk", "ncrs"]["value"] == pytest.approx(305 / 805)
    assert found["walker_walk", "sac_true (yardstick)"]["value"] == pytest.approx(1)
    assert found["walker_walk", "ncrs"]["score"] == pytest.approx(0.305 * 18.5 / 19)  # the last two of 20 iterations
    assert np.isnan(found["cheetah_run", "ncrs"]["value"])


def test_a_yardstick_that_got_not_as_far_says_nothing(runs_folder: Path) -> None:
    write_run(runs_folder, [100.0] * 40, agent="dpo")
    runs, _ = find([runs_folder])
    yardstick = [run for run in runs if run.yardstick]
    found = {row[1]: row for row in normalised(runs, "", yardstick, Bootstrap(50, 0)).rows if row[0] == "walker_walk"}
    assert found["dpo"][3:] == ["-", "0 of 1"]


def evaluate(run: RecordedRun, returns: Mapping[int, float]) -> RecordedRun:
    """The same run, evaluated after these iterations only."""
    evaluations = np.full(run.iterations, np.nan)
    evaluations[list(returns)] = list(returns.values())
    return dataclasses.replace(run, metrics={**run.metrics, "eval_return": evaluations})


def test_evaluations_after_so_many_steps_are_divided_by_the_yardsticks(runs_folder: Path) -> None:
    found, _ = find([runs_folder])
    heights = {"ncrs": 100.0, "zpg": 200.0, "sac_true (yardstick)": 400.0}
    runs = [evaluate(run, {0: 0.0, 4: heights[run.agent] + 20 * run.seed, 8: heights[run.agent] * 2}) for run in found]
    yardstick = [run for run in runs if run.yardstick]
    # An iteration is 64,000 steps: evaluated after 64,000, 320,000 and 576,000.
    table = at_steps(runs, yardstick, [192_000, 320_000, 576_000, 577_000], Bootstrap(50, 0))
    records = {(row["task"], row["agent"], row["steps"]): row for row in table.records}
    assert records["walker_walk", "ncrs", 192_000]["return"] == pytest.approx(110 / 2)  # half way from 0
    assert records["walker_walk", "ncrs", 320_000]["return"] == pytest.approx(110)
    assert records["walker_walk", "ncrs", 320_000]["value"] == pytest.approx(110 / 410)
    assert records["walker_walk", "zpg", 576_000]["value"] == pytest.approx(0.5)
    assert records["walker_walk", "sac_true (yardstick)", 320_000]["value"] == pytest.approx(1)
    assert np.isnan(records["walker_walk", "ncrs", 577_000]["value"])  # never evaluated so late
    assert np.isnan(records["cheetah_run", "ncrs", 320_000]["value"])  # no yardstick there
    assert records["cheetah_run", "ncrs", 320_000]["return"] == pytest.approx(110)


def test_a_run_that_was_never_evaluated_has_no_return_after_any_steps(runs_folder: Path) -> None:
    runs = [evaluate(run, {}) for run in find([runs_folder])[0]]
    table = at_steps(runs, [run for run in runs if run.yardstick], [64_000], Bootstrap(50, 0))
    assert {(row[2], row[3]) for row in table.rows} == {("-", "-")}


@pytest.mark.parametrize("name", ["sac_true", "ppo_true", ""])
def test_the_command(
    runs_folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs_folder)
    arguments = ["--normalise", name] if name else []
    monkeypatch.setattr(sys, "argv", ["pbrl.report", ".", "--resamples", "50", *arguments])
    if name == "ppo_true":
        with pytest.raises(SystemExit, match="no runs of a yardstick 'ppo_true' to normalise by, only of sac_true"):
            main()
        return
    main()
    shown = capsys.readouterr().out
    assert ("of sac_true at as many steps" in shown) == (name == "sac_true")
    assert "zpg has the highest interquartile mean" in shown
    for file in (runs_folder / "report/tables").glob("*.csv"):
        with file.open() as opened:
            ranked = [row for row in csv.DictReader(opened) if file.stem.startswith(("aggregates", "improvement"))]
        assert not any("yardstick" in "".join(map(str, row.values())) for row in ranked)
