"""Every comparison that was asked, with its answer and the truth, in Parquet. Agents never read it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pbrl.types import Answers, Int64, Preferences, Reason

REASONS = [reason.name.lower() for reason in Reason]
SCHEMA = pa.schema(
    {
        "iteration": pa.int32(),
        "question": pa.int32(),  # which call to the oracle of the run this pair was in, from 0
        "first": pa.int32(),  # trajectory of the iteration
        "second": pa.int32(),
        "first_step": pa.int32(),  # where the clip begins
        "second_step": pa.int32(),
        "clip_steps": pa.int32(),
        "episode_steps": pa.int32(),
        "mean_return": pa.float64(),  # of the iteration so far: what the teacher's thresholds scale with
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


class PreferenceLog:
    """A folder of Parquet parts named by their first row, one for each checkpoint; one file once closed.

    `state_dict` puts on disk what was asked since the last one, before the checkpoint that speaks of it is
    written; `load_state_dict` cuts away what came after the checkpoint. So however a run is interrupted, the
    log of the continued run has each comparison once.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.rows = 0  # on disk
        self.questions = 0
        self._pending: list[pa.Table] = []

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
        """Note one question: P pairs and their answers. The next `state_dict` puts it on disk."""
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
        """How much has been logged; all of it is on disk when this returns."""
        if self._pending:
            for stale in _parts(self.folder):  # left by a run that died before its first checkpoint
                if int(stale.stem) >= self.rows:
                    stale.unlink()
            table = pa.concat_tables(self._pending)
            _write(table, self.folder / f"{self.rows:012d}.parquet")
            self.rows += len(table)
            self._pending.clear()
        return {"rows": self.rows, "questions": self.questions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`: what was logged after it is cut away."""
        table = read(self.folder)
        if len(table) < state["rows"]:
            raise ValueError(
                f"the checkpoint speaks of {state['rows']} logged comparisons, "
                f"but {self.folder.absolute()} holds {len(table)}"
            )
        self._pending.clear()
        self.rows, self.questions = state["rows"], state["questions"]
        self._merge(table.slice(0, self.rows))

    def close(self) -> None:
        """Put everything on disk, as one file."""
        self.state_dict()
        self._merge(read(self.folder))

    def _merge(self, table: pa.Table) -> None:
        merged = self.folder / f"{0:012d}.parquet"
        if len(table) > 0:
            _write(table, merged)
        for part in _parts(self.folder):
            if part != merged or len(table) == 0:
                part.unlink()


def read(folder: Path | str) -> pa.Table:
    """The log in the order of asking."""
    tables, rows = [SCHEMA.empty_table()], 0
    for part in _parts(Path(folder)):
        if int(part.stem) == rows:  # else it is in a merged part already, whose writer died before tidying up
            tables.append(pq.read_table(part, schema=SCHEMA))
            rows += len(tables[-1])
    return pa.concat_tables(tables).unify_dictionaries()


def questions(table: pa.Table) -> list[pa.Table]:
    """A log cut into its questions, in the order of asking."""
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
    return sorted(folder.glob("*.parquet"))


def _write(table: pa.Table, path: Path) -> None:
    """All or nothing, even if the machine stops half-way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
