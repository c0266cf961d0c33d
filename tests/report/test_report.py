"""The report, as a user meets it: a command in a folder, and what lies there afterwards."""

from __future__ import annotations

import base64
import csv
import hashlib
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from synthetic_runs import write_run

from pbrl.report.__main__ import main
from pbrl.report.files import to_latex
from pbrl.report.runs import find, load
from pbrl.report.tables import Bootstrap, Table, aggregates, headline, improvement, returns, robustness, speed

TEACHERS = {"rational": 1.0, "irrational": 0.5}
HEIGHTS = {("ncrs", "walker_walk"): 800.0, ("ncrs", "cheetah_run"): 600.0, ("zpg", "walker_walk"): 400.0}
HEIGHTS[("zpg", "cheetah_run")] = 200.0


class Command:
    """The command, in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def __call__(self, folder: Path, *arguments: str) -> str:
        """What it prints."""
        self.monkeypatch.chdir(folder)
        self.monkeypatch.setattr(sys, "argv", ["pbrl.report", "--resamples", "50", *arguments])
        main()
        return self.capsys.readouterr().out


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def write_benchmark(root: Path) -> None:
    """Two agents on two tasks with two teachers, three seeds each, 10 apart; zpg asks ten experts."""
    for teacher, share in TEACHERS.items():
        for (agent, task), height in HEIGHTS.items():
            for seed in range(3):
                returns = np.linspace(0, share * height + 10 * (seed - 1), 10).tolist()
                how = {"agent": agent, "task": task, "oracle": teacher, "seed": seed}
                write_run(root, returns, **how, experts=10 if agent == "zpg" else 1)  # type: ignore[arg-type]


def rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


TARGETS = {("a", "href"), ("label", "for")}


class Requests(HTMLParser):
    """Everything that a page might fetch or point at."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.pictures: list[bytes] = []
        self.ids: list[str | None] = []
        self.targets: list[str] = []
        self.addresses = re.findall(r"url\(([^)]*)\)|@import\s+(\S+)", page)
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        fetching = ("src", "href", "srcset", "data", "action", "poster", "background")
        self.addresses += [value for name, value in attrs if name in fetching]
        self.ids += [value for name, value in attrs if name == "id"]
        self.targets += [str(value).removeprefix("#") for name, value in attrs if (tag, name) in TARGETS]
        if tag == "img":
            self.pictures.append(base64.b64decode(str(dict(attrs)["src"]).removeprefix("data:image/png;base64,")))


