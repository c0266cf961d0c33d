"""Read the runs of `python -m pbrl.finetune` in a folder, and choose the best hyperparameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.report.runs import ASIDE
from pbrl.run import checkpoint
from pbrl.run.folder import read_settings
from pbrl.run.record import columns, read
from pbrl.run.settings import ConfigurationError
from pbrl.types import Float64


@dataclass(frozen=True)
class TuningRecord:
    """What is on disk of one run, finished or not. Evaluations are arrays [evaluations]."""

    folder: Path
    settings: Mapping[str, Any]
    iteration: Float64  # of each evaluation, from 1
    accuracy: Float64
    validation_loss: Float64
    iterations: int  # made so far
    target: float | None  # the accuracy to exceed
    ended: str  # arrived, diverged, or "" if the run used all its iterations or is unfinished

    @property
    def task(self) -> str:
        """The name of the data set."""
        return str(self.settings["task"]["name"])

    @property
    def setting(self) -> str:
        """The model, and which layers are kept, new and tuned."""
        return str(self.settings["setting"])

    @property
    def method(self) -> str:
        """The name of the method."""
        return str(self.settings["name"])

    @property
    def hyperparameters(self) -> tuple[float, float | None]:
        """The learning rate, and the radius if the method has one."""
        return float(self.settings["lr"]), self.settings["mu"]

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.settings["seed"])

    @property
    def finished(self) -> bool:
        """Whether the run has ended."""
        return bool(self.ended) or self.iterations >= self.settings["iterations"]

    @property
    def lowest_loss(self) -> float:
        """The lowest validation loss; infinite if the run diverged."""
        return float(self.validation_loss.min()) if len(self.validation_loss) and self.ended != "diverged" else np.inf

    @property
    def best_accuracy(self) -> float:
        """The best validation accuracy."""
        return float(self.accuracy.max()) if len(self.accuracy) else np.nan

    @property
    def iterations_to_best(self) -> int:
        """The iterations until the best accuracy was first reached."""
        return int(self.iteration[self.accuracy.argmax()]) if len(self.accuracy) else 0

    def reached(self, accuracy: float) -> float:
        """The iterations it took to exceed an accuracy; nan if it never did."""
        above = self.iteration[self.accuracy > accuracy]
        return float(above[0]) if len(above) else np.nan


def find(root: Path) -> list[TuningRecord]:
    """All runs in a folder, sorted by name."""
    return [load(path) for path in _folders(root)]


def find_all(root: Path) -> tuple[list[TuningRecord], dict[Path, str]]:
    """All runs in a folder that can be read, and those that cannot, with the reason."""
    runs, left_out = [], {}
    for path in _folders(root):
        try:
            runs.append(load(path))
        except Exception as error:  # whatever is wrong with one folder, the others are shown
            left_out[path] = " ".join(f"it cannot be read ({type(error).__name__}: {error})".split())
    return runs, left_out


def _folders(root: Path) -> list[Path]:
    paths = [path.parent for path in sorted(root.rglob("metrics.jsonl"))]
    return [path for path in paths if not ASIDE.search(path.name) and (path / "config.yaml").exists()]


def load(folder: Path) -> TuningRecord:
    """Read one run."""
    settings = read_settings(folder)
    for name, kind in (("task", dict), ("setting", str), ("name", str), ("seed", int), ("iterations", int)):
        if not isinstance(settings.get(name), kind):
            raise ConfigurationError(f"this is not a run of fine-tuning: its {name} is {settings.get(name)!r}")
    if not isinstance(settings["task"].get("name"), str) or not {"lr", "mu", "target"} <= {*settings}:
        raise ConfigurationError("this is not a run of fine-tuning")
    metrics = columns(read(folder / "metrics.jsonl"))
    none = np.empty(0)
    known = np.isfinite(metrics.get("accuracy", none))
    saved = checkpoint.load(folder / "checkpoint")
    state: dict[str, Any] = saved[1] if saved else {"target": None, "ended": ""}
    if not {"target", "ended"} <= {*state}:
        raise ConfigurationError("its checkpoint is not one of fine-tuning")
    return TuningRecord(
        folder,
        settings,
        metrics["iteration"][known] + 1 if known.any() else none,
        metrics["accuracy"][known] if known.any() else none,
        metrics["validation_loss"][known] if known.any() else none,
        int(metrics["iteration"][-1]) + 1 if "iteration" in metrics else 0,
        state["target"],
        state["ended"],
    )


Hyperparameters = tuple[float, float | None]


def losses(runs: Sequence[TuningRecord]) -> dict[Hyperparameters, float]:
    """The lowest validation loss of each choice of hyperparameters, averaged over its finished runs without a target.

    It is infinite if one of its runs diverged. All runs must be of one setting and method.
    """
    found = defaultdict(list)
    for run in runs:
        if run.settings["target"] is None and run.finished:
            found[run.hyperparameters].append(run.lowest_loss)
    return {choice: float(np.mean(values)) for choice, values in sorted(found.items(), key=str)}


def best_settings(root: Path, task: str, setting: str, method: str) -> Hyperparameters:
    """The hyperparameters with the lowest validation loss, of a sweep in which nothing else differs."""
    folder = root / task / setting / method
    swept = [run for run in find(folder) if run.settings["target"] is None and run.finished]
    found = losses(swept)
    if not found or not np.isfinite(min(found.values())):
        raise ConfigurationError(
            f"tuned=true chooses lr and mu from a sweep, but {folder} has no finished run "
            f"without a target: sweep first, such as with `-m method={method} lr=...`"
        )
    room = {run.settings["method"].get("headroom") for run in swept}
    if len(room) > 1:
        raise ConfigurationError(f"the sweep in {folder} mixes method.headroom={', '.join(map(str, sorted(room)))}")
    seeds = {choice: {run.seed for run in swept if run.hyperparameters == choice} for choice in found}
    if uneven := [run.seed for run in swept if any(run.seed not in others for others in seeds.values())]:
        raise ConfigurationError(f"the sweep in {folder} has seed {uneven[0]} for some of its lr and mu only")
    return min(found, key=lambda choice: found[choice])


def target_of_sgd(root: Path, task: str, setting: str) -> float:
    """The best accuracy of SGD with its best learning rate, averaged over its runs."""
    runs = [run for run in find(root / task / setting / "sgd") if run.finished]
    if not runs:
        raise ConfigurationError(
            f"target=sgd is the accuracy of the setting's SGD runs, but {root / task / setting / 'sgd'} has no "
            "finished one: run method=sgd first, or give target a number"
        )
    best = best_settings(root, task, setting, "sgd")
    return float(np.mean([run.best_accuracy for run in runs if run.hyperparameters == best]))
