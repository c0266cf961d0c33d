"""A user's runs beside the reference: where an agent stands, and what is not compared."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from synthetic_runs import write_run
from test_report import Command, rows

from pbrl.report.figures import COLOURS, styles
from pbrl.report.shipped import from_folder, write_runs


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def rising(height: float, iterations: int) -> list[float]:
    """Returns that rise by the same amount in every iteration, up to a height."""
    return [height * (i + 1) / iterations for i in range(iterations)]


def write_reference(root: Path, heights: dict[str, float], *, iterations: int = 10, **how: Any) -> list[Any]:
    """Made-up reference runs of three seeds, 2 apart."""
    found = []
    for agent, height in heights.items():
        for seed in range(3):
            folder = write_run(
                root / "made", rising(height + 2 * (seed - 1), iterations), agent=agent, seed=seed, **how
            )
            found.append(from_folder(folder, "command"))
    return found


def write_mine(
    root: Path, height: float, iterations: int = 10, seeds: Sequence[int] = (0, 1, 2), **changes: Any
) -> None:
    for seed in seeds:
        settings = {"name": "mine", **changes}
        write_run(root / "runs", rising(height + 2 * (seed - 1), iterations), seed=seed, settings=settings)


def plain(text: str) -> str:
    return " ".join(text.split())


def test_an_agent_is_told_where_it_stands(tmp_path: Path, report: Command) -> None:
    heights = {"random": 5.0, "ncrs": 400.0, "zpg": 399.0, "dpo": 900.0}
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, heights))
    write_mine(tmp_path, 400.0)
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    sentence = re.search(
        r"mine beside the reference, irrational teacher, after 10 iterations of walker_walk: mean score 0\.400 "
        r"\[0\.39\d, 0\.40\d\]; above random; below dpo; not told apart from ncrs, zpg\.",
        printed,
    )
    assert sentence is not None, printed
    page = (tmp_path / "report/index.html").read_text()
    assert sentence[0] in page
    assert "Beside the reference" in page
    table = {row["agent"]: float(row["mean"]) for row in rows(tmp_path / "report/tables/reference.csv")}
    assert table == pytest.approx({"mine": 400.0, **{f"{agent} (reference)": each for agent, each in heights.items()}})
    assert "not compared" not in printed
    assert "(reference)" not in (tmp_path / "report/tables/final_return.csv").read_text()  # the rest is as ever


@pytest.mark.parametrize(("mine", "shipped", "after", "score"), [(20, 10, 10, 0.2), (5, 10, 5, 0.4), (5, 5, 5, 0.4)])
def test_runs_are_cut_to_the_same_length(
    mine: int, shipped: int, after: int, score: float, tmp_path: Path, report: Command
) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"zpg": 100.0}, iterations=shipped))
    write_runs(tmp_path / "results/full.parquet", write_reference(tmp_path / "3", {"dpo": 100.0}, iterations=3))
    write_mine(tmp_path, 400.0, iterations=mine)
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    assert f"after {after} iterations of walker_walk: mean score {score:.3f}" in printed
    (theirs,) = (row for row in rows(tmp_path / "report/tables/reference.csv") if row["agent"] == "zpg (reference)")
    assert float(theirs["mean"]) == pytest.approx(100.0 * after / shipped)
    assert "dpo (reference)" not in printed


def test_one_seed_tells_nothing_apart(tmp_path: Path, report: Command) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"random": 5.0}))
    write_mine(tmp_path, 400.0, seeds=[1])
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    assert "mean score 0.400 (one seed: no interval); not told apart from random." in printed


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"trajectories": 128}, "trajectories is 128 here and 64 there"),
        ({"pairs": 16, "bits": 32}, "pairs is 16 here and 32 there"),
        ({"bits": 320}, "bits is 320 here and 32 there"),
        ({"env.steps": 500}, "env.steps is 500 here and null there"),
        ({"normalise_observations": True}, "normalise_observations is true here and false there"),
        ({"oracle.eps_mistake": 0.3}, "oracle.eps_mistake is 0.3 here and 0.1 there"),
        ({"env.name": "my_task"}, "it has no runs of this task, only of walker_walk"),
    ],
)
def test_what_is_not_comparable_is_refused(changes: dict[str, Any], why: str, tmp_path: Path, report: Command) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"random": 5.0}))
    write_mine(tmp_path, 400.0, **changes)
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    task = changes.get("env.name", "walker_walk")
    assert f"mine on {task} is not compared with the reference: {why}." in printed
    assert "beside the reference, irrational" not in printed
    assert "No run can be compared with the reference." in (tmp_path / "report/index.html").read_text()


def test_equal_budgets_said_in_two_ways_are_equal(tmp_path: Path, report: Command) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"random": 5.0}))
    write_mine(tmp_path, 400.0, bits=32)
    assert "above random" in plain(report(tmp_path, "runs", "--reference", "--results", "results"))


def test_runs_are_compared_with_those_of_their_own_budget(tmp_path: Path, report: Command) -> None:
    usual = write_reference(tmp_path, {"random": 5.0})
    large = write_reference(tmp_path / "large", {"ncrs": 800.0}, settings={"trajectories": 128, "name": "large"})
    write_runs(tmp_path / "results/short.parquet", usual + large)
    write_mine(tmp_path, 400.0)
    write_mine(tmp_path, 400.0, trajectories=128, name="mine_large")
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    assert re.search(r"mine beside [^;]*; above random\.", printed)
    assert re.search(r"mine_large beside [^;]*; below large\.", printed)


def test_a_reproduction_is_compared_bit_for_bit(tmp_path: Path, report: Command) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"zpg": 100.0}))
    for seed in (0, 1):
        write_run(tmp_path / "runs", rising(100.0 + 2 * (seed - 1), 10), agent="zpg", seed=seed)
    other = rising(102.0, 10)
    other[7] += 1e-9
    folder = write_run(tmp_path / "runs", other, agent="zpg", seed=2)
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    assert "2 runs of zpg repeat the reference bit for bit." in printed
    where = folder.relative_to(tmp_path)
    assert f"{where} has the settings of a reference run, but other returns from iteration 7 on" in printed


def test_without_results_it_says_where_they_are(tmp_path: Path, report: Command) -> None:
    write_mine(tmp_path, 400.0)
    with pytest.raises(SystemExit, match="there are no reference results in nowhere: a clone of pbrl's repository has"):
        report(tmp_path, "runs", "--reference", "--results", "nowhere")
    assert not (tmp_path / "report").exists()


def test_a_damaged_file_of_results_is_left_out_and_named(tmp_path: Path, report: Command) -> None:
    write_runs(tmp_path / "results/short.parquet", write_reference(tmp_path, {"random": 5.0}))
    (tmp_path / "results/full.parquet").write_bytes(b"PAR1")
    write_mine(tmp_path, 400.0)
    printed = plain(report(tmp_path, "runs", "--reference", "--results", "results"))
    assert "Left out: results/full.parquet cannot be read" in printed
    assert "above random" in printed
    assert (tmp_path / "results/full.parquet").exists()  # a report changes nothing


def test_a_reference_agent_has_its_colour_dashed() -> None:
    looks = styles(["ncrs", "ncrs (reference)", "mine"])
    assert looks["ncrs (reference)"] == {"color": COLOURS[0], "linestyle": "--"}
    assert looks["ncrs"] == {"color": COLOURS[0], "linestyle": "-"}
    assert looks["mine"] not in (looks["ncrs"], looks["ncrs (reference)"])
