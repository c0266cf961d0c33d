"""The record of a run: `metrics.jsonl`, one JSON object per iteration.

It is strictly JSON, which has no word for nan and infinity: they are written as null, and read as nan in `columns`.
A line counts once its end is written. wandb and TensorBoard only follow this file (`pbrl.run.mirrors`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.types import Float64, Metrics

Row = dict[str, float | None]


class RecordError(RuntimeError):
    """The record could not be written or read; the message says what to do."""


class Record:
    """Appends to a record, after the row of the iteration `after`; -1 begins a new one.

    Rows beyond it, whole or half-written, were not part of the checkpoint that a run continues from: they are cut
    away, and the continued record is the uninterrupted one.
    """

    def __init__(self, path: Path, *, after: int) -> None:
        self.path = path
        self.iteration = after  # of the last row
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._refusal(error) from error
        try:
            self._file.truncate(_end_of_row(path, after))
        except RecordError:
            self._file.close()
            raise

    def write(self, metrics: Metrics) -> None:
        """Add the row of an iteration: numbers by name, `iteration` among them."""
        iteration = int(metrics["iteration"])
        if iteration <= self.iteration:
            raise ValueError(f"iteration {iteration} cannot follow {self.iteration} in {self.path.absolute()}")
        row = {name: _plain(name, value) for name, value in metrics.items()}
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        try:
            while line:
                line = line[self._file.write(line) :]
        except OSError as error:
            raise self._refusal(error) from error
        self.iteration = iteration

    def sync(self) -> None:
        """See that every row is on disk, before a checkpoint that speaks of them is written."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from error

    def close(self) -> None:
        """No more rows."""
        self._file.close()

    def _refusal(self, error: OSError) -> RecordError:
        return RecordError(
            f"could not write to {self.path.absolute()}: {error.strerror or error}. "
            "Put this right, and the same command continues from the last checkpoint."
        )


def read(path: Path) -> list[Row]:
    """All rows; a last line that was only half-written is left out."""
    return [row for row, _ in _rows(path)]


def columns(rows: Sequence[Row]) -> dict[str, Float64]:
    """One array per metric, nan where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name) for row in rows], dtype=np.float64) for name in names}


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Every row with the position of its end in the file."""
    end, last = 0, -1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row: Row = json.loads(line)
                iteration = int(row["iteration"])  # type: ignore[arg-type]  # a TypeError is an answer, too
            except (ValueError, TypeError, LookupError):
                raise RecordError(
                    f"{path.absolute()}, line {number}: this is not the row of an iteration: {line[:60]!r}. "
                    "Restore the file from a copy, or remove the line if you can do without it."
                ) from None
            if iteration <= last:
                raise RecordError(
                    f"{path.absolute()}, line {number}: iteration {iteration} follows {last}. "
                    "Did two runs write to one folder? Restore the file from a copy, or start over with `resume=false`."
                )
            end, last = end + len(line), iteration
            yield row, end


def _end_of_row(path: Path, iteration: int) -> int:
    """Where the row of an iteration ends. What follows it may be anything, and is not looked at."""
    if iteration < 0:
        return 0
    last: Any = None
    for row, end in _rows(path):
        last = row["iteration"]
        if last == iteration:
            return end
    raise RecordError(
        f"the checkpoint is of iteration {iteration}, but {path.absolute()} "
        f"{'is empty' if last is None else f'ends at iteration {last}'}. Restore the file from a copy, "
        "or start over with `resume=false`, which keeps the old run aside."
    )


def _plain(name: str, value: Any) -> float | None:
    number = value.item() if hasattr(value, "item") else value  # of numpy and torch
    if not isinstance(number, int | float):
        raise TypeError(f"the metric {name} must be a number, not {value!r}")
    return number if math.isfinite(number) else None
