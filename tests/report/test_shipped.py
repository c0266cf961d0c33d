"""Files of reference runs: what goes in comes out, and what is damaged is never taken for a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from synthetic_runs import write_run

from pbrl.report.shipped import SCHEMA, DamagedFileError, ShippedRun, from_folder, read_runs, write_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[ShippedRun]:
    root = tmp_path_factory.mktemp("runs")
    made = [(agent, seed) for agent in ("zpg", "ncrs") for seed in (2, 10)]
    values = np.random.default_rng(0).normal(size=(len(made), 50)).tolist()
    return [
        from_folder(write_run(root, each, agent=agent, seed=seed), f"python -m pbrl.train agent={agent} seed={seed}")
        for (agent, seed), each in zip(made, values, strict=True)
    ]


@pytest.fixture(scope="module")
def written(runs: list[ShippedRun], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("results") / "short.parquet"
    write_runs(path, runs)
    return path.read_bytes()


def test_what_goes_in_comes_out(runs: list[ShippedRun], written: bytes, tmp_path: Path) -> None:
    path = tmp_path / "short.parquet"
    path.write_bytes(written)
    found = read_runs(path)
    assert [each.name[1:] for each in found] == [
        (agent, "irrational", seed) for agent in ("ncrs", "zpg") for seed in (2, 10)
    ]
    by_name = {each.name: each for each in runs}
    for each in found:
        original = by_name[each.name]
        assert (each.identity, each.command, each.hours) == (original.identity, original.command, original.hours)
        assert each.hours == pytest.approx(50 * 3 / 3600, rel=1e-3)
        for name, values in original.recorded.metrics.items():
            assert each.recorded.metrics[name].tobytes() == values.tobytes(), name
    assert len(written) / len(runs) < 5_000  # some kilobytes a run


def test_a_paused_iteration_does_not_count_in_full(tmp_path: Path) -> None:
    folder = write_run(tmp_path, [1.0] * 10)  # 3 seconds each
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    rows[4] = rows[4].replace('"seconds_learn": 0.5', '"seconds_learn": 7000.5')
    (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    run = from_folder(folder, "")
    assert run.seconds_per_iteration == pytest.approx((9 * 3 + 30) / 10)
    assert run.hours == pytest.approx(7030 / 3600, rel=1e-3)


@given(st.data())
def test_the_order_does_not_matter(
    data: st.DataObject, runs: list[ShippedRun], written: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("results") / "short.parquet"
    write_runs(path, data.draw(st.permutations(runs)))
    assert path.read_bytes() == written


@given(st.data())
def test_damage_never_changes_a_number(
    data: st.DataObject, runs: list[ShippedRun], written: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Parts of a file matter to nobody; whatever else is damaged is found."""
    path = tmp_path_factory.mktemp("results") / "short.parquet"
    damaged = bytearray(written)
    damaged[data.draw(st.integers(0, len(written) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    try:
        found = read_runs(path)
    except DamagedFileError:
        return
    expected = sorted(runs, key=lambda run: run.name)
    assert [each.identity for each in found] == [each.identity for each in expected]
    for each, original in zip(found, expected, strict=True):
        for name, values in original.recorded.metrics.items():
            assert each.recorded.metrics[name].tobytes() == values.tobytes(), name


@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_that_was_cut_off_is_refused(
    share: float, written: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("results") / "short.parquet"
    path.write_bytes(written[: int(share * len(written))])
    with pytest.raises(DamagedFileError, match=r"short\.parquet cannot be read"):
        read_runs(path)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("settings", "{}", "cannot be read"),
        ("settings", "[", "cannot be read"),
        ("versions", "{", "cannot be read"),
        ("return_mean", [1.0], "differ in length"),
    ],
)
def test_rows_that_make_no_sense_are_refused(
    column: str, value: object, message: str, written: bytes, tmp_path: Path
) -> None:
    rows = parquet.read_table(pyarrow.BufferReader(written)).to_pylist()
    rows[0][column] = value
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=SCHEMA), tmp_path / "x.parquet")
    with pytest.raises(DamagedFileError, match=message):
        read_runs(tmp_path / "x.parquet")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"task": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DamagedFileError, match="it is not a file of reference runs of this version of pbrl"):
        read_runs(tmp_path / "x.parquet")
