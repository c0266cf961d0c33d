"""The ridge experiment: the paper's table, and the command as a user meets it."""

from __future__ import annotations

import csv
import functools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import pytest
from omegaconf import OmegaConf
from scipy import stats

from pbrl.ridge.experiment import Cell, Experiment, Track
from pbrl.ridge.problem import Outcome, Ridge, run
from pbrl.ridge.report import COLUMNS, exponent, interval, verdict, write_csv

ROOT = Path(__file__).resolve().parents[2]
PAPER = {  # k: (uniform margin comparisons, confidence iterations, confidence comparisons)
    5: (898, 340, 170_000),
    10: (1_780, 695, 695_000),
    20: (3_620, 1_346, 2_691_000),
    40: (7_414, 2_687, 10_748_000),
    80: (14_940, 5_414, 43_312_000),
}
ALL_K = [5, 10, 20, *(pytest.param(k, marks=pytest.mark.slow) for k in (40, 80))]


@functools.cache
def configured(*overrides: str) -> Experiment:
    with hydra.initialize_config_module("conf"):
        config = hydra.compose("ridge", overrides=list(overrides))
    settings: Any = OmegaConf.to_container(config.experiment, resolve=True)
    return Experiment(**settings, allow=list(config.allow))


# The paper's table


@pytest.fixture(scope="module")
def table() -> Any:
    experiment = configured("experiment.only=[ncrs]")
    cells: dict[tuple[str, int], Cell] = {}

    def measured(oracle: str, k: int) -> Cell:
        if (oracle, k) not in cells:
            cells[oracle, k] = experiment.measure(Track("ncrs", oracle, "sphere"), k)
        return cells[oracle, k]

    return measured


@pytest.mark.parametrize("k", ALL_K)
@pytest.mark.parametrize("oracle", ["uniform_margin", "confidence"])
def test_every_cell_of_the_papers_table_is_reproduced(table: Any, oracle: str, k: int) -> None:
    cell = table(oracle, k)
    paper_iterations = PAPER[k][0] if oracle == "uniform_margin" else PAPER[k][1]
    paper_comparisons = PAPER[k][0] if oracle == "uniform_margin" else PAPER[k][2]
    assert cell.paper == paper_comparisons
    iterations = cell.outcome.iterations
    assert len(iterations) == 200
    assert paper_iterations == pytest.approx(iterations.mean(), rel=0.05)
    assert paper_comparisons == pytest.approx(cell.comparisons.mean(), rel=0.05)
    # The 95 % prediction interval of a mean of five further seeds
    width = stats.t.ppf(0.975, 199) * iterations.std(ddof=1) * math.sqrt(1 / 5 + 1 / 200)
    assert abs(paper_iterations - iterations.mean()) <= width
    assert cell.average is not None
    assert cell.average <= cell.bound


@pytest.mark.slow
def test_the_exponents_are_one_and_two(table: Any) -> None:
    assert exponent([table("uniform_margin", k) for k in PAPER]) == pytest.approx(1, abs=0.05)
    assert exponent([table("confidence", k) for k in PAPER]) == pytest.approx(2, abs=0.05)


@pytest.mark.parametrize("k", [10, pytest.param(20, marks=pytest.mark.slow)])
def test_gaussian_directions_do_not_give_the_papers_table(k: int) -> None:
    experiment = configured("experiment.only=[ncrs]", "experiment.optimizers.ncrs.budget=4000")
    exact = experiment.measure(Track("ncrs", "confidence", "gaussian"), k)
    noisy = experiment.measure(Track("ncrs", "uniform_margin", "gaussian"), k)
    late = np.nan_to_num(exact.outcome.iterations, nan=4_000)  # those who never arrive count with the budget only
    assert interval(late)[1] > 1.5 * PAPER[k][1]
    assert np.isnan(noisy.comparisons).all()


# The command


@pytest.mark.parametrize("track", configured().tracks(), ids=lambda t: f"{t.optimizer}-{t.oracle}-{t.direction}")
def test_every_entry_of_the_configuration_runs(track: Track) -> None:
    experiment = configured()
    optimizer, oracle = experiment.build(track, 5, step=0.1, batch=(3, 4), purpose="test")
    done = run(optimizer, Ridge(5), oracle, votes=1, target=1e-12, budget=60)
    assert done.gradient_norm.shape == (1 + math.ceil(60 / done.pairs_per_round), 3)
    assert np.isfinite(done.gradient_norm).all()
    assert optimizer.x.dtype == np.float32


def test_tuning_picks_the_step_with_which_all_arrive_first() -> None:
    experiment = configured("experiment.tuning.grid=[0.001,1.6,1000]")
    assert experiment.size(Track("saha_2025", "uniform_margin", "sphere"), 10) == 1.6


def test_the_same_seed_gives_the_same_table(tmp_path: Path) -> None:
    def rows(name: str, *overrides: str) -> str:
        experiment = configured(*overrides)
        cells = [
            experiment.measure(Track(*names), 5)
            for names in (("ncrs", "uniform_margin", "sphere"), ("saha_2025", "confidence", "sphere"))
        ]
        write_csv(cells, tmp_path / name)
        return (tmp_path / name).read_text()

    once = rows("once.csv")
    assert rows("twice.csv") == once
    assert rows("other.csv", "experiment.seed=1") != once
    assert rows("alone.csv", "experiment.only=[saha_2025,ncrs]") == once  # a stream belongs to its own name


