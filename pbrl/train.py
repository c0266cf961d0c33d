"""Train an agent from preferences.

    python -m pbrl.train agent=ncrs env=walker_walk

Composes simulator, teacher, ledger and agent from the configuration (`conf/train.yaml`) and runs the loop.
The same command continues an unfinished run and leaves a finished one alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from safetensors.numpy import save_file
from tqdm import tqdm

from pbrl import checkpoint, tasks
from pbrl.configuration import ConfigurationError, check, suggest
from pbrl.ledger import BudgetError, Ledger
from pbrl.preference_log import PreferenceLog
from pbrl.record import Record
from pbrl.simulator import Simulator
from pbrl.types import Agent

log = logging.getLogger(__name__)

# Settings that make a run what it is; the others may change when it is continued.
IDENTITY = ("env", "agent", "oracle", "seed", "trajectories", "pairs", "evaluation", "calibration")


class Timer:
    """Seconds spent in each part of an iteration."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add what happens inside to a part's time."""
        begin = time.perf_counter()
        yield
        self.seconds[f"seconds_{part}"] = self.seconds.get(f"seconds_{part}", 0.0) + time.perf_counter() - begin


class Run:
    """All objects of a run, each with its own random stream."""

    def __init__(self, cfg: DictConfig) -> None:
        simulation, teaching, learning, evaluating, calibrating = np.random.SeedSequence(cfg.seed).spawn(5)
        where = {"task": cfg.env.name, "steps": cfg.env.steps, "threads": cfg.threads}
        self.simulator = Simulator(**where, seed=simulation)
        self.evaluation = Simulator(**where, seed=evaluating)
        self.calibration = Simulator(**where, seed=calibrating)
        sizes = {"obs_size": self.simulator.obs_size, "act_size": self.simulator.act_size}
        self.agent: Agent = instantiate(
            cfg.agent,
            policy=instantiate(cfg.agent.policy, **sizes),
            rng=np.random.default_rng(learning),
            trajectories=cfg.trajectories,
        )
        self.folder = Path(cfg.folder)
        self.ledger = Ledger(
            simulator=self.simulator,
            oracle=instantiate(cfg.oracle, rng=np.random.default_rng(teaching)),
            trajectories_per_iteration=cfg.trajectories,
            pairs_per_iteration=cfg.pairs,
            preference_log=PreferenceLog(self.folder / "preferences.parquet") if cfg.preference_log else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"agent": self.agent.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.agent.load_state_dict(state["agent"])
        self.ledger.load_state_dict(state["ledger"])

    def save(self, iteration: int) -> None:
        """Leave a checkpoint after `iteration` iterations, and the policy for others to read."""
        checkpoint.save(self.folder / "checkpoint", iteration, self.state_dict())
        temporary = self.folder / "policy.safetensors.new"
        sizes = " ".join(str(size) for size in self.agent.policy.sizes)
        metadata = {"task": self.simulator.task, "sizes": sizes, "iteration": str(iteration)}
        save_file({"parameters": self.agent.parameters}, temporary, metadata)
        os.replace(temporary, self.folder / "policy.safetensors")

    def iterate(self, iteration: int, cfg: DictConfig) -> dict[str, float]:
        """One iteration: ask, compare, tell; what came of it."""
        timer, agent, ledger = Timer(), self.agent, self.ledger
        metrics: dict[str, float] = {}
        budget = ledger.open_iteration(iteration)
        with timer("calibrate"):
            ledger.calibrate(self.calibration, agent.policy, agent.parameters, **cfg.calibration, mean_actions=False)
        while True:
            with timer("collect"):
                pairs = agent.ask(budget)
            if pairs is None:
                break
            with timer("ask"):
                preferences = ledger.compare(pairs)
            with timer("learn"):
                metrics |= agent.tell(pairs, preferences)
        if iteration % cfg.evaluation.every == 0 or iteration == cfg.iterations - 1:
            with timer("evaluate"):
                metrics |= self.evaluate(iteration, cfg.evaluation.trajectories)
        return {"iteration": iteration, **ledger.iteration_metrics(), **metrics, **ledger.counts(), **timer.seconds}

    def evaluate(self, iteration: int, trajectories: int) -> dict[str, float]:
        """How the incumbent does in truth, with mean actions."""
        collected = self.evaluation.collect(
            self.agent.policy,
            self.agent.parameters[None],
            np.zeros(trajectories, np.int64),
            iteration=iteration,
            mean_actions=True,
        )
        return {"eval_return": float(collected.returns.mean()), "eval_return_std": float(collected.returns.std())}


def prepare(cfg: DictConfig) -> None:
    """Make the run's folder, or check that the run in it is this one."""
    folder = Path(cfg.folder)
    if not cfg.resume and folder.exists():
        aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}~{n}")).exists())
        folder.rename(aside)
        log.info("the run that was there is now %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    ours = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(ours, dict)
    if (folder / "config.yaml").exists():
        theirs = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        assert isinstance(theirs, dict)
        changed = [key for key in IDENTITY if ours[key] != theirs.get(key)]
        if changed:
            raise ConfigurationError(
                f"{folder} holds a run with other settings ({', '.join(changed)}; see its config.yaml): "
                "give this one another name=..., or start over with resume=false"
            )
    temporary = folder / "config.yaml.new"
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(ours)))
    os.replace(temporary, folder / "config.yaml")


class Interrupted(Exception):  # noqa: N818
    """The user or the system asked to stop."""


@contextmanager
def finishing_the_iteration() -> Iterator[list[int]]:
    """Note SIGTERM and Ctrl-C instead of dying of them; a second one is obeyed at once."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        print("\nfinishing this iteration before stopping (once more to stop at once)", file=sys.stderr)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not in the main thread: whoever started us handles signals
        before = {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def train(cfg: DictConfig) -> None:
    """Run, or go on, to the last iteration."""
    settings = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(settings, dict)
    check(settings)  # type: ignore[arg-type]
    torch.set_num_threads(cfg.threads or len(os.sched_getaffinity(0)))
    prepare(cfg)
    run = Run(cfg)
    saved = checkpoint.load(run.folder / "checkpoint")
    start = 0
    if saved is not None:
        start, state = saved
        if start >= cfg.iterations:
            print(f"{run.folder} is finished ({start} iterations); resume=false would start over")
            return
        run.load_state_dict(state)
        print(f"continuing {run.folder} after iteration {start - 1}")
    with finishing_the_iteration() as signals, Record(run.folder, settings, start) as record:
        bar = tqdm(range(start, cfg.iterations), initial=start, total=cfg.iterations, desc=str(run.folder), unit="it")
        for iteration in bar:
            metrics = run.iterate(iteration, cfg)
            record.write(metrics)
            bar.set_postfix({"return": f"{metrics['return_mean']:.1f}"})
            done = iteration + 1
            if done % cfg.checkpoint_every == 0 or done == cfg.iterations or signals:
                record.flush()
                run.save(done)
            if signals:
                bar.close()
                raise Interrupted(f"stopped after iteration {iteration} of {cfg.iterations}; the same command goes on")
        run.ledger.close()
    summarise(run.folder, record)
