"""Mirrors: that they show the whole record, and that nothing they do reaches the run."""

import contextlib
import json
import logging
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pbrl.run.mirrors import in_section, mirror_to_tensorboard, mirror_to_wandb
from pbrl.run.record import Record, read
from pbrl.train import command


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """A stand-in for wandb, in the mirrors' processes only."""
    modules = tmp_path / "modules"
    (modules / "wandb").mkdir(parents=True)
    (modules / "wandb" / "__init__.py").write_text(Path(__file__).with_name("fake_wandb.py").read_text())
    monkeypatch.setenv("PYTHONPATH", str(modules))
    monkeypatch.setenv("JOURNAL", str(tmp_path / "journal"))
    monkeypatch.setenv("TROUBLE", "")
    monkeypatch.setenv("STEP", "0")
    monkeypatch.setenv("WANDB_SERVICE", "another process's")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return modules


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def mirror(path, mode="auto", finish_seconds=20.0, **about):
    about = {"entity": None, "group": "sweep 7", "job_type": "ncrs", "name": "ncrs walker_walk 0", **about}
    about |= {"project": "pbrl", "tags": ("walker_walk", "ncrs"), "config": {"seed": 0, "path": Path("runs")}}
    return mirror_to_wandb(path, mode=mode, init_seconds=3.0, finish_seconds=finish_seconds, **about)


def rows(iterations):
    return [
        {
            "iteration": iteration,
            "return_mean": iteration / 3,
            "loss": float("nan"),
            "trajectories": 64 * iteration,
            "pairs_asked": 32 * iteration,
            "env_steps": 64000 * iteration,
        }
        for iteration in iterations
    ]


def run(path, iterations, after=-1, **settings):
    """A short run with a mirror."""
    record = Record(path, after=after)
    following = mirror(path, **settings)
    for row in rows(iterations):
        record.write(row)
    record.close()
    if following:
        following.close()


def journal(tmp_path, call):
    path = tmp_path / "journal"
    lines = path.read_text().splitlines() if path.exists() else []
    return [entry for entry in map(json.loads, lines) if entry["call"] == call]


def wait_for(event):
    for _ in range(600):
        if event():
            return
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def shown(iterations, *, in_wandb=True):
    """What a mirror makes of the rows: wandb has the paper's curve against each axis."""
    against = ("trajectories", "pairs_asked", "env_steps") if in_wandb else ()
    sections = {"iteration": "iteration", "return_mean": "return/mean"}
    sections |= {axis: f"budget/{axis}" for axis in ("trajectories", "pairs_asked", "env_steps")}
    return [
        {sections[name]: value for name, value in row.items() if name != "loss"}
        | {f"return/against_{axis}": row["return_mean"] for axis in against}
        for row in rows(iterations)
    ]


def test_every_metric_has_a_section() -> None:
    found = {
        "return_std": "return/std",
        "eval_return": "eval/return",
        "eval_return_std": "eval/return_std",
        "teacher_error_rate": "teacher/error_rate",
        "seconds_learn": "time/learn",
        "bits": "budget/bits",
        "pairs_answered": "budget/pairs_answered",
        "pairs_skipped": "teacher/pairs_skipped",
        "diverged": "return/diverged",
        "gradient_norm": "update/gradient_norm",
        "iteration": "iteration",
    }
    assert {name: in_section(name) for name in found} == found


@pytest.mark.usefixtures("fakes")
def test_wandb_is_told_everything_once(tmp_path, path, caplog):
    caplog.set_level(logging.INFO)
    run(path, range(3))
    (init,) = journal(tmp_path, "init")
    identifier = (path.parent / "wandb" / "run_id").read_text()
    assert len(identifier) == 8
    assert init == {
        "call": "init",
        "mode": None,  # as wandb is set up
        "timeout": 3.0,
        "service": None,
        "project": "pbrl",
        "entity": None,
        "group": "sweep 7",
        "job_type": "ncrs",
        "name": "ncrs walker_walk 0",
        "tags": ["walker_walk", "ncrs"],
        "config": {"seed": 0, "path": "runs"},
        "id": identifier,
        "resume": "allow",
        "dir": str(path.parent),
    }
    assert journal(tmp_path, "define_metric") == [
        {"call": "define_metric", "name": "iteration", "hidden": True},
        {"call": "define_metric", "name": "*", "step_metric": "iteration"},
        {"call": "define_metric", "name": "budget/*", "step_metric": "iteration", "hidden": True},
        *(
            {"call": "define_metric", "name": f"return/against_{axis}", "step_metric": f"budget/{axis}"}
            for axis in ("trajectories", "pairs_asked", "env_steps")
        ),
    ]
    logged = journal(tmp_path, "log")
    assert [entry["row"] for entry in logged] == shown(range(3))  # without nan
    assert [entry["step"] for entry in logged] == [0, 1, 2]
    assert len(journal(tmp_path, "finish")) == 1
    (message,) = caplog.records
    assert (message.levelname, message.message) == ("INFO", "wandb: https://example.org/run")
    assert set((path.parent / "wandb" / "mirror.log").read_text().splitlines()) == {"chatter", "more chatter"}