def test_a_benchmark_becomes_tables_figures_and_a_page(tmp_path: Path, report: Command) -> None:
    write_benchmark(tmp_path / "runs")
    printed = report(tmp_path, "runs/")
    folder = tmp_path / "report"
    final = {(row["teacher"], row["task"], row["agent"]): row for row in rows(folder / "tables" / "final_return.csv")}
    for (agent, task), height in HEIGHTS.items():
        row = final["irrational", task, agent]
        assert float(row["mean"]) == pytest.approx(height / 2)
        assert float(row["standard_error"]) == pytest.approx(10 / 3**0.5)
        assert float(row["low"]) < height / 2 < float(row["high"])
        assert f"{height / 2:.1f} [{float(row['low']):.1f}, {float(row['high']):.1f}]" in printed
    for row in rows(folder / "tables" / "robustness.csv"):
        assert float(row["value"]) == pytest.approx(TEACHERS[row["teacher"]])
    assert {row["bits"] for row in rows(folder / "tables" / "ledger.csv")} == {"320.0", "3200.0"}
    (pair,) = (row for row in rows(folder / "tables" / "improvement.csv") if row["teacher"] == "rational")
    assert (pair["agent"], pair["over"], float(pair["value"])) == ("ncrs", "zpg", 1.0)
    assert len(rows(folder / "tables" / "runs.csv")) == 24

    figures = {path.stem for path in (folder / "figures").glob("*.png")}
    assert figures == {path.stem for path in (folder / "figures").glob("*.svg")}
    axes = ("iteration", "trajectories", "pairs_asked", "env_steps", "seconds")
    kinds = [*(f"curves_{axis}" for axis in axes), "aggregates", "profiles", "improvement"]
    kinds.append("evaluation")
    assert figures == {"robustness", *(f"{kind}_{teacher}" for kind in kinds for teacher in TEACHERS)}

    page = (folder / "index.html").read_text()
    requests = Requests(page)
    assert requests.tags.count("img") == len(figures)
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)  # beside data, one that draws the curves
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert (
        f"default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
        in page
    )
    assert all(str(address).startswith(("data:", "#section-")) for address in requests.addresses)
    assert sorted(requests.pictures) == sorted(path.read_bytes() for path in (folder / "figures").glob("*.png"))
    assert len(set(requests.ids)) == len(requests.ids)
    assert set(requests.targets) <= set(requests.ids)
    assert len(requests.targets) == 5 + 2 * (len(axes) + 1)  # sections, and the tabs of both teachers
    sentence = "With the rational teacher, ncrs has the highest interquartile mean over 2 tasks: 0.700 ["
    assert sentence in page
    assert sentence in " ".join(printed.split())
    assert "Within this interval: no other agent." in page
    assert re.findall(r"<td><strong>(\d+)\.", page).count("800") == 1  # the best of its task
    assert r"\textbf{800.0 [" in (folder / "tables" / "final_return_rational.tex").read_text()
    assert "python -m pbrl.train -m agent=ncrs,zpg env=cheetah_run,walker_walk oracle=irrational,rational" in page
    assert "agent.policy" not in page  # they differ in nothing that both have
    for said in (page, printed):
        assert "Unequal budgets, bits per iteration: ncrs 32, zpg 320." in said
    assert "Unequal budgets, bits per trajectory" in (folder / "figures/curves_trajectories_rational.svg").read_text()

    before = {path: path.read_bytes() for path in folder.rglob("*.*")}
    report(tmp_path, "runs/")
    assert before == {path: path.read_bytes() for path in folder.rglob("*.*")}  # the same runs, the same bytes


def test_one_seed_of_one_agent_on_one_task_has_no_intervals(tmp_path: Path, report: Command) -> None:
    write_run(tmp_path / "runs", [1.0, 2.0], drop=["eval_return"])
    printed = report(tmp_path, "runs", "--output", "elsewhere")
    assert "2.0 (one seed)" in printed
    assert "0.002 (one seed)" in printed
    page = (tmp_path / "elsewhere" / "index.html").read_text()
    assert "Unequal budgets" not in page
    assert "This needs runs with the rational teacher" in page
    (row,) = rows(tmp_path / "elsewhere" / "tables" / "final_return.csv")
    assert row["standard_error"] == ""
    assert not list((tmp_path / "elsewhere").glob("figures/improvement*"))


def test_unfinished_broken_and_mixed_runs_are_named(tmp_path: Path, report: Command) -> None:
    write_run(tmp_path, [1.0, 2.0, 3.0], seed=0)
    unfinished = write_run(tmp_path, [1.0, 2.0], seed=1, settings={"iterations": 3})
    broken = write_run(tmp_path, [1.0], seed=2)
    (broken / "metrics.jsonl").write_text("no\n")
    mixed = write_run(tmp_path, [1.0, 2.0, 3.0], seed=3, settings={"agent.votes": 16})
    printed = report(tmp_path, ".")
    page = (tmp_path / "report" / "index.html").read_text()
    for said in (" ".join(printed.split()), page):
        assert (
            f"Unfinished, used as far as it is recorded: {unfinished.relative_to(tmp_path)} (2 of 3 iterations)" in said
        )
        assert f"Left out: {broken.relative_to(tmp_path)}: " in said
        assert "Runs called ncrs differ in agent.votes (null in " in said
        assert f"16 in {mixed.relative_to(tmp_path)}" in said
    assert re.search(r"2\.7 \[\d\.\d, \d\.\d\] \*", printed)


