"""A user's runs beside reference runs: what is compared, what is refused and why, and where an agent stands."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import write_run

from pbrl.report.__main__ import main
from pbrl.report.reference import equally_long, side_by_side
from pbrl.report.runs import RecordedRun, load
from pbrl.report.shipped import from_folder, write_runs

HEIGHTS = {"zpg": 200.0, "dpo": 600.0, "ncrs": 400.0, "sac_true": 900.0}
SEEDS = range(3)


def heights(middle: float, seed: int, iterations: int = 10) -> list[float]:
    """A flat curve; three seeds are 10 apart."""
    return [middle + 10 * (seed - 1)] * iterations


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Reference results of three agents and a yardstick on walker_walk."""
    folder = tmp_path / "results"
    folder.mkdir()
    made = [
        from_folder(write_run(tmp_path / "made", heights(middle, seed), agent=agent, seed=seed), "command")
        for agent, middle in HEIGHTS.items()
        for seed in SEEDS
    ]
    write_runs(folder / "short.parquet", made)
    return folder


def run_of(root: Path, returns: list[float], **how: Any) -> RecordedRun:
    """One recorded run."""
    return load(write_run(root, returns, **how))


def report(folder: Path, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m pbrl.report runs --reference`."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(
        sys, "argv", ["pbrl.report", "runs", "--reference", "--results", str(results), "--resamples", "200"]
    )
    main()


def test_the_sentence_on_where_an_agent_stands(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in SEEDS:  # as good as ncrs of the reference, with other seeds
        write_run(tmp_path / "runs", heights(405.0, seed), agent="pes", seed=seed + 10)
    report(tmp_path, results, monkeypatch)
    shown = " ".join(capsys.readouterr().out.split())
    assert "pes beside the reference, irrational teacher, after 10 iterations of walker_walk: mean score 0.405" in shown
    assert "; above zpg; below dpo; not told apart from ncrs." in shown
    page = (tmp_path / "report/index.html").read_text()
    assert "above zpg; below dpo; not told apart from ncrs." in page
    assert "ncrs (reference)" in page
    assert "sac_true" not in page  # a yardstick is no agent that one stands above or below


def test_what_is_not_comparable_is_refused_with_the_reason(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", heights(1.0, 0), agent="pes", settings={"trajectories": 32, "name": "small"})
    write_run(tmp_path / "runs", heights(1.0, 0), agent="pes", oracle="rational", settings={"name": "easy"})
    write_run(tmp_path / "runs", heights(1.0, 0), agent="pes", task="hopper_stand")
    report(tmp_path, results, monkeypatch)
    shown = " ".join(capsys.readouterr().out.split())
    assert "small on walker_walk is not compared with the reference: trajectories is 32 here and 64 there." in shown
    assert "easy on walker_walk is not compared with the reference: " in shown
    assert "oracle.gamma is 1.0 here and 0.9 there" in shown
    assert (
        "pes on hopper_stand is not compared with the reference: it has no runs of this task, only of walker_walk."
        in shown
    )
    assert "beside the reference, irrational teacher" not in shown


def test_a_budget_of_bits_is_that_of_pairs_unless_it_is_set(tmp_path: Path) -> None:
    theirs = [run_of(tmp_path / "theirs", [1.0, 2.0])]
    same = run_of(tmp_path / "same", [1.0, 2.0], settings={"bits": 32})
    more = run_of(tmp_path / "more", [1.0, 2.0], settings={"bits": 320})
    compared, refused = side_by_side([same], theirs)
    assert (len(compared), refused) == (1, [])
    compared, refused = side_by_side([more], theirs)
    assert not compared
    assert refused == ["ncrs on walker_walk is not compared with the reference: bits is 320 here and 32 there."]


@pytest.mark.parametrize(("ours", "chosen", "length"), [(3, 5, 3), (5, 5, 5), (7, 9, 7), (20, 9, 9)])
def test_runs_are_cut_to_one_length(ours: int, chosen: int, length: int, tmp_path: Path) -> None:
    """Of reference runs of 5 and of 9 iterations, the shortest that are long enough, or else the longest."""
    mine = run_of(tmp_path / "mine", np.arange(float(ours)).tolist(), agent="pes")
    theirs = [run_of(tmp_path / f"{n}", [float(n)] * n) for n in (5, 9)]
    first, other = equally_long([mine], theirs)
    assert (first.iterations, other.iterations) == (length, length)
    assert first.final_return == length - 1
    assert (other.agent, other.final_return) == ("ncrs (reference)", chosen)
    assert first.finished


def test_no_results_and_damaged_results_are_answered_in_a_sentence(
    tmp_path: Path, results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs", heights(400.0, 1), agent="pes")
    with pytest.raises(SystemExit, match=r"pbrl\.report: there are no reference results in .*nowhere"):
        report(tmp_path, tmp_path / "nowhere", monkeypatch)
    content = (results / "short.parquet").read_bytes()
    (results / "worse.parquet").write_bytes(content[: len(content) // 2])
    report(tmp_path, results, monkeypatch)
    shown = " ".join(capsys.readouterr().out.split())
    assert "Left out: " in shown
    assert "worse.parquet cannot be read" in shown
    assert "pes beside the reference" in shown
