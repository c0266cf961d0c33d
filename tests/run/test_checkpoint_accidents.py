"""Checkpoints: that no accident costs more than the last of them."""

import errno
import logging
import os
import pickle
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pbrl.run import checkpoint
from pbrl.run.checkpoint import CheckpointError, load, save

FILES = ("state.json", "arrays.safetensors", "SHA256SUMS")


@pytest.fixture
def two(tmp_path):
    folder = tmp_path / "checkpoint"
    save(folder, 1, {"name": "previous", "values": np.arange(3, dtype=np.uint8)})
    save(folder, 2, {"name": "newest", "values": np.arange(4, dtype=np.uint8)})
    return folder


def damages():
    """Every truncation and one flipped bit in every byte, of every file."""
    rng = np.random.default_rng(0)

    def cut(content, position):
        return content[:position]

    def flip(content, position):
        return content[:position] + bytes([content[position] ^ (1 << rng.integers(8))]) + content[position + 1 :]

    return [cut, flip]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", damages(), ids=lambda damage: damage.__name__)
def test_damage_anywhere_is_noticed_and_named(two, caplog, name, damage):
    path = two / "000002" / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(damage(whole, position))
        caplog.clear()
        iteration, state = load(two)
        assert (iteration, state["name"]) == (1, "previous")
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert str(path.parent) in warning.message
        assert name in warning.message or "SHA256SUMS" in path.name
        assert "continuing from iteration 1" in warning.message
    path.write_bytes(whole)
    assert load(two)[0] == 2


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_damage_too(two, caplog, name):
    (two / "000002" / name).unlink()
    assert load(two)[0] == 1
    assert name in caplog.text


def test_a_run_goes_on_after_damage_and_keeps_what_is_sound(two):
    (two / "000002" / "state.json").write_text("{}")
    save(two, 3, {"name": "third"})
    assert sorted(path.name for path in two.iterdir()) == ["000001", "000003"]  # not 2: it is worth nothing
    (two / "000003" / "state.json").write_text("{}")
    assert load(two)[1]["name"] == "previous"
    save(two, 2, {"name": "second"})  # the future that was damaged is over
    assert sorted(path.name for path in two.iterdir()) == ["000001", "000002"]
    assert load(two)[1] == {"name": "second"}


