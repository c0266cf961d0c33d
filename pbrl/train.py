"""Train an agent from preferences.

    python -m pbrl.train agent=ncrs env=walker_walk

Composes simulator, teacher, ledger and agent from the configuration (`conf/train.yaml`) and runs the loop.
The same command continues an unfinished run and leaves a finished one alone.
"""

from __future__ import annotations

import fcntl
import logging
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table
from safetensors.numpy import save_file
from tqdm import tqdm

from pbrl import checkpoint, native, tasks
from pbrl.configuration import ConfigurationError, check, differences, suggest
from pbrl.ledger import BudgetError, Ledger
from pbrl.mirrors import MirrorProcess, mirror_to_tensorboard, mirror_to_wandb
from pbrl.normaliser import Normaliser
from pbrl.preference_log import PreferenceLog
from pbrl.provenance import note_versions
from pbrl.record import Record, RecordError, columns, read
from pbrl.simulator import Simulator, cores
from pbrl.types import Agent

log = logging.getLogger(__name__)


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
        temporary = self.folder / "policy.safetensors.new"
        sizes = " ".join(str(size) for size in self.agent.policy.sizes)
        metadata = {"task": self.simulator.task, "sizes": sizes, "iteration": str(iteration)}
        save_file({"parameters": self.policy.folded(self.agent.parameters)}, temporary, metadata)
        temporary.replace(self.folder / "policy.safetensors")

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