@pytest.mark.usefixtures("fakes")
def test_a_continued_run_is_found_again_and_sends_what_is_missing(tmp_path, path, monkeypatch):
    run(path, range(5))
    (tmp_path / "journal").unlink()
    monkeypatch.setenv("STEP", "5")  # wandb has 0 to 4, the checkpoint was at 2
    run(path, range(3, 8), after=2)
    (init,) = journal(tmp_path, "init")
    assert init["id"] == (path.parent / "wandb" / "run_id").read_text()
    assert [entry["row"] for entry in journal(tmp_path, "log")] == shown(range(5, 8))


@pytest.mark.usefixtures("fakes")
def test_an_offline_run_is_whole_and_takes_the_place_of_the_one_before(tmp_path, path, caplog):
    caplog.set_level(logging.INFO)
    run(path, range(5), mode="offline")
    (first,) = path.parent.glob("wandb/offline-run-*")
    assert f"`wandb sync {first}`" in caplog.text
    (tmp_path / "journal").unlink()
    run(path, range(3, 8), after=2, mode="offline")
    assert [entry["row"] for entry in journal(tmp_path, "log")] == shown(range(8))
    (second,) = path.parent.glob("wandb/*run-*")
    assert second != first


@pytest.mark.usefixtures("fakes")
def test_a_sweep_is_a_group_and_what_differs_in_the_seed_alone_a_job_type(tmp_path, monkeypatch):
    tiny = ["env=pendulum_swingup", "env.steps=5", "iterations=1", "trajectories=8", "pairs=4", "threads=1"]
    chosen = ["agent=random", "name=floor", "oracle=rational", "seed=0,1", "wandb.mode=offline"]
    monkeypatch.setattr(sys, "argv", ["pbrl.train", "-m", *tiny, *chosen, "evaluation.trajectories=2"])
    monkeypatch.chdir(tmp_path)
    command()
    begun = journal(tmp_path, "init")
    (sweep,) = (tmp_path / "runs/sweeps").iterdir()
    assert [each["group"] for each in begun] == [sweep.name] * 2
    assert {each["job_type"] for each in begun} == {"pendulum_swingup/floor/rational"}
    assert [each["name"] for each in begun] == [f"runs/pendulum_swingup/floor/rational/seed_{n}" for n in range(2)]
    labels = [[each["config"][key] for key in ("agent_name", "task", "teacher", "seed")] for each in begun]
    assert labels == [["floor", "pendulum_swingup", "rational", 0], ["floor", "pendulum_swingup", "rational", 1]]


@pytest.mark.usefixtures("fakes")
def test_videos_are_shown_once_each_with_the_row_of_their_moment(tmp_path, path):
    record = Record(path, after=-1)
    following = mirror(path)
    videos = path.parent / "videos"
    videos.mkdir()

    def logged():
        return [(entry["row"], entry["step"]) for entry in journal(tmp_path, "log") if "videos" in str(entry["row"])]

    for iteration, name in enumerate(["iteration_000000.mp4", "iteration_000001.gif", "iteration_000002.gif.new"]):
        (videos / name).touch()  # the last is not complete
        record.write(rows([iteration])[0])
        wait_for(lambda many=iteration + 1: len(journal(tmp_path, "log")) >= many)
    (videos / "iteration_000002.gif.new").rename(videos / "iteration_000002.gif")
    record.close()
    following.close()
    assert [step for _, step in logged()][-1] == 2  # after the last row
    assert [row for row, _ in logged()] == [
        {f"videos/{name.split('.')[0]}": str(videos / name)}
        for name in ("iteration_000000.mp4", "iteration_000001.gif", "iteration_000002.gif")
    ]


