"""The synthetic ridge experiment: how many comparisons an optimiser needs, against the intrinsic dimension k.

    python -m pbrl.ridge

Every run starts where the gradient has norm 1 and stops at the first iterate where it is at most `target`.
This is the one experiment of the NCRS paper with published numbers, and a track for every optimiser that
speaks the ask/tell of `pbrl.search`: one class and one entry in `conf/ridge.yaml` put it in the table.

Only A s of a direction s matters, so a run lives in k dimensions (see `pbrl.search.Directions`): its cost
depends neither on d nor on the number of votes. All seeds of a cell run at once, as one batch.
"""

from __future__ import annotations

import math
import multiprocessing
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig
from tqdm import tqdm

from pbrl.ridge.problem import Confidence, Oracle, Ridge, Run, UniformMargin, run
from pbrl.search import NCRS, Directions, Optimizer
from pbrl.types import Float64


@dataclass(frozen=True)
class Track:
    """One line of the table: an optimiser with its directions before an oracle."""

    optimizer: str
    oracle: str
    direction: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One measured cell of the table."""

    track: Track
    k: int
    size: float  # c of the step c / k
    votes: int
    run: Run  # of all seeds
    paper: int | None  # the comparisons that the paper reports
    average: float | None  # gradient norm, mean over the seeds and the paper's number of iterations
    bound: float | None  # what the theorem allows for that average
    success: Float64 | None  # share of the seeds that arrive within the noise budget, for each advantage p

    @property
    def comparisons(self) -> Float64:
        """Comparisons until the target [seeds]; NaN: never arrived."""
        return self.run.pairs * self.votes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """How `conf/ridge.yaml` enters an optimiser."""

    optimizer: Callable[..., Optimizer]  # (x, *, step, directions, rng)
    directions: Mapping[str, int]  # direction -> seeds
    oracles: list[str]
    active: list[int]  # the intrinsic dimensions k
    budget: int  # pairs that one run may ask about
    size: float | None  # c of the step c / k; None: tuned on the grid, for each k
    paper: Mapping[str, Mapping[int, int]]  # oracle -> k -> comparisons


@dataclass(kw_only=True)
class Experiment:
    """The whole experiment, built from `conf/ridge.yaml`."""

    seed: int
    dimension: int  # d
    target: float  # epsilon
    precision: str
    tuning: Mapping[str, Any]  # seeds, grid
    noise: Mapping[str, Any]  # k, seeds, budget, oracle, advantages
    oracles: Mapping[str, Mapping[str, Any]]  # name -> make, votes
    unless_said: Mapping[str, Any]  # what holds for every optimiser whose entry does not say otherwise
    optimizers: Mapping[str, Mapping[str, Any]]
    only: list[str] | None  # the optimisers to run; None: all

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ValueError(f"the target gradient norm must be positive, not {self.target}")
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision must be float32 or float64, not {self.precision!r}")
        names = list(self.optimizers) if self.only is None else self.only
        if unknown := set(names) - set(self.optimizers):
            raise ValueError(f"unknown optimizer {unknown}; known are {', '.join(self.optimizers)}")
        self.entries = {name: self.enter(name, self.optimizers[name]) for name in names}

    def enter(self, name: str, settings: Mapping[str, Any]) -> Entry:
        """Check an entry of the configuration."""
        settings = {**self.unless_said, **settings}
        wanted = {entry_field.name for entry_field in fields(Entry)}
        if wrong := wanted ^ set(settings):
            raise ValueError(f"optimizer {name} has missing or unknown settings: {', '.join(sorted(wrong))}")
        entry = Entry(**settings)
        for k in entry.active:
            if not 1 <= k <= self.dimension:
                raise ValueError(f"the intrinsic dimension k must lie in [1, d = {self.dimension}], not {k}")
        if min(entry.directions.values()) < 2:
            raise ValueError(f"optimizer {name}: an interval needs two seeds or more, not {entry.directions}")
        if unknown := set(entry.oracles) - set(self.oracles):
            raise ValueError(f"optimizer {name} has oracle {unknown}; known are {', '.join(self.oracles)}")
        return entry

    def tracks(self) -> list[Track]:
        """Every line of the table."""
        return [
            Track(name, oracle, direction)
            for name, entry in self.entries.items()
            for direction in entry.directions
            for oracle in entry.oracles
        ]

    def size(self, track: Track, k: int) -> float:
        """c of the step c / k. Where it is tuned, the c wins with which all tuning seeds arrive first."""
        entry = self.entries[track.optimizer]
        if entry.size is not None:
            return entry.size
        grid = np.array(self.tuning["grid"], self.precision)
        batch = (len(grid), self.tuning["seeds"])
        optimizer, oracle = self.build(track, k, step=grid[:, None, None] / k, batch=batch, purpose="tune")
        race = run(
            optimizer,
            Ridge(k),
            oracle,
            target=self.target,
            budget=entry.budget,
            enough=lambda arrived: arrived.all(axis=-1).any(),
        )
        # If the budget ended first: the c with which most seeds arrived, then the least gradient.
        missing = np.isnan(race.pairs).sum(axis=-1)
        best = np.lexsort((race.gradient_norm[-1], missing))[0]
        return float(self.tuning["grid"][best])

    def measure(self, track: Track, k: int) -> Cell:
        """Run all seeds of one cell."""
        entry, size, problem = self.entries[track.optimizer], self.size(track, k), Ridge(k)
        batch = (entry.directions[track.direction],)
        optimizer, oracle = self.build(track, k, step=size / k, batch=batch, purpose="measure")
        paper = entry.paper.get(track.oracle, {}).get(k)
        iterations = math.ceil(paper / oracle.votes) if paper else 0
        done = run(optimizer, problem, oracle, target=self.target, budget=entry.budget, at_least=iterations)
        average = bound = None
        if paper and isinstance(optimizer, NCRS) and isinstance(oracle, UniformMargin | Confidence):
            average = float(done.gradient_norm[:iterations].mean())
            gap = float(problem.value(problem.start()))
            bound = oracle.bound(step=size / k, iterations=iterations, gap=gap, directions=optimizer.directions, k=k)
        return Cell(
            track=track,
            k=k,
            size=size,
            votes=oracle.votes,
            run=done,
            paper=paper,
            average=average,
            bound=bound,
            success=self.success(track, k, size) if k == self.noise["k"] else None,
        )

    def success(self, track: Track, k: int, size: float) -> Float64 | None:
        """Share of the seeds that arrive within the noise budget, for each advantage p."""
        if track.oracle != self.noise["oracle"]:
            return None
        advantages = np.array(self.noise["advantages"])
        batch = (len(advantages), self.noise["seeds"])
        optimizer, oracle = self.build(
            track, k, step=size / k, batch=batch, purpose="noise", advantage=advantages[:, None]
        )
        done = run(optimizer, Ridge(k), oracle, target=self.target, budget=self.noise["budget"])
        return np.asarray(np.isfinite(done.pairs).mean(axis=-1))

    def build(
        self, track: Track, k: int, *, step: Any, batch: tuple[int, ...], purpose: str, **oracle_settings: Any
    ) -> tuple[Optimizer, Oracle]:
        """The optimiser and the oracle of a batch; their random streams depend on their own names alone."""
        name = f"{purpose}/{track.optimizer}/{track.oracle}/{track.direction}/{k}"
        streams = np.random.SeedSequence([self.seed, zlib.crc32(name.encode())]).spawn(2)
        search_rng, oracle_rng = (np.random.Generator(np.random.SFC64(stream)) for stream in streams)
        votes = self.oracles[track.oracle]["votes"]
        if votes == "theory":
            votes = math.ceil(k / self.target**2)
        oracle = self.oracles[track.oracle]["make"](votes=votes, rng=oracle_rng, **oracle_settings)
        optimizer = self.entries[track.optimizer].optimizer(
            np.broadcast_to(Ridge(k).start().astype(self.precision), (*batch, k)),
            step=step,
            directions=Directions(track.direction, ambient=self.dimension),
            rng=search_rng,
        )
        return optimizer, oracle


def measure_all(experiment: Experiment, *, processes: int) -> list[Cell]:
    """Measure every cell, the largest first, on so many processes, and show the time left."""
    jobs = [(track, k) for track in experiment.tracks() for k in experiment.entries[track.optimizer].active]
    bar = tqdm(total=len(jobs), desc="ridge", unit="cell")
    with bar, ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        largest_first = sorted(jobs, key=lambda job: -job[1])
        futures = {job: pool.submit(experiment.measure, *job) for job in largest_first}
        for future in as_completed(futures.values()):
            future.result()  # raises what the cell raised
            bar.update()
    return [futures[job].result() for job in jobs]


@hydra.main(config_path="pkg://conf", config_name="ridge")
def main(config: DictConfig) -> None:
    """Measure every cell, then print the table and write it and its figures to the folder."""
    from pbrl.ridge import report  # here, because the worker processes need no matplotlib

    experiment: Experiment = hydra.utils.instantiate(config.experiment, _convert_="all")
    cells = measure_all(experiment, processes=config.processes)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    report.write_csv(cells, folder / "table.csv")
    report.draw(cells, experiment, folder)
    report.show(cells)
    print(f"Table and figures are in {folder}.")
