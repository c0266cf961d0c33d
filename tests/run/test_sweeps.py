"""Sweeps, as a user meets them: one command, many runs."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.core_plugins import basic_launcher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st
from test_train import ROOT, Command, record

import pbrl.train
from pbrl.run import sweep
from pbrl.run.settings import choices
from pbrl.run.sweep import commands, naming_overrides
from pbrl.run.training import TrainingRun
from pbrl.threads import threads_of_a_job

TINY = [
    "env=pendulum_swingup",  # starts without compiling
    "env.steps=5",
    "trajectories=4",
    "pairs=2",
    "agent.policy.hidden=[8,8]",
    "evaluation={every:9,trajectories:2}",
    "checkpoint_every=1",
    "wandb.mode=disabled",
    "iterations=2",
]
AGENTS = ["-m", "agent=ncrs_single,zpg", "seed=0,1", *TINY]
PAIR = ["-m", "agent=zpg", "seed=0,1", *TINY]
RUNS = [
    Path(f"runs/pendulum_swingup/{agent}/irrational/seed_{seed}") for agent in ("ncrs_single", "zpg") for seed in (0, 1)
]


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def times(folder: Path) -> dict[Path, int]:
    """When each file in a folder was last written, without the files of sweeps."""
    files = (path for path in folder.rglob("*") if path.is_file() and "sweeps" not in path.parts)
    return {path: path.stat().st_mtime_ns for path in files}


def settings(run: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((run / "config.yaml").read_text()))


def summary(folder: Path) -> str:
    (path,) = folder.glob("runs/sweeps/*/summary.txt")
    return path.read_text()


# ------------------------------------------------------------------------------------------------ launchers


@pytest.mark.parametrize(
    "launcher",
    [pytest.param(name, marks=[pytest.mark.slow] if name == "ray" else []) for name in choices("hydra/launcher")],
)
def test_presets_are_settings_that_their_plugins_know(launcher: str, train: Command, tmp_path: Path) -> None:
    code, out, err = train(["--cfg", "hydra", "-p", "hydra.launcher", f"hydra/launcher={launcher}"], tmp_path)
    assert code == 0, err
    ours = yaml.safe_load((ROOT / f"conf/hydra/launcher/{launcher}.yaml").read_text())
    assert ours.items() <= yaml.safe_load(out).items()


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


@pytest.mark.parametrize("argument", ["hydra/launcher=joblib", "hydra/launcher=ray", "experiment=tune"])
def test_a_plugin_that_is_missing_has_its_extra_named(
    argument: str, train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hydra_plugins", None)  # as without the extras: not even the parent package
    for name in [name for name in sys.modules if name.startswith("hydra_plugins.")]:
        monkeypatch.delitem(sys.modules, name)
    code, out, err = train(["-m", "seed=0,1", argument], tmp_path)
    assert code == 1
    extra = {"experiment=tune": "optuna"}.get(argument, argument.partition("=")[2])
    assert f"{argument} needs a Hydra plugin that is not installed: pip install 'pbrl[{extra}]'" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


def test_what_a_sweep_costs_is_tried_and_said_before_it_starts(train: Command, tmp_path: Path) -> None:
    cost = ["+hydra.callbacks.cost._target_=pbrl.run.trial.Cost", "+hydra.callbacks.cost.steps=[2,4]"]
    assert train([*PAIR, "seed=0"], tmp_path)[0] == 0
    code, out, err = train([*AGENTS, *cost], tmp_path)
    assert code == 0, out + err
    said = out.index("4 runs, 1 of them finished: the others take about 0.0 hours on this machine, 1 at a time")
    assert said < out.index("run 1 of 4, about 0.0 hours are left") < out.index("run 4 of 4")


# ------------------------------------------------------------------------------- relaunching, failing, stopping


def test_relaunching_runs_only_what_is_missing(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / RUNS[2], tmp_path / RUNS[3]
    assert train([*PAIR, "iterations=1"], tmp_path)[0] == 0
    before = times(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(pbrl.train, "TrainingRun", None)  # nothing heavy is made
        code, out, err = train([*PAIR, "iterations=1"], tmp_path)
    assert code == 0, out + err
    assert times(tmp_path) == before
    assert out.count("nothing is left to do") == 2
    assert summary(tmp_path).count("already finished") == 2
    # One is finished, one must go on.
    assert train([*PAIR, "seed=0"], tmp_path)[0] == 0
    before = times(first)
    made = []
    make = pbrl.train.TrainingRun
    monkeypatch.setattr(pbrl.train, "TrainingRun", lambda settings: made.append(settings["seed"]) or make(settings))
    code, out, err = train(PAIR, tmp_path)
    assert code == 0, out + err
    assert made == [1]
    assert times(first) == before
    assert "seed_1: 1 of 2 iterations are there" in out
    assert [len(record(run)) for run in (first, second)] == [2, 2]


def test_a_failure_leaves_the_others_and_says_how_to_rerun(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = TrainingRun.iterate

    def fail(self: TrainingRun, iteration: int) -> dict[str, float]:
        if self.seed < 2 and iteration == 1:
            raise RuntimeError("the moon was\nin the wrong house")
        return iterate(self, iteration)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingRun, "iterate", fail)
        code, out, err = train([*PAIR, "seed=0,1,2"], tmp_path)
    assert code == 1
    assert "Traceback" not in out + err
    assert "1 of 3 runs are finished" in out
    failed, good = [tmp_path / run for run in RUNS[2:]], tmp_path / RUNS[3].with_name("seed_2")
    assert [len(record(run)) for run in (*failed, good)] == [1, 1, 2]
    table = summary(tmp_path)
    assert table.count("failed") == 2
    assert "RuntimeError: the moon was" in table
    (folder,) = tmp_path.glob("runs/sweeps/*")
    assert "in fail\n" in (folder / "jobs/1.txt").read_text()  # the traceback
    assert not (folder / "jobs/2.txt").exists()
    (line,) = [line.strip() for line in table.splitlines() if line.startswith("  python")]
    assert line in out
    assert "seed=0,1 " in line
    # The very command runs those two, from where they are.
    before = times(good)
    code, out, err = train(shlex.split(line)[3:], tmp_path)
    assert code == 0, out + err
    assert "2 of 2 runs are finished" in out
    assert out.count("1 of 2 iterations are there") == 2
    assert times(good) == before
    for run in failed:
        assert len(record(run)) == 2
        assert settings(run)["wandb"]["group"] == settings(good)["wandb"]["group"]


def test_settings_that_make_no_sense_are_a_failure_of_their_own_run(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "agent=ncrs", "agent.votes=2,99", *TINY], tmp_path)
    assert code == 1
    assert "votes must be between 1 and 2, the pairs of an iteration, not 99" in summary(tmp_path)
    assert (tmp_path / "runs/pendulum_swingup/ncrs_votes_2/irrational/seed_0/metrics.jsonl").exists()
    assert not (tmp_path / "runs/pendulum_swingup/ncrs_votes_99").exists()
    assert "Traceback" not in out + err


def test_a_signal_stops_the_sweep_and_the_same_command_goes_on(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    iterate = TrainingRun.iterate

    def interrupt(self: TrainingRun, iteration: int) -> dict[str, float]:
        signal.raise_signal(signal.SIGINT)
        return iterate(self, iteration)

    before = signal.getsignal(signal.SIGINT)
    launched, launch = [], basic_launcher.run_job
    with monkeypatch.context() as patch:
        patch.setattr(basic_launcher, "run_job", lambda *a, **more: launched.append(0) or launch(*a, **more))
        patch.setattr(TrainingRun, "iterate", interrupt)
        code, out, _ = train(PAIR, tmp_path)
    assert code == 128 + signal.SIGINT
    assert "0 of 2 runs are finished; stopped by a signal: the same command continues" in out
    assert len(record(tmp_path / RUNS[2])) == 1
    assert not (tmp_path / RUNS[3]).exists()
    assert len(launched) == 1  # a sweep of many runs ends at once
    assert summary(tmp_path).count("not started") == 1
    assert signal.getsignal(signal.SIGINT) is before
    code, out, err = train(PAIR, tmp_path)
    assert code == 0, err
    assert "1 of 2 iterations are there" in out
    assert "2 of 2 runs are finished" in out


def test_jobs_that_never_started_are_listed_and_run_again(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker of joblib's, for example, takes the launcher down."""
    launched = []

    def launch(*arguments: Any, **more: Any) -> Any:
        launched.append(0)
        if len(launched) == 2:
            raise RuntimeError("a worker was killed")
        return run_job(*arguments, **more)

    run_job = basic_launcher.run_job
    with monkeypatch.context() as patch:
        patch.setattr(basic_launcher, "run_job", launch)
        patch.setenv(sweep.AGAIN, "1")  # as if this were the second launch already
        code, out, _ = train(AGENTS, tmp_path)
    assert code == 1
    assert "1 of 4 runs are finished; the launcher failed: the same command runs what is missing" in out
    table = summary(tmp_path)
    assert table.count("not started") == 3
    assert all(str(run) in table for run in RUNS)
    lines = [line.strip() for line in table.splitlines() if line.startswith("  python")]
    for line in lines:
        assert train(shlex.split(line)[3:], tmp_path)[0] == 0
    assert [len(record(tmp_path / run)) for run in RUNS] == [2] * 4


