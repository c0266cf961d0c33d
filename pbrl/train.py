"""Train an agent from preferences.

    python -m pbrl.train agent=ncrs env=walker_walk
    python -m pbrl.train -m agent=ncrs,zpg seed=0,1,2      # a sweep, see pbrl/run/sweep.py

Composes simulator, teacher, ledger and agent from the configuration (`conf/train.yaml`) and runs the loop.
The same command continues an unfinished run and leaves a finished one alone.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from rich.logging import RichHandler
from safetensors.numpy import save_file
from tqdm import tqdm

from pbrl.ledger import BudgetError, Ledger
from pbrl.normaliser import Normaliser
from pbrl.report.provenance import note_versions
from pbrl.run import checkpoint, sweep
from pbrl.run.checkpoint import CheckpointError
from pbrl.run.films import Films
from pbrl.run.folder import alone_in, is_finished, prepare
from pbrl.run.job import asked_to_stop, has_the_terminal, in_a_sweep, run_job
from pbrl.run.mirrors import mirrors
from pbrl.run.preference_log import PreferenceLog
from pbrl.run.record import Record, RecordError, columns, read
from pbrl.run.settings import ConfigurationError, check, instantiate, suggest
from pbrl.run.signals import Stopped, signals_noted
from pbrl.run.summary import summarise
from pbrl.simulation import native, tasks
from pbrl.simulation.simulator import Simulator, cores
from pbrl.threads import threads_of_a_job
from pbrl.types import Agent


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
        self.policy = instantiate(cfg.agent.policy, **sizes)
        if cfg.normalise_observations:
            self.policy.normaliser = Normaliser(self.simulator.obs_size)
        self.agent: Agent = instantiate(
            cfg.agent,
            policy=self.policy,
            rng=np.random.default_rng(learning),
            trajectories=cfg.trajectories,
        )
        self.folder = Path(cfg.folder)
        self.ledger = Ledger(
            simulator=self.simulator,
            oracle=instantiate(cfg.oracle, rng=np.random.default_rng(teaching)),
            trajectories_per_iteration=cfg.trajectories,
            pairs_per_iteration=cfg.pairs,
            preference_log=PreferenceLog(self.folder / "preferences") if cfg.preference_log else None,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        state = {"agent": self.agent.state_dict(), "ledger": self.ledger.state_dict()}
        if self.policy.normaliser is not None:
            state["normaliser"] = self.policy.normaliser.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.agent.load_state_dict(state["agent"])
        self.ledger.load_state_dict(state["ledger"])
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(state["normaliser"])

    def save(self, iteration: int) -> None:
        """Leave a checkpoint of the state after the iteration, and the policy for others to read."""
        checkpoint.save(self.folder / "checkpoint", iteration, self.state_dict())
        self.save_policy(self.folder / "policy.safetensors", iteration)

    def save_policy(self, path: Path, iteration: int) -> None:
        """Write the incumbent's parameters and what they are of. The file appears when it is complete."""
        temporary = path.with_name(f"{path.name}.new")
        sizes = " ".join(str(size) for size in self.agent.policy.sizes)
        metadata = {"task": self.simulator.task, "sizes": sizes, "iteration": str(iteration)}
        save_file({"parameters": self.policy.folded(self.agent.parameters)}, temporary, metadata)
        temporary.replace(path)

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
        if self.policy.normaliser is not None:
            self.policy.normaliser.include(ledger.observations())
        if iteration % cfg.evaluation.every == 0 or iteration == cfg.iterations - 1:
            with timer("evaluate"):
                metrics |= self.evaluate(iteration, cfg.evaluation.trajectories)
        truth = ledger.iteration_metrics(getattr(agent, "learnt_returns", None))
        return {"iteration": iteration, **truth, **metrics, **ledger.counts(), **timer.seconds}

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


def labels(cfg: DictConfig) -> dict[str, Any]:
    """What wandb shows a run by."""
    teacher = HydraConfig.get().runtime.choices["oracle"]
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    plain = {"agent_name": cfg.name, "task": cfg.env.name, "teacher": teacher}  # to group and filter by, as the seed
    curve = f"{cfg.env.name}/{cfg.name}/{teacher}"  # what differs in the seed alone
    return {"job_type": curve, "name": str(cfg.folder), "config": {**settings, **plain}}