@pytest.mark.usefixtures("fakes")
def test_a_continued_run_that_sends_no_row_sends_no_video(tmp_path, path, monkeypatch):
    """Its step would be one that a later row needs."""
    monkeypatch.setenv("STEP", "5")
    (path.parent / "videos").mkdir(parents=True)
    (path.parent / "videos" / "iteration_000000.mp4").touch()
    run(path, range(3))
    assert journal(tmp_path, "log") == []


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("mode", ["auto", "online"])
def test_what_cannot_be_online_is_offline(tmp_path, path, monkeypatch, caplog, mode):
    monkeypatch.setenv("TROUBLE", "online:raise")
    run(path, range(3), mode=mode)
    assert [entry["mode"] for entry in journal(tmp_path, "init")] == [None if mode == "auto" else "online", "offline"]
    assert [entry["row"] for entry in journal(tmp_path, "log")] == shown(range(3))
    (warning,) = (each for each in caplog.records if each.levelno == logging.WARNING)
    assert warning.message == "wandb: not online (no luck with online), so offline"


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("moment", ["import", "init", "log", "finish"])
@pytest.mark.parametrize("kind", ["raise", "hang", "die"])
def test_no_trouble_with_wandb_reaches_the_run(path, monkeypatch, caplog, moment, kind):
    monkeypatch.setenv("TROUBLE", f"{moment}:{kind}")
    run(path, range(50), mode="offline", finish_seconds=0.5 if kind == "hang" else 20.0)
    assert [row["iteration"] for row in read(path)] == list(range(50))
    (warning,) = (each for each in caplog.records if each.levelno >= logging.WARNING)  # once
    assert {
        "raise": f"stopped (RuntimeError: no luck with {moment}); the run continues, and its record is complete",
        "hang": f"not done 0.5 s after the run; what it has is in {path.parent}/wandb; the run's record is complete",
        "die": "ended unexpectedly (code 3, see ",
    }[kind] in warning.message


def test_without_the_packages_the_message_says_what_to_install(fakes, path, caplog):
    (fakes / "wandb" / "__init__.py").write_text("raise ImportError('no wandb here')")
    (fakes / "torch" / "utils").mkdir(parents=True)
    (fakes / "torch" / "__init__.py").touch()
    (fakes / "torch" / "utils" / "__init__.py").touch()
    (fakes / "torch" / "utils" / "tensorboard.py").write_text("raise ImportError('no tensorboard here')")
    run(path, range(3))
    mirror_to_tensorboard(path, finish_seconds=20.0).close()
    wandb, tensorboard = caplog.messages
    assert "no wandb here; `pip install wandb`, or turn it off with its mode `disabled`" in wandb
    assert "no tensorboard here; `pip install tensorboard`, or turn it off" in tensorboard
    assert len(read(path)) == 3


def test_a_process_that_cannot_start_is_said(path, monkeypatch, caplog):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run(path, range(3))
    assert "wandb could not be started" in caplog.text
    assert len(read(path)) == 3


@pytest.mark.usefixtures("fakes")
def test_a_process_that_is_killed_is_said(tmp_path, path, caplog):
    Record(path, after=-1).close()
    following = mirror(path)
    wait_for(lambda: journal(tmp_path, "init"))
    os.kill(following._process.pid, signal.SIGKILL)
    following.close()
    assert "wandb ended unexpectedly (code -9" in caplog.text


