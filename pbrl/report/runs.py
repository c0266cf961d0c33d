"""The runs in a folder, as `pbrl.train` leaves them: settings and record, read and named."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import yaml  # type: ignore[import-untyped]
from pyarrow import json

from pbrl.report.provenance import in_words, nearest
from pbrl.run.record import RecordError, columns, read
from pbrl.types import Float64

CHARGES = ("trajectories", "env_steps", "pairs_asked", "bits")
SECONDS = ("seconds_collect", "seconds_ask", "seconds_learn")
READ = ("iteration", "return_mean", "eval_return", *CHARGES, *SECONDS)  # of a record
ONLY = json.ParseOptions(
    explicit_schema=pyarrow.schema([(name, pyarrow.float64()) for name in READ]), unexpected_field_behavior="ignore"
)
MAXIMUM_REWARD = 1.0  # of a control step, in every task of DM Control
STEPS = 1000  # of an episode, unless env.steps says otherwise
ASIDE = re.compile(r"~\d+$")  # `resume=false` keeps the run that was there as seed_0~1


@dataclass(frozen=True)
class Run:
    """A run, up to where it is."""

    folder: Path
    settings: Mapping[str, Any]
    teacher: str  # the oracle's preset, and what was changed of it
    metrics: Mapping[str, Float64]  # of the iterations that have a return; `seconds` since the start

    @property
    def agent(self) -> str:
        """The name it goes by in tables: the agent's, or `name=...`."""
        return str(self.settings["name"])

    @property
    def task(self) -> str:
        """The task it learns."""
        return str(self.settings["env"]["name"])

    @property
    def seed(self) -> int:
        """Of all its randomness."""
        return int(self.settings["seed"])

    @property
    def iterations(self) -> int:
        """How many there are."""
        return int(self.metrics["iteration"][-1]) + 1

    @property
    def finished(self) -> bool:
        """Whether all iterations asked for are there."""
        return self.iterations >= int(self.settings["iterations"])

    @property
    def final_return(self) -> float:
        """Mean of the last tenth of `return_mean`."""
        returns = self.metrics["return_mean"]
        return float(returns[-max(1, len(returns) // 10) :].mean())

    @property
    def eval_return(self) -> float:
        """The last evaluation's; nan without one."""
        evaluations = self.metrics.get("eval_return", np.empty(0))
        return float(next((value for value in evaluations[::-1] if np.isfinite(value)), np.nan))

    @property
    def score(self) -> float:
        """The final return as a share of the task's maximum."""
        return self.final_return / (MAXIMUM_REWARD * (self.settings["env"]["steps"] or STEPS))


class NotARunError(ValueError):
    """What is in the folder cannot be used; the message says why."""


def find(folders: Sequence[Path]) -> tuple[list[Run], dict[Path, str]]:
    """All runs in the folders, and those that cannot be used with the reason."""
    paths = {path.parent.resolve(): path.parent for folder in folders for path in sorted(folder.rglob("metrics.jsonl"))}
    runs: dict[tuple[str, str, str, int], Run] = {}
    left_out: dict[Path, str] = {}
    for path in paths.values():
        if ASIDE.search(path.name) or not (path / "config.yaml").exists():
            continue
        try:
            run = load(path)
        except (NotARunError, RecordError, OSError) as error:
            left_out[path] = str(error)
            continue
        key = run.task, run.agent, run.teacher, run.seed
        if key in runs:
            left_out[path] = (
                f"{runs[key].folder} has the same task, agent, teacher and seed; "
                "report one of them at a time, or give one another name in its config.yaml"
            )
        else:
            runs[key] = run
    return [runs[key] for key in sorted(runs)], left_out


def load(folder: Path) -> Run:
    """One run."""
    settings = _settings(folder / "config.yaml")
    metrics = _metrics(folder / "metrics.jsonl")
    if not metrics:
        raise NotARunError("it has not recorded an iteration yet")
    if missing := [name for name in ("return_mean", *CHARGES) if np.isnan(metrics.get(name, np.nan)).all()]:
        raise NotARunError(f"its record has no {', '.join(missing)}: was it written by another program?")
    nothing = np.zeros(len(metrics["iteration"]))
    spent = [np.nan_to_num(metrics.pop(part, nothing)) for part in SECONDS]
    metrics["seconds"] = np.sum(spent, axis=0).cumsum()
    known = np.isfinite(metrics["return_mean"])
    teacher, changed = nearest("oracle", settings["oracle"])
    words = [f"{path.removeprefix('oracle.')}={in_words(value)}" for path, value in changed.items()]
    named = " ".join([teacher or settings["oracle"]["_target_"], *words])
    return Run(folder, settings, named, {name: values[known] for name, values in metrics.items()})


def _metrics(path: Path) -> dict[str, Float64]:
    """The columns of a record that a report needs. Arrow reads a sound one ten times as fast as `pbrl.run.record`."""
    try:
        table = json.read_json(path, parse_options=ONLY) if _ends_with_a_line(path) else None
    except pyarrow.ArrowInvalid:
        table = None
    if table is not None:
        metrics = {name: table[name].to_numpy() for name in READ}
        if (np.diff(metrics["iteration"], prepend=-1) > 0).all():
            return metrics
    try:  # there is something special about it
        return columns([{name: row[name] for name in READ if name in row} for row in read(path)])
    except (ValueError, TypeError) as error:
        raise NotARunError(f"its record has something that is not a number: {error}") from None


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        return file.seek(0, 2) > 0 and file.seek(-1, 2) >= 0 and file.read() == b"\n"


def _settings(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # C's is 7 times as fast
        for name in ("agent", "oracle"):
            str(settings[name]["_target_"])
        str(settings["name"]), str(settings["env"]["name"]), settings["env"]["steps"]
        int(settings["seed"]), int(settings["iterations"])
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise NotARunError(f"its config.yaml cannot be read: {' '.join(str(error).split())}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise NotARunError(f"its config.yaml is not one that pbrl.train wrote ({error!r})") from None
    return dict(settings)
