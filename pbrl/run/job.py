"""One job of a sweep, in whatever process its launcher runs it. Its state is written to the sweep's folder."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from pbrl.run.files import write_atomically
from pbrl.run.record import read
from pbrl.run.signals import Stopped

# States of a job. `train` returns one of the first two.
FINISHED, ALREADY_FINISHED = "finished", "already finished"
NOT_STARTED, RUNNING, STOPPED, FAILED = "not started", "running", "stopped", "failed"

SLURM_SECONDS = (
    300.0  # that a job which has saved its state waits to be ended: were it to end by itself, it would be over
)


def in_sweep() -> bool:
    """Whether this run is a job of a sweep."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def owns_terminal() -> bool:
    """Whether no other run prints at the same time: a single run, or a sweep that runs one job after the other."""
    return not in_sweep() or HydraConfig.get().launcher["_target_"].endswith("BasicLauncher")


def run_job(
    cfg: DictConfig, train: Callable[[DictConfig, Path], str], user_message: Callable[[Exception], str | None]
) -> float | None:
    """Train, and write the job's state; its final evaluation, or None (Optuna takes no nan) if there is none.

    train: takes the configuration and the sweep's folder, and returns FINISHED or ALREADY_FINISHED.
    user_message: explains an error that a user can mend; None for others, which get a traceback.
    """
    hydra = HydraConfig.get()
    os.chdir(hydra.runtime.cwd)  # a worker of Ray's is in the folder in which its node was started
    folder = Path(hydra.sweep.dir)
    path = folder / "jobs" / f"{hydra.job.num}.json"
    overrides = OmegaConf.to_container(hydra.overrides.task, resolve=False)  # as they were given
    job = {"run": str(cfg.folder), "overrides": overrides, "host": platform.node(), "process": os.getpid()}
    job["iterations"] = cfg.iterations

    def write_state(state: str, **more: Any) -> None:
        write_atomically(path, json.dumps({**job, "state": state, **more}, indent=2) + "\n")

    if number := stop_signal(folder):
        write_state(NOT_STARTED)
        if owns_terminal():
            raise Stopped(number)
        return None
    write_state(RUNNING)
    try:
        state = train(cfg, folder)
    except Stopped as stopped:
        write_state(STOPPED)
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":  # Slurm tells one job, which it may put back into its queue
            time.sleep(SLURM_SECONDS)
        else:
            request_stop(folder, stopped.number)
        if owns_terminal():  # no other job is under way, and none is to come: this ends the launcher
            raise
        return None
    except Exception as error:
        why = user_message(error) or f"{type(error).__name__}: {error}"
        write_atomically(path.with_suffix(".txt"), traceback.format_exc())
        write_state(FAILED, why=why, traceback=str(path.with_suffix(".txt")))
        if owns_terminal():  # else the process with the bars says it, see `pbrl.run.sweep`
            print(f"{cfg.folder}: {why}", file=sys.stderr, flush=True)
        return None
    evaluation = final_evaluation(Path(cfg.folder))
    write_state(state, evaluation=evaluation)
    return evaluation


def request_stop(folder: Path, number: int) -> None:
    """Ask all jobs of the sweep in a folder to save and stop, as if each had received the signal."""
    write_atomically(folder / "stop", f"{number}\n")


def stop_signal(folder: Path) -> int:
    """The signal that the sweep in a folder was stopped with; 0 if it was not stopped."""
    try:
        return int((folder / "stop").read_text())
    except FileNotFoundError:
        return 0


def final_evaluation(run: Path) -> float | None:
    """The return of the last evaluation; None if it is no number, or if there was none."""
    return next((row["eval_return"] for row in reversed(read(run / "metrics.jsonl")) if "eval_return" in row), None)
