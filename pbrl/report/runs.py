"""The runs in a folder, as `pbrl.train` leaves them: their settings and records, read and checked.

A run folder is data that may come from anywhere. Nothing in it is imported or instantiated, and whatever is wrong with
one folder is a reason to leave out that folder, never the end of a report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import json

from pbrl.report.provenance import teacher_name, upgrade
from pbrl.report.text import label, printable
from pbrl.run.files import ASIDE as ASIDE
from pbrl.run.folder import read_settings
from pbrl.run.record import RecordError, columns, read
from pbrl.run.settings import ConfigurationError
from pbrl.types import Float64

CHARGES = ("trajectories", "env_steps", "pairs_asked", "bits")
SECONDS = ("seconds_collect", "seconds_ask", "seconds_learn")
READ = ("iteration", "return_mean", "eval_return", "teacher_error_rate", *CHARGES, *SECONDS)  # columns of the record
PARSE_OPTIONS = json.ParseOptions(
    explicit_schema=pyarrow.schema([(name, pyarrow.float64()) for name in READ]), unexpected_field_behavior="ignore"
)
LARGEST = 1e15  # a larger number in a record is not a measurement
MAXIMUM_REWARD = 1.0  # of a control step, in every task of DM Control
STEPS = 1000  # of an episode, unless env.steps says otherwise
YARDSTICK = " (yardstick)"  # behind the names of those that learn from the true reward


@dataclass(frozen=True)
class RecordedRun:
    """A run as far as it is recorded."""

    folder: Path
    settings: Mapping[str, Any]
    agent: str  # its name in tables: the agent's preset, or what `name=...` says
    task: str
    teacher: str  # the oracle's preset, and what was changed of it
    metrics: Mapping[str, Float64]  # by iteration, nan where it has none; `seconds` since the start

    @property
    def seed(self) -> int:
        """The seed of all its random numbers."""
        return int(self.settings["seed"])

    @property
    def yardstick(self) -> bool:
        """Whether it learnt from the true reward: it is shown, and never ranked with the agents."""
        return self.settings["agent"].get("yardstick") is True

    @property
    def iterations(self) -> int:
        """The number of recorded iterations."""
        return int(self.metrics["iteration"][-1]) + 1

    @property
    def finished(self) -> bool:
        """Whether all iterations are recorded."""
        return self.iterations >= int(self.settings["iterations"])

    @property
    def final_return(self) -> float:
        """The mean of the last tenth of `return_mean`, of the iterations that collected something."""
        returns = self.metrics["return_mean"]
        known = returns[np.isfinite(returns)]
        return float(known[-max(1, len(known) // 10) :].mean())

    @property
    def eval_return(self) -> float:
        """The return of the last evaluation; nan without one."""
        evaluations = self.metrics.get("eval_return", np.empty(0))
        return float(next((value for value in evaluations[::-1] if np.isfinite(value)), np.nan))

    @property
    def video(self) -> Path | None:
        """A film of its policy, the newest; None if there is none."""
        films = [path for name in ("play", "learning") for path in self.folder.glob(f"{name}.*")]
        films += sorted(self.folder.glob("videos/iteration_*.*"), reverse=True)
        return next((path for path in films if path.suffix in (".mp4", ".gif") and path.is_file()), None)

    @property
    def maximum(self) -> float:
        """The highest return that is possible in the task."""
        return MAXIMUM_REWARD * (self.settings["env"].get("steps") or STEPS)

    @property
    def score(self) -> float:
        """The final return as a share of the task's maximum."""
        return self.final_return / self.maximum

    @property
    def scores(self) -> Float64:
        """The return of every iteration as a share of the task's maximum; nan where nothing was collected."""
        return self.metrics["return_mean"] / self.maximum


class NotARunError(ValueError):
    """The folder cannot be used; the message says why."""


def find(folders: Sequence[Path]) -> tuple[list[RecordedRun], dict[Path, str]]:
    """All runs in the folders, and the folders that cannot be used, with the reason."""
    paths = {path.parent.resolve(): path.parent for folder in folders for path in sorted(folder.rglob("metrics.jsonl"))}
    runs: dict[tuple[str, str, str, int], RecordedRun] = {}
    left_out: dict[Path, str] = {}
    for path in paths.values():
        if ASIDE.search(path.name) or not (path / "config.yaml").exists():
            continue
        try:
            run = load(path)
        except (NotARunError, RecordError, OSError) as error:
            left_out[path] = printable(str(error))
            continue
        except Exception as error:  # whatever else is wrong with a folder, the report is made of the others
            left_out[path] = printable(f"it cannot be read ({type(error).__name__}: {error})")
            continue
        key = run.task, run.agent, run.teacher, run.seed
        if key in runs:
            left_out[path] = (
                f"{printable(str(runs[key].folder))} has the same task, agent, teacher and seed; "
                "report one of them at a time, or give one another name in its config.yaml"
            )
        else:
            runs[key] = run
    return [runs[key] for key in sorted(runs)], left_out


