"""One job of a sweep, wherever its launcher runs it: what became of it is noted in the folder of `pbrl.run.sweep`."""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pbrl.run.record import read
from pbrl.run.signals import Stopped

# Hydra completes a preset of conf/hydra/launcher by the plugin's own of that name, and warns that it will not always.
# Ours are complete without. Here, because each of a launcher's processes imports this.
warnings.filterwarnings("ignore", message=r"\s*'hydra/launcher/\w+' is validated against ConfigStore schema")


def in_a_sweep() -> bool:
    """Whether this is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def has_the_terminal() -> bool:
    """Whether no other run prints at the same time: it is a single one, or its sweep runs one after the other."""
    return not in_a_sweep() or HydraConfig.get().launcher["_target_"].endswith("BasicLauncher")


def run_job(
    cfg: DictConfig, train: Callable[[DictConfig, Path], str], sentence: Callable[[Exception], str | None]
) -> float | None:
    """One job, with a note of what became of it; its final evaluation, None (not nan, for Optuna) if there is none.

    train: takes the configuration and the sweep's folder, says whether the run is finished or was left alone.
    sentence: puts an error into words, if it is one that a user can do something about.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.sweep.dir)
    path = folder / "jobs" / f"{hydra.job.num}.json"
    about: dict[str, Any] = {"run": str(cfg.folder), "overrides": list(hydra.overrides.task)}
    about |= {"host": platform.node(), "process": os.getpid()}

    def note(state: str, **more: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps({**about, "state": state, **more}, indent=2) + "\n")
        temporary.replace(path)

    if asked_to_stop(folder):
        note("not begun")
        return None
    note("begun")
    try:
        state = train(cfg, folder)
    except Stopped as stopped:
        stop(folder, stopped.number)
        note("stopped")
        return None
    except Exception as error:
        why = sentence(error) or f"{type(error).__name__}: {error}"
        path.with_suffix(".txt").write_text(traceback.format_exc())
        note("failed", why=why, traceback=str(path.with_suffix(".txt")))
        print(f"{cfg.folder}: {why}", file=sys.stderr, flush=True)
        return None
    evaluation = final_evaluation(Path(cfg.folder))
    note(state, evaluation=evaluation)
    return evaluation


def stop(folder: Path, number: int) -> None:
    """Ask all jobs of the sweep in a folder to save and end, as if each had got the signal."""
    temporary = folder / f"stop.{secrets.token_hex(4)}"  # several may ask at once
    temporary.write_text(f"{number}\n")
    temporary.replace(folder / "stop")


def asked_to_stop(folder: Path) -> int:
    """The signal that the sweep in a folder was stopped with; 0 if it was not."""
    try:
        return int((folder / "stop").read_text())
    except FileNotFoundError:
        return 0


def final_evaluation(run: Path) -> float | None:
    """The last evaluation's return, if it is a number."""
    return next((row["eval_return"] for row in reversed(read(run / "metrics.jsonl")) if "eval_return" in row), None)
