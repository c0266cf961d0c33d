"""The record: one strictly valid JSON object per iteration, whatever interrupts it."""

import errno
import json
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pbrl.run import checkpoint
from pbrl.run.record import Record, RecordError, columns, find_problem, read


def row(iteration):
    return {"iteration": iteration, "return_mean": iteration / 3, "trajectories": 64 * (iteration + 1)}


def written(path, iterations, after=-1):
    record = Record(path, after=after)
    for iteration in iterations:
        record.write(row(iteration))
    record.close()
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "metrics.jsonl"


def test_rows_come_back_in_order(path):
    record = Record(path, after=-1)
    for iteration in range(3):
        record.write(row(iteration))
        assert read(path) == [row(each) for each in range(iteration + 1)]  # at once, for whoever looks
    record.sync()
    record.close()


def test_every_kind_of_number_is_strict_json(path):
    record = Record(path, after=-1)
    metrics = {
        "iteration": np.int64(0),
        "float32": np.float32(0.1),
        "float64": np.float64(0.1),
        "tensor": torch.tensor(2.5),
        "bool": np.True_,
        "large": 2**70,
        "nan": float("nan"),
        "infinite": -np.inf,
        "nan_too": np.float32("nan"),
    }
    record.write(metrics)
    record.close()

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    (line,) = path.read_text().splitlines()
    back = json.loads(line, parse_constant=refuse)
    assert back == read(path)[0]
    assert back == {
        "iteration": 0,
        "float32": float(np.float32(0.1)),
        "float64": 0.1,
        "tensor": 2.5,
        "bool": True,
        "large": 2**70,
        "nan": None,
        "infinite": None,
        "nan_too": None,
    }


@given(st.dictionaries(st.text(max_size=8), st.floats() | st.integers(-(2**62), 2**62), max_size=5))
@settings(max_examples=50, deadline=None)
def test_finite_numbers_come_back_exactly(tmp_path_factory, metrics):
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    metrics = {**metrics, "iteration": 5}
    record = Record(path, after=-1)
    record.write(metrics)
    record.close()
    (back,) = read(path)
    assert back == {name: value if np.isfinite(value) else None for name, value in metrics.items()}
    assert path.read_bytes().count(b"\n") == 1


@pytest.mark.parametrize("value", ["text", None, [1.0], 1j])
def test_what_is_not_a_number_is_refused_by_name(path, value):
    record = Record(path, after=-1)
    with pytest.raises(TypeError, match="the metric loss must be a number"):
        record.write({"iteration": 0, "loss": value})
    record.close()
    assert read(path) == []


def test_iterations_only_go_up(path):
    record = Record(path, after=-1)
    record.write(row(4))
    for iteration in (4, 3):
        with pytest.raises(ValueError, match=f"iteration {iteration} cannot follow 4 in .*metrics.jsonl"):
            record.write(row(iteration))
    record.write(row(5))
    record.close()
    assert [each["iteration"] for each in read(path)] == [4, 5]


