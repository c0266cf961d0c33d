"""What a sweep costs: measured before it starts, and said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_sweeps import TINY
from test_train import ROOT, Command

from pbrl.run import trial
from pbrl.run.record import Row

COST = "+hydra.callbacks.cost={_target_:pbrl.run.trial.Cost,steps:[2,4]}"


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def test_a_straight_line_leads_to_the_whole_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class FakeRun:
        """Its iterations take half a second and a hundredth for every step; the first takes longer."""

        def __init__(self, settings: dict[str, Any]) -> None:
            self.steps, self.done = settings["env"]["steps"], 0

        def iterate(self, _: int) -> None:
            clock[0] += 0.5 + 0.01 * self.steps + (60.0 if self.done == 0 else 0.0)
            self.done += 1

    monkeypatch.setattr(trial, "TrainingRun", FakeRun)
    monkeypatch.setattr(trial.time, "perf_counter", lambda: clock[0])
    settings = {"env": {"name": "pendulum_swingup", "steps": None}, "name": "x", "threads": 1, "allow": []}
    assert trial.try_out(settings, [10, 50]) == pytest.approx(0.5 + 0.01 * 1000)
    short = {**settings, "env": {"name": "pendulum_swingup", "steps": 5}}  # shorter than what is tried
    assert trial.try_out(short, [10, 50]) == pytest.approx(0.5 + 0.01 * 5)


def test_the_pace_of_a_record_by_hand() -> None:
    rows: list[Row] = [{"iteration": 0, "seconds_collect": 2.0, "seconds_learn": None}, {"seconds_ask": 1.0}]
    assert trial.pace(rows) == 1.5


@pytest.mark.parametrize(
    ("launcher", "jobs"), [({"_target_": "x.BasicLauncher"}, 1), ({"_target_": "x", "n_jobs": 1}, 1)]
)
def test_jobs_at_a_time(launcher: dict[str, Any], jobs: int) -> None:
    assert trial.jobs_at_a_time(launcher) == jobs


def test_a_sweep_says_what_it_takes_and_how_far_it_is(train: Command, tmp_path: Path) -> None:
    arguments = ["-m", "agent=random,ncrs", "seed=0,1", *TINY, COST]
    code, out, err = train(arguments, tmp_path)
    assert code == 0, out + err
    assert out.count("trying how long an iteration takes: pendulum_swingup,") == 2  # not once for each seed
    assert "4 runs, 0 of them finished: the others take about 0.0 hours on this machine, 1 at a time" in out
    for number in (1, 2, 3, 4):
        assert f"run {number} of 4, about 0.0 hours are left" in out
    assert not list(tmp_path.glob("runs/pendulum_swingup/*/*/*/preferences~*"))
    code, out, _ = train(arguments, tmp_path)
    assert code == 0
    assert "4 runs, 4 of them finished" in out
    assert "trying" not in out


def test_runs_on_disk_need_no_trial(train: Command, tmp_path: Path) -> None:
    assert train(["agent=random", *TINY], tmp_path)[0] == 0
    path = tmp_path / "runs/pendulum_swingup/random/irrational/seed_0/metrics.jsonl"
    kept = [json.loads(line) for line in path.read_text().splitlines()]
    slow = [
        {name: 1800.0 if name == "seconds_learn" else 0.0 for name in row} | {"iteration": row["iteration"]}
        for row in kept
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in slow))
    code, out, err = train(["-m", "agent=random", "seed=0,1", *TINY, COST], tmp_path)
    assert code == 0, out + err
    assert "trying" not in out
    assert "2 runs, 1 of them finished: the others take about 1.0 hours" in out  # 2 iterations of half an hour


@pytest.mark.parametrize("name", ["paper", "paper_short"])
def test_the_long_experiments_say_what_they_cost(name: str) -> None:
    experiment = yaml.safe_load((ROOT / f"conf/experiment/{name}.yaml").read_text())
    assert experiment["hydra"]["callbacks"]["cost"]["_target_"] == f"{trial.Cost.__module__}.{trial.Cost.__name__}"
