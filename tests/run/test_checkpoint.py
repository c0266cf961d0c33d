"""Checkpoints: that a state comes back as it was."""

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pbrl.run import checkpoint
from pbrl.run.checkpoint import CheckpointError, load, save
from pbrl.types import Fixed

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
    assert {path.name for path in newest.iterdir()} == {"state.json", "arrays.safetensors", "SHA256SUMS"}
    assert json.loads((newest / "state.json").read_text())["state"] == {"rows": {"$array": "state/rows"}}
    for line in (newest / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split("  ")
        assert hashlib.sha256((newest / name).read_bytes()).hexdigest() == digest


def test_another_digest_of_the_settings_is_refused(tmp_path):
    save(tmp_path, 1, {"name": "before"}, settings_digest="1234")
    save(tmp_path, 2, {"name": "newest"}, settings_digest="5678")
    assert load(tmp_path, settings_digest="5678") == (2, {"name": "newest"})
    assert load(tmp_path) == (2, {"name": "newest"})  # to look at it
    with pytest.raises(
        CheckpointError, match=r"000002 was saved by a run with other settings: .*name=.*`resume=false`"
    ):
        load(tmp_path, settings_digest="1234")  # it is not damage: the one before is no substitute
    save(tmp_path, 3, {"name": "by an earlier version"})
    assert load(tmp_path, settings_digest="1234") == (3, {"name": "by an earlier version"})


def test_a_checkpoint_that_cannot_be_used_gives_way_to_the_one_before(tmp_path, caplog):
    for iteration in (1, 2):
        save(tmp_path, iteration, {"rows": 10 * iteration})

    def find_problem(iteration, state):
        return f"{state['rows']} rows after iteration {iteration} are too many" if state["rows"] > limit else None

    limit = 15
    assert load(tmp_path, find_problem=find_problem) == (1, {"rows": 10})
    (warning,) = caplog.messages
    assert warning.endswith(
        "000002 cannot be used: 20 rows after iteration 2 are too many; continuing from iteration 1"
    )
    limit = 5
    with pytest.raises(
        CheckpointError, match=r"no checkpoint can be used:\n.*20 rows.*\n.*10 rows.*\n.*`resume=false`"
    ):
        load(tmp_path, find_problem=find_problem)


def test_a_negative_iteration_is_refused(tmp_path):
    with pytest.raises(ValueError, match="at least 0, not -1"):
        save(tmp_path, -1, {})


# What does not change any more


def fixed(seed, **more):
    rng = np.random.default_rng(seed)
    return Fixed(obs=rng.standard_normal((3, 2)), reward=torch.from_numpy(rng.standard_normal(3)), **more)


def shared(folder):
    return {path.name: path.stat().st_mtime_ns for path in (folder / "fixed").iterdir()}


def test_fixed_arrays_are_written_once_shared_and_deleted_with_the_last_checkpoint_that_has_them(tmp_path):
    save(tmp_path, 0, {"parts": [fixed(0)]})
    first = shared(tmp_path)
    save(tmp_path, 1, {"parts": [fixed(0), fixed(1)]})
    assert len(shared(tmp_path)) == 2
    assert first.items() <= shared(tmp_path).items()  # not written again
    for path in tmp_path.glob("00*"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=path, check=True)
    _, back = load(tmp_path)
    assert canonical(back) == canonical({"parts": [dict(fixed(0)), dict(fixed(1))]})
    back["parts"][0]["obs"] += 1  # an agent may go on in place
    save(tmp_path, 2, {"parts": [fixed(1)]})
    assert len(shared(tmp_path)) == 2  # the checkpoint before has both
    save(tmp_path, 3, {"parts": [fixed(1)]})
    assert len(shared(tmp_path)) == 1
    assert canonical(load(tmp_path)[1]) == canonical({"parts": [dict(fixed(1))]})


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"short")])
def test_a_damaged_shared_file_damages_its_checkpoints_and_is_mended_by_the_next(tmp_path, damage, caplog):
    save(tmp_path, 0, {"parts": [fixed(0)]})
    save(tmp_path, 1, {"parts": [fixed(0), fixed(1)]})
    (new,) = {*shared(tmp_path)} - {line.split("/")[-1] for line in sums(tmp_path / "000000")}
    damage(tmp_path / "fixed" / new)
    assert load(tmp_path)[0] == 0
    assert "000001 is damaged" in caplog.text
    save(tmp_path, 1, {"parts": [fixed(0), fixed(1)]})
    assert load(tmp_path)[0] == 1


def sums(path):
    return (path / "SHA256SUMS").read_text().splitlines()


def test_a_state_cannot_name_a_file_elsewhere(tmp_path, caplog):
    save(tmp_path, 0, {"parts": []})
    save(tmp_path, 1, {"parts": [fixed(0)]})
    path = tmp_path / "000001"
    (name,) = shared(tmp_path)
    state = (path / "state.json").read_text().replace(name.removesuffix(".safetensors"), "../../secret")
    (path / "state.json").write_text(state)
    own = {name: (path / name).read_bytes() for name in ("state.json", "arrays.safetensors")}
    (path / "SHA256SUMS").write_bytes(checkpoint._own_sums(own))
    assert load(tmp_path)[0] == 0
    assert "is no SHA-256" in caplog.text