def test_agents_are_compared_on_the_tasks_that_they_share(tmp_path: Path, report: Command) -> None:
    for seed in range(2):
        write_run(tmp_path, [100.0 + seed], seed=seed)
        write_run(tmp_path, [900.0], seed=seed, task="cheetah_run")
        write_run(tmp_path, [200.0 + seed], seed=seed, agent="random")
    assert "Over walker_walk only: some agent has no run of cheetah_run." in report(tmp_path, ".")
    values = {row["agent"]: row for row in rows(tmp_path / "report/tables/aggregates.csv")}
    assert float(values["ncrs"]["value"]) == pytest.approx(1 - 0.1005)  # the last is its gap
    assert {row["tasks"] for row in values.values()} == {"1"}


def test_intervals_end_where_scores_must(tmp_path: Path, report: Command) -> None:
    for seed, final in enumerate((0.0, 300.0)):  # two runs: the interval is widened far beyond what can be
        write_run(tmp_path, [final], seed=seed)
        write_run(tmp_path, [1000.0 - final], seed=seed, agent="random")
    report(tmp_path, ".")
    ends = [(float(row["low"]), float(row["high"])) for row in rows(tmp_path / "report/tables/aggregates.csv")]
    assert min(ends) == (0.0, 1.0)
    assert all(0 <= low < high <= 1 for low, high in ends)


def test_an_agent_within_the_interval_of_the_best_is_marked(tmp_path: Path) -> None:
    for seed, noise in enumerate((-100.0, 0.0, 100.0)):
        write_run(tmp_path, [500.0 + noise], seed=seed)
        write_run(tmp_path, [480.0 + noise], seed=seed, agent="zpg")
        write_run(tmp_path, [10.0 + noise / 100], seed=seed, agent="dpo")
    runs, _ = find([tmp_path])
    table = returns(runs, "irrational", "final_return", "", Bootstrap(200, 0))
    ((_, dpo, ncrs, zpg),) = table.rows
    assert table.best == {(0, 2)}  # ncrs's
    assert [cell.endswith("≈") for cell in (dpo, ncrs, zpg)] == [False, False, True]
    sentence = headline(aggregates(runs, "irrational", Bootstrap(200, 0)), "irrational")
    assert sentence.startswith(
        "With the irrational teacher, ncrs has the highest interquartile mean over 1 task: 0.500 ["
    )
    assert sentence.endswith("Within this interval: zpg.")


def test_learning_speed_by_hand(tmp_path: Path) -> None:
    for seed, curve in enumerate([[0.0, 500.0, 700.0], [0.0, 100.0, 500.0], [0.0, 0.0, 0.0]]):
        write_run(tmp_path, curve, seed=seed)
    runs, _ = find([tmp_path])
    (record,) = speed(runs, "irrational", 0.5, Bootstrap(200, 0)).records
    assert record["area_value"] == pytest.approx((0.4 + 0.2 + 0.0) / 3)
    assert (record["iterations"], record["reached"]) == (3, 2)  # of 2, 3 and never
    (record,) = speed(runs, "irrational", 0.6, Bootstrap(200, 0)).records
    assert math.isnan(float(str(record["iterations"])))
    assert record["reached"] == 1


def test_agents_and_tasks_can_be_selected(tmp_path: Path, report: Command) -> None:
    for agent in ("ncrs", "zpg", "dpo"):
        for task in ("walker_walk", "cheetah_run"):
            write_run(tmp_path / "runs", [1.0, 2.0], agent=agent, task=task)
    report(tmp_path, "runs", "--agents", "ncrs,dpo", "--tasks", "cheetah_run", "--title", "Mine & yours")
    found = {(row["agent"], row["task"]) for row in rows(tmp_path / "report" / "tables" / "runs.csv")}
    assert found == {("ncrs", "cheetah_run"), ("dpo", "cheetah_run")}
    assert "<h1>Mine &amp; yours</h1>" in (tmp_path / "report" / "index.html").read_text()
    with pytest.raises(SystemExit, match="there are no runs of the agent 'ncsr', only of dpo, ncrs, zpg"):
        report(tmp_path, "runs", "--agents", "ncsr")