def train(cfg: DictConfig, sweep_folder: Path | None = None) -> str:
    """Compose the run, and let it go on to the last iteration: it is `finished`, or was and is `left alone`."""
    check(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    if is_finished(cfg):
        print(f"{cfg.folder}: nothing is left to do; resume=false would start over", flush=True)
        return "left alone"
    torch.set_num_threads(cfg.threads or cores())
    try:
        run = Run(cfg)  # first of all: what cannot be run leaves no folder behind
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    prepare(cfg)
    with alone_in(run.folder):
        go_on(run, cfg, sweep_folder)
    return "finished"


def go_on(run: Run, cfg: DictConfig, sweep_folder: Path | None) -> None:
    """Continue from the last checkpoint, if there is one, to the last iteration."""
    start, saved = 0, checkpoint.load(run.folder / "checkpoint")
    if saved is not None:
        start = saved[0] + 1
        run.load_state_dict(saved[1])
        print(f"{run.folder}: {start} of {cfg.iterations} iterations are there", flush=True)
    if not native.is_kept():
        print("compiling the simulator, which takes some ten seconds this first time")
    note_versions(run.folder)
    record_path = run.folder / "metrics.jsonl"
    record = Record(record_path, after=start - 1)
    followers = mirrors(record_path, wandb=cfg.wandb, tensorboard=cfg.tensorboard, **labels(cfg))
    films = Films(run.folder, **{**cfg.video, "steps": min(cfg.video.steps, run.simulator.steps)})
    try:
        with signals_noted() as signals:
            bar = tqdm(
                range(start, cfg.iterations),
                desc=str(run.folder),
                initial=start,
                total=cfg.iterations,
                unit="it",
                disable=not has_the_terminal(),
            )
            for iteration in bar:
                metrics = run.iterate(iteration, cfg)
                record.write(metrics)
                bar.set_postfix_str(f"return {metrics['return_mean']:.1f}")
                if sweep_folder is not None and (number := asked_to_stop(sweep_folder)):
                    signals.append(number)
                stopping = bool(signals)  # asked once: a signal that comes later must not end what was not saved
                last = stopping or iteration == cfg.iterations - 1
                if last or (iteration + 1) % cfg.checkpoint_every == 0:
                    record.sync()
                    run.save(iteration)
                if cfg.video.every and (iteration % cfg.video.every == 0 or iteration == cfg.iterations - 1):
                    films.film(iteration, run.save_policy)
                if stopping:
                    bar.close()
                    print(f"stopped after {iteration + 1} of {cfg.iterations} iterations; the same command goes on")
                    raise Stopped(signals[0])
        run.ledger.close()
        films.finish()
    finally:
        record.close()
        films.stop()
        for follower in followers:
            follower.close()
    summarise(run.folder, columns(read(record_path)))


def in_a_sentence(error: Exception) -> str | None:
    """What to tell a user; None for what only a traceback can explain."""
    if isinstance(error, ConfigurationError | BudgetError | tasks.UnknownTaskError | CheckpointError | RecordError):
        return str(error)
    if isinstance(error, InstantiationException):
        return str(error.__cause__ or error)
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}; nothing that was saved is lost"
    return None


@hydra.main(config_path="pkg://conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train, and answer what goes wrong with a sentence; a search needs the final evaluation."""
    # By force: on its import, dm_control has set up logging for warnings alone.
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)], force=True)
    if in_a_sweep():
        cfg.threads = cfg.threads or threads_of_a_job(HydraConfig.get().launcher, cores())
        return run_job(cfg, train, in_a_sentence)
    try:
        train(cfg)
    except Exception as error:
        sentence = in_a_sentence(error)
        if sentence is None:
            raise
        raise SystemExit(f"pbrl.train: {sentence}") from None
    return None


def command() -> None:
    """What `python -m pbrl.train` does."""
    try:
        suggest(sys.argv[1:], ("agent", "env", "oracle", "experiment"))
        sweep.see_that_plugins_are_there(sys.argv[1:])
    except ConfigurationError as error:
        raise SystemExit(f"pbrl.train: {error}") from None
    with sweep.overseen():
        main()


if __name__ == "__main__":
    from pbrl import train as importable  # a launcher's processes find by name what is not in __main__

    importable.command()
