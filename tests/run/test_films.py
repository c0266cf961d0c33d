"""Videos beside a run: that there is one of each incumbent, and that nothing about them reaches the run."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rich
from safetensors.numpy import load_file, save_file

from pbrl.run import films
from pbrl.run.films import Films, kept_policy
from pbrl.run.record import read
from pbrl.train import command

TINY = [
    "env=pendulum_swingup",  # starts without compiling
    "env.steps=20",
    "iterations=8",
    "trajectories=8",
    "pairs=4",
    "agent.votes=4",
    "agent.policy.hidden=[8,8]",
    "evaluation.trajectories=2",
    "checkpoint_every=3",
    "threads=1",
    "wandb.mode=disabled",
    "video.width=64",
    "video.height=64",
]

# Stands in for pbrl.play: the "video" is a copy of the parameters.
PLAY = """
import json, os, pathlib, shutil, signal, subprocess, sys, time
run, _, iteration, _, output, *rest = sys.argv[1:]
journal = pathlib.Path(os.environ["JOURNAL"]).open("a")
print(json.dumps([int(iteration), os.getpid(), rest]), file=journal, flush=True)
trouble = os.environ["TROUBLE"]
if trouble == "fail":
    print("a library speaks\\npbrl.play: nothing can draw:\\n  egl: no\\nWhat to do: install it", file=sys.stderr)
    sys.exit(1)
if trouble == "die":
    os._exit(3)
if trouble == "signal":
    os.kill(os.getppid(), signal.SIGTERM)
if trouble in ("hang", "signal"):
    subprocess.run(["sleep", "1000"])
gate = pathlib.Path(os.environ["JOURNAL"] + ".gate")
while trouble == "wait" and not gate.exists():
    time.sleep(0.01)
shutil.copy(f"{output}.safetensors", f"{output}.gif")
print(json.dumps([int(iteration), "done", []]), file=journal, flush=True)
"""


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[list[Any]]]:
    """The stand-in; what it did and when."""
    script, journal = tmp_path / "play.py", tmp_path / "journal"
    script.write_text(PLAY)
    monkeypatch.setattr(films, "PLAY", (sys.executable, str(script)))
    monkeypatch.setenv("JOURNAL", str(journal))
    monkeypatch.setenv("TROUBLE", "")
    return lambda: [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []


Studio = Callable[[], list[list[Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def make(run: Path, *, seconds: float = 60.0, finish_seconds: float = 60.0) -> Films:
    how = {"steps": 250, "width": 480, "height": 360}
    return Films(run, every=10, seconds=seconds, finish_seconds=finish_seconds, **how)  # type: ignore[arg-type]


def save(path: Path, iteration: int) -> None:
    save_file({"parameters": np.full(3, iteration, np.float32)}, path, {"iteration": str(iteration)})


def names(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("videos/*"))


def wait_for(event: Callable[[], Any]) -> None:
    for _ in range(6000):
        if event():
            return
        time.sleep(0.01)
    raise AssertionError("waited in vain")


def gone(process: int) -> bool:
    """Whether a process and those that it started are no more."""
    try:
        os.killpg(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_every_video_is_of_its_own_iteration(run: Path, studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    taken = make(run)
    for iteration in (0, 10):
        taken.film(iteration, save)
    taken.finish()
    taken.stop()
    assert names(run) == ["iteration_000000.gif", "iteration_000010.gif"]  # and the parameters are gone
    for iteration in (0, 10):
        video = kept_policy(run, iteration).with_suffix(".gif")
        np.testing.assert_array_equal(load_file(video)["parameters"], np.full(3, iteration, np.float32))
    assert studio()[0][2] == ["--steps", "250", "--size", "480x360"]
    assert not caplog.records
    again = make(run)
    again.film(10, save)  # of a run continued from before
    again.finish()
    assert len(studio()) == 4


def test_one_at_a_time_and_the_newest_first(run: Path, studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUBLE", "wait")
    taken = make(run)
    taken.film(0, save)
    wait_for(studio)
    for iteration in (10, 20, 30):
        taken.film(iteration, save)  # returns at once
    Path(os.environ["JOURNAL"] + ".gate").touch()
    taken.finish()
    begun_and_done = [0, 0, 30, 30, 20, 20, 10, 10]
    assert [entry[0] for entry in studio()] == begun_and_done


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("fail", "nothing can draw: egl: no What to do: install it"),
        ("die", "pbrl.play ended with code 3"),
        ("hang", "not done after 0.5 s"),
    ],
)
def test_a_failure_is_one_warning_and_the_next_run_tries_again(
    run: Path,
    studio: Studio,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    trouble: str,
    reason: str,
) -> None:
    monkeypatch.setenv("TROUBLE", trouble)
    taken = make(run, seconds=0.5 if trouble == "hang" else 60.0)
    taken.film(0, save)
    wait_for(lambda: caplog.messages)
    for iteration in (10, 20):
        taken.film(iteration, save)
    taken.finish()
    taken.stop()
    assert caplog.messages == [f"no video of iteration 0, nor of others ({reason}); the run continues"]
    assert {entry[0] for entry in studio()} <= {0}  # the others were not tried
    wait_for(lambda: all(gone(process) for _, process, _ in studio()))
    assert names(run) == [f"iteration_0000{number}.safetensors" for number in ("00", "10", "20")]
    monkeypatch.setenv("TROUBLE", "")
    make(run).finish()
    assert names(run) == [f"iteration_0000{number}.gif" for number in ("00", "10", "20")]


def test_the_end_of_a_run_waits_so_long_and_no_longer(
    run: Path, studio: Studio, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TROUBLE", "hang")
    taken = make(run, finish_seconds=0.2)
    taken.film(0, save)
    wait_for(studio)
    taken.film(10, save)
    taken.finish()
    taken.stop()
    assert caplog.messages == [
        f"no time for a video of iteration 0, 10: `python -m pbrl.play {run} --iteration 10` makes it"
    ]
    wait_for(lambda: gone(studio()[0][1]))
    assert names(run) == ["iteration_000000.safetensors", "iteration_000010.safetensors"]


def test_what_cannot_be_started_or_saved_is_said(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(films, "PLAY", ("/no/such/program",))
    taken = make(run)
    taken.film(0, save)
    taken.finish()
    (run / "videos" / "iteration_000000.safetensors").unlink()
    (run / "videos").rmdir()
    (run / "videos").touch()  # a file where the folder should be
    taken.film(10, save)
    started, saved = caplog.messages
    assert "No such file or directory: '/no/such/program'" in started
    assert saved.startswith("no video of iteration 10 (")
    assert all(each.levelno == logging.WARNING for each in caplog.records)


# ------------------------------------------------------------------------------------------------ beside a run


def results(folder: Path) -> tuple[list[dict[str, Any]], list[float]]:
    """The record, but for the times, and the parameters."""
    rows = [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in read(folder / "metrics.jsonl")]
    return rows, load_file(folder / "policy.safetensors")["parameters"].tolist()


class Command:
    """The command, in this process, which saves the time to start one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd
        monkeypatch.setenv("COLUMNS", "1000")
        monkeypatch.setattr(rich, "_console", None)  # the one there may be knows another width

    def __call__(self, folder: Path, *arguments: str) -> str:
        """What it prints."""
        self.monkeypatch.setattr(sys, "argv", ["pbrl.train", *TINY, f"folder={folder}", *arguments])
        command()
        return self.capfd.readouterr().out


