"""Finding and reading runs: whole, unfinished, broken, kept aside, twice."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run

from pbrl.report.curves import curve
from pbrl.report.reference import repeated
from pbrl.report.runs import NotARunError, find, load
from pbrl.report.shipped import ShippedRun
from pbrl.report.tables import Bootstrap, speed
from pbrl.run.record import RecordError


def test_a_run_is_named_by_its_settings_and_scored_by_its_last_tenth(tmp_path: Path) -> None:
    run = load(write_run(tmp_path, [float(i) for i in range(50)], agent="zpg", oracle="mistake", seed=3))
    assert (run.agent, run.task, run.teacher, run.seed) == ("zpg", "walker_walk", "mistake", 3)
    assert run.finished
    assert run.iterations == 50
    assert run.final_return == np.mean([45, 46, 47, 48, 49])
    assert run.score == run.final_return / 1000
    assert run.eval_return == 59
    assert run.metrics["seconds"][-1] == 150  # three of each iteration


def test_a_shorter_episode_has_a_lower_maximum(tmp_path: Path) -> None:
    assert load(write_run(tmp_path, [50.0], settings={"env.steps": 500})).score == 0.1


def test_teachers_that_were_changed_are_other_teachers(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [1.0], settings={"oracle.eps_mistake": 0.3, "oracle.tau": {"error_rate": 0.2}})
    assert load(folder).teacher == "irrational tau={error_rate:0.2} eps_mistake=0.3"


def test_an_unfinished_run_counts_as_far_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [1.0, 2.0, 3.0], settings={"iterations": 10})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "return_me')  # the next one is being written
    run = load(folder)
    assert not run.finished
    assert run.iterations == 3
    assert run.final_return == 3


def test_an_iteration_may_collect_nothing(tmp_path: Path) -> None:
    """What it is charged, and its evaluation, still count; the run is as long as its record."""
    run = load(write_run(tmp_path, [1.0, math.nan, 3.0, 4.0]))  # json.dumps writes NaN, which only Python reads
    np.testing.assert_array_equal(run.metrics["return_mean"], [1, math.nan, 3, 4])
    folder = write_run(tmp_path, [1.0, 2.0], seed=1)
    text = (folder / "metrics.jsonl").read_text().replace('"return_mean": 2.0', '"return_mean": null')
    (folder / "metrics.jsonl").write_text(text)
    run = load(folder)
    assert run.finished
    assert (run.final_return, run.eval_return, run.metrics["pairs_asked"][-1]) == (1, 12, 64)
    (row,) = speed([run], "irrational", 0.001, Bootstrap(resamples=10, seed=0)).records
    assert (row["area_value"], row["iterations"]) == (0.001, 1)
    assert repeated([run], [ShippedRun(run, "", [], 0.0)]) == ["1 run of ncrs: bit for bit the reference."]
    assert curve([run], "iteration").mean.tolist() == [1]


def test_a_run_without_evaluations_or_times_is_a_run(tmp_path: Path) -> None:
    drop = ["eval_return", "seconds_collect", "seconds_ask", "seconds_learn"]
    run = load(write_run(tmp_path, [1.0, 2.0], drop=drop))
    assert math.isnan(run.eval_return)
    np.testing.assert_array_equal(run.metrics["seconds"], [0, 0])


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("", "it has not recorded an iteration yet"),
        ('{"iteration": 0, "return_m', "it has not recorded an iteration yet"),
        ('{"iteration": 0, "return_mean": 1.0}\n', "its record has no trajectories, env_steps, pairs_asked, bits"),
        ('{"iteration": 0, "return_mean": "good"}\n', "something that is not a number"),
        ('{"iteration": 0, "return_mean": null, "trajectories": 1, "env_steps": 1, "pairs_asked": 1, "bits": 1}\n',
         "its record has no return_mean"),
    ],
)  # fmt: skip
def test_what_has_no_returns_is_not_a_run(tmp_path: Path, record: str, reason: str) -> None:
    folder = write_run(tmp_path, [1.0])
    (folder / "metrics.jsonl").write_text(record)
    with pytest.raises(NotARunError, match=reason):
        load(folder)


def test_a_broken_record_is_refused_as_the_record_refuses_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [1.0, 2.0])
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text() * 2)
    with pytest.raises(RecordError, match="line 3: iteration 0 follows 1"):
        load(folder)
    path.write_text("not even JSON\n")
    with pytest.raises(RecordError, match="line 1: this is not the row"):
        load(folder)


@pytest.mark.parametrize("config", ["", "a: [", "name: x", "agent: 1\noracle: 2\n", "\xff\x00"])
def test_a_configuration_of_something_else_is_named(tmp_path: Path, config: str) -> None:
    folder = write_run(tmp_path, [1.0])
    (folder / "config.yaml").write_text(config, encoding="latin-1")
    with pytest.raises(NotARunError, match=r"its config\.yaml"):
        load(folder)


def test_find_names_what_it_leaves_out_and_ignores_what_is_aside(tmp_path: Path) -> None:
    kept = write_run(tmp_path, [1.0], seed=0)
    broken = write_run(tmp_path, [1.0], seed=1)
    (broken / "metrics.jsonl").write_text("no\n")
    aside = write_run(tmp_path, [1.0], seed=2)
    aside.rename(aside.with_name("seed_2~1"))
    other = tmp_path / "notes"
    other.mkdir()
    (other / "metrics.jsonl").write_text("no run: there is no config.yaml\n")
    runs, left_out = find([tmp_path, kept, tmp_path / "walker_walk"])  # whatever overlaps counts once
    assert [run.folder for run in runs] == [kept]
    assert list(left_out) == [broken]


def test_a_second_run_of_the_same_name_is_left_out_and_said_so(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", [1.0])
    second = write_run(tmp_path / "b", [2.0])
    runs, left_out = find([tmp_path / "a", tmp_path / "b"])
    assert [run.folder for run in runs] == [first]
    assert f"{first} has the same task, agent, teacher and seed" in left_out[second]


def test_rows_are_read_as_the_record_reads_them(tmp_path: Path) -> None:
    """The fast way and the careful way give the same numbers; a half-written row takes the careful one."""
    folder = write_run(tmp_path, list(np.random.default_rng(0).normal(300, 100, 40)), settings={"iterations": 41})
    fast = load(folder).metrics
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"iteration": 40}))
    careful = load(folder).metrics
    assert fast.keys() == careful.keys()
    for name in fast:
        np.testing.assert_array_equal(fast[name], careful[name])
