"""Sweeps, as a user meets them: one command, many runs."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from test_train import ROOT, Command, record

import pbrl.train
from pbrl.simulator import cores
from pbrl.sweep import commands
from pbrl.threads import threads_of_a_job

TINY = [
    "env=pendulum_swingup",  # starts without compiling
    "env.steps=5",
    "agent.policy.hidden=[8,8]",
    "evaluation={every:2,trajectories:2}",
    "checkpoint_every=1",
    "wandb.mode=disabled",
    "iterations=3",
]
AGENTS = ["-m", "agent=ncrs,zpg", "seed=0,1", *TINY]
RUNS = [Path(f"runs/pendulum_swingup/{agent}/irrational/seed_{seed}") for agent in ("ncrs", "zpg") for seed in (0, 1)]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, as a launcher wants it."""
    token = {"RAY_AUTH_TOKEN_PATH": str(folder / "ray_token")}  # and not in the home folder
    return subprocess.Popen(
        [sys.executable, "-m", "pbrl.train", *arguments],
        cwd=folder,
        env={**os.environ, **token, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def times(folder: Path) -> dict[Path, int]:
    """When each file of the runs was last written; sweeps have folders of their own."""
    return {
        path: path.stat().st_mtime_ns
        for path in folder.glob("runs/*/**/*")
        if path.is_file() and path.relative_to(folder).parts[1] != "sweeps"
    }


def settings(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((run / "config.yaml").read_text()))


def summary(folder: Path) -> str:
    (path,) = folder.glob("runs/sweeps/*/summary.txt")
    return path.read_text()


# ------------------------------------------------------------------------------------------------ launchers


@pytest.mark.parametrize(
    ("launcher", "threads"),
    [
        pytest.param(["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], max(1, cores() // 2), id="joblib"),
        pytest.param(["hydra/launcher=submitit_local"], 1, id="submitit_local", marks=pytest.mark.slow),
        pytest.param(["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"], 1, id="ray", marks=pytest.mark.slow),
    ],
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
    assert "validated against ConfigStore" not in out  # our presets do not quarrel with the plugins'
    groups = set()
    for run in RUNS:
        rows = record(tmp_path / "launched" / run)
        assert len(rows) == 3
        assert rows == record(tmp_path / "sequential" / run)
        assert settings(tmp_path / "launched" / run)["threads"] == threads  # so that jobs do not fight for cores
        groups |= {settings(tmp_path / way / run)["wandb"]["group"] for way in ("sequential", "launched")}
    (group,) = groups  # one for the sweep, however it is launched
    assert re.fullmatch(r"agent-seed-[0-9a-f]{8}", group)
    assert (tmp_path / "launched/runs/sweeps" / group / "summary.txt").exists()


@pytest.mark.parametrize(
    ("launcher", "machine", "threads"),
    [
        ({}, 8, 8),  # one run after the other
        ({"n_jobs": -1}, 8, 1),
        ({"n_jobs": -2}, 8, 1),
        ({"n_jobs": 2}, 8, 4),
        ({"n_jobs": 3}, 8, 2),
        ({"n_jobs": 99}, 8, 1),
        ({"n_jobs": 1}, 8, 8),
        ({"cpus_per_task": 4}, 8, 4),
        ({"cpus_per_task": 16}, 8, 8),
        ({"cpus_per_task": None}, 8, 8),
        ({"ray": {"init": {}, "remote": {"num_cpus": 2}}}, 8, 2),
        ({"ray": {"init": {}, "remote": {"num_cpus": 0.5}}}, 8, 1),
        ({"ray": {"init": {}, "remote": {}}}, 8, 8),
    ],
)
def test_threads_are_a_jobs_share(launcher: dict[str, Any], machine: int, threads: int) -> None:
    assert threads_of_a_job(launcher, machine) == threads


def test_threads_that_were_asked_for_are_given(train: Command, tmp_path: Path) -> None:
    assert train(["-m", "agent=random", "seed=0", "threads=1", *TINY, "iterations=1"], tmp_path)[0] == 0
    assert settings(tmp_path / "runs/pendulum_swingup/random/irrational/seed_0")["threads"] == 1


@pytest.mark.parametrize("argument", ["hydra/launcher=joblib", "hydra/launcher=ray", "experiment=tune"])
def test_a_plugin_that_is_missing_has_its_extra_named(
    argument: str, train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("hydra_plugins.") else name)
    code, out, err = train(["-m", "seed=0,1", argument], tmp_path)
    assert code == 1
    extra = {"experiment=tune": "optuna"}.get(argument, argument.partition("=")[2])
    assert f"{argument} needs a plugin of Hydra's that is not installed: pip install 'pbrl[{extra}]'" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- relaunching, failing, stopping


def test_relaunching_runs_only_what_is_missing(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(AGENTS, tmp_path)[0] == 0
    before, whole = times(tmp_path), record(tmp_path / RUNS[3])
    with monkeypatch.context() as patch:
        patch.setattr(pbrl.train, "Run", None)  # nothing heavy is made
        code, out, err = train(AGENTS, tmp_path)
    assert code == 0, out + err
    assert times(tmp_path) == before
    assert out.count("nothing is left to do") == 4
    assert summary(tmp_path).count("left alone") == 4
    # One that is gone, and one that was cut short after its first iteration.
    for path in sorted((tmp_path / RUNS[0]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert train([*AGENTS, "agent=zpg", "seed=1", "iterations=1", "resume=false"], tmp_path)[0] == 0
    before = times(tmp_path)
    made = []
    monkeypatch.setattr(pbrl.train, "Run", lambda cfg, make=pbrl.train.Run: made.append(cfg.folder) or make(cfg))
    code, out, err = train(AGENTS, tmp_path)
    assert code == 0, out + err
    assert made == [str(RUNS[0]), str(RUNS[3])]
    for path, moment in before.items():
        if RUNS[3] not in (path.relative_to(tmp_path), *path.relative_to(tmp_path).parents):
            assert path.stat().st_mtime_ns == moment
    assert record(tmp_path / RUNS[3]) == whole


def test_a_failure_leaves_the_others_and_says_how_to_rerun(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = pbrl.train.Run.iterate

    def fail(self: pbrl.train.Run, iteration: int, cfg: Any) -> dict[str, float]:
        if cfg.seed > 0 and cfg.name == "zpg" and iteration == 1:
            raise RuntimeError("the moon was\nin the wrong house")
        return iterate(self, iteration, cfg)

    with monkeypatch.context() as patch:
        patch.setattr(pbrl.train.Run, "iterate", fail)
        code, out, err = train(["-m", "agent=ncrs,zpg", "seed=0,1,2", *TINY], tmp_path)
    assert code == 1
    assert "Traceback" not in out + err
    assert "4 of 6 runs are finished" in out
    assert len(record(tmp_path / RUNS[0])) == len(record(tmp_path / RUNS[2])) == 3
    table = summary(tmp_path)
    assert table.count("failed") == 2
    assert "RuntimeError: the moon was" in table
    (folder,) = tmp_path.glob("runs/sweeps/*")
    assert "in fail\n" in (folder / "jobs/4.txt").read_text()  # the traceback
    assert not (folder / "jobs/3.txt").exists()
    (line,) = [line.strip() for line in table.splitlines() if line.startswith("  python")]
    assert line in out
    assert "agent=zpg" in line
    assert "seed=1,2" in line
    # The very command runs those two, from where they are.
    before = times(tmp_path)
    code, out, err = train(shlex.split(line)[3:], tmp_path)
    assert code == 0, out + err
    assert "2 of 2 runs are finished" in out
    assert out.count("1 of 3 iterations are there") == 2
    failed = [tmp_path / RUNS[3], tmp_path / RUNS[3].with_name("seed_2")]
    for path, moment in before.items():
        assert path.stat().st_mtime_ns == moment or {*failed} & {*path.parents}
    for run in failed:
        assert len(record(run)) == 3
        assert settings(run)["wandb"]["group"] == settings(tmp_path / RUNS[0])["wandb"]["group"]


def test_settings_that_make_no_sense_are_a_failure_of_their_own_run(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "agent.votes=4,99", *TINY, "iterations=1"], tmp_path)
    assert code == 1
    assert "votes must be between 1 and 32, half the trajectories, not 99" in summary(tmp_path)
    assert (tmp_path / "runs/pendulum_swingup/ncrs_votes_4/irrational/seed_0/metrics.jsonl").exists()
    assert not (tmp_path / "runs/pendulum_swingup/ncrs_votes_99").exists()
    assert "Traceback" not in out + err


def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = pbrl.train.Run.iterate

    def interrupt(self: pbrl.train.Run, iteration: int, cfg: Any) -> dict[str, float]:
        if cfg.seed == 1 and iteration == 1:
            signal.raise_signal(signal.SIGINT)
        return iterate(self, iteration, cfg)

    with monkeypatch.context() as patch:
        patch.setattr(pbrl.train.Run, "iterate", interrupt)
        code, out, _ = train(AGENTS, tmp_path)
    assert code == 128 + signal.SIGINT
    assert "1 of 4 runs are finished; stopped by a signal, and the same command goes on" in out
    assert [(tmp_path / run).exists() for run in RUNS] == [True, True, False, False]
    assert len(record(tmp_path / RUNS[1])) == 2
    code, out, err = train(AGENTS, tmp_path)
    assert code == 0, err
    assert "2 of 3 iterations are there" in out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


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
    arguments = [*AGENTS, "agent=random", "iterations=300", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process = start(arguments, tmp_path)
    run = tmp_path / "runs/pendulum_swingup/random/irrational/seed_0"
    while process.poll() is None and not (run / "metrics.jsonl").exists():
        time.sleep(0.05)
    workers = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "loky"], capture_output=True, text=True)
    os.kill(int(workers.stdout.split()[-1]), signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "the launcher broke off, and the same command runs what is missing" in out
    assert "broken off" in out
    code, out, err = train(arguments[:-2], tmp_path)  # one after the other will do
    assert code == 0, out + err
    assert len(record(run)) == 300


# ------------------------------------------------------------------------------------------------- the commands

GRID = [
    f"agent={agent} seed={seed} +x={x}".split() for agent in "abc" for seed in (0, 1, 2) for x in ("[1,2]", "'p,q'")
]


@given(chosen=st.lists(st.sampled_from(GRID), unique_by=tuple, min_size=1))
def test_rerun_commands_run_those_jobs_and_no_others(chosen: list[list[str]]) -> None:
    lines = commands(chosen, ["hydra/launcher=joblib"])
    assert len(lines) <= len(chosen)
    jobs = []
    for line in lines:
        arguments = shlex.split(line)
        assert arguments[:5] == ["python", "-m", "pbrl.train", "-m", "hydra/launcher=joblib"]
        parsed = OverridesParser.create().parse_overrides(arguments[5:])
        jobs += [job for batch in BasicSweeper.split_arguments(parsed, None) for job in batch]
    assert sorted(jobs) == sorted(chosen)


def test_a_whole_grid_is_one_command() -> None:
    assert len(commands(GRID, [])) == 1


# ------------------------------------------------------------------------------------------- settings and search


def test_runs_of_different_settings_are_told_apart(train: Command, tmp_path: Path) -> None:
    sweep = ["-m", "agent.votes=4,8", "oracle.eps_mistake=0,0.2", *TINY, "iterations=1"]
    code, out, err = train(sweep, tmp_path)
    assert code == 0, out + err
    runs = {(votes, eps): tmp_path / f"runs/pendulum_swingup/ncrs_votes_{votes}/irrational_eps_mistake_{eps}/seed_0"
            for votes in (4, 8) for eps in (0, 0.2)}  # fmt: skip
    for (votes, eps), run in runs.items():
        found = settings(run)
        assert (found["agent"]["votes"], found["oracle"]["eps_mistake"]) == (votes, eps)
        assert found["name"] == f"ncrs_votes_{votes}"  # a report knows teachers by their settings
    # Whoever names runs, names them.
    code, _, err = train([*sweep, "name=v${agent.votes}e${oracle.eps_mistake}"], tmp_path)
    assert code == 0, err
    assert (tmp_path / "runs/pendulum_swingup/v4e0.2/irrational/seed_0").exists()


def test_a_search_finds_the_highest_evaluation_and_its_trials_do_not_collide(tmp_path: Path) -> None:
    search = ["experiment=tune", "hydra.sweeper.n_trials=3", "agent.step.maximum=tag(log,interval(0.005,0.2))", *TINY]
    process = start(search, tmp_path)
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


def test_searching_for_the_lowest_return_is_refused(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "hydra/sweeper=optuna", "agent.step.maximum=interval(0.01,0.2)"], tmp_path)
    assert code == 1
    assert "this would search for the lowest return: use experiment=tune" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())
