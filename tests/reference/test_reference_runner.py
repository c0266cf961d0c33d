"""The runner, as a user meets it: started, stopped, killed, started again."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from synthetic_runs import write_run
from test_train import Command, record
from tiny_reference import part, settings, start

from pbrl.reference import runner
from pbrl.reference.__main__ import main, run
from pbrl.reference.pace import hours
from pbrl.reference.protocol import PlannedRun, plan
from pbrl.reference.runner import Job, Results, begin, is_missing
from pbrl.report.shipped import from_folder, read_runs
from pbrl.run.folder import lock
from pbrl.run.settings import ConfigurationError

HOW = {"workers": 2, "niceness": 0, "changed": "run", "poll_seconds": 0.01}


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def write_planned(planned: PlannedRun, returns: list[float], root: Path) -> None:
    """A made-up run in the folder of a planned one."""
    task, agent, oracle, seed = planned.name
    made = write_run(root, returns, agent=agent, task=task, oracle=oracle, seed=seed)
    planned.folder.parent.mkdir(parents=True, exist_ok=True)
    made.rename(planned.folder)


def test_runs_are_made_added_and_can_be_made_again(
    tmp_path: Path, train: Command, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    good = part(agents=["ncrs"])
    bad = part(agents=["ncrs"], seeds=[3], overrides=[*good["overrides"], "agent.votes=99"])
    process = start(tmp_path, bad, good)  # the failing run comes first
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "2 of 2 runs are missing" in out
    assert "failed: runs/tiny/pendulum_swingup/ncrs/irrational/seed_3: pbrl.train: votes must be between" in out
    assert "1 of 2 runs are in results" in out
    shipped = read_runs(tmp_path / "results/tiny.parquet")
    assert [each.name[1] for each in shipped] == ["ncrs"]
    assert (tmp_path / "results/tiny.parquet").stat().st_size < 10_000
    page = (tmp_path / "results/README.md").read_text()
    assert "1 of 2 runs are there." in page
    assert "(tiny.png)" in page
    for each in shipped:
        rows = record(tmp_path / f"runs/tiny/pendulum_swingup/{each.name[1]}/irrational/seed_0")
        for name in ("return_mean", "trajectories", "env_steps", "pairs_asked", "bits"):
            assert each.recorded.metrics[name].tolist() == [row[name] for row in rows]
        assert each.recorded.eval_return == rows[-1]["eval_return"]
        assert each.hours > 0
        assert each.versions[-1]["pbrl"]

    # A point of the table again, from its recorded command, bit for bit.
    again = tmp_path / "again"
    again.mkdir()
    code, _, err = train(shlex.split(shipped[0].command)[3:], again)
    assert code == 0, err
    remade = from_folder(again / "runs/pendulum_swingup/ncrs/irrational/seed_0", shipped[0].command)
    assert remade.identity == shipped[0].identity
    for name, values in shipped[0].recorded.metrics.items():
        if name != "seconds":
            assert remade.recorded.metrics[name].tobytes() == values.tobytes(), name

    # Nothing is made twice.
    monkeypatch.setattr(runner.subprocess, "Popen", None)
    before = (tmp_path / "results/tiny.parquet").read_bytes()
    monkeypatch.chdir(tmp_path)
    assert run(settings(tmp_path, good)) == 0
    assert "0 of 1 runs are missing" in capfd.readouterr().out
    # The file is made again from the folders if it is lost.
    (tmp_path / "results/tiny.parquet").unlink()
    assert run({**settings(tmp_path, good), "folder": "runs"}) == 0
    assert (tmp_path / "results/tiny.parquet").read_bytes() == before


@pytest.mark.slow
def test_stopped_and_killed_a_run_goes_on_and_is_the_same(tmp_path: Path, train: Command) -> None:
    long = part(agents=["ncrs"], iterations=60, overrides=[*part()["overrides"], "checkpoint_every=4", "env.steps=50"])
    folder = tmp_path / "runs/tiny/pendulum_swingup/ncrs/irrational/seed_0"

    def start_and_wait(rows: int) -> tuple[subprocess.Popen[str], int]:
        """The runner, and the process of its run, once that many iterations are recorded."""
        process = start(tmp_path, long)
        while not (folder / "metrics.jsonl").exists() or len(record(folder)) < rows:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.01)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
        return process, int(children.stdout)

    process, child = start_and_wait(2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "stopped; the same command goes on" in out
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)  # it has ended, too
    assert not (tmp_path / "results").exists()

    stopped_at = len(record(folder))
    process, child = start_and_wait(stopped_at + 6)
    process.kill()
    os.kill(child, signal.SIGKILL)
    process.communicate()
    assert len(record(folder)) < 60

    process = start(tmp_path, long)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    (shipped,) = read_runs(tmp_path / "results/tiny.parquet")
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert train(shlex.split(shipped.command)[3:], undisturbed)[0] == 0
    assert record(undisturbed / "runs/pendulum_swingup/ncrs/irrational/seed_0") == record(folder)
    assert len(shipped.recorded.metrics["return_mean"]) == 60


def test_a_run_of_a_killed_runner_is_waited_for(tmp_path: Path) -> None:
    (planned,) = plan(settings(tmp_path, part()))
    planned.folder.mkdir(parents=True)
    with lock(planned.folder):
        job = begin(planned, Results(tmp_path / "results"), niceness=0)
        assert job == Job(planned, None)
        assert not job.is_over()
    assert job.is_over()


def test_only_one_runner_works_on_a_protocol(tmp_path: Path) -> None:
    (tmp_path / "runs/tiny").mkdir(parents=True)
    with lock(tmp_path / "runs/tiny"), pytest.raises(ConfigurationError, match="another process is at work in"):
        run(settings(tmp_path, part()))


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Instead of starting processes, collect their commands; each ends at once, having done nothing."""
    started: list[list[str]] = []

    class Process:
        pid = -1  # of no process

        def __init__(self, command: list[str], **_: Any) -> None:
            started.append(command)

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(runner.subprocess, "Popen", Process)
    return started


