"""Fine-tune a language model by comparisons of its loss, to see how the intrinsic dimension sets the pace.

    python -m pbrl.finetune method=ncrs task.path=/folder/with/mrpc
    python -m pbrl.finetune -m method=sgd lr=0.01,0.03,0.1 ...      # a sweep
    python -m pbrl.finetune -m method=ncrs target=sgd tuned=true seed=0,1,2 ...

The first experiment of the NCRS paper (El Bakkali El Kadi et al. 2026, section 4.1): SGD shows which accuracy is
possible in a setting; NCRS, MeZO and RSGF run until they exceed it. An iteration is two evaluations on the same
minibatch. Settings differ in the layers kept, the layers reinitialised and the share of the data. `python -m
pbrl.finetune.report` makes tables and figures of the runs. The same command resumes an unfinished run and leaves a
finished one unchanged.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.errors import InstantiationException
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from pbrl.finetune import problem as finetune_problem
from pbrl.finetune.paraphrases import DataError
from pbrl.finetune.refusals import listed_refusals, refuse
from pbrl.finetune.runs import best_settings, target_of_sgd
from pbrl.run import checkpoint, loop
from pbrl.run.command_line import run_main
from pbrl.run.folder import lock, prepare
from pbrl.run.loop import DivergedError
from pbrl.run.mirrors import mirrors
from pbrl.run.record import RecordError, Row
from pbrl.run.settings import (
    ConfigurationError,
    check_flags,
    check_node,
    check_threads,
    check_wandb,
    check_whole,
    digest,
    instantiate,
)
from pbrl.run.terminal import log_messages
from pbrl.seeds import as_number, streams
from pbrl.threads import cores

# In the row of an evaluated iteration.
EVALUATION = ("accuracy", "validation_loss", "best_accuracy", "seconds_evaluate")
GROUPS = ("task", "model", "method", "study")


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
        self.digest = digest(OmegaConf.to_container(cfg, resolve=True))  # type: ignore[arg-type]
        self.iterations, self.evaluate_every, self.keep_weights = cfg.iterations, cfg.evaluation.every, cfg.keep_weights
        self.problem = build_problem(cfg)
        stream = streams(cfg.seed, "weights", "minibatches", "directions")  # the first two are the problem's
        self.tuner = instantiate(
            cfg.method,
            allow=cfg.allow,
            parameters=self.problem.tuned,
            seed=as_number(stream["directions"]),
            threads=cfg.threads or cores(),
        )
        self.best = self.scheduled_best = 0.0  # best accuracy so far; without that of the last iteration
        self.ended = ""  # why the run ended before its last iteration: arrived or diverged

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; returns its metrics."""
        begin = time.perf_counter()
        batch = self.problem.batch(iteration)
        metrics: dict[str, float] = {"iteration": iteration, **self.tuner.step(lambda: self.problem.loss(batch))}
        metrics["seconds_learn"] = time.perf_counter() - begin
        if (iteration + 1) % self.evaluate_every == 0 or iteration == self.iterations - 1:
            accuracy, loss = self.problem.evaluate()
            self.best = max(self.best, accuracy)
            if (iteration + 1) % self.evaluate_every == 0:
                self.scheduled_best = self.best
            metrics |= {"accuracy": accuracy, "validation_loss": loss, "best_accuracy": self.best}
            metrics["seconds_evaluate"] = time.perf_counter() - begin - metrics["seconds_learn"]
            if self.target is not None and accuracy > self.target:
                self.ended = "arrived"
        return metrics

    def headline(self, metrics: Mapping[str, float]) -> str:
        """What the progress bar shows."""
        return f"best accuracy {self.best:.3f}" if self.best else f"loss {metrics['loss']:.3f}"

    def save(self, iteration: int) -> None:
        """The checkpoint is all that a run leaves."""

    def find_problem(self, state: Mapping[str, Any]) -> str | None:  # noqa: ARG002
        """The checkpoint is all that is needed."""
        return None

    def without_last_evaluation(self, row: Row) -> Row:
        """The row of an iteration, had it not been the run's last one, which is always evaluated."""
        if (int(row["iteration"] or 0) + 1) % self.evaluate_every == 0:
            return row
        return {name: value for name, value in row.items() if name not in EVALUATION}

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly; a finished run may go without its weights."""
        finished = bool(self.ended) or self.tuner.iteration >= self.iterations
        weights = dict(self.problem.tuned) if self.keep_weights or not finished else {}
        about = {"best": self.scheduled_best, "target": self.target, "ended": self.ended}
        return {"weights": weights, "iteration": self.tuner.iteration, **about}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.best = self.scheduled_best = state["best"]
        self.target, self.ended = state["target"], state["ended"]
        self.tuner.iteration = state["iteration"]
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
    for group in ("evaluation", "wandb"):
        if not isinstance(cfg[group], DictConfig):
            raise ConfigurationError(f"{group} is a group of settings, such as {group}.x=..., not {cfg[group]!r}")
    for name in ("iterations", "head_examples", "batch_size", "checkpoint_every"):
        check_whole(cfg, name, 1)
    for name in ("every", "batch_size"):
        check_whole(cfg.evaluation, name, 1, "evaluation.")
    check_whole(cfg, "seed", 0)
    check_flags(cfg, ("tuned", "resume", "keep_weights", "tensorboard"))
    check_threads(cfg)
    wandb: dict[str, Any] = OmegaConf.to_container(cfg.wandb, resolve=True)  # type: ignore[assignment]
    check_wandb(wandb)
    if cfg.target not in (None, "sgd") and not (isinstance(cfg.target, float) and 0 < cfg.target < 1):
        raise ConfigurationError(f"target must be null, sgd, or an accuracy between 0 and 1, not {cfg.target!r}")
    check_node(OmegaConf.to_container(cfg.method, resolve=True), "method", allow=cfg.allow)
    for group, loader in (("model", "pbrl.finetune.pretrained.load"), ("task", "pbrl.finetune.paraphrases.load")):
        node: dict[str, Any] = OmegaConf.to_container(cfg[group], resolve=True)  # type: ignore[assignment]
        rest = {
            key: value for key, value in node.items() if key not in ("tuned_layers", "tune_embeddings", "batch_size")
        }
        check_node({"_target_": loader, **rest}, group, allow=[loader.rpartition(".")[0]])  # a function


def finetune(cfg: DictConfig) -> None:
    """Start or resume a run, and run it to its end."""
    check(cfg)
    if cfg.tuned:
        cfg.lr, cfg.mu = best_settings(Path(cfg.root), cfg.task.name, cfg.setting, cfg.name)
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
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    prepare(settings)
    labels = {"job_type": f"{cfg.task.name}/{cfg.setting}/{cfg.name}", "name": str(cfg.folder), "config": settings}
    with lock(tuning.folder):
        loop.run(
            tuning,
            iterations=cfg.iterations,
            checkpoint_every=cfg.checkpoint_every,
            mirrors=lambda record: mirrors(record, wandb=cfg.wandb, tensorboard=cfg.tensorboard, **labels),
            progress_bar=True,
        )
    print(
        f"{tuning.folder}: {tuning.ended or 'done'} after {tuning.tuner.iteration} iterations, "
        f"best accuracy {tuning.best:.3f}"
        + (f", target {tuning.target:.3f}" if tuning.target is not None else "")
        + f"; the majority class gives {tuning.problem.data.majority:.3f}"
    )


@hydra.main(config_path="pkg://conf", config_name="finetune")
def main(cfg: DictConfig) -> None:
    """Fine-tune; errors that a user can mend become messages."""
    log_messages(logging.WARNING)
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
    with listed_refusals("pbrl.finetune"):
        run_main(main, program="pbrl.finetune", config="finetune", groups=GROUPS, about=__doc__ or "")