def test_a_continued_record_is_the_uninterrupted_one_wherever_it_was_cut(tmp_path):
    whole = written(tmp_path / "whole.jsonl", range(4)).read_bytes()
    path = tmp_path / "metrics.jsonl"
    end_of_checkpoint = whole.index(b"\n", whole.index(b"\n") + 1) + 1  # iterations 0 and 1
    for cut in range(end_of_checkpoint, len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert [each["iteration"] for each in read(path)] == list(range(whole[:cut].count(b"\n")))
        written(path, [2, 3], after=1)
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "garbage", [b"\0" * 50, b"\0\n{}\n", b'{"iteration": 1}\n{"iteration": 0}\n', b"\xff\n"], ids=range(4)
)
def test_what_follows_the_checkpoint_may_be_anything(path, garbage):
    written(path, range(3))
    whole = path.read_bytes()
    path.write_bytes(whole + garbage)
    written(path, [3], after=2)
    assert [each["iteration"] for each in read(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("content", ["rows", "half a row", "garbage"])
def test_a_record_without_its_checkpoint_is_kept_aside(path, caplog, content):
    whole = written(path, range(20)).read_bytes()
    old = {"rows": whole, "half a row": whole[:10], "garbage": b"\0" + whole}[content]
    path.write_bytes(old)
    written(path, range(2), after=-1)
    assert path.with_name("metrics~1.jsonl").read_bytes() == old
    assert [each["iteration"] for each in read(path)] == [0, 1]
    (warning,) = caplog.records
    assert (
        warning.message
        == f"{path} has rows, but there is no checkpoint to continue from: it is kept as metrics~1.jsonl"
    )
    written(path, range(3), after=-1)
    assert [each["iteration"] for each in read(path.with_name("metrics~2.jsonl"))] == [0, 1]


def test_an_empty_record_is_not_kept_aside(path, caplog):
    for _ in range(2):
        written(path, [])
    assert list(path.parent.iterdir()) == [path]
    assert caplog.records == []


@pytest.mark.parametrize(("rows", "found"), [(3, "ends at iteration 2"), (0, "is empty")])
def test_a_checkpoint_beyond_the_record_is_refused(path, rows, found):
    written(path, range(rows))
    before = path.read_bytes()
    assert found in find_problem(path, 5)
    with pytest.raises(RecordError, match=rf"checkpoint is of iteration 5, but .*metrics.jsonl {found}.*resume=false"):
        Record(path, after=5)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (b"{half\n", "not the row"),
        (b"[1]\n", "not the row"),
        (b"{}\n", "not the row"),
        (b'{"iteration": null}\n', "not the row"),
        (b"\xff\xfe\n", "not the row"),
        (b"\n", "not the row"),
        (b'{"iteration": Infinity}\n', "not the row"),
        (b'{"iteration": 1}\n', "iteration 1 follows 1.*two runs"),
    ],
)
def test_garbage_is_named_by_its_line(path, garbage, said):
    written(path, range(2))
    with path.open("ab") as file:
        file.write(garbage + b'{"iteration": 2}\n')
    with pytest.raises(RecordError, match=rf"metrics.jsonl, line 3: .*{said}"):
        read(path)
    with pytest.raises(RecordError, match=rf"metrics.jsonl, line 3: .*{said}"):
        Record(path, after=2)


def test_without_its_last_rows_the_checkpoint_before_is_used(path, caplog):
    folder = path.parent / "checkpoint"
    for iteration in (9, 19):
        checkpoint.save(folder, iteration, {})
    written(path, range(12))
    iteration, _ = checkpoint.load(folder, find_problem=lambda iteration, _: find_problem(path, iteration))
    assert iteration == 9
    assert "metrics.jsonl ends at iteration 11" in caplog.text
    written(path, range(10, 20), after=iteration)
    assert find_problem(path, 19) is None
    path.unlink()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint can be used:\n.*No such file(.|\n)*resume=false"
    ):
        checkpoint.load(folder, find_problem=lambda iteration, _: find_problem(path, iteration))


def test_columns_have_nan_where_a_row_lacks_a_metric(path):
    record = Record(path, after=-1)
    record.write({"iteration": 0, "return_mean": 1.5})
    record.write({"iteration": 1, "return_mean": float("nan"), "eval_return": 7})
    record.close()
    table = columns(read(path))
    assert list(table) == ["iteration", "return_mean", "eval_return"]
    np.testing.assert_array_equal(table["iteration"], [0, 1])
    np.testing.assert_array_equal(table["return_mean"], [1.5, np.nan])
    np.testing.assert_array_equal(table["eval_return"], [np.nan, 7])
    assert all(column.dtype == np.float64 for column in table.values())
    assert columns([]) == {}


def test_a_full_disk_is_said_and_repaired(path, monkeypatch):
    record = Record(path, after=-1)
    record.write(row(0))
    real = record._file

    class Full:
        def write(self, line):
            if len(line) > 10:
                return real.write(line[:10])  # so much was left
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(record, "_file", Full())
        with pytest.raises(RecordError, match=r"metrics.jsonl: No space left on device.*the same command continues"):
            record.write(row(1))
    record.close()
    assert read(path) == [row(0)]
    written(path, [1], after=0)
    assert read(path) == [row(0), row(1)]


def test_a_disk_that_loses_data_is_said(path, monkeypatch):
    record = Record(path, after=-1)

    def fail(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(RecordError, match=r"metrics.jsonl: Input/output error"):
            record.sync()
    record.close()


def test_a_folder_that_cannot_be_is_named(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(RecordError, match=r"could not write to .*/file/run/metrics.jsonl: Not a directory"):
        Record(tmp_path / "file" / "run" / "metrics.jsonl", after=-1)