def test_runs_give_way_as_they_are_told_to(
    tmp_path: Path, no_processes: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(runner, "give_way", lambda *how: told.append(how))
    (planned,) = plan(settings(tmp_path, part()))
    begin(planned, Results(tmp_path / "results"), niceness=7)
    assert len(no_processes) == 1
    assert told == [(-1, 7)]


def test_finished_folders_are_added_in_whatever_order_to_the_same_bytes(
    tmp_path: Path, no_processes: list[list[str]]
) -> None:
    found = []
    for order in (1, -1):
        root = tmp_path / str(order)
        runs = plan(settings(root, part(agents=["random", "ncrs"], seeds=[0, 1, 2], overrides=[])))
        results = Results(root / "results")
        for i, planned in enumerate(runs):
            write_planned(planned, [float(i), 2.0 * i], tmp_path / "made" / str(order))
        for planned in runs[::order]:
            results.add(planned, from_folder(planned.folder, planned.command))
        found.append((root / "results/tiny.parquet").read_bytes())
    assert found[0] == found[1]
    assert not no_processes


def test_a_run_with_other_settings_is_made_again_or_kept_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_processes: list[list[str]]
) -> None:
    (old,) = plan(settings(tmp_path, part(agents=["ncrs"], overrides=[])))
    (new,) = plan(settings(tmp_path, part(agents=["ncrs"], overrides=["agent.direction=sphere"], iterations=3)))
    write_planned(old, [1.0, 2.0], tmp_path / "made")
    results = Results(tmp_path / "results")
    results.add(old, from_folder(old.folder, old.command))
    assert not is_missing(old, results, "run")
    assert capsys.readouterr().out == ""
    what = "has other settings (agent.direction: gaussian, not sphere; iterations: 2, not 3)"
    assert not is_missing(new, results, "keep")
    assert f"pendulum_swingup, ncrs, irrational, 0 of tiny {what}: it is kept" in capsys.readouterr().out
    assert is_missing(new, results, "run")
    assert f"{what}: it is made again" in capsys.readouterr().out
    failed = runner.make([new], results, **HOW)  # type: ignore[arg-type]
    assert "resume=false" in no_processes[0]  # which keeps the old run aside
    assert list(failed) == [new.folder]


def test_what_another_protocol_has_is_not_made_twice(tmp_path: Path, no_processes: list[list[str]]) -> None:
    first, second = plan(settings(tmp_path, part(overrides=[]), part(protocol="other", overrides=[])))
    write_planned(first, [1.0, 2.0], tmp_path / "made")
    results = Results(tmp_path / "results")
    results.add(first, from_folder(first.folder, first.command))
    assert runner.make([first, second], results, **HOW) == {}  # type: ignore[arg-type]
    assert not no_processes
    assert (tmp_path / "results/other.parquet").read_bytes() == (tmp_path / "results/tiny.parquet").read_bytes()


def test_what_another_protocol_has_may_be_called_otherwise(tmp_path: Path, no_processes: list[list[str]]) -> None:
    renamed = part(protocol="renamed", overrides=["name=floor"])
    first, second = plan(settings(tmp_path, part(overrides=[]), renamed))
    write_planned(first, [1.0, 2.0], tmp_path / "made")
    results = Results(tmp_path / "results")
    results.add(first, from_folder(first.folder, first.command))
    assert begin(second, results, 0) is None
    assert not no_processes
    (row,) = read_runs(tmp_path / "results/renamed.parquet")
    assert row.name == second.name == ("pendulum_swingup", "floor", "irrational", 0)
    assert row.recorded.agent == "floor"
    assert "name=floor" in row.command
    assert not is_missing(second, Results(tmp_path / "results"), "run")