def test_a_run_is_the_same_with_videos_without_and_with_trouble(
    tmp_path: Path, studio: Studio, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    here = Command(monkeypatch, capfd)
    here(tmp_path / "without")
    assert not (tmp_path / "without" / "videos").exists()
    for trouble in ("", "fail", "die", "hang"):
        monkeypatch.setenv("TROUBLE", trouble)
        folder = tmp_path / f"with_{trouble}"
        said = here(folder, "video.every=3", "video.finish_seconds=20" if trouble != "hang" else "video.seconds=0.2")
        assert results(folder) == results(tmp_path / "without")
        assert said.count("the run continues") == (trouble != "")
    filmed = tmp_path / "with_" / "videos"
    assert names(filmed.parent) == [f"iteration_00000{number}.gif" for number in (0, 3, 6, 7)]
    last = load_file(filmed / "iteration_000007.gif")["parameters"]
    np.testing.assert_array_equal(last, results(filmed.parent)[1])
    assert studio()[0][2] == ["--steps", "20", "--size", "64x64"]  # the episode's, which is shorter than asked for


def test_a_signal_does_not_wait_for_videos(
    tmp_path: Path, studio: Studio, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TROUBLE", "signal")
    patience = ["video.every=100000", "video.finish_seconds=1000", "video.seconds=1000"]
    with pytest.raises(SystemExit) as stop:
        Command(monkeypatch, capfd)(tmp_path / "run", "iterations=1000000", *patience)
    assert stop.value.code == 128 + signal.SIGTERM
    command = f"python -m pbrl.play {tmp_path / 'run'} --iteration 0"
    assert f"no time for a video of iteration 0: `{command}` makes it" in capfd.readouterr().out
    wait_for(lambda: gone(studio()[0][1]))


def test_without_opengl_one_line_names_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYOPENGL_PLATFORM", "nothing")  # neither EGL nor OSMesa is loaded
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    said = Command(monkeypatch, capfd)(tmp_path / "run", "video.every=4", "video.finish_seconds=300")
    (line,) = (line for line in said.splitlines() if "the run continues" in line)
    assert "libegl1" in line
    assert "Traceback" not in said
    assert len(results(tmp_path / "run")[0]) == 8


@pytest.mark.slow
def test_with_opengl_there_are_videos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = Command(monkeypatch, capfd)(tmp_path / "run", "video.every=4", "video.finish_seconds=300")
    taken = sorted((tmp_path / "run" / "videos").iterdir())
    assert [path.stem for path in taken] == [f"iteration_00000{number}" for number in (0, 4, 7)], said
    assert {path.suffix for path in taken} <= {".mp4", ".gif"}, said


def test_filming_gives_way_to_training(run: Path, studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(films, "give_way", lambda _, niceness: told.append(niceness))
    filming = make(run)
    filming.film(10, save)
    filming.finish()
    assert studio()
    assert told == [films.NICENESS]
