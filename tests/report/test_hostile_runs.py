"""A run folder is data from anywhere: one that is damaged or hostile is left out or shown safely, and never the end."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from synthetic_runs import write_run

from pbrl.report.__main__ import main
from pbrl.report.files import file_name, to_csv
from pbrl.report.provenance import compare_versions
from pbrl.report.runs import find
from pbrl.report.tables import Table
from pbrl.report.text import LONGEST_LABEL, label, printable


def make_report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The page of a report over a folder; no file of it has a control character."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["pbrl.report", "--resamples", "20", "."])
    main()
    for path in (folder / "report").rglob("*.*"):
        if path.suffix == ".svg":
            ElementTree.parse(path)
        if path.suffix != ".png":
            assert all(each.isprintable() for each in path.read_text().split("\n")), path
    return html.unescape((folder / "report" / "index.html").read_text())


def change(folder: Path, path: str, value: object) -> None:
    config = yaml.safe_load((folder / "config.yaml").read_text())
    node = config
    *parents, last = path.split(".")
    for parent in parents:
        node = node[parent]
    node[last] = value
    (folder / "config.yaml").write_text(yaml.dump(config))


NAMES = ["[/x]", r"$\x$", "$a$", "\x1b[31mred", "two\nlines", "<script>alert(1)</script>", "_hidden", "a" * 300]
NAMES += ["\u202eright to left", "../../x", "=1+1", "%s {0} \\"]


def test_agents_and_tasks_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i, name in enumerate(NAMES):
        folder = write_run(tmp_path / "runs" / str(i), [1.0, 2.0])
        change(folder, "name", name)
        change(folder, "env.name", NAMES[i // 2])
    page = make_report(tmp_path, monkeypatch)
    assert f"{len(NAMES)} runs" in page
    for name in NAMES:
        assert printable(name)[:50] in page
    assert {path.name for path in tmp_path.iterdir()} == {"report", "runs"}


def test_teachers_may_have_any_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [r"[/x] $\x$", "\x1b[31m\n../../x", "a" * 300]
    for i, value in enumerate(values):
        change(write_run(tmp_path / "runs" / str(i), [1.0, 2.0]), "oracle.tie", value)
    page = make_report(tmp_path, monkeypatch)
    for value in values:
        assert f"irrational tie={printable(value)}"[:50] in page
    assert {path.name for path in tmp_path.iterdir()} == {"report", "runs"}


SETTINGS = {
    "seed: .inf": "seed is not a whole number",
    "seed: -1": "seed is not a whole number",
    "iterations: many": "iterations is not a whole number",
    "env: {name: walker_walk, steps: abc}": "env.steps is not a whole number",
    "env: {name: walker_walk, steps: 0}": "env.steps is not a whole number",
    "env: {name: [walker_walk], steps: null}": "env.name is not a name",
    "env: walker_walk": "env is not a node",
    "name: {a: 1}": "name is not a name",
    "agent: {_target_: 3}": "agent is not a node with a _target_",
    "oracle: null": "oracle is not a node with a _target_",
    "pairs: 0x" + "f" * 20_000: "a number of too many digits",
    "pairs: " + "9" * 5_000: "cannot be read",
    "pairs: 2024-13-45": "cannot be read",
    "pairs: !!python/object/apply:os.system [touch executed]": "cannot be read",
    "pairs: " + "[" * 60 + "]" * 60: "nested more than 50 levels deep",
    "pairs: " + "[" * 10_000: "nested more than 50 levels deep",
    "pairs: &a [1]": "anchors or aliases",
    "padding: " + "x" * 100_000: "more than 100000 bytes",
}


@pytest.mark.parametrize(("line", "reason"), SETTINGS.items(), ids=[line[:30] for line in SETTINGS])
def test_a_run_with_impossible_settings_is_left_out(tmp_path: Path, line: str, reason: str) -> None:
    good = write_run(tmp_path, [1.0, 2.0])
    bad = write_run(tmp_path, [1.0, 2.0], seed=1)
    with (bad / "config.yaml").open("a") as file:
        file.write(f"{line}\n")  # of two settings of one name, the last counts
    runs, left_out = find([tmp_path])
    assert [run.folder for run in runs] == [good]
    assert reason in left_out[bad]
    assert not Path("executed").exists()


def test_an_alias_bomb_is_refused_before_anything_is_made_of_it(tmp_path: Path) -> None:
    bad = write_run(tmp_path, [1.0])
    lines = ["a0: &a0 {x: 1}"] + [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 30)]
    text = (bad / "config.yaml").read_text()
    (bad / "config.yaml").write_text("\n".join([*lines, text]))
    runs, left_out = find([tmp_path])
    assert not runs
    assert "anchors or aliases" in left_out[bad]


ROWS = {
    '"return_mean": 1e300': "an impossible number in return_mean",
    '"bits": -5': "an impossible number in bits",
    '"bits": Infinity': "an impossible number in bits",
    '"bits": null': "its record has no bits for some iterations",
    '"seconds_learn": 1e300': "an impossible number in seconds_learn",
    '"trajectories": []': "something that is not a number",
    '"trajectories": ' + "[" * 100_000: "",
}


@pytest.mark.parametrize(("cell", "reason"), ROWS.items(), ids=[cell[:30] for cell in ROWS])
def test_a_run_with_an_impossible_record_is_left_out(tmp_path: Path, cell: str, reason: str) -> None:
    good = write_run(tmp_path, [1.0, 2.0])
    bad = write_run(tmp_path, [1.0, 2.0], seed=1)
    name = cell.split(":")[0]
    first, *rest = (bad / "metrics.jsonl").read_text().splitlines()
    first = re.sub(f"{name}: [^,}}]+", lambda _: cell, first)
    (bad / "metrics.jsonl").write_text("\n".join([first, *rest, ""]))
    runs, left_out = find([tmp_path])
    assert [run.folder for run in runs] == [good]
    assert reason in left_out[bad]


def test_what_is_not_a_file_is_not_read(tmp_path: Path) -> None:
    pipe = write_run(tmp_path, [1.0])
    (pipe / "metrics.jsonl").unlink()
    os.mkfifo(pipe / "metrics.jsonl")  # reading it would wait for ever
    folder = write_run(tmp_path, [1.0], seed=1)
    (folder / "config.yaml").unlink()
    (folder / "config.yaml").mkdir()
    runs, left_out = find([tmp_path])
    assert not runs
    assert left_out[pipe] == "its metrics.jsonl is not a file"
    assert "config.yaml is not a file" in left_out[folder]


def test_one_bad_folder_does_not_end_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, [1.0, 2.0])
    bad = write_run(tmp_path, [1.0, 2.0], seed=1)
    change(bad, "seed", float("inf"))
    bad.rename(bad.with_name("\x1b]0;title\x07"))
    write_run(tmp_path, [1.0, 2.0], agent="zpg").rename(os.fsdecode(bytes(tmp_path) + b"/not \xff Unicode"))
    page = make_report(tmp_path, monkeypatch)
    assert "2 runs:" in page
    assert r"Left out: walker_walk/ncrs/irrational/\x1b]0;title\x07: its config.yaml is not one" in page


@pytest.mark.parametrize("noted", ["null", "[null]", '[{"numpy": []}]', "{}", '"x"', "[" * 100_000, "\xff"])
def test_damaged_notes_of_versions_do_no_harm(tmp_path: Path, noted: str) -> None:
    (tmp_path / "versions.json").write_text(noted, encoding="latin-1")
    assert all(line.endswith("; runs: not noted (1)") for line in compare_versions([tmp_path]))


def test_versions_are_shown_safely(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text(json.dumps([{"numpy": "\x1b[31m" + "9" * 300}]))
    (line,) = (line for line in compare_versions([tmp_path]) if line.startswith("numpy"))
    assert line.isprintable()
    assert len(line) < 200


def test_references_in_a_run_are_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "opensesame")
    folder = write_run(tmp_path, [1.0, 2.0])
    change(folder, "oracle.tie", "${oc.env:A_SECRET}")
    change(folder, "pairs", "${oc.env:A_SECRET}")
    page = make_report(tmp_path, monkeypatch)
    assert "irrational tie=${oc.env:A_SECRET}" in page
    assert "opensesame" not in page


@pytest.mark.parametrize("text", ["=1+1", "+cmd|x", "@x", "-cmd", "-", "+1+1", "-2+3"])
def test_a_spreadsheet_runs_no_cell(text: str) -> None:
    (row,) = csv.DictReader(to_csv([Table("", "", [], records=[{"name": text}])]).splitlines())
    assert row["name"] == f"'{text}"


@pytest.mark.parametrize("value", ["-5", "+1.5e-3", "a=b", "walker_walk", -5, -1.5])
def test_other_cells_stay_as_they_are(value: object) -> None:
    (row,) = csv.DictReader(to_csv([Table("", "", [], records=[{"name": value}])]).splitlines())
    assert row["name"] == str(value)


def test_long_and_strange_names_stay_different() -> None:
    long = ["a" * 300 + end for end in "bc"]
    assert len({label(name) for name in long}) == 2
    assert max(len(label(name)) for name in long) <= LONGEST_LABEL
    strange = ["[x]", "(x)", "日本", "中国", *long]
    assert len({file_name("curves", name) for name in strange}) == len(strange)
    assert max(len(file_name(name)) for name in strange) < 100
    assert file_name("curves", "irrational tau={error_rate:0.2}") == "curves_irrational_tau=_error_rate_0.2"


def test_a_record_of_nothing_asked_has_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, [1.0, 2.0])
    idle = write_run(tmp_path, [1.0, 2.0], agent="random")
    rows = [
        json.loads(line) | {"pairs_asked": 0, "bits": 0} for line in (idle / "metrics.jsonl").read_text().splitlines()
    ]
    (idle / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "Unequal budgets, pairs asked per iteration: ncrs 32, random 0." in make_report(tmp_path, monkeypatch)