def test_without_a_sound_one_the_message_says_what_to_do(two):
    for path in two.iterdir():
        (path / "arrays.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError) as raised:
        load(two)
    for part in ("000001 is damaged: arrays", "000002 is damaged: arrays", "cut short or altered", "`resume=false`"):
        assert part in str(raised.value)


def reseal(path):
    files = {name: (path / name).read_bytes() for name in FILES}
    (path / "SHA256SUMS").write_bytes(checkpoint._own_sums(files))


def test_a_newer_format_is_not_taken_for_damage(two):
    path = two / "000002"
    (path / "state.json").write_text('{"format": 3, "iteration": 2, "news": {"$what": 1}}')
    reseal(path)
    with pytest.raises(CheckpointError, match=r"000002 was written by a newer pbrl \(format 3.*upgrade pbrl"):
        load(two)


def test_a_renamed_checkpoint_is_not_believed(two, caplog):
    (two / "000002").rename(two / "000009")
    assert load(two)[0] == 1
    assert "000009 is damaged: its name does not match its iteration, 2" in caplog.text


class Malice:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("name", FILES[:2])
def test_a_checkpoint_cannot_execute_code(two, tmp_path, name):
    canary = tmp_path / "executed"
    payload = pickle.dumps(Malice(canary))
    pickle.loads(payload)
    assert canary.exists()  # it would, if anyone let it
    canary.unlink()
    (two / "000002" / name).write_bytes(payload)
    reseal(two / "000002")
    assert load(two)[0] == 1
    assert not canary.exists()


# Saves that fail or are stopped.


class PowerCutError(BaseException):
    """The machine stops: nothing after this runs."""


def stop_at(call, patch):
    """Let the machine stop at the n-th operation on the disk, half-way if it is a removal."""
    counter = iter(range(10**6))

    def wrap(module, name):
        real = getattr(module, name)

        def operation(*args, **kwargs):
            if next(counter) == call:
                if name == "rmtree":
                    next(Path(args[0]).iterdir()).unlink()
                raise PowerCutError
            return real(*args, **kwargs)

        patch.setattr(module, name, operation)

    wrap(os, "fsync")
    wrap(os, "mkdir")
    wrap(os, "rename")
    wrap(shutil, "rmtree")


@pytest.mark.parametrize("iteration", [3, 2], ids=["next", "same again"])
def test_a_machine_that_stops_at_any_moment_leaves_a_whole_state(tmp_path, monkeypatch, iteration):
    folder = tmp_path / "checkpoint"
    outcomes = []
    for call in range(100):
        shutil.rmtree(folder, ignore_errors=True)
        save(folder, 1, {"name": "first"})
        save(folder, 2, {"name": "second"})
        (folder / "000002.unfinished").mkdir()  # from an earlier accident
        (folder / "000002.unfinished" / "state.json").write_text("half")
        try:
            with monkeypatch.context() as patch:
                stop_at(call, patch)
                save(folder, iteration, {"name": "third"})
        except PowerCutError:
            outcomes.append(load(folder)[1]["name"])
            save(folder, 4, {"name": "fourth"})  # and life goes on
            assert load(folder)[1]["name"] == "fourth"
            assert len(list(folder.iterdir())) == 2
        else:
            break
    assert load(folder)[1]["name"] == "third"
    assert set(outcomes) == {"second", "third"}
    assert outcomes == sorted(outcomes)  # old until it is new


@pytest.mark.parametrize("call", range(6))
@pytest.mark.parametrize("iteration", [3, 2])
def test_a_full_disk_costs_nothing_but_this_checkpoint(two, monkeypatch, call, iteration):
    before = {path: path.read_bytes() for path in two.rglob("*") if path.is_file()}
    calls = iter(range(100))
    real = os.fsync

    def fsync(descriptor):
        if next(calls) == call:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(CheckpointError) as raised:
            save(two, iteration, {"name": "third", "values": np.zeros(10**6, dtype=np.uint8)})
    for part in (str(two), "No space left on device", "1.000 MB", "the same command continues"):
        assert part in str(raised.value)
    assert not list(two.glob("*.unfinished"))  # the space is given back
    if call < 4:  # before the new one took its place
        assert {path: path.read_bytes() for path in two.rglob("*") if path.is_file()} == before
    assert load(two)[1]["name"] == ("newest" if call < 4 else "third")


def test_a_file_that_may_not_grow_costs_nothing_but_this_checkpoint(two):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*1.000 MB"):
            save(two, 3, {"values": np.zeros(10**6, dtype=np.uint8)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load(two)[1]["name"] == "newest"
    assert sorted(path.name for path in two.iterdir()) == ["000001", "000002"]


def test_a_folder_that_cannot_be_is_named(tmp_path):
    blocked = tmp_path / "file" / "checkpoint"
    blocked.parent.write_text("not a folder")
    with pytest.raises(CheckpointError, match=rf"could not save iteration 3 in {blocked}: Not a directory"):
        save(blocked, 3, {})
    for folder in (blocked, blocked.parent):
        with pytest.raises(CheckpointError, match=f"cannot look for checkpoints in {folder}: Not a directory"):
            load(folder)


KILLS = """
import os, random, signal, sys, time
from pathlib import Path
import numpy as np
from pbrl.run.checkpoint import load, save

folder = Path(sys.argv[1])
draw = random.Random(0)
interrupted = 0
for kill in range(20):
    found = load(folder)
    start = 0 if found is None else found[0]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        for iteration in range(start, start + 100000):  # the first one again
            state = {"iteration": iteration, "values": np.full(200_000, iteration), "more": {"again": iteration}}
            save(folder, iteration, state)
            os.write(writer, b"%d " % iteration)
    os.close(writer)
    said = os.read(reader, 100)  # it is at work
    time.sleep(draw.uniform(0, 0.1))
    if kill % 2:  # a random moment is rarely in the middle of a save where disks are fast
        deadline = time.monotonic() + 10
        while not any(path.suffix for path in folder.iterdir()) and time.monotonic() < deadline:
            pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 100000):
        said += more
    interrupted += any(path.suffix for path in folder.iterdir())
    iteration, state = load(folder)
    saved = int(said.split()[-1])
    assert saved <= iteration <= saved + 1, (saved, iteration)
    assert state["iteration"] == state["more"]["again"] == iteration
    assert state["values"].shape == (200_000,) and (state["values"] == iteration).all()
print(interrupted)
"""


def test_kill_9_at_random_moments_loses_nothing(tmp_path):
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLS, tmp_path], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0  # some of them hit a save in the middle
    assert run.stderr == ""  # without a single damaged one
