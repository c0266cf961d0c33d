"""The record of a run: `metrics.jsonl`, one JSON object per iteration.

It is strict JSON, which has no nan and no infinity: they are written as null, and `columns` reads null as nan.
A line without its newline is incomplete and does not count. wandb and TensorBoard are fed from this file
(`pbrl.run.mirrors`).
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.run.files import unused_name, write_atomically
from pbrl.types import Float64, Metrics

Row = dict[str, float | None]
LONGEST_ROW = 20_000  # bytes; the rows of today have about 1,000

logger = logging.getLogger(__name__)


class RecordError(RuntimeError):
    """The record could not be written or read; the message says what to do."""


class Digest:
    """A fingerprint of rows."""

    def __init__(self, lines: bytes = b"") -> None:
        self.earlier, self.last = hashlib.sha256(), b""
        for line in lines.splitlines(keepends=True):
            self.add(line)

    def add(self, line: bytes) -> None:
        """One more row."""
        self.earlier.update(self.last)
        self.last = line

    def of(self, shorten: Callable[[Row], Row] = dict) -> str:
        """The fingerprint of the rows so far, with another content of the last."""
        digest = self.earlier.copy()
        digest.update(_line(shorten(json.loads(self.last))) if self.last else b"")
        return digest.hexdigest()


class Record:
    """Appends to a record, after the row of the iteration `after`; -1 begins a new one.

    Rows after it, complete or not, are removed: they are later than the checkpoint that the run continues from, which
    makes them again. Without a checkpoint (-1) nothing explains the rows of an earlier record: its file is kept aside.
    """

    def __init__(self, path: Path, *, after: int) -> None:
        self.path = path
        self.iteration = after  # of the last row
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if after < 0 and path.exists() and path.stat().st_size > 0:
                aside = unused_name(path)
                path.rename(aside)
                logger.warning(
                    "%s has rows, but there is no checkpoint to continue from: it is kept as %s", path, aside.name
                )
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise self._error(error) from error
        try:
            self._file.truncate(_end_of_row(path, after))
        except RecordError:
            self._file.close()
            raise
        self.digest = Digest(path.read_bytes())

    def write(self, metrics: Metrics) -> None:
        """Add the row of an iteration: numbers by name, one of them `iteration`."""
        iteration = int(metrics["iteration"])
        if iteration <= self.iteration:
            raise ValueError(f"iteration {iteration} cannot follow {self.iteration} in {self.path.absolute()}")
        row = {name: _plain(name, value) for name, value in metrics.items()}
        line = left = _line(row)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise self._error(error) from error
        self.iteration = iteration
        self.digest.add(line)

    def sync(self) -> None:
        """Put every row on disk. Call it before saving a checkpoint that counts these rows."""
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """No more rows."""
        self._file.close()

    def _error(self, error: OSError) -> RecordError:
        return RecordError(
            f"could not write to {self.path.absolute()}: {error.strerror or error}. "
            "Once this is mended, the same command continues from the last checkpoint."
        )


def read(path: Path) -> list[Row]:
    """All rows; an incomplete last line is left out."""
    return [row for row, _ in _rows(path)]


def last_iteration(run: Path) -> int:
    """The iteration of the last row in a run's folder, read from the end of its file; -1 if there is none."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_ROW))
            *_, last, _ = [b"", *file.read().split(b"\n")]
            return int(json.loads(last)["iteration"])
    except (OSError, ValueError, LookupError):
        return -1


def columns(rows: Sequence[Row]) -> dict[str, Float64]:
    """One array per metric, nan where a row lacks it."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name) for row in rows], dtype=np.float64) for name in names}


def find_problem(path: Path, iteration: int, digests: Collection[str] = ()) -> str | None:
    """Why a record cannot be continued after the row of an iteration; None if it can. For `checkpoint.load`.

    digests: those that the rows may have; empty if they are not known.
    """
    try:
        rows = path.read_bytes()[: _end_of_row(path, iteration)]
    except (RecordError, OSError) as error:
        return str(error)
    if digests and hashlib.sha256(rows).hexdigest() not in digests:
        return f"{path.absolute()} was altered since it was written. Restore the file from a copy"
    return None


def shorten_row(path: Path, iteration: int, shorten: Callable[[Row], Row]) -> None:
    """Change the row of an iteration, and remove those after it."""
    *earlier, last = path.read_bytes()[: _end_of_row(path, iteration)].splitlines(keepends=True)
    if (line := _line(shorten(json.loads(last)))) != last:
        write_atomically(path, b"".join(earlier) + line)


def _rows(path: Path) -> Iterator[tuple[Row, int]]:
    """Every row, and where in the file it ends."""
    end, last = 0, -1
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row: Row = json.loads(line)
                iteration = int(row["iteration"])  # type: ignore[arg-type]  # raises TypeError if it is no number
            except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
                raise RecordError(
                    f"{path.absolute()}, line {number}: this is not the row of an iteration: {line[:60]!r}. "
                    "Restore the file from a copy, or delete the line."
                ) from None
            if iteration <= last:
                raise RecordError(
                    f"{path.absolute()}, line {number}: iteration {iteration} follows {last}. "
                    "Did two runs write to one folder? Restore the file from a copy, or start over with `resume=false`."
                )
            end, last = end + len(line), iteration
            yield row, end


def _end_of_row(path: Path, iteration: int) -> int:
    """Where the row of an iteration ends. What follows it is not read."""
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


def _line(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _plain(name: str, value: Any) -> float | None:
    number = value.item() if hasattr(value, "item") else value  # numpy and torch
    if not isinstance(number, int | float):
        raise TypeError(f"the metric {name} must be a number, not {value!r}")
    return number if math.isfinite(number) else None