def test_directions_that_miss_the_target_do_not_reproduce_the_paper() -> None:
    def cell(k: int, pairs: list[float]) -> Cell:
        outcome = Outcome(np.array(pairs), np.array(pairs), np.ones(3), 1)
        return Cell(
            track=Track("ncrs", "uniform_margin", "sphere"),
            k=k,
            size=0.8,
            votes=1,
            outcome=outcome,
            paper=100 * k,
            average=None,
            bound=None,
            success=None,
        )

    good = [cell(1, [98.0, 104.0]), cell(2, [202.0, 204.0])]
    assert "Reproduces the paper: every number within 1.5%" in verdict(good)
    assert "Does not reproduce" in verdict([*good, cell(4, [400.0, math.nan])])
    assert "Does not reproduce" in verdict([*good, cell(4, [300.0, 310.0])])


def test_the_interval_is_students() -> None:
    mean, low, high = interval(np.array([1.0, 2.0, 3.0, 4.0]))
    assert mean == 2.5
    assert high - mean == pytest.approx(mean - low) == pytest.approx(3.182446 * 1.290994 / 2, rel=1e-5)
    assert all(math.isnan(number) for number in interval(np.array([1.0, np.nan])))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("experiment.only=[ncrs,adam]", "unknown optimizer {'adam'}; known are ncrs, "),
        ("experiment.optimizers.ncrs.active=[501]", r"\[1, d = 500\], not 501"),
        ("+experiment.optimizers.ncrs.oracles=[human]", "known are uniform_margin, confidence, labels, values"),
        ("+experiment.optimizers.ncrs.colour=red", "ncrs has missing or unknown settings: colour"),
        ("~experiment.optimizers.ncrs.directions", "ncrs has missing or unknown settings: directions"),
        ("~experiment.optimizers.ncrs.rule", "ncrs needs either a rule or an optimizer"),
        ("~experiment.optimizers.saha_2025.optimizer.radius", "radius"),
        ("experiment.optimizers.ncrs.rule._target_=mine.Rule", r"if you trust the package, add allow=\[mine\]"),
        ("experiment.oracles.uniform_margin.oracle.p=0.7", r"\(0, 1/2\], not 0.7"),
        (
            "experiment.oracles.confidence.theorem='3.6'",
            r"theorem of oracle confidence must be null or one of 2\.2, 3\.5",
        ),
        ("experiment.optimizers.ncrs.directions={sphere: 1}", "two seeds or more"),
        ("experiment.target=-1", "positive, not -1"),
        ("experiment.precision=float16", "float32 or float64, not 'float16'"),
    ],
)
def test_a_wrong_setting_is_named(override: str, words: str) -> None:
    with pytest.raises(Exception, match=words):
        configured(override)


def test_a_users_optimizer_joins_the_table_from_any_folder(tmp_path: Path) -> None:
    """With the class and the entry of docs/ridge.md: it runs in any folder, writes there, and has them in its table."""
    page = (ROOT / "docs/ridge.md").read_text()
    (snippet,) = re.findall(r"^```python\n# mine\.py\n(.*?)^```$", page, flags=re.M | re.S)
    (tmp_path / "mine.py").write_text(snippet)
    (entry,) = re.findall(r"\+experiment\.optimizers\.mine=({.*})\"", page)
    entry = entry.replace("sphere:50}", "sphere:5},active:[5,10]")
    overrides = [
        "allow=[mine]",
        f"+experiment.optimizers.mine={entry}",
        "experiment.only=[mine,mezo,ncrs]",
        "experiment.shared.active=[5]",
        "experiment.optimizers.ncrs.active=[5]",
        "experiment.optimizers.ncrs.budget=2000",
        "experiment.optimizers.ncrs.directions={sphere: 5}",
        "experiment.noise.budget=200",
        "processes=1",
    ]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pbrl.ridge", *overrides],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mine, sphere" in done.stdout
    assert "eproduce" in done.stdout
    folder = tmp_path / "runs" / "ridge"
    with (folder / "table.csv").open() as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == COLUMNS
    assert ",".join(COLUMNS) == (
        "optimizer,oracle,direction,k,iterations_mean,iterations_low,iterations_high,comparisons_mean,paper"
    )
    assert {(row["optimizer"], row["oracle"], row["k"]) for row in rows} == {
        ("ncrs", "uniform_margin", "5"),
        ("ncrs", "confidence", "5"),
        ("mezo", "values", "5"),
        *(("mine", oracle, k) for oracle in ("uniform_margin", "confidence") for k in ("5", "10")),
    }
    ours = next(row for row in rows if row["optimizer"] == "ncrs" and row["oracle"] == "confidence")
    assert float(ours["comparisons_mean"]) == pytest.approx(500 * float(ours["iterations_mean"]))
    assert ours["paper"] == "170000"
    figures = {"comparisons_against_k", "gradient_norm", "success_against_noise"}
    assert {path.name for path in folder.iterdir()} == {"table.csv"} | {
        f"{figure}.{ending}" for figure in figures for ending in ("png", "svg")
    }
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.py", "runs", "__pycache__"}
