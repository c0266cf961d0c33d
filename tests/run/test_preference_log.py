"""The preference log: what it keeps, and that interruptions and lost files neither lose nor repeat a comparison."""

import logging
import os
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pbrl.run import checkpoint, preference_log
from pbrl.run.preference_log import SCHEMA, PreferenceLog, PreferenceLogError, answers_of, questions, read
from pbrl.types import Answers, Preferences, Reason

ITERATIONS = 6
ROWS = 6  # per iteration: two questions of three pairs


def answers(pairs, seed=0):
    """Random answers to so many pairs."""
    rng = np.random.default_rng(seed)
    probability, label = rng.uniform(size=pairs), rng.choice([0.0, 0.5, 1.0], size=pairs)
    return Answers(
        preferences=Preferences(
            probability=probability, score=2 * probability - 1, label=label, answered=rng.uniform(size=pairs) < 0.8
        ),
        reason=rng.integers(len(Reason), size=pairs).astype(np.uint8),
        first_sum=rng.normal(size=pairs),
        second_sum=rng.normal(size=pairs),
        bits=rng.integers(4, size=pairs),
        tau=0.5,
    )


class Run:
    """A run that asks twice per iteration. What it asks depends on the iteration alone."""

    def __init__(self, folder, state=None):
        self.log, self.iteration = PreferenceLog(folder), 0
        if state is not None:
            self.iteration = state["iteration"]
            self.log.load_state_dict(state["log"])

    def iterate(self, times=1):
        for _ in range(times):
            for question in range(2):
                trajectories = 8 * self.iteration + 4 * question + np.array([0, 2, 1, 1, 3, 2])
                self.log.append(
                    answers(3, seed=2 * self.iteration + question),
                    iteration=self.iteration,
                    first=trajectories[:3],
                    second=trajectories[3:],
                    first_step=0,
                    second_step=0,
                    clip_steps=7,
                    episode_steps=7,
                    mean_return=1.5,
                    experts=1 + question,
                )
            self.iteration += 1

    def checkpoint(self):
        return {"iteration": self.iteration, "log": self.log.state_dict()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "preferences"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    run.iterate(ITERATIONS)
    run.log.close()
    return read(run.log.folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_every_comparison_is_kept(uninterrupted):
    assert uninterrupted.schema == SCHEMA
    assert len(uninterrupted) == ITERATIONS * ROWS
    assert uninterrupted["iteration"].to_pylist() == sorted([*range(ITERATIONS)] * 6)
    assert uninterrupted["question"].to_pylist() == sorted([*range(2 * ITERATIONS)] * 3)
    assert uninterrupted["first"].to_pylist()[-6:] == [40, 42, 41, 44, 46, 45]  # numbered over the whole run
    assert uninterrupted["second"].to_pylist()[-6:] == [41, 43, 42, 45, 47, 46]
    assert set(uninterrupted["reason"].to_pylist()) == {"answered", "skipped", "equal", "mistaken"}
    assert [len(question) for question in questions(uninterrupted)] == [3] * 2 * ITERATIONS


def test_answers_and_the_numbers_of_trajectories_come_back_exactly(folder):
    log, given = PreferenceLog(folder), answers(100)
    rows = 2**40 + np.arange(100)
    about = {"iteration": 3, "clip_steps": 5, "episode_steps": 5, "mean_return": 5.0, "experts": 1}
    log.append(given, first=rows, second=rows + 1, first_step=np.arange(100), second_step=0, **about)
    assert len(read(folder)) == 0  # not on disk before a checkpoint asks for it
    log.state_dict()
    table = read(folder)
    assert table["first"].to_pylist() == rows.tolist()
    back = answers_of(table)
    np.testing.assert_equal(vars(back.preferences), vars(given.preferences))
    for name in ("reason", "first_sum", "second_sum", "bits"):
        np.testing.assert_array_equal(getattr(back, name), getattr(given, name))
    assert back.tau == given.tau


def test_a_closed_log_is_one_file_that_any_reader_understands(folder):
    run = Run(folder)
    for _ in range(3):
        run.iterate()
        run.checkpoint()
    assert len(list(folder.iterdir())) == 3
    run.log.close()
    (file,) = folder.iterdir()
    assert pq.read_table(file).num_rows == 18
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask()
    run.log.close()  # closing it again changes nothing
    assert len(read(folder)) == 18


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_log_of_the_version_before_is_read(folder, uninterrupted):
    """It numbered trajectories within an iteration, in 32 bits."""
    folder.mkdir()
    old = pa.schema([(field.name, pa.int32() if field.name in ("first", "second") else field.type) for field in SCHEMA])
    pq.write_table(uninterrupted.cast(old), folder / f"{0:012d}.parquet")
    assert read(folder).equals(uninterrupted)


@pytest.mark.parametrize("saved", range(ITERATIONS + 1))
@pytest.mark.parametrize("beyond", ["nothing", "unsaved", "flushed", "closed"])
def test_a_continued_run_logs_what_an_uninterrupted_one_does(folder, uninterrupted, saved, beyond):
    run = Run(folder)
    run.iterate(saved // 2)
    run.checkpoint()
    run.iterate(saved - saved // 2)
    state = run.checkpoint()
    if beyond != "nothing":
        run.iterate(2)
    if beyond == "flushed":
        run.checkpoint()  # on disk, but the machine stops before the checkpoint is
    if beyond == "closed":
        run.log.close()
    resumed = Run(folder, state)
    resumed.iterate(ITERATIONS - saved)
    resumed.log.close()
    assert read(folder).equals(uninterrupted)
    assert not list(folder.parent.glob("*~*"))


class PowerCutError(BaseException):
    """The machine stops."""


@pytest.mark.parametrize("stop_at", ["write_table", "fsync", "replace", "unlink"])
def test_a_machine_that_stops_while_writing_costs_nothing(folder, uninterrupted, monkeypatch, stop_at):
    run = Run(folder)
    for _ in range(3):
        run.iterate()
        state = run.checkpoint()

    def stop(*_args, **_kwargs):
        raise PowerCutError

    target = {"write_table": preference_log.pq, "fsync": os}.get(stop_at, preference_log.Path)
    with monkeypatch.context() as patch:
        patch.setattr(target, stop_at, stop)
        with pytest.raises(PowerCutError):
            run.log.close()  # merging
    assert read(folder).equals(uninterrupted.slice(0, 18))
    run.iterate()
    with monkeypatch.context() as patch:
        patch.setattr(preference_log.pq, "write_table", stop)
        with pytest.raises(PowerCutError):
            run.checkpoint()
    resumed = Run(folder, state)
    resumed.iterate(ITERATIONS - 3)
    resumed.log.close()
    assert read(folder).equals(uninterrupted)


def test_the_folder_is_synced_when_a_part_is_written(folder, monkeypatch):
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino) or fsync(number))
    run = Run(folder)
    run.iterate()
    run.checkpoint()
    (part,) = folder.iterdir()
    assert synced == [each.stat().st_ino for each in (part, folder, folder.parent)]  # the parent: the folder is new


# --------------------------------------------------------------------------------------------- files that are lost


@pytest.fixture
def three_parts(folder):
    """The folder of a run with three parts, the run, and its last two checkpoints."""
    run, states = Run(folder), []
    for _ in range(3):
        run.iterate()
        states.append(run.checkpoint())
    return run, states


def test_a_missing_first_part_deletes_nothing(folder, three_parts, caplog):
    run, (_, _, last) = three_parts
    (folder / f"{0:012d}.parquet").unlink()
    left = contents(folder)
    run.log.close()
    assert contents(folder) == left
    assert "has only 0 of 18 logged comparisons in a row: its files are left as they are" in caplog.text
    with pytest.raises(PreferenceLogError):
        Run(folder, last)
    assert contents(folder) == left


@pytest.mark.parametrize("damage", ["deleted", "cut short"])
def test_without_its_newest_part_the_checkpoint_before_is_used(folder, three_parts, uninterrupted, caplog, damage):
    newest = folder / f"{12:012d}.parquet"
    for state in three_parts[1][1:]:
        checkpoint.save(folder.parent / "checkpoint", state["iteration"], state)
    if damage == "deleted":
        newest.unlink()
    else:
        newest.write_bytes(newest.read_bytes()[:100])
    log = PreferenceLog(folder)
    iteration, state = checkpoint.load(
        folder.parent / "checkpoint", find_problem=lambda _, state: log.find_problem(state["log"])
    )
    assert iteration == 2
    assert f"counts 18 logged comparisons, but {folder} has only 12; continuing from iteration 2" in caplog.text
    resumed = Run(folder, state)
    resumed.iterate(ITERATIONS - 2)
    resumed.log.close()
    assert read(folder).equals(uninterrupted)


def test_without_any_part_the_message_says_what_to_do(folder, three_parts):
    shutil.rmtree(folder)
    with pytest.raises(checkpoint.CheckpointError) as raised:
        Run(folder, three_parts[1][-1])
    for part in ("counts 18 logged comparisons", f"{folder} has only 0", "preference_log=false", "resume=false"):
        assert part in str(raised.value)


@pytest.mark.parametrize("name", ["copy.parquet", "1.parquet", "000000000006 (1).parquet"])
def test_another_parquet_file_in_the_folder_is_ignored_with_a_warning(folder, three_parts, uninterrupted, caplog, name):
    stranger = folder / name
    stranger.write_bytes(b"not even Parquet")
    resumed = Run(folder, three_parts[1][1])
    resumed.iterate(ITERATIONS - 2)
    resumed.log.close()
    caplog.clear()
    assert read(folder).equals(uninterrupted)
    (warning,) = caplog.records
    assert (warning.levelno, warning.message) == (logging.WARNING, f"{stranger} is not part of the log, and is ignored")
    assert stranger.read_bytes() == b"not even Parquet"


@pytest.mark.usefixtures("three_parts")
def test_a_log_without_its_checkpoint_is_kept_aside(folder, uninterrupted, caplog):
    fresh = Run(folder)
    fresh.iterate(2)
    fresh.checkpoint()
    assert read(folder.with_name("preferences~1")).equals(uninterrupted.slice(0, 18))
    assert read(folder).equals(uninterrupted.slice(0, 12))
    (warning,) = caplog.messages
    assert str(folder.with_name("preferences~1")) in warning
    again = Run(folder)
    again.log.close()  # although it has asked nothing
    assert read(folder.with_name("preferences~2")).equals(uninterrupted.slice(0, 12))
    assert len(read(folder)) == 0


@pytest.mark.usefixtures("three_parts")
def test_a_log_that_was_turned_off_and_on_keeps_its_old_rows(folder, uninterrupted):
    on_again = Run(folder)  # the checkpoint without a log has no state for it
    on_again.iteration = 5
    on_again.iterate()
    on_again.log.close()
    assert read(folder.with_name("preferences~1")).equals(uninterrupted.slice(0, 18))
    assert read(folder)["iteration"].to_pylist() == [5] * ROWS


def test_the_log_is_compact(folder):
    run = Run(folder)
    run.iterate(600)
    run.log.close()
    (file,) = folder.iterdir()
    assert file.stat().st_size / (600 * ROWS) < 50  # bytes per comparison, 24 of them random numbers


def test_a_flipped_bit_anywhere_is_noticed_or_changes_nothing(folder):
    """Parquet alone reads some of them as other numbers."""
    run = Run(folder)
    run.iterate()
    run.log.close()
    (part,) = folder.iterdir()
    content, table, noticed = part.read_bytes(), read(folder), []
    for position in range(0, len(content), 29):
        part.write_bytes(content[:position] + bytes([content[position] ^ 1 << position % 8]) + content[position + 1 :])
        found = read(folder)
        noticed.append(len(found) == 0)
        assert len(found) == 0 or found.to_pydict() == table.to_pydict()
    assert sum(noticed) > len(noticed) / 4