def test_a_sweep_that_cannot_be_launched_says_why_without_a_table(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "agent=zpg", "agent.vots=1,2", *TINY], tmp_path)
    assert code == 1
    assert "vots" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.glob("runs/*"))


def test_a_failure_to_prepare_a_sweep_ends_it(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra would make a warning of it and launch jobs that have no folder for their states."""

    def fail(*_: Any) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr(sweep, "plan", fail)
    code, out, err = train(PAIR, tmp_path)
    assert code == 1
    assert "no luck" in err
    assert not list(tmp_path.iterdir()), out


def test_a_stop_of_another_sweep_does_not_matter(train: Command, tmp_path: Path) -> None:
    (tmp_path / "runs/sweeps").mkdir(parents=True)
    (tmp_path / "runs/sweeps/stop").write_text("15\n")
    code, out, err = train([*PAIR, "iterations=1"], tmp_path)
    assert code == 0, err
    assert "2 of 2 runs are finished" in out


# ------------------------------------------------------------------------------------------------- the commands

GRID = [
    f"agent={agent} seed={seed} +x={x}".split() for agent in "abc" for seed in (0, 1, 2) for x in ("[1,2]", "'p,q'")
]


@settings_of_hypothesis(max_examples=30)
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


CHOICE = "${hydra:runtime.choices.oracle}"
FOLDER = f"runs/${{name}}/{CHOICE}"


@pytest.mark.parametrize(
    ("swept", "added"),
    [
        (["agent", "env", "oracle", "seed", "threads", "wandb.tags", "checkpoint_every"], []),
        (["agent.votes"], ["name='ncrs_votes_${agent.votes}'"]),
        (["seed", "agent.step.maximum", "pairs"], ["name='ncrs_step.maximum_${agent.step.maximum}_pairs_${pairs}'"]),
        (["oracle.tau"], [f"folder='runs/${{name}}/{CHOICE}_tau_${{oracle.tau}}'"]),
    ],
)
def test_swept_settings_are_in_a_runs_name_or_its_teachers(swept: list[str], added: list[str]) -> None:
    assert naming_overrides(swept, "ncrs", FOLDER) == added


def test_runs_of_different_settings_do_not_collide(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "agent=zpg", "oracle.eps_mistake=0,0.2", *TINY, "iterations=1"], tmp_path)
    assert code == 0, out + err
    for eps in (0, 0.2):
        found = settings(tmp_path / f"runs/pendulum_swingup/zpg/irrational_eps_mistake_{eps}/seed_0")
        assert found["oracle"]["eps_mistake"] == eps
        assert found["name"] == "zpg"  # a report knows teachers by their settings


@pytest.mark.parametrize(
    ("template", "folder"),
    [
        ("name=${hydra:runtime.choices.agent}_s", "pendulum_swingup/zpg_s/irrational/seed_{}"),
        pytest.param(
            "folder=runs/${env.name}/${name}/${hydra:runtime.choices.oracle}/s${seed}",
            "pendulum_swingup/zpg/irrational/s{}",
            marks=pytest.mark.slow,
        ),
        pytest.param("folder=runs/${hydra:job.num}", "{}", marks=pytest.mark.slow),
    ],
)
def test_names_and_folders_may_be_templates(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str, folder: str
) -> None:
    runs = [tmp_path / "runs" / folder.format(seed) for seed in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(pbrl.train, "TrainingRun", None)  # all fail, to try the command that runs them again
        assert train([*PAIR, template, "iterations=1"], tmp_path)[0] == 1
    table = summary(tmp_path)
    assert all(str(run.relative_to(tmp_path)) in table for run in runs)
    (line,) = [line.strip() for line in table.splitlines() if line.startswith("  python")]
    code, out, err = train(shlex.split(line)[3:], tmp_path)
    assert code == 0, out + err
    assert [len(record(run)) for run in runs] == [1, 1]


@pytest.mark.parametrize(
    ("swept", "said"),
    [
        (["iterations=1,2"], "seed_0 (iterations=1 and iterations=2)"),
        (["seed=3,3"], "seed_3 (the same settings twice)"),
        (["agent=zpg,random", "name=mine"], "mine/irrational/seed_0 (agent=zpg and agent=random)"),
        (["seed=0,1", "folder=runs/mine"], "folder runs/mine (seed=0 and seed=1)"),
    ],
)
def test_runs_that_would_share_a_folder_are_refused_before_the_first_starts(
    train: Command, tmp_path: Path, swept: list[str], said: str
) -> None:
    code, out, err = train(["-m", "agent=zpg", *TINY, *swept], tmp_path)
    assert code == 1
    assert "pbrl.train: 2 runs of this sweep would share the folder" in err
    assert said in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


def test_searching_for_the_lowest_return_is_refused(train: Command, tmp_path: Path) -> None:
    code, out, err = train(["-m", "hydra/sweeper=optuna", "agent.step.maximum=interval(0.01,0.2)"], tmp_path)
    assert code == 1
    assert "this would search for the lowest return: use experiment=tune" in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())


def test_the_bars_say_why_a_job_of_another_process_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep, "STOP_SIGNALS", ())
    watched = sweep.Sweep(tmp_path, [{"run": "runs/a"}, {"run": "runs/b"}], [], total=2, progress_bar=False)
    failed = {"run": "runs/a", "state": "failed", "why": "votes must be between 1 and 2, not 99"}
    for number, state in enumerate([failed, {"run": "runs/b", "state": "finished", "evaluation": 28.64}]):
        (tmp_path / f"jobs/{number}.json").write_text(json.dumps(state))
    watched.over.set()
    watched.watch()
    out = capfd.readouterr().out.splitlines()
    assert out[1:] == ["runs/a: failed: votes must be between 1 and 2, not 99", "runs/b: finished, evaluation 28.6"]


@pytest.mark.parametrize("alone", [True, False])
def test_a_job_says_why_it_failed_only_where_no_bars_are(
    alone: bool, train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pbrl.run.job.owns_terminal", lambda: alone)
    _, _, err = train(["-m", "agent=ncrs", "agent.votes=98,99", *TINY], tmp_path)
    assert err.count("votes must be between 1 and 2") == (2 if alone else 0)
