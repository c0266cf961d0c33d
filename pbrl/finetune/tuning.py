"""Fine-tune a language model by comparisons of its loss, to see how the intrinsic dimension sets the pace.

    python -m pbrl.finetune method=ncrs task.path=/folder/with/mrpc
    python -m pbrl.finetune -m method=sgd lr=0.01,0.03,0.1 task.path=...          # a sweep
    python -m pbrl.finetune -m method=ncrs seed=0,1,2,3,4 target=sgd tuned=true task.path=...

The first experiment of the NCRS paper (El Bakkali El Kadi et al. 2026, section 4.1): SGD shows which accuracy is
possible in a setting; NCRS, MeZO and RSGF run until they exceed it. An iteration is two evaluations on the same
minibatch. Settings differ in the layers kept, the layers reinitialised and the share of the data. `python -m
pbrl.finetune.report` makes tables and figures of the runs. The same command resumes an unfinished run and leaves a
finished one unchanged.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from rich.logging import RichHandler
from torch import Tensor
from tqdm import tqdm

from pbrl.finetune import problem as finetune_problem
from pbrl.finetune.inplace import DivergedError
from pbrl.finetune.paraphrases import DataError
from pbrl.finetune.refusals import listed_refusals, refuse
from pbrl.finetune.runs import best_settings, target_of_sgd
from pbrl.report.provenance import note_versions
from pbrl.run import checkpoint
from pbrl.run.folder import alone_in, prepare
from pbrl.run.mirrors import mirrors
from pbrl.run.record import Record, RecordError
from pbrl.run.settings import ConfigurationError, check_node, instantiate, suggest
from pbrl.run.signals import signals_noted
from pbrl.threads import cores

log = logging.getLogger(__name__)


class SGD:
    """Stochastic gradient descent, the first-order method that the others are compared with.

    theta <- theta - lr * gradient of f_B(theta)
    """

    def __init__(self, *, parameters: Mapping[str, Tensor], lr: float, seed: int, threads: int) -> None:  # noqa: ARG002
        self.optimizer = torch.optim.SGD(parameters.values(), lr)
        self.iteration = 0

    def step(self, loss: Callable[[], Tensor]) -> dict[str, float]:
        """One iteration."""
        value = loss()
        if not math.isfinite(value.item()):
            raise DivergedError(f"iteration {self.iteration}: the loss is {value.item()}: take a smaller lr")
        self.optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.iteration += 1
        return {"loss": value.item()}


class Tuning:
    """A run: a problem, the method that tunes it, and how far it has come."""

    def __init__(self, cfg: DictConfig, target: float | None) -> None:
        self.folder, self.target = Path(cfg.folder), target
        self.problem = build_problem(cfg)
        directions = int(np.random.SeedSequence(cfg.seed).generate_state(3)[2])  # the first two: build_problem's
        self.tuner = instantiate(
            cfg.method,
            allow=cfg.allow,
            parameters=self.problem.tuned,
            seed=directions,
            threads=cfg.threads or cores(),
            _convert_="all",
        )
        self.best = 0.0  # best accuracy so far
        self.ended = ""  # why the run ended before its last iteration: arrived or diverged

    def iterate(self, evaluate: bool) -> dict[str, float]:
        """One iteration; returns its metrics."""
        begin = time.perf_counter()
        iteration = self.tuner.iteration
        batch = self.problem.batch(iteration)
        metrics: dict[str, float] = {"iteration": iteration, **self.tuner.step(lambda: self.problem.loss(batch))}
        metrics["seconds_learn"] = time.perf_counter() - begin
        if evaluate:
            accuracy, loss = self.problem.evaluate()
            self.best = max(self.best, accuracy)
            metrics |= {"accuracy": accuracy, "validation_loss": loss, "best_accuracy": self.best}
            metrics["seconds_evaluate"] = time.perf_counter() - begin - metrics["seconds_learn"]
            if self.target is not None and accuracy > self.target:
                self.ended = "arrived"
        return metrics

    def save(self, iteration: int, *, weights: bool) -> None:
        """Write a checkpoint of the state after the iteration."""
        kept = dict(self.problem.tuned) if weights else {}
        state = {"weights": kept, "best": self.best, "target": self.target, "ended": self.ended}
        checkpoint.save(self.folder / "checkpoint", iteration, state)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any], iteration: int) -> None:
        """Resume after an iteration."""
        self.best, self.target, self.ended = state["best"], state["target"], state["ended"]
        self.tuner.iteration = iteration + 1
        for name, weights in state["weights"].items():
            self.problem.tuned[name].copy_(weights)


def build_problem(cfg: DictConfig) -> finetune_problem.Problem:
    """The problem of a configuration: a model, its tuned part, its minibatches and its validation set."""
    model: dict[str, Any] = OmegaConf.to_container(cfg.model, resolve=True)  # type: ignore[assignment]
    return finetune_problem.build(
        model={key: value for key, value in model.items() if key != "batch_size"},
        task=OmegaConf.to_container(cfg.task, resolve=True),  # type: ignore[arg-type]
        head_examples=cfg.head_examples,
        batch_size=cfg.batch_size,
        evaluation_batch_size=cfg.evaluation.batch_size,
        cache_gib=cfg.cache_gib,
        cache_folder=cfg.cache_folder,
        device=cfg.device,
        seed=cfg.seed,
    )


def check(cfg: DictConfig) -> None:
    """Raise ConfigurationError for a wrong setting, with its name."""
    for name in (
        "iterations",
        "head_examples",
        "batch_size",
        "checkpoint_every",
        "evaluation.every",
        "evaluation.batch_size",
    ):
        value = OmegaConf.select(cfg, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")
    if cfg.target not in (None, "sgd") and not (isinstance(cfg.target, float) and 0 < cfg.target < 1):
        raise ConfigurationError(f"target must be null, sgd, or an accuracy between 0 and 1, not {cfg.target!r}")
    check_node(OmegaConf.to_container(cfg.method, resolve=True), "method")
    for group, loader in (("model", "pbrl.finetune.pretrained.load"), ("task", "pbrl.finetune.paraphrases.load")):
        node: dict[str, Any] = OmegaConf.to_container(cfg[group], resolve=True)  # type: ignore[assignment]
        rest = {
            key: value for key, value in node.items() if key not in ("tuned_layers", "tune_embeddings", "batch_size")
        }
        check_node({"_target_": loader, **rest}, group)


def finetune(cfg: DictConfig) -> None:
    """Start or resume a run, and run it to its end."""
    if cfg.tuned:
        cfg.lr, cfg.mu = best_settings(Path(cfg.root), cfg.task.name, cfg.setting, cfg.name)
    check(cfg)
    torch.set_num_threads(cfg.threads or cores())
    target = target_of_sgd(Path(cfg.root), cfg.task.name, cfg.setting) if cfg.target == "sgd" else cfg.target
    saved = checkpoint.load(Path(cfg.folder) / "checkpoint") if cfg.resume else None
    if saved is not None and (saved[1]["ended"] or saved[0] + 1 >= cfg.iterations):
        print(f"{cfg.folder}: finished after {saved[0] + 1} iterations; resume=false starts over")
        return
    if saved is not None and not saved[1]["weights"]:
        raise ConfigurationError(
            f"{cfg.folder} ended after {saved[0] + 1} iterations without keeping its weights (keep_weights=false), "
            f"so it cannot be continued to {cfg.iterations}; resume=false starts over"
        )
    try:
        tuning = Tuning(cfg, target)  # before the folder is made: a refused run leaves none behind
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    prepare(cfg)
    with alone_in(tuning.folder):
        tune(tuning, cfg, saved)


def tune(tuning: Tuning, cfg: DictConfig, saved: tuple[int, dict[str, Any]] | None) -> None:
    """Iterate, from the last checkpoint if there is one, until the target or the last iteration."""
    start = 0
    if saved is not None:
        start = saved[0] + 1
        tuning.load_state_dict(saved[1], saved[0])
        print(f"{tuning.folder}: resuming after {start} of {cfg.iterations} iterations", flush=True)
    note_versions(tuning.folder)
    record = Record(tuning.folder / "metrics.jsonl", after=start - 1)
    labels = {"job_type": f"{cfg.task.name}/{cfg.setting}/{cfg.name}", "name": str(cfg.folder)}
    settings = OmegaConf.to_container(cfg, resolve=True)
    path = tuning.folder / "metrics.jsonl"
    followers = mirrors(path, wandb=cfg.wandb, tensorboard=cfg.tensorboard, config=settings, **labels)
    iteration = start - 1
    try:
        with (
            signals_noted() as signals,
            tqdm(total=cfg.iterations, initial=start, desc=str(tuning.folder), unit="it", mininterval=0.5) as bar,
        ):
            while iteration + 1 < cfg.iterations and not tuning.ended:
                last = iteration + 2 == cfg.iterations
                try:
                    metrics = tuning.iterate(evaluate=last or (iteration + 2) % cfg.evaluation.every == 0)
                except DivergedError as error:
                    log.warning("%s: %s", tuning.folder, error)
                    tuning.ended = "diverged"
                    break
                iteration += 1
                record.write(metrics)
                bar.update()
                if "accuracy" in metrics:
                    bar.set_postfix_str(f"accuracy {metrics['accuracy']:.3f}, best {tuning.best:.3f}", refresh=False)
                if signals:
                    break
                if (iteration + 1) % cfg.checkpoint_every == 0:
                    record.sync()
                    tuning.save(iteration, weights=True)
        finished = bool(tuning.ended) or iteration + 1 >= cfg.iterations
        record.sync()
        if iteration >= 0 or tuning.ended:
            tuning.save(max(iteration, 0), weights=cfg.keep_weights or not finished)
        if signals and not finished:
            print(f"stopped after {iteration + 1} of {cfg.iterations} iterations; the same command resumes")
            raise SystemExit(128 + signals[0])
    finally:
        record.close()
        for follower in followers:
            follower.close()
    print(
        f"{tuning.folder}: {tuning.ended or 'done'} after {iteration + 1} iterations, best accuracy {tuning.best:.3f}"
        + (f", target {tuning.target:.3f}" if tuning.target is not None else "")
        + f"; the majority class gives {tuning.problem.data.majority:.3f}"
    )


@hydra.main(config_path="pkg://conf", config_name="finetune")
def main(cfg: DictConfig) -> None:
    """Fine-tune; errors that a user can mend become messages."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    try:
        finetune(cfg)
    except (ConfigurationError, DataError, checkpoint.CheckpointError, RecordError) as error:
        refuse("pbrl.finetune", str(error))
    except InstantiationException as error:
        refuse("pbrl.finetune", str(error.__cause__ or error))
    except OSError as error:
        refuse("pbrl.finetune", f"{error.strerror}: {error.filename}; everything saved so far is kept")


def command() -> None:
    """What `python -m pbrl.finetune` does."""
    try:
        suggest(sys.argv[1:], ("task", "model", "method", "study"))
    except ConfigurationError as error:
        raise SystemExit(f"pbrl.finetune: {error}") from None
    with listed_refusals("pbrl.finetune"):
        main()