def test_disabled_does_nothing(path, monkeypatch):
    run(path, range(3), mode="disabled")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run(path, range(3, 6), after=2, mode="auto")
    assert [each.name for each in path.parent.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(ValueError, match="one of auto, online, offline, disabled, not 'of'"):
        mirror(path, mode="of")


@pytest.mark.usefixtures("fakes")
def test_the_run_s_randomness_and_modules_are_its_own(path):
    def streams():
        return random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002

    before, modules = streams(), set(sys.modules)
    run(path, range(3))
    assert streams() == before
    assert not {name for name in set(sys.modules) - modules if name.split(".")[0] in ("wandb", "tensorboard")}


KILLED = """
import os, signal
from pathlib import Path
from pbrl.run.record import Record
from tests.run.test_mirrors import mirror, rows

path = Path({path!r})
record = Record(path, after=-1)
mirror(path)
for row in rows(range(3)):
    record.write(row)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.usefixtures("fakes")
def test_the_mirror_of_a_killed_run_finishes_by_itself(tmp_path, path, fakes):
    root = Path(__file__).parents[2]
    # The run itself has no stand-ins on its path: it passes them on.
    source = f"import os; os.environ['PYTHONPATH'] = {str(fakes)!r}\n" + KILLED.format(path=str(path))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    killed = subprocess.run([sys.executable, "-c", source], cwd=root, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    wait_for(lambda: journal(tmp_path, "finish"))
    assert [entry["row"] for entry in journal(tmp_path, "log")] == shown(range(3))


def test_tensorboard_has_every_row_once(path):
    pytest.importorskip("tensorboard", reason="pip install 'pbrl[tensorboard]'")
    for iterations, after in ((range(5), -1), (range(3, 8), 2)):
        record = Record(path, after=after)
        following = mirror_to_tensorboard(path, finish_seconds=60.0)
        for row in rows(iterations):
            record.write(row)
        record.close()
        following.close()
    (events,) = path.parent.glob("tensorboard/events.out.tfevents.*")
    expected = {
        name: [(row["iteration"], float(np.float32(row[name]))) for row in shown(range(8), in_wandb=False)]
        for name in ("return/mean", "budget/trajectories", "budget/pairs_asked", "budget/env_steps")  # loss is nan
    }
    assert scalars(events) == expected


def scalars(events):
    """The steps and values of each scalar in a file of TensorBoard's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about what tensorboard itself imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        reader = EventAccumulator(str(events), size_guidance={"scalars": 0})  # 0: all of them
        reader.Reload()
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def records(path):
    """What a wandb file holds: a log of LevelDB's kind, in blocks, of protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    content, parts = path.read_bytes(), b""
    position = 7
    while position + 7 <= len(content):
        if (left := 32768 - position % 32768) < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(parts)
            parts = b""


@pytest.mark.slow  # beside other tests, one of which may use the proxy that it watches
def test_the_real_wandb_offline_keeps_to_its_folder_and_to_itself(tmp_path, path, monkeypatch, caplog):
    home = tmp_path / "home"
    home.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as outside:
        address = f"http://127.0.0.1:{outside.getsockname()[1]}"
        for name in [name for name in os.environ if name.startswith("WANDB_")]:
            monkeypatch.delenv(name)
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, address)
        monkeypatch.setenv("WANDB_BASE_URL", address)
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("NETRC", str(home / ".netrc"))
        monkeypatch.chdir(home)
        caplog.set_level(logging.INFO)
        run(path, range(5), finish_seconds=60.0)  # not logged in
        (path.parent / "videos").mkdir()
        (path.parent / "videos" / "iteration_000004.gif").write_bytes(b"a film")
        run(path, range(3, 8), after=2, finish_seconds=60.0)
        outside.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            caller, _ = outside.accept()
            caller.settimeout(5)
            pytest.fail(f"somebody called: {caller.recv(1000)!r}")
    assert list(home.iterdir()) == []
    assert {each.name for each in tmp_path.iterdir()} == {"home", "run"}
    assert [each.levelname for each in caplog.records] == ["INFO"] * 4  # `auto` has promised it
    assert "not online (No API key configured" in caplog.messages[0]
    (file,) = path.parent.glob("wandb/offline-run-*/*.wandb")
    assert f"`wandb sync {file.parent}`" in caplog.messages[3]
    contents = list(records(file))
    history = [
        {"".join([item.key, *item.nested_key]): json.loads(item.value_json) for item in record.history.item}
        for record in contents
        if record.WhichOneof("record_type") == "history"
    ]
    history = [{name: value for name, value in row.items() if not name.startswith("_")} for row in history]
    key = "videos/iteration_000004"
    film = {name.removeprefix(key): row.pop(name) for row in history for name in list(row) if name.startswith(key)}
    assert film["_type"] == "video-file"
    assert (file.parent / "files" / film["path"]).read_bytes() == b"a film"
    assert history == shown(range(8))
    (begun,) = (record.run for record in contents if record.WhichOneof("record_type") == "run")
    assert (begun.run_group, begun.job_type, list(begun.tags)) == ("sweep 7", "ncrs", ["walker_walk", "ncrs"])
    assert begun.run_id == (path.parent / "wandb" / "run_id").read_text()