def test_agents_that_share_no_task_are_not_compared(tmp_path: Path, report: Command) -> None:
    write_run(tmp_path, [1.0])
    write_run(tmp_path, [1.0], agent="zpg", task="cheetah_run")
    assert "No task has runs of all agents" in report(tmp_path, ".")
    assert not (tmp_path / "report" / "tables" / "aggregates.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "pbrl.report: there is no folder nowhere"),
        (["."], "pbrl.report: no runs in .; a run is a folder with config.yaml and metrics.jsonl"),
        ([".", "--output", "file"], "pbrl.report: Not a directory: file"),
    ],
)
def test_what_cannot_be_reported_is_said_in_a_sentence(
    tmp_path: Path, report: Command, arguments: list[str], message: str
) -> None:
    (tmp_path / "file").touch()
    if "--output" in arguments:
        write_run(tmp_path / "runs", [1.0])
    with pytest.raises(SystemExit, match=re.escape(message)):
        report(tmp_path, *arguments)


def test_in_a_narrow_terminal_a_table_goes_on_below(
    tmp_path: Path, report: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = [f"an_agent_with_a_name_{i}" for i in range(4)]
    for agent in agents:
        write_run(tmp_path, [123.4], settings={"name": agent})
    monkeypatch.setattr(Console, "is_terminal", property(lambda _: True))
    monkeypatch.setenv("COLUMNS", "80")
    printed = re.sub(r"\x1b\[[0-9;]*m", "", report(tmp_path, "."))  # without colours
    assert "…" not in printed
    assert max(len(line) for line in printed.splitlines()) <= 80
    for word in ("iterations", "trajectories", "64,000 (64,000)", "pairs asked"):
        assert word in printed
    returns = printed[: printed.index("Over all tasks")]
    assert [word for word in returns.split() if word.startswith("an_agent")] == agents  # in order, each once
    assert returns.count("walker_walk") == 2  # the key of a row is in both parts


def test_latex_is_escaped_and_every_row_has_its_cells() -> None:
    table = Table("", "", ["a_b", "50 %"], [["x & y", "1.0 ± 0.1 [0, 1]"], ["~$#{}^\\", "-"]])
    assert to_latex(table).splitlines() == [
        r"\begin{tabular}{lr}",
        r"\hline",
        r"a\_b & 50 \% \\",
        r"\hline",
        r"x \& y & 1.0 $\pm$ 0.1 [0, 1] \\",
        r"\textasciitilde{}\$\#\{\}\textasciicircum{}\textbackslash{} & - \\",
        r"\hline",
        r"\end{tabular}",
    ]


def test_of_two_agents_the_better_one_comes_first(tmp_path: Path) -> None:
    heights = {"dpo": (100.0, 200.0), "ncrs": (400.0, 500.0), "zpg": (150.0, 600.0)}
    runs = [
        load(write_run(tmp_path, [height] * 10, agent=agent, seed=seed))
        for agent, both in heights.items()
        for seed, height in enumerate(both)
    ]
    table = improvement(runs, "irrational", Bootstrap(resamples=100, seed=0))
    # zpg beats dpo in three of four pairings; ncrs and zpg win half of theirs and stay in their order.
    assert [row[:2] for row in table.rows] == [["ncrs", "dpo"], ["ncrs", "zpg"], ["zpg", "dpo"]]
    assert [each["value"] for each in table.records] == pytest.approx([1, 0.5, 0.75])
    assert [(each["agent"], each["over"]) for each in table.records] == [tuple(row[:2]) for row in table.rows]


def test_robustness_is_of_the_seeds_that_both_teachers_have(tmp_path: Path) -> None:
    # Seed 2 alone has runs with both `rational` and `mistake`; `skip` has no seed in common with `rational`.
    returns = {
        "rational": {0: 100.0, 1: 300.0, 2: 500.0},
        "mistake": {2: 150.0, 3: 250.0, 7: 50.0},
        "skip": {3: 100.0, 4: 300.0},
    }
    runs = [
        load(write_run(tmp_path, [height] * 10, oracle=teacher, seed=seed))
        for teacher, seeds in returns.items()
        for seed, height in seeds.items()
    ]
    table = robustness(runs, Bootstrap(resamples=50, seed=0))
    assert table.columns == ["agent", "rational", "mistake", "skip"]
    assert table.rows == [["ncrs", "1", "0.30 (one seed)", "-"]]
