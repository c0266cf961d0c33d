"""The preference log: every comparison of a run, with its answer and the true sums. Agents never read it."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute  # "cast" would import it in the seconds of the first question
import pyarrow.parquet as pq

from pbrl.run.checkpoint import CheckpointError
from pbrl.run.files import sync_folder, unused_name, write_atomically
from pbrl.types import Answers, Int64, Preferences, Reason

REASONS = [reason.name.lower() for reason in Reason]
SCHEMA = pa.schema(
    {
        "iteration": pa.int32(),
        "question": pa.int32(),  # number of the call to the oracle that this pair was part of; the run's first is 0
        "first": pa.int64(),  # number of the trajectory in the run; the first one collected is 0
        "second": pa.int64(),
        "first_step": pa.int32(),  # where the clip begins
        "second_step": pa.int32(),
        "clip_steps": pa.int32(),
        "episode_steps": pa.int32(),
        "mean_return": pa.float64(),  # of as many trajectories as an iteration has: the teacher's thresholds follow it
        "experts": pa.int32(),
        "probability": pa.float64(),
        "score": pa.float64(),
        "label": pa.float64(),
        "answered": pa.bool_(),
        "reason": pa.dictionary(pa.int8(), pa.string()),
        "first_sum": pa.float64(),  # undiscounted true sums
        "second_sum": pa.float64(),
        "bits": pa.int32(),
        "tau": pa.float64(),
    }
)

DIGEST = b"sha256"  # the name of a part's fingerprint in its metadata
PART = re.compile(r"\d{12}\.parquet")

logger = logging.getLogger(__name__)


class PreferenceLogError(CheckpointError):
    """The log lacks rows that the checkpoint counts; the message says what to do."""


class PreferenceLog:
    """A folder of Parquet parts, one for each checkpoint, named by their first row; `close` makes them one file.

    Call `state_dict` before saving a checkpoint: it writes the comparisons since the last call. `load_state_dict`
    removes rows that are later than the checkpoint. So each comparison is in the log once, wherever a run was
    interrupted. A log that was neither begun nor loaded by this run is kept aside in a folder of its own.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.rows = 0  # on disk
        self.questions = 0
        self._pending: list[pa.Table] = []
        self._owns_folder = False  # whether the parts in the folder are this log's

    def append(
        self,
        answers: Answers,
        *,
        iteration: int,
        first: Int64,
        second: Int64,
        first_step: Int64 | int,
        second_step: Int64 | int,
        clip_steps: int,
        episode_steps: int,
        mean_return: float,
        experts: int,
    ) -> None:
        """Add one question: P pairs and their answers. The next `state_dict` writes it to disk."""
        columns = {
            "iteration": iteration,
            "question": self.questions,
            "first": first,
            "second": second,
            "first_step": first_step,
            "second_step": second_step,
            "clip_steps": clip_steps,
            "episode_steps": episode_steps,
            "mean_return": mean_return,
            "experts": experts,
            **vars(answers.preferences),
            "first_sum": answers.first_sum,
            "second_sum": answers.second_sum,
            "bits": answers.bits,
            "tau": answers.tau,
        }
        arrays = {name: pa.array(np.broadcast_to(values, len(answers))) for name, values in columns.items()}
        arrays["reason"] = pa.DictionaryArray.from_arrays(answers.reason.astype(np.int8), REASONS)
        self._pending.append(pa.table([arrays[name].cast(SCHEMA.field(name).type) for name in SCHEMA.names], SCHEMA))
        self.questions += 1

    def state_dict(self) -> dict[str, Any]:
        """How much has been logged. All of it is on disk when this returns."""
        if self._pending:
            self._keep_earlier_log_aside()
            table = pa.concat_tables(self._pending)
            _write(table, self.folder / f"{self.rows:012d}.parquet")
            self.rows += len(table)
            self._pending.clear()
        return {"rows": self.rows, "questions": self.questions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`: rows logged after it are removed."""
        if problem := self.find_problem(state):
            raise PreferenceLogError(
                f"{problem}. Restore the folder from a copy, continue without a log (preference_log=false), "
                "or start over with resume=false, which keeps the old run aside."
            )
        self._pending.clear()
        self.rows, self.questions = state["rows"], state["questions"]
        self._owns_folder = True
        self._merge(read(self.folder).slice(0, self.rows))

    def find_problem(self, state: Mapping[str, Any]) -> str | None:
        """Why the log cannot be continued from `state_dict()`; None if it can. For `checkpoint.load`."""
        if any(type(state[name]) is not int or state[name] < 0 for name in ("rows", "questions")):
            return f"its counts of logged comparisons make no sense: {state['rows']!r} and {state['questions']!r}"
        rows = len(read(self.folder))
        if rows >= state["rows"]:
            return None
        return f"the checkpoint counts {state['rows']} logged comparisons, but {self.folder.absolute()} has only {rows}"

    def is_whole(self, state: Mapping[str, Any]) -> bool:
        """Whether the log was closed at `state_dict()`: one file with all its rows."""
        merged = [self.folder / f"{0:012d}.parquet"] if state["rows"] else []
        return _parts(self.folder) == merged and len(read(self.folder)) == state["rows"]

    def close(self) -> None:
        """Write everything to disk, and merge the parts into one file."""
        self.state_dict()
        self._keep_earlier_log_aside()
        table = read(self.folder)
        if len(table) >= self.rows:
            self._merge(table.slice(0, self.rows))
        else:
            logger.warning(
                "%s has only %d of %d logged comparisons in a row: its files are left as they are",
                self.folder,
                len(table),
                self.rows,
            )

    def _keep_earlier_log_aside(self) -> None:
        """Move parts that are not this log's to another folder: a run without its checkpoint, or with the log off."""
        if not self._owns_folder and (parts := _parts(self.folder)):
            aside = unused_name(self.folder)
            aside.mkdir()
            for part in parts:
                part.rename(aside / part.name)
            sync_folder(aside)
            sync_folder(self.folder)
            logger.warning(
                "%s held comparisons that this run does not continue: they are kept in %s", self.folder, aside
            )
        self._owns_folder = True

    def _merge(self, table: pa.Table) -> None:
        """Replace all parts by one."""
        parts, merged = _parts(self.folder), self.folder / f"{0:012d}.parquet"
        if len(table) > 0:
            if parts == [merged] and pq.read_metadata(merged).num_rows == len(table):
                return
            _write(table, merged)
        for part in parts:
            if part != merged or len(table) == 0:
                part.unlink()


def read(folder: Path | str, columns: Sequence[str] | None = None) -> pa.Table:
    """The log in the order of asking, up to the first row that is missing.

    columns: only these, ten times as fast, and not checked: the fingerprint is of all.
    """
    tables, rows, parts = [SCHEMA.empty_table().select(columns or SCHEMA.names)], 0, _parts(Path(folder))
    for other in sorted({*Path(folder).glob("*.parquet")} - {*parts}):
        logger.warning("%s is not part of the log, and is ignored", other)
    for part in parts:
        if int(part.stem) != rows:  # a merge was interrupted: its rows are in the merged part, too
            continue
        try:
            tables.append(_read(part) if columns is None else pq.read_table(part, schema=SCHEMA, columns=columns))
        except (OSError, ValueError, pa.ArrowException) as error:
            logger.warning("%s cannot be read (%s): the log ends before it", part, error)
            break
        rows += len(tables[-1])
    return pa.concat_tables(tables).unify_dictionaries()


def questions(table: pa.Table) -> list[pa.Table]:
    """The questions of a log, in the order of asking."""
    numbers = table["question"].to_numpy()
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return [table.slice(start, stop - start) for start, stop in pairwise([*starts.tolist(), len(table)])]


def answers_of(table: pa.Table) -> Answers:
    """The answers in (a part of) a log, as the oracle gave them."""
    column = {
        name: table[name].to_numpy()
        for name in ("probability", "score", "label", "answered", "first_sum", "second_sum", "bits", "tau")
    }
    taus = np.unique(column["tau"])
    return Answers(
        preferences=Preferences(**{name: column[name] for name in ("probability", "score", "label", "answered")}),
        reason=np.array([REASONS.index(reason) for reason in table["reason"].to_pylist()], dtype=np.uint8),
        first_sum=column["first_sum"],
        second_sum=column["second_sum"],
        bits=column["bits"].astype(np.int64),
        tau=float(taus[0]) if len(taus) == 1 else float("nan"),
    )


def _parts(folder: Path) -> list[Path]:
    """The log's own files in a folder, in order."""
    return sorted(file for file in folder.glob("*.parquet") if PART.fullmatch(file.name))


def _digest(table: pa.Table) -> bytes:
    """A fingerprint of a table's content: Parquet itself does not notice every flipped bit."""
    digest = hashlib.sha256(str(len(table)).encode())
    for column in table.columns:
        if pa.types.is_dictionary(column.type):
            digest.update("\n".join(map(str, column.to_pylist())).encode())
        else:
            digest.update(column.to_numpy().tobytes())
    return digest.hexdigest().encode()


def _read(part: Path) -> pa.Table:
    content = pa.py_buffer(part.read_bytes())
    table = pq.read_table(pa.BufferReader(content), schema=SCHEMA)
    metadata = pq.read_schema(pa.BufferReader(content)).metadata or {}
    if metadata.get(DIGEST) not in (None, _digest(table)):  # earlier versions wrote none
        raise ValueError("it was altered since it was written")
    return table


def _write(table: pa.Table, path: Path) -> None:
    table = table.replace_schema_metadata({DIGEST: _digest(table)})
    content = pa.BufferOutputStream()
    pq.write_table(table, content, compression="zstd")
    write_atomically(path, content.getvalue().to_pybytes())
