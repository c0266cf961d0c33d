"""Reference runs in compact form: one Parquet file for each protocol, some kilobytes a run.

A row is a run: what it is (settings, the command that makes it again, versions), and for each of its iterations what
came of it and what was charged. Rows are sorted, so that the same runs give the same bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from pbrl.report.provenance import INCIDENTAL, teacher_name, upgrade
from pbrl.report.runs import CHARGES, YARDSTICK, NotARunError, RecordedRun, agent_name, check_settings, load
from pbrl.report.text import label
from pbrl.run.files import write_atomically
from pbrl.run.record import columns, read
from pbrl.run.settings import digest
from pbrl.run.versions import noted_versions

FORMAT = b"1"
PAUSED = 10.0  # times the median: an iteration that took longer was paused
PER_ITERATION = {
    "iteration": pyarrow.int64(),
    "return_mean": pyarrow.float64(),
    "eval_return": pyarrow.float64(),  # nan where there was no evaluation
    **dict.fromkeys(CHARGES, pyarrow.int64()),
    "seconds": pyarrow.float32(),  # to collect, ask and learn, since the start
}
SCHEMA = pyarrow.schema(
    [
        *(pyarrow.field(name, pyarrow.string()) for name in ("task", "agent", "teacher")),
        pyarrow.field("seed", pyarrow.int64()),
        *(pyarrow.field(name, pyarrow.string()) for name in ("command", "settings", "versions")),  # the last two: JSON
        pyarrow.field(
            "hours", pyarrow.float64()
        ),  # by the clock, with evaluation and all that the machine did beside it
        *(pyarrow.field(name, pyarrow.list_(kind)) for name, kind in PER_ITERATION.items()),
    ],
    metadata={"pbrl": FORMAT},
)


class DamagedFileError(ValueError):
    """A file of reference runs that cannot be read; the message says why."""


@dataclass(frozen=True)
class ShippedRun:
    """A reference run."""

    recorded: RecordedRun
    command: str  # makes it again
    versions: Sequence[Mapping[str, str]]  # of packages, one entry for each time they changed during the run
    hours: float

    @property
    def name(self) -> tuple[str, str, str, int]:
        """Task, agent, teacher, seed: different for all runs of a file."""
        recorded = self.recorded
        return recorded.task, recorded.agent.removesuffix(YARDSTICK), recorded.teacher, recorded.seed

    @functools.cached_property
    def identity(self) -> tuple[str, int]:
        """The same for two runs that learn the same: a fingerprint of the settings, and the iterations."""
        return digest(self.recorded.settings), int(self.recorded.settings["iterations"])

    def renamed(self, name: str, command: str) -> ShippedRun:
        """The same run, called otherwise: a protocol may have a run of another one under a name of its own."""
        settings = {**self.recorded.settings, "name": name}
        recorded = dataclasses.replace(self.recorded, settings=settings, agent=agent_name(settings))
        return dataclasses.replace(self, recorded=recorded, command=command)

    @property
    def seconds_per_iteration(self) -> float:
        """What an iteration takes on average."""
        return seconds_per_iteration(self.recorded)


def seconds_per_iteration(run: RecordedRun) -> float:
    """What an iteration takes on average. One that took ten times the median was paused, and counts as that."""
    taken = np.diff(run.metrics["seconds"], prepend=0.0)
    return float(np.minimum(taken, PAUSED * np.median(taken)).mean())


def files(folder: Path) -> list[Path]:
    """The files of reference runs in a folder, without those that were kept aside."""
    return [path for path in sorted(folder.glob("*.parquet")) if "~" not in path.name]


def from_folder(folder: Path, command: str) -> ShippedRun:
    """The run that `pbrl.train` left in a folder."""
    rows = columns(read(folder / "metrics.jsonl"))
    seconds = sum(float(np.nansum(values)) for name, values in rows.items() if name.startswith("seconds_"))
    return ShippedRun(load(folder), command, noted_versions(folder), round(seconds / 3600, 6))


def write_runs(path: Path, runs: Sequence[ShippedRun]) -> None:
    """Replace a file of reference runs."""
    table = pyarrow.Table.from_pylist([_row(run) for run in sorted(runs, key=lambda run: run.name)], schema=SCHEMA)
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(
        table, sink, compression="zstd", compression_level=19, write_statistics=False, write_page_checksum=True
    )
    write_atomically(path, sink.getvalue().to_pybytes())


def _row(run: ShippedRun) -> dict[str, Any]:
    recorded = run.recorded
    settings = {key: value for key, value in recorded.settings.items() if key not in INCIDENTAL or key == "choices"}
    empty = np.full(len(recorded.metrics["iteration"]), np.nan)
    row = dict(zip(("task", "agent", "teacher", "seed"), run.name, strict=True))
    row |= {"command": run.command, "settings": json.dumps(settings), "versions": json.dumps(run.versions)}
    row |= {"hours": run.hours}
    for name, kind in PER_ITERATION.items():
        row[name] = recorded.metrics.get(name, empty).astype(kind.to_pandas_dtype())
    return row


def read_runs(path: Path) -> list[ShippedRun]:
    """The runs of a file, sorted by task, agent, teacher and seed. The file is data: nothing in it is executed."""
    content = path.read_bytes()
    try:
        table = parquet.read_table(pyarrow.BufferReader(content), page_checksum_verification=True)
        if not table.schema.equals(SCHEMA) or (table.schema.metadata or {}).get(b"pbrl") != FORMAT:
            raise ValueError("it is not a file of reference runs of this version of pbrl")
        return [_run(path, row) for row in table.to_pylist()]
    except (pyarrow.ArrowException, NotARunError, OSError, LookupError, TypeError, ValueError) as error:
        raise DamagedFileError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _run(path: Path, row: Mapping[str, Any]) -> ShippedRun:
    settings = json.loads(row["settings"])
    check_settings(settings)
    settings = upgrade(settings, path)
    metrics = {name: np.array(row[name], np.float64) for name in PER_ITERATION}
    if len({len(values) for values in metrics.values()}) != 1 or not len(metrics["iteration"]):
        raise ValueError(f"the columns of {row['task']}, {row['agent']} differ in length")
    recorded = RecordedRun(
        folder=path,
        settings=settings,
        agent=agent_name(settings),
        task=label(str(settings["env"]["name"])),
        teacher=label(teacher_name(settings)),
        metrics=metrics,
    )
    return ShippedRun(recorded, row["command"], json.loads(row["versions"]), row["hours"])