def prepare(cfg: DictConfig) -> None:
    """Make the run's folder, or see that the run in it is this one."""
    folder = Path(cfg.folder)
    if not cfg.resume and folder.exists():
        aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}~{n}")).exists())
        with alone_in(folder):
            folder.rename(aside)
        log.info("the run that was there is now %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    settings = OmegaConf.to_container(cfg, resolve=True)
    if (folder / "config.yaml").exists():
        earlier = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        if changed := differences(settings, earlier):
            raise ConfigurationError(
                f"{folder} holds a run with other settings ({'; '.join(changed)}): "
                "give this one another name=..., or start over with resume=false, which keeps the old one aside"
            )
    temporary = folder / "config.yaml.new"
    temporary.write_text(OmegaConf.to_yaml(OmegaConf.create(settings)))
    temporary.replace(folder / "config.yaml")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the run's folder: a second process that means to write there is turned away."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process is at work in {folder}") from None
        yield


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note SIGTERM and Ctrl-C instead of dying of them; a second one is obeyed at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        print("\nfinishing this iteration; once more to stop at once", file=sys.stderr)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def mirrors(cfg: DictConfig, record: Path) -> list[MirrorProcess]:
    """Who follows the record."""
    labels = {"job_type": cfg.name, "name": str(cfg.folder), "config": OmegaConf.to_container(cfg, resolve=True)}
    found = [mirror_to_wandb(record, **cfg.wandb, **labels)]
    if cfg.tensorboard:
        found.append(mirror_to_tensorboard(record, finish_seconds=cfg.wandb.finish_seconds))
    return [mirror for mirror in found if mirror is not None]


def train(cfg: DictConfig) -> None:
    """Compose the run, and let it go on to the last iteration."""
    check(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
    torch.set_num_threads(cfg.threads or cores())
    try:
        run = Run(cfg)  # first of all: what cannot be run leaves no folder behind
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    prepare(cfg)
    with alone_in(run.folder):
        go_on(run, cfg)


def go_on(run: Run, cfg: DictConfig) -> None:
    """Continue from the last checkpoint, if there is one, to the last iteration."""
    start, saved = 0, checkpoint.load(run.folder / "checkpoint")
    if saved is not None:
        start = saved[0] + 1
        run.load_state_dict(saved[1])
        print(f"{run.folder}: {start} of {cfg.iterations} iterations are there", flush=True)
    if start >= cfg.iterations:
        print("nothing is left to do; resume=false would start over")
        return
    if not native.is_kept():
        print("compiling the simulator, which takes some ten seconds this first time")
    note_versions(run.folder)
    record_path = run.folder / "metrics.jsonl"
    record = Record(record_path, after=start - 1)
    followers = mirrors(cfg, record_path)
    try:
        with signals_noted() as signals:
            bar = tqdm(
                range(start, cfg.iterations), desc=str(run.folder), initial=start, total=cfg.iterations, unit="it"
            )
            for iteration in bar:
                metrics = run.iterate(iteration, cfg)
                record.write(metrics)
                bar.set_postfix_str(f"return {metrics['return_mean']:.1f}")
                last = bool(signals) or iteration == cfg.iterations - 1
                if last or (iteration + 1) % cfg.checkpoint_every == 0:
                    record.sync()
                    run.save(iteration)
                if signals:
                    bar.close()
                    print(f"stopped after {iteration + 1} of {cfg.iterations} iterations; the same command goes on")
                    raise SystemExit(128 + signals[0])
        run.ledger.close()
    finally:
        record.close()
        for follower in followers:
            follower.close()
    summarise(run.folder, columns(read(record_path)))


def summarise(folder: Path, metrics: dict[str, Any]) -> None:
    """A closing table, what was learnt and what it cost, and the curve as a picture."""
    from matplotlib.figure import Figure  # here, because a run starts sooner without

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(metrics["iteration"], metrics["return_mean"], label="collected (return_mean)")
    evaluated = np.isfinite(metrics["eval_return"])
    axes.plot(metrics["iteration"][evaluated], metrics["eval_return"][evaluated], "o-", label="evaluated (eval_return)")
    axes.set(xlabel="iteration", ylabel="true return", title=str(folder))
    axes.legend()
    figure.savefig(folder / "curve.png", dpi=150)
    table = Table(title=str(folder), show_header=False)
    returns, evaluations = metrics["return_mean"], metrics["eval_return"][np.isfinite(metrics["eval_return"])]
    tenth = max(1, len(returns) // 10)
    table.add_row("return, first and last tenth", f"{returns[:tenth].mean():.1f} -> {returns[-tenth:].mean():.1f}")
    table.add_row(
        "evaluation, first, best, last",
        " / ".join(f"{x:.1f}" for x in (evaluations[0], evaluations.max(), evaluations[-1])),
    )
    for name in ("trajectories", "env_steps", "pairs_asked", "pairs_answered", "bits"):
        table.add_row(name.replace("_", " "), f"{metrics[name][-1]:,.0f}")
    for name in ("collect", "ask", "learn", "evaluate"):
        seconds = np.nansum(metrics[f"seconds_{name}"])
        table.add_row(f"seconds to {name}", f"{seconds:.1f} ({seconds / len(returns):.3f} per iteration)")
    table.add_row("the curve", str(folder / "curve.png"))
    Console().print(table)


@hydra.main(version_base=None, config_path="pkg://conf", config_name="train")
def main(cfg: DictConfig) -> None:
    """Train, and answer what goes wrong with a sentence."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=[RichHandler(show_path=False)])
    try:
        train(cfg)
    except (ConfigurationError, BudgetError, tasks.UnknownTaskError, checkpoint.CheckpointError, RecordError) as error:
        raise SystemExit(f"pbrl.train: {error}") from None
    except InstantiationException as error:
        raise SystemExit(f"pbrl.train: {error.__cause__ or error}") from None
    except OSError as error:
        raise SystemExit(f"pbrl.train: {error.strerror}: {error.filename}; nothing that was saved is lost") from None


def command() -> None:
    """What `python -m pbrl.train` does."""
    try:
        suggest(sys.argv[1:], ("agent", "env", "oracle", "experiment"))
    except ConfigurationError as error:
        raise SystemExit(f"pbrl.train: {error}") from None
    main()


if __name__ == "__main__":
    command()
