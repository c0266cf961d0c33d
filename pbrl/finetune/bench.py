"""The cost of zeroth-order tuning: evaluations per second and peak memory, compared with bare inference.

    python -m pbrl.finetune.bench task.path=/folder/with/mrpc

Each method runs in the setting of `pbrl.finetune`. An iteration is two evaluations; bare inference makes the same two
on the same minibatches without changing the weights. The methods take turns, so that other load on the machine affects
all alike. Memory is the peak of a separate process, as the system counts it (ru_maxrss), including everything loaded.
"""

from __future__ import annotations

import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable

import hydra
import torch
from hydra import compose
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from pbrl.finetune.paraphrases import DataError
from pbrl.finetune.problem import Problem
from pbrl.finetune.tuning import build_problem, check
from pbrl.run.command_line import run_main
from pbrl.run.settings import ConfigurationError, instantiate
from pbrl.run.terminal import ProgressBar
from pbrl.threads import cores

BARE = "inference"


def turn(problem: Problem, cfg: DictConfig, method: str) -> Callable[[int], None]:
    """A function of the iteration that runs it once, by a method or as bare inference."""
    if method == BARE:

        @torch.inference_mode()
        def infer(iteration: int) -> None:
            batch = problem.batch(iteration)
            for _ in range(2):
                float(problem.loss(batch))

        return infer
    node = compose("finetune", overrides=[f"method={method}", f"lr={cfg.step}"]).method
    tuner = instantiate(
        node,
        allow=cfg.allow,
        parameters=problem.tuned,
        seed=cfg.seed,
        threads=cfg.threads or cores(),
        _convert_="all",
    )

    def search(iteration: int) -> None:
        batch = problem.batch(iteration)
        tuner.step(lambda: problem.loss(batch))

    return search


def rates(cfg: DictConfig) -> dict[str, list[float]]:
    """Evaluations per second of each method, one number per turn."""
    problem = build_problem(cfg)
    turns = {method: turn(problem, cfg, method) for method in (BARE, *cfg.methods)}
    found: dict[str, list[float]] = {method: [] for method in turns}
    for method in ProgressBar([*turns, *list(turns) * cfg.alternations], desc="evaluations per second"):
        begin = time.perf_counter()
        for iteration in range(cfg.iterations):
            turns[method](iteration)
        found[method].append(2 * cfg.iterations / (time.perf_counter() - begin))
    return {method: values[1:] for method, values in found.items()}  # the first turn compiles and warms up


def peak_memory(cfg: DictConfig, method: str) -> float:
    """Peak memory of the calling process, in MiB."""
    torch.set_num_threads(cfg.threads or cores())
    with hydra.initialize_config_module("conf"):
        problem = build_problem(cfg)
        one = turn(problem, cfg, method)
        for iteration in range(cfg.iterations):
            one(iteration)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def measure_memory(cfg: DictConfig) -> dict[str, float]:
    """Peak memory of each method in MiB, each in its own process."""
    found = {}
    for method in ProgressBar((BARE, *cfg.methods), desc="peak memory"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found[method] = pool.apply(peak_memory, (cfg, method))
    return found


def show(speeds: dict[str, list[float]], memory: dict[str, float]) -> Table:
    """The table. A ratio is the median over the alternations."""
    table = Table(title="fine-tuning against bare inference on the same minibatches")
    for column in ("", "evaluations / s", "ratio", "peak memory, MiB", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for method, values in speeds.items():
        ratio = statistics.median(ours / bare for ours, bare in zip(values, speeds[BARE], strict=True))
        cells = [f"{statistics.median(values):.1f}", f"{ratio:.2f}"]
        table.add_row(method, *cells, f"{memory[method]:.0f}", f"{memory[method] / memory[BARE]:.3f}")
    return table


@hydra.main(config_path="pkg://conf", config_name="finetune_bench")
def main(cfg: DictConfig) -> None:
    """Measure and print."""
    try:
        check(cfg)
        torch.set_num_threads(cfg.threads or cores())
        memory = measure_memory(cfg)
        Console().print(show(rates(cfg), memory))
    except (ConfigurationError, DataError) as error:
        raise SystemExit(f"pbrl.finetune.bench: {error}") from None


if __name__ == "__main__":
    run_main(main, program="pbrl.finetune.bench", config="finetune_bench", groups=("task", "model"), about=__doc__)
