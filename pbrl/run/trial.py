"""What a sweep costs on this machine: said before it starts, and what is left of it before every run.

Runs that differ in the seed alone take equally long. Their pace is that of a run on disk; if there is none, it is
tried: two iterations with a few control steps and two with more, and a straight line from there to the whole episode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from hydra.core.global_hydra import GlobalHydra
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from pbrl.run import sweep
from pbrl.run.job import stop_signal
from pbrl.run.record import RecordError, Row, read
from pbrl.run.settings import plain_settings
from pbrl.run.terminal import ProgressBar, say
from pbrl.run.training import TrainingRun, task_of
from pbrl.simulation.simulator import Simulator
from pbrl.threads import cores, threads_of_a_job


class Cost(Callback):
    """Says how many runs and hours a sweep takes. Experiments of many hours name it: conf/experiment/paper.yaml."""

    def __init__(self, *, steps: Sequence[int]) -> None:
        self.steps = steps  # control steps of the two episodes that are tried
        self.hours: dict[int, float] = {}  # that are left of each job, by its number

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Measure, and say it. Comes after `pbrl.run.sweep.Begin`, which has planned the jobs."""
        planned = sweep.sweeps[-1]
        kinds: dict[tuple[str, ...], list[int]] = {}
        for number, job in enumerate(planned.jobs):
            kinds.setdefault(tuple(each for each in job["overrides"] if not each.startswith("seed=")), []).append(
                number
            )
        trying = "trying how long an iteration takes"
        for numbers in ProgressBar(kinds.values(), desc=trying, unit="kind", leave=False, dynamic_ncols=True):
            if stop_signal(planned.folder):
                return
            settings = job_settings(config, planned.jobs[numbers[0]]["overrides"])
            rows = {number: recorded(Path(planned.jobs[number]["run"])) for number in numbers}
            left = {number: max(0, settings["iterations"] - len(rows[number])) for number in numbers}
            seconds = 0.0
            if any(left.values()):
                longest = max(rows.values(), key=len)
                seconds = pace(longest) if len(longest) > 1 else try_out(settings, self.steps)
            self.hours |= {number: iterations * seconds / 3600 for number, iterations in left.items()}
        at_a_time = jobs_at_a_time(config.hydra.launcher)
        finished = sum(hours == 0 for hours in self.hours.values())
        say(
            f"{len(planned.jobs)} runs, {finished} of them finished: the others take about "
            f"{sum(self.hours.values()) / at_a_time:,.1f} hours on this machine, {at_a_time} at a time"
        )

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Say how far the sweep is, where no bar shows it: its runs come one after the other."""
        number = int(config.hydra.job.num)
        if number in self.hours and config.hydra.launcher["_target_"].endswith("BasicLauncher"):
            left = sum(hours for other, hours in self.hours.items() if other >= number)
            say(f"run {number + 1} of {len(self.hours)}, about {left:,.1f} hours are left")


def job_settings(config: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """The settings of a job of the sweep, with its share of the cores."""
    loader = GlobalHydra.instance().config_loader()
    settings = plain_settings(loader.load_sweep_config(config, list(overrides)))
    settings["threads"] = settings["threads"] or threads_of_a_job(config.hydra.launcher, cores())
    return settings


def jobs_at_a_time(launcher: Mapping[str, Any]) -> int:
    """How many jobs a launcher runs on this machine at the same time."""
    return (
        1 if launcher["_target_"].endswith("BasicLauncher") else max(1, cores() // threads_of_a_job(launcher, cores()))
    )


def recorded(folder: Path) -> list[Row]:
    """What a run has recorded so far; nothing if it cannot be read."""
    try:
        return read(folder / "metrics.jsonl")
    except (OSError, RecordError):
        return []


def pace(rows: Sequence[Row]) -> float:
    """Seconds of an iteration, from a record."""
    return sum(value or 0.0 for row in rows for name, value in row.items() if name.startswith("seconds_")) / len(rows)


def try_out(settings: Mapping[str, Any], steps: Sequence[int]) -> float:
    """Seconds of an iteration, from iterations with shorter episodes: a straight line through two of them."""
    env = settings["env"]
    torch.set_num_threads(settings["threads"])
    whole = Simulator(task_of(env, settings["allow"]), steps=env["steps"], seed=0).steps
    few, more = (min(each, whole) for each in steps)
    seconds = {}
    for each in (few, more):
        run = TrainingRun({**settings, "preference_log": False, "env": {**env, "steps": each}})
        run.iterate(1)  # not counted: it also makes what later iterations use again
        begin = time.perf_counter()
        run.iterate(2)
        seconds[each] = time.perf_counter() - begin
    slope = max(0.0, seconds[more] - seconds[few]) / max(1, more - few)
    return seconds[more] + slope * (whole - more)
