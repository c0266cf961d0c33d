"""The report of fine-tuning: what it picks, what it counts, and that it never hides a censored run."""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml  # type: ignore[import-untyped]

from pbrl.finetune import report as finetune_report
from pbrl.finetune.d90 import D90
from pbrl.finetune.report import Cell, collect, in_words, trends
from pbrl.finetune.runs import best_settings, find, target_of_sgd
from pbrl.run import checkpoint
from pbrl.run.record import Record
from pbrl.run.settings import ConfigurationError


def write(
    root: Path,
    setting: str,
    method: str,
    lr: float,
    mu: float | None,
    seed: int,
    target: float | None,
    curve: Any,
    headroom: float = 4.0,
) -> None:
    """A run with an evaluation at every 10th iteration: (accuracy, loss)."""
    folder = root / "mrpc" / setting / method / f"lr_{lr}-mu_{mu}-target_{target}" / f"seed_{seed}"
    record = Record(folder / "metrics.jsonl", after=-1)
    for i, (accuracy, loss) in enumerate(curve):
        record.write({"iteration": 10 * i + 9, "accuracy": accuracy, "validation_loss": loss})
    record.close()
    arrived = target is not None and curve[-1][0] > target
    settings = {"task": {"name": "mrpc"}, "setting": setting, "name": method, "lr": lr, "mu": mu, "seed": seed}
    settings |= {
        "target": None if target is None else "sgd",
        "iterations": 10 * len(curve),
        "method": {"headroom": headroom},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    state = {"weights": {}, "best": 0.0, "target": target, "ended": "arrived" if arrived else ""}
    checkpoint.save(folder / "checkpoint", 10 * len(curve) - 1, state)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed in (0, 1):
        write(tmp_path, "a", "sgd", 0.1, None, seed, None, [(0.7, 0.6), (0.8 + 0.02 * seed, 0.5), (0.75, 0.55)])
        write(tmp_path, "a", "sgd", 0.5, None, seed, None, [(0.9, 0.7)] * 3)  # a better accuracy, but a worse loss
    for lr, mu, loss in ((1.0, 0.1, 0.6), (1.0, 0.2, 0.4), (2.0, 0.1, 0.5), (2.0, 0.2, 0.7)):
        write(tmp_path, "a", "mezo", lr, mu, 0, None, [(0.7, loss)] * 2)
    write(tmp_path, "a", "mezo", 1.0, 0.2, 0, 0.81, [(0.7, 0.5), (0.82, 0.4)])
    write(tmp_path, "a", "mezo", 1.0, 0.2, 1, 0.81, [(0.7, 0.5)] * 3 + [(0.82, 0.4)])
    write(tmp_path, "a", "ncrs", 1.0, None, 0, 0.81, [(0.7, 0.5), (0.9, 0.4)])
    write(tmp_path, "a", "ncrs", 1.0, None, 1, 0.81, [(0.7, 0.5), (0.71, 0.4)])
    write(tmp_path, "a", "rsgf", 1.0, 0.1, 0, 0.81, [(0.7, 0.5), (0.81, 0.4)])  # reaches, but does not exceed
    found = {
        "majority": 0.675,
        "full": [0.8, 0.82],
        "subspace": {"4": [0.7, 0.7], "64": [0.75, 0.76], "256": [0.8, 0.8]},
    }
    (tmp_path / "mrpc" / "a" / "intrinsic_dimension.json").write_text(json.dumps(found))
    return tmp_path


def test_hyperparameters_are_picked_by_validation_loss(root: Path) -> None:
    assert best_settings(root, "mrpc", "a", "mezo") == (1.0, 0.2)
    assert best_settings(root, "mrpc", "a", "sgd") == (0.1, None)
    assert target_of_sgd(root, "mrpc", "a") == pytest.approx(0.81)


def test_a_sweep_in_which_more_than_lr_and_mu_differs_chooses_nothing(root: Path) -> None:
    write(root, "a", "sgd", 0.5, None, 2, None, [(0.9, 0.7)] * 3)
    with pytest.raises(ConfigurationError, match="has seed 2 for some of its lr and mu only"):
        best_settings(root, "mrpc", "a", "sgd")
    write(root, "a", "mezo", 4.0, 0.1, 0, None, [(0.7, 0.3)] * 2, headroom=64.0)
    with pytest.raises(ConfigurationError, match=r"mixes method\.headroom=4\.0, 64\.0"):
        best_settings(root, "mrpc", "a", "mezo")


def test_iterations_are_counted_and_censored_runs_are_said(root: Path) -> None:
    cells = {cell.method: cell for cell in collect(find(root), root)[0]}
    assert cells["sgd"].iterations.tolist() == [20, 20]
    assert cells["sgd"].target == pytest.approx(0.81)
    assert cells["mezo"].iterations.tolist() == [20, 40]
    assert np.array_equal(cells["ncrs"].iterations, [20, math.nan], equal_nan=True)
    # exp(ln 28.28 -+ 12.706 * 0.4901 / sqrt(2))
    assert in_words(cells["mezo"]) == "28 (0 to 2312)"
    assert in_words(cells["ncrs"]) == "20, and 1 of 2 runs not within 20"
    assert in_words(cells["rsgf"]) == "none of 1 runs within 20"


def test_the_command_writes_table_and_figures(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["report", str(root)])
    finetune_report.main()
    rows = list(csv.DictReader((root / "report" / "tables" / "finetune.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["mezo", "ncrs", "rsgf", "sgd"]
    assert (rows[1]["censored"], rows[1]["majority"]) == ("1", "0.675")
    # the gain's target is 0.675 + 0.9 * 0.135 = 0.7965, between 0.755 at 64 and 0.8 at 256, on a scale of logarithms
    assert float(rows[0]["d90_gain"]) == pytest.approx(64 * 4 ** ((0.7965 - 0.755) / 0.045))
    names = {path.name for path in (root / "report" / "figures").glob("*.png")}
    assert names == {"intrinsic_dimension.png", "sweep_mrpc_a.png", "curves_mrpc_a.png"}
    page = (root / "report" / "index.html").read_text()
    assert page.count("<img") == 3
    assert "20, and 1 of 2 runs not within 20" in page


def test_the_trend_is_the_exponent_and_says_what_is_censored() -> None:
    def cell(k: float, iterations: list[float], method: str = "ncrs", size: float = math.inf) -> Cell:
        d90 = D90(k, k / 2, 2 * k, smallest=1, largest=1000)
        values = np.array(iterations)
        return Cell("mrpc", "a", method, (1.0, None), 0.8, values, 900, values, 0.6, (d90, d90), size)

    (said,) = trends([cell(k, [3 * k**2] * 2) for k in (2, 4, 8, 16)] + [cell(2, [1], "sgd")])
    assert said.startswith("ncrs: iterations ~ k^2.00 (95 % interval 2.00 to 2.00, 4 settings)")
    (said,) = trends([cell(k, [100 * k, math.nan]) for k in (1, 3, 9)])  # nan counts as 900
    expected = np.polyfit(np.log([1, 3, 9]), np.log([300, 900 * 3**-0.5, 900]), 1)[0]
    assert f"k^{expected:.2f}" in said
    assert "3 of 6 runs are censored" in said
    assert trends([cell(2, [5]), cell(math.inf, [9]), cell(4, [5])]) == []  # a d90 beyond its grid is no place
    (said,) = trends([cell(2, [2]), cell(4, [4]), cell(math.inf, [8], size=8)])  # but never more than D
    assert "k^1.00" in said


def test_a_folder_without_runs_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"has no runs of pbrl\.finetune"):
        finetune_report.main()


def test_every_run_is_shown_and_what_is_not_counted_says_why(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = root / "mrpc" / "a" / "sgd" / "broken"
    broken.mkdir()
    (broken / "metrics.jsonl").write_text("{}\n")
    (broken / "config.yaml").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["pbrl.finetune.report", str(root)])
    finetune_report.main()
    with (root / "report" / "tables" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 13
    reasons = {(row["method"], row["lr"], row["mu"], row["target"]): row["not_counted"] for row in rows}
    assert reasons["mezo", "2.0", "0.1", ""] == "no target"
    assert reasons["mezo", "1.0", "0.2", "0.81"] == ""
    assert reasons["sgd", "0.5", "", ""] == "other lr or mu"
    page = (root / "report" / "index.html").read_text()
    assert "Left out: " in page
    assert str(broken) in " ".join(capsys.readouterr().out.split()).replace(" ", "") or str(broken) in page
    assert (root / "report" / "figures" / "curves_mrpc_a.png").exists()


def test_a_single_run_that_was_not_swept_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", "mezo", 1.0, 0.2, 0, None, [(0.7, 0.5), (0.8, 0.4)])
    monkeypatch.setattr(sys, "argv", ["pbrl.finetune.report", str(tmp_path)])
    finetune_report.main()
    page = (tmp_path / "report" / "index.html").read_text()
    assert "No run can be counted yet" in page
    assert "mezo" in page
    assert "0.800" in page
    assert 'alt="curves_mrpc_a"' in page