def agent_name(settings: Mapping[str, Any]) -> str:
    """What a run's agent is called in tables and figures; a yardstick is marked as one."""
    return label(str(settings["name"])) + (YARDSTICK if settings["agent"].get("yardstick") is True else "")


def load(folder: Path) -> RecordedRun:
    """Read one run."""
    settings = upgrade(_settings(folder / "config.yaml"), folder)
    return RecordedRun(
        folder=folder,
        settings=settings,
        agent=agent_name(settings),
        task=label(str(settings["env"].get("name", settings["choices"]["env"]))),
        teacher=label(teacher_name(settings)),
        metrics=_metrics(folder / "metrics.jsonl"),
    )


def _metrics(path: Path) -> dict[str, Float64]:
    """The columns of a record, checked; without rows that have neither a return nor charges."""
    metrics = _columns(path)
    if not metrics:
        raise NotARunError("it has not recorded an iteration yet")
    if missing := [name for name in ("return_mean", *CHARGES) if np.isnan(metrics.get(name, np.nan)).all()]:
        raise NotARunError(f"its record has no {', '.join(missing)}: was it written by another program?")
    for name, values in metrics.items():
        if (np.abs(values) > LARGEST).any() or (name in (*CHARGES, *SECONDS) and (values < 0).any()):
            raise NotARunError(f"its record has an impossible number in {name}")
    nothing = np.zeros(len(metrics["iteration"]))
    spent = [np.nan_to_num(metrics.pop(part, nothing)) for part in SECONDS]
    metrics["seconds"] = np.sum(spent, axis=0).cumsum()
    known = np.isfinite([metrics[name] for name in CHARGES]).all(axis=0) | np.isfinite(metrics["return_mean"])
    metrics = {name: values[known] for name, values in metrics.items()}
    if missing := [name for name in CHARGES if np.isnan(metrics[name]).any()]:
        raise NotARunError(f"its record has no {', '.join(missing)} for some iterations")
    return metrics


def _columns(path: Path) -> dict[str, Float64]:
    """The columns of a record. Arrow reads a sound record ten times as fast as `pbrl.run.record`."""
    if not path.is_file():
        raise NotARunError(f"its {path.name} is not a file")
    content = path.read_bytes()
    try:
        whole = content.endswith(b"\n")
        table = json.read_json(pyarrow.BufferReader(content), parse_options=PARSE_OPTIONS) if whole else None
    except pyarrow.ArrowInvalid:
        table = None
    if table is not None:
        metrics = {name: table[name].to_numpy() for name in READ}
        if (np.diff(metrics["iteration"], prepend=-1) > 0).all():
            return metrics
    try:  # an unfinished or damaged record
        return columns([{name: row.get(name) for name in READ} for row in read(path)])
    except (ValueError, TypeError) as error:
        raise NotARunError(f"its record has something that is not a number: {error}") from None


def _settings(path: Path) -> dict[str, Any]:
    """The settings in a config.yaml, checked as far as a report needs them."""
    try:
        settings = read_settings(path.parent)
    except ConfigurationError as error:
        raise NotARunError(f"its config.yaml cannot be read: {error}") from None
    try:
        check_settings(settings)
    except (LookupError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise NotARunError(f"its config.yaml is not one that pbrl.train wrote: {reason}") from None
    return dict(settings)


def check_settings(settings: Any) -> None:
    """Refuse settings that a report cannot use."""
    if not isinstance(settings, dict):
        raise TypeError("it is not a list of settings")
    for group in ("agent", "oracle"):
        if not isinstance(settings[group], dict) or not isinstance(settings[group]["_target_"], str):
            raise TypeError(f"{group} is not a node with a _target_")
    if not isinstance(settings["env"], dict):
        raise TypeError("env is not a node")
    if "name" not in settings["env"] and not isinstance(settings["choices"]["env"], str):
        raise TypeError("the task has no name")
    for path, value in {"name": settings["name"], "env.name": settings["env"].get("name", "")}.items():
        if not isinstance(value, str | int | float):
            raise TypeError(f"{path} is not a name")
    steps = settings["env"].get("steps")
    numbers = {"seed": (settings["seed"], 0), "iterations": (settings["iterations"], 1), "env.steps": (steps, 1)}
    for path, (value, minimum) in numbers.items():
        if path == "env.steps" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
            raise ValueError(f"{path} is not a whole number of at least {minimum}")
    _check_numbers(settings)


def _check_numbers(node: Any) -> None:
    if isinstance(node, dict | list):
        for each in [*node, *node.values()] if isinstance(node, dict) else node:
            _check_numbers(each)
    elif isinstance(node, int) and abs(node) >= 2**63:
        raise ValueError("it has a number of too many digits")
