"""The intrinsic dimension of a setting of `pbrl.finetune`: d90 by SAID (Aghajanyan et al. 2021).

    python -m pbrl.finetune.dimension model.layers=4 task.path=/folder/with/mrpc

Tunes the setting with Adam, in random subspaces of d' dimensions and in full, several times each. The best accuracies
are written to `intrinsic_dimension.json` in the setting's folder, where `pbrl.finetune.report` finds them. Those
already in the file are not measured again.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from omegaconf import DictConfig

from pbrl.finetune.d90 import D90, d90
from pbrl.finetune.paraphrases import DataError
from pbrl.finetune.problem import Problem
from pbrl.finetune.refusals import listed_refusals, refuse
from pbrl.finetune.said import Subspace, train_in_subspace
from pbrl.finetune.tuning import build_problem, check
from pbrl.run.command_line import run_main
from pbrl.run.files import write_atomically
from pbrl.run.settings import ConfigurationError
from pbrl.run.terminal import ProgressBar
from pbrl.threads import cores


def layer_of(name: str) -> str:
    """`layers.3.attention...` -> `layers.3`; the head is one layer, and the embeddings are one."""
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" else parts[0]


def best_in_subspace(problem: Problem, cfg: DictConfig, dimension: int, seed: int, progress: Any) -> float:
    """The best accuracy that SAID reaches with d' numbers."""
    rng = np.random.default_rng([cfg.seed, dimension, seed])
    subspace = Subspace(problem.tuned, layer_of=layer_of, dimension=dimension, rng=rng)
    training = train_in_subspace(
        subspace,
        loss=problem.loss,
        batches=problem.batches(seed * cfg.iterations),
        accuracy=problem.accuracy,
        optimizer=partial(torch.optim.Adam, lr=cfg.learning_rate / math.sqrt(dimension)),
        iterations=cfg.iterations,
        evaluate_every=cfg.evaluation.every,
        progress=progress,
    )
    subspace.restore()
    return training.best


def best_in_full(problem: Problem, cfg: DictConfig, seed: int, progress: Any) -> float:
    """The best accuracy of full fine-tuning."""
    start = [parameter.detach().clone() for parameter in problem.tuned.values()]
    optimizer = torch.optim.Adam(problem.tuned.values(), cfg.full_learning_rate)
    best, batches = 0.0, problem.batches(seed * cfg.iterations)
    for iteration in range(1, cfg.iterations + 1):
        loss = problem.loss(next(batches))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if iteration % cfg.evaluation.every == 0 or iteration == cfg.iterations:
            best = max(best, problem.accuracy())
        progress(iteration, loss.item())
    with torch.no_grad():
        for parameter, original in zip(problem.tuned.values(), start, strict=True):
            parameter.copy_(original)
    return best


def measure(cfg: DictConfig, path: Path) -> dict[str, Any]:
    """Measure every accuracy that is not in the file yet; the file is written after each."""
    problem = build_problem(cfg)
    found: dict[str, Any] = {"majority": problem.data.majority, "full": [], "subspace": {}}
    if path.exists():
        found = json.loads(path.read_text())
    found["size"] = sum(parameter.numel() for parameter in problem.tuned.values())  # D
    jobs = [(d, seed) for seed in range(cfg.seeds) for d in (None, *cfg.dimensions)]
    with ProgressBar(total=len(jobs) * cfg.iterations, desc=str(path.parent), unit="it", mininterval=0.5) as bar:
        for dimension, seed in jobs:
            results = found["full"] if dimension is None else found["subspace"].setdefault(str(dimension), [])
            if len(results) > seed:
                bar.update(cfg.iterations)
                continue

            def progress(iteration: int, loss: float, dimension: int | None = dimension) -> None:
                bar.update()
                if iteration % 25 == 0:
                    bar.set_postfix_str(f"d' = {dimension or 'all'}, loss {loss:.3f}")

            if dimension is None:
                results.append(best_in_full(problem, cfg, seed, progress))
            else:
                results.append(best_in_subspace(problem, cfg, dimension, seed, progress))
            write_atomically(path, json.dumps(found, indent=2) + "\n")
    write_atomically(path, json.dumps(found, indent=2) + "\n")
    return found


def read_off(found: dict[str, Any], resamples: int) -> tuple[D90, D90]:
    """d90 of the accuracy, and of its gain over the majority."""
    accuracies = {int(dimension): results for dimension, results in found["subspace"].items() if results}
    return d90(accuracies, full=found["full"], majority=found["majority"], resamples=resamples, seed=0)


@hydra.main(config_path="pkg://conf", config_name="finetune_dimension")
def main(cfg: DictConfig) -> None:
    """Measure, and print the results."""
    try:
        check(cfg)
        torch.set_num_threads(cfg.threads or cores())
        path = Path(cfg.root) / cfg.task.name / cfg.setting / "intrinsic_dimension.json"
        found = measure(cfg, path)
        accuracy, gain = read_off(found, cfg.resamples)
    except (ConfigurationError, DataError, ValueError) as error:
        refuse("pbrl.finetune.dimension", str(error))
        return
    for dimension, results in {"all": found["full"], **found["subspace"]}.items():
        print(f"d' = {dimension}: best accuracy {np.mean(results):.3f}, mean of {len(results)}")
    print(f"majority class: {found['majority']:.3f}")
    print(f"d90 of the accuracy: {accuracy}; of its gain over the majority: {gain}; in {path}")


if __name__ == "__main__":
    with listed_refusals("pbrl.finetune.dimension"):
        run_main(
            main,
            program="pbrl.finetune.dimension",
            config="finetune_dimension",
            groups=("task", "model"),
            about=__doc__,
        )
