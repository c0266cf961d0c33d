"""Sweeps whose runs are other processes, through each of the launchers, and a search. All of them are slow ones.

Ray is not among what the tests install, being large: `pip install -c constraints.txt -e '.[ray]'`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from test_sweeps import AGENTS, RUNS, TINY, settings
from test_train import ROOT, Command, record

from pbrl.simulation.simulator import cores


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, as a launcher wants it."""
    token = folder / "ray_token"  # Ray would leave one in the home folder
    token.write_text(secrets.token_hex(32))
    return subprocess.Popen(
        [sys.executable, "-m", "pbrl.train", *arguments],
        cwd=folder,
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "threads"),
    [
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], max(1, cores() // 2)),
        (["hydra/launcher=submitit_local"], 1),
        (["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"], 1),
    ],
    ids=["joblib", "submitit_local", "ray"],
)
def test_every_launcher_gives_the_sequential_record(
    launcher: list[str], threads: int, train: Command, tmp_path: Path
) -> None:
    for way in ("sequential", "launched"):
        (tmp_path / way).mkdir()
    code, out, err = train(AGENTS, tmp_path / "sequential")
    assert code == 0, out + err
    process = start([*AGENTS, *launcher], tmp_path / "launched")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "4 of 4 runs are finished" in out
    assert "Warning" not in out
    groups = set()
    for run in RUNS:
        rows = record(tmp_path / "launched" / run)
        assert len(rows) == 2
        assert rows == record(tmp_path / "sequential" / run)
        assert settings(tmp_path / "launched" / run)["threads"] == threads  # so that jobs do not fight for cores
        groups |= {settings(tmp_path / way / run)["wandb"]["group"] for way in ("sequential", "launched")}
    (group,) = groups  # one for the sweep, however it is launched
    assert re.fullmatch(r"agent-seed-[0-9a-f]{8}", group)
    assert (tmp_path / "launched/runs/sweeps" / group / "summary.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_sigterm_lets_the_runs_of_other_processes_save(launcher: str, tmp_path: Path) -> None:
    arguments = ["-m", "agent=random", "seed=0,1", *TINY, "iterations=100000", f"hydra/launcher={launcher}"]
    arguments += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = start([*arguments, "checkpoint_every=100000"], tmp_path)
    runs = [tmp_path / f"runs/pendulum_swingup/random/irrational/seed_{seed}" for seed in (0, 1)]
    while process.poll() is None and not all((run / "metrics.jsonl").exists() for run in runs):
        time.sleep(0.1)
    process.terminate()
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "0 of 2 runs are finished; stopped by a signal" in out
    for run in runs:
        (saved,) = (run / "checkpoint").iterdir()
        assert int(saved.name) + 1 == len(record(run))  # nothing was lost


@pytest.mark.slow
def test_a_process_that_is_killed_is_reported_and_the_same_command_goes_on(train: Command, tmp_path: Path) -> None:
    sweep = ["-m", "agent=random", "seed=0,1", *TINY]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process = start([*sweep, "iterations=100000", *launcher], tmp_path)
    run = tmp_path / "runs/pendulum_swingup/random/irrational/seed_0"
    while process.poll() is None and not ((run / "metrics.jsonl").exists() and record(run)):
        time.sleep(0.1)
    (note,) = tmp_path.glob("runs/sweeps/*/jobs/0.json")
    os.kill(json.loads(note.read_text())["process"], signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "the launcher failed: the same command runs what is missing" in out
    assert "lost" in out
    iterations = len(record(run)) + 2
    code, out, err = train([*sweep, f"iterations={iterations}"], tmp_path)  # one after the other will do
    assert code == 0, out + err
    assert len(record(run)) == iterations


@pytest.mark.slow
def test_a_search_finds_the_highest_evaluation_and_its_trials_do_not_collide(tmp_path: Path) -> None:
    search = ["experiment=tune", "hydra.sweeper.n_trials=3", "agent=ncrs_single", *TINY]
    process = start([*search, "agent.step.maximum=tag(log,interval(0.005,0.2))"], tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    runs = sorted(tmp_path.glob("runs/pendulum_swingup/*/irrational/seed_0"))
    assert len(runs) == 3
    evaluations = {record(run)[-1]["eval_return"]: settings(run)["agent"]["step"]["maximum"] for run in runs}
    (results,) = tmp_path.glob("runs/sweeps/*/optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == max(evaluations)
    steps = {settings(run)["agent"]["step"]["maximum"] for run in runs}
    assert len(steps) == 3
    assert best["best_params"]["agent.step.maximum"] in steps
    # The same search with one more trial finds the three on disk. One that fails is no end of it.
    more = [*search, "agent.step.maximum=tag(log,interval(0.005,0.2))", "hydra.sweeper.n_trials=4"]
    blocked = runs[0] / "checkpoint"
    blocked.rename(runs[0] / "aside")
    blocked.write_text("a file where a folder should be")
    process = start(more, tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "3 of 4 runs are finished" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  python")]
    assert shlex.split(line)[3:] == more
    blocked.unlink()
    (runs[0] / "aside").rename(blocked)
    process = start(shlex.split(line)[3:], tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert out.count("nothing is left to do") >= 3
    assert "4 of 4 runs are finished" in out
    assert f"the best settings are in {results.relative_to(tmp_path)}" in out
