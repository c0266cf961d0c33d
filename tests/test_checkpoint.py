"""Checkpoints: that a state comes back as it was, and that no accident costs more than the last of them."""

import errno
import hashlib
import json
import logging
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pbrl import checkpoint
from pbrl.checkpoint import CheckpointError, load, save

FILES = ("state.json", "arrays.safetensors", "SHA256SUMS")
DTYPES = st.sampled_from([np.float32, np.float64, np.int64, np.int32, np.uint8, np.bool_])
ARRAYS = hnp.arrays(DTYPES, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**130), 2**130)
    | st.floats()
    | st.text(max_size=5)
    | ARRAYS
    | ARRAYS.map(np.copy).map(torch.from_numpy)
    | ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.flat[0])
)
KEYS = st.text(max_size=4) | st.sampled_from(["$array", "$dict", "a/b", "a", "b"])
STATES = st.dictionaries(
    KEYS,
    st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.lists(inner, max_size=3).map(tuple)
            | st.dictionaries(KEYS | st.integers(), inner, max_size=3)
        ),
        max_leaves=8,
    ),
    max_size=4,
)


def canonical(value):
    """The value with the type of everything in it, and every number as bits."""
    if isinstance(value, dict):
        return dict, [(canonical(key), canonical(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [canonical(item) for item in value]
    if isinstance(value, torch.Tensor):
        return torch.Tensor, canonical(value.numpy())
    if isinstance(value, np.ndarray | np.generic):
        return type(value), value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, float):
        return float, "nan" if np.isnan(value) else struct.pack("d", value)
    return type(value), value


@given(STATES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_state_comes_back_as_it_was(tmp_path_factory, state):
    folder = tmp_path_factory.mktemp("checkpoint")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # it takes most of the time
        save(folder, 7, state)
    iteration, back = load(folder)
    assert iteration == 7
    assert canonical(back) == canonical(state)
    shutil.rmtree(folder)


def test_mappings_parameters_and_odd_layouts_come_back_plain(tmp_path):
    strided = np.arange(24.0).reshape(4, 6)[::2, ::-3]
    state = {
        "ordered": OrderedDict(b=1, a=2),
        "parameter": torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).T),
        "strided": strided,
        "fortran": np.asfortranarray(strided),
        "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
    }
    save(tmp_path, 0, state)
    _, back = load(tmp_path)
    assert list(back["ordered"].items()) == [("b", 1), ("a", 2)]
    assert type(back["parameter"]) is torch.Tensor
    assert not back["parameter"].requires_grad
    assert back["parameter"].tolist() == [[0, 3], [1, 4], [2, 5]]
    for name in ("strided", "fortran", "broadcast"):
        np.testing.assert_array_equal(back[name], state[name])
        back[name] += 1  # an agent may go on in place
    back["parameter"] += 1


class Learner:
    """Adam on noisy gradients: every step depends on the optimiser's state and on the generator's."""

    def __init__(self):
        self.rng = np.random.default_rng(5)
        self.parameter = torch.nn.Parameter(torch.zeros(7))
        self.optimiser = torch.optim.Adam([self.parameter], lr=0.1, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimiser, 0.9)

    def step(self, times):
        for _ in range(times):
            self.parameter.grad = torch.from_numpy(self.rng.standard_normal(7, dtype=np.float32))
            self.optimiser.step()
            self.schedule.step()

    def state_dict(self):
        return {
            "rng": self.rng.bit_generator.state,
            "parameter": self.parameter,
            "optimiser": self.optimiser.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load_state_dict(self, state):
        self.rng.bit_generator.state = state["rng"]
        self.parameter.data.copy_(state["parameter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.schedule.load_state_dict(state["schedule"])


def test_an_optimiser_and_a_generator_continue_bit_for_bit(tmp_path):
    uninterrupted, interrupted, continued = Learner(), Learner(), Learner()
    uninterrupted.step(20)
    interrupted.step(8)
    save(tmp_path, 8, interrupted.state_dict())
    continued.load_state_dict(load(tmp_path)[1])
    continued.step(12)
    save(tmp_path, 20, continued.state_dict())
    assert torch.equal(continued.parameter, uninterrupted.parameter)
    assert continued.rng.bit_generator.state == uninterrupted.rng.bit_generator.state


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.Philox, np.random.SFC64, np.random.PCG64DXSM])
def test_every_generator_of_numpy_continues(tmp_path, generator):
    rng, continued = (np.random.Generator(generator(seed)) for seed in (1, 2))
    rng.standard_normal(3)
    save(tmp_path, 0, {"rng": rng.bit_generator.state})
    continued.bit_generator.state = load(tmp_path)[1]["rng"]
    assert continued.integers(2**62, size=9).tolist() == rng.integers(2**62, size=9).tolist()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({1, 2}, "agent/x is a set"),
        (b"bytes", "agent/x is a bytes"),
        (np.random.default_rng(), "agent/x is a Generator"),
        (Path(), "agent/x is a PosixPath"),
        ({(1, 2): 3}, r"agent/x has the key \(1, 2\)"),
        ({True: 3}, "agent/x has the key True"),
        (np.array([None]), "agent/x is of object"),
        (np.array(["text"]), "agent/x is of <U4"),
        (np.zeros(2, ">f4"), "agent/x is of >f4"),
        (np.ma.zeros(2), "agent/x is a MaskedArray"),
        (torch.zeros(2, dtype=torch.bfloat16), "agent/x is of bfloat16"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tmp_path, value, said):
    with pytest.raises(TypeError, match=said):
        save(tmp_path, 3, {"agent": {"x": value}})
    assert list(tmp_path.iterdir()) == []


def test_the_last_two_are_kept_with_their_hashes(tmp_path):
    assert load(tmp_path / "nothing yet") is None
    assert load(tmp_path) is None
    (tmp_path / "notes.txt").write_text("not ours")
    for iteration in (10, 20, 30, 1_000_000, 1_000_010):
        save(tmp_path, iteration, {"rows": np.arange(iteration % 7)})
        assert load(tmp_path)[0] == iteration
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "1000000", "1000010"}
    newest = tmp_path / "1000010"
    assert {path.name for path in newest.iterdir()} == set(FILES)
    assert json.loads((newest / "state.json").read_text())["state"] == {"rows": {"$array": "state/rows"}}
    for line in (newest / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((newest / name).read_bytes()).hexdigest() == digest


def test_a_negative_iteration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        save(tmp_path, -1, {})


# Damage.


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
    (path / "SHA256SUMS").write_bytes(checkpoint._sums(files))


def test_a_newer_format_is_not_taken_for_damage(two):
    path = two / "000002"
    (path / "state.json").write_text('{"format": 2, "iteration": 2, "news": {"$what": 1}}')
    reseal(path)
    with pytest.raises(CheckpointError, match=r"000002 was written by a newer pbrl \(format 2.*upgrade pbrl"):
        load(two)


def test_a_renamed_checkpoint_is_not_believed(two, caplog):
    (two / "000002").rename(two / "000009")
    assert load(two)[0] == 1
    assert "000009 is damaged: its name is not that of its iteration, 2" in caplog.text


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
from pbrl.checkpoint import load, save

folder = Path(sys.argv[1])
draw = random.Random(0)
interrupted = 0
for _ in range(20):
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
    root = Path(__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILLS, tmp_path], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) > 0  # some of them hit a save in the middle
    assert run.stderr == ""  # without a single damaged one