def test_a_damaged_file_is_kept_aside_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configured = settings(tmp_path, part(overrides=[]))
    (planned,) = plan(configured)
    write_planned(planned, [1.0, 2.0], tmp_path / "made")
    results = Results(tmp_path / "results")
    results.add(planned, from_folder(planned.folder, planned.command))
    path = tmp_path / "results/tiny.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    results = Results(tmp_path / "results")
    assert "tiny.parquet cannot be read" in (said := capsys.readouterr().err)
    assert f"It is kept as {tmp_path / 'results/tiny~1.parquet'}" in said
    assert (tmp_path / "results/tiny~1.parquet").read_bytes() == whole[:-100]
    # Made-up folders have no checkpoint, by which a finished run is known.
    results.add(planned, from_folder(planned.folder, planned.command))
    assert path.read_bytes() == whole
    assert Results(tmp_path / "results").find(planned) is not None


def test_the_time_left_by_hand(tmp_path: Path) -> None:
    how = {"overrides": [], "iterations": 100}
    runs = plan(settings(tmp_path, part(agents=["random", "ncrs"], **how), part(tasks=["cheetah_run"], **how)))
    assert hours(runs, [], workers=2) is None
    results = Results(tmp_path / "results")
    write_planned(runs[0], [1.0, 2.0], tmp_path / "made")  # 3 seconds an iteration
    results.add(runs[0], from_folder(runs[0].folder, runs[0].command))
    # 98 iterations of the first run, and its pace for an agent and a task without finished runs: 100 each.
    assert hours(runs, results.every(), workers=2) == pytest.approx(298 * 3 / 3600 / 2)


def test_the_time_left_is_reckoned_from_the_fastest_runs(tmp_path: Path) -> None:
    how = {"overrides": [], "iterations": 100}
    tasks = ["pendulum_swingup", "cheetah_run"]
    runs = plan(settings(tmp_path, part(agents=["random", "ncrs", "zpg"], tasks=tasks, seeds=[0, 1], **how)))
    paces = {("pendulum_swingup", "random"): [9.0, 1.0], ("pendulum_swingup", "ncrs"): [2.0, 5.0]}
    paces[("cheetah_run", "random")] = [8.0, 30.0]
    finished = [
        SimpleNamespace(name=planned.name, seconds_per_iteration=paces[planned.name[:2]][planned.name[3]])
        for planned in runs
        if planned.name[:2] in paces
    ]
    # On the pendulum zpg has the mean of the two others, on the cheetah both others have that of random.
    expected = 2 * 100 * (1 + 2 + 1.5 + 8 + 8 + 8) / 3600
    assert hours(runs, finished, workers=1) == pytest.approx(expected)  # type: ignore[arg-type]
    assert hours(runs, finished[::-1], workers=1) == pytest.approx(expected)  # type: ignore[arg-type]


def test_without_a_finished_run_the_time_left_is_reckoned_from_one_that_is_under_way(tmp_path: Path) -> None:
    runs = plan(settings(tmp_path, part(agents=["random", "ncrs", "zpg"], overrides=[], iterations=100)))
    dear = SimpleNamespace(name=("walker_walk", "zpg", "rational", 0), seconds_per_iteration=50.0)
    write_planned(runs[0], [1.0, 2.0], tmp_path / "made")  # 3 seconds an iteration, 98 left
    # The others have the median of what is known on this task, which is the first run's pace.
    assert hours(runs, [dear], workers=1) == pytest.approx((98 + 100 + 100) * 3 / 3600)  # type: ignore[list-item]
    dear.name = ("pendulum_swingup", "random", "rational", 1)  # a finished run of the same agent
    assert hours(runs[:1], [dear], workers=1) == pytest.approx(98 * 50 / 3600)  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "python -m pbrl.reference run"),
        (["walk"], "python -m pbrl.reference run"),
        (["run", "workres=2"], "workres"),
        (["run", "workers=0"], "workers must be a whole number of at least 1, not 0"),
        (["run", "changed=maybe"], "changed must be run or keep, not 'maybe'"),
        (["write", "bootstrap=null"], "bootstrap has the settings resamples, seed, not None"),
        (["write", "yardstick=sac_true"], "yardstick has the settings names, steps, not 'sac_true'"),
        (["run", "yardstick.names=sac_true"], "yardstick.names must be a list of names of yardsticks, not 'sac_true'"),
        (["write", "tried_on=walker_walk"], "tried_on must be a list of names of tasks, not 'walker_walk'"),
        (["run", "yardstick.steps=[many]"], r"yardstick.steps must be a list of whole numbers, not \['many'\]"),
        (["run", "protocol=shrot"], "there is no protocol 'shrot', only short, full, teachers"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_sentence(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pbrl.reference", *arguments])
    with pytest.raises(SystemExit, match=message):
        main()
    assert not list(tmp_path.iterdir())
