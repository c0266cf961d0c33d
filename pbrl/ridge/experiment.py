"""The synthetic ridge experiment: how many comparisons an optimiser needs, against the intrinsic dimension k.

    python -m pbrl.ridge

Every run starts where the gradient has norm 1 and stops at the first iterate where the norm is at most `target`.
This is the one experiment of the NCRS paper with published numbers, and a benchmark for every optimiser with the
ask/tell of `pbrl.search`: one class and one entry in `conf/ridge.yaml` add it to the table.

Only A s of a direction s matters, so a run is simulated in k dimensions (see `pbrl.search.Directions`): its cost
depends neither on d nor on the number of votes. All seeds of a cell run at once, as one batch.
"""

from __future__ import annotations

import math
import multiprocessing
import zlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf

from pbrl.ridge.bounds import THEOREMS, bound
from pbrl.ridge.problem import ComparisonOracle, Outcome, Ridge, run
from pbrl.run.settings import instantiate
from pbrl.run.terminal import ProgressBar
from pbrl.search import NCRS, Directions, Optimizer, Search
from pbrl.types import Float64


@dataclass(frozen=True)
class Track:
    """One line of the table: an optimiser, its kind of directions, and the oracle that answers it."""

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
    outcome: Outcome  # of all seeds
    paper: int | None  # comparisons that the paper reports
    average: float | None  # gradient norm, mean over the seeds and the paper's number of iterations
    bound: float | None  # the theorem's upper bound on that average
    success: Float64 | None  # share of the seeds that reach the target within `noise.budget`, for each advantage p

    @property
    def comparisons(self) -> Float64:
        """Comparisons until the target [seeds]; NaN: never reached."""
        return self.outcome.pairs * self.votes


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The settings of one optimiser in `conf/ridge.yaml`: either a rule of `pbrl.search`, or a class of its own."""

    rule: Mapping[str, Any] | None  # _target_ and settings of a class that takes (*, step)
    optimizer: Mapping[str, Any] | None  # _target_ and settings of a class that takes (x, *, step, directions, rng)
    directions: Mapping[str, int]  # kind of directions -> seeds
    oracles: list[str]
    active: list[int]  # the intrinsic dimensions k
    budget: int  # pairs that one run may compare
    size: float | None  # c of the step c / k; None: tuned on the grid, for each k
    paper: Mapping[str, Mapping[int, int]]  # oracle -> k -> comparisons


@dataclass(kw_only=True)
class Experiment:
    """The whole experiment. It holds plain settings only, so that worker processes can build what they need."""

    seed: int
    dimension: int  # d
    target: float  # epsilon
    precision: str
    tuning: Mapping[str, Any]  # seeds, grid
    noise: Mapping[str, Any]  # k, seeds, budget, oracle, advantages
    oracles: Mapping[str, Mapping[str, Any]]  # name -> oracle, votes, theorem
    shared: Mapping[str, Any]  # settings of every optimiser that does not set them itself
    optimizers: Mapping[str, Mapping[str, Any]]  # name -> settings of an `Entry`
    only: list[str] | None  # the optimisers to run; None: all
    allow: list[str]  # packages, beside pbrl's own, whose classes may be used

    def __post_init__(self) -> None:
        if not self.target > 0:
            raise ValueError(f"the target gradient norm must be positive, not {self.target}")
        if self.precision not in ("float32", "float64"):
            raise ValueError(f"precision must be float32 or float64, not {self.precision!r}")
        names = list(self.optimizers) if self.only is None else self.only
        if unknown := set(names) - set(self.optimizers):
            raise ValueError(f"unknown optimizer {unknown}; known are {', '.join(self.optimizers)}")
        for name, settings in self.oracles.items():
            if settings["theorem"] not in (None, *THEOREMS):
                raise ValueError(f"the theorem of oracle {name} must be null or one of {', '.join(THEOREMS)}")
        self.entries = {name: self.entry(name, self.optimizers[name]) for name in names}
        for track in self.tracks():  # a wrong setting of a class is found now, not in a worker
            self.build(track, self.entries[track.optimizer].active[0], step=1.0, batch=(1,), purpose="check")

    def entry(self, name: str, settings: Mapping[str, Any]) -> Entry:
        """Check the settings of an optimiser."""
        settings = {**self.shared, **settings}
        wanted = {entry_field.name for entry_field in fields(Entry)}
        if wrong := wanted ^ set(settings):
            raise ValueError(f"optimizer {name} has missing or unknown settings: {', '.join(sorted(wrong))}")
        entry = Entry(**settings)
        if (entry.rule is None) == (entry.optimizer is None):
            raise ValueError(f"optimizer {name} needs either a rule or an optimizer")
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
        """c of the step c / k. If it is tuned: the c with which all tuning seeds reach the target first."""
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
            votes=self.votes(track, k),
            target=self.target,
            budget=entry.budget,
            enough=lambda arrived: arrived.all(axis=-1).any(),
        )
        # If the budget ended first: the c with which most seeds arrived, then the smallest gradient.
        missing = np.isnan(race.pairs).sum(axis=-1)
        best = np.lexsort((race.gradient_norm[-1], missing))[0]
        return float(self.tuning["grid"][best])

    def measure(self, track: Track, k: int) -> Cell:
        """Run all seeds of one cell."""
        entry, size, problem = self.entries[track.optimizer], self.size(track, k), Ridge(k)
        batch, votes = (entry.directions[track.direction],), self.votes(track, k)
        optimizer, oracle = self.build(track, k, step=size / k, batch=batch, purpose="measure")
        paper = entry.paper.get(track.oracle, {}).get(k)
        iterations = math.ceil(paper / votes) if paper else 0
        outcome = run(
            optimizer, problem, oracle, votes=votes, target=self.target, budget=entry.budget, at_least=iterations
        )
        average = allowed = None
        theorem = self.oracles[track.oracle]["theorem"]
        if paper and theorem and isinstance(optimizer, Search) and isinstance(optimizer.rule, NCRS):
            average = float(outcome.gradient_norm[:iterations].mean())
            gap = float(problem.value(problem.start()))
            settings = {"step": size / k, "iterations": iterations, "directions": optimizer.directions, "k": k}
            allowed = bound(theorem, oracle, votes=votes, gap=gap, **settings)
        return Cell(
            track=track,
            k=k,
            size=size,
            votes=votes,
            outcome=outcome,
            paper=paper,
            average=average,
            bound=allowed,
            success=self.success(track, k, size) if k == self.noise["k"] else None,
        )

    def success(self, track: Track, k: int, size: float) -> Float64 | None:
        """Share of the seeds that reach the target within `noise.budget`, for each advantage p."""
        if track.oracle != self.noise["oracle"]:
            return None
        advantages = np.array(self.noise["advantages"])
        batch = (len(advantages), self.noise["seeds"])
        optimizer, oracle = self.build(track, k, step=size / k, batch=batch, purpose="noise", p=advantages[:, None])
        votes, budget = self.votes(track, k), self.noise["budget"]
        outcome = run(optimizer, Ridge(k), oracle, votes=votes, target=self.target, budget=budget)
        return np.asarray(np.isfinite(outcome.pairs).mean(axis=-1))

    def votes(self, track: Track, k: int) -> int:
        """How often the track's oracle compares each pair."""
        votes = self.oracles[track.oracle]["votes"]
        return math.ceil(k / self.target**2) if votes == "theory" else int(votes)

    def build(
        self, track: Track, k: int, *, step: Any, batch: tuple[int, ...], purpose: str, **oracle_settings: Any
    ) -> tuple[Optimizer, ComparisonOracle]:
        """The optimiser and the oracle of a batch. Their random streams depend on the names given here only."""
        name = f"{purpose}/{track.optimizer}/{track.oracle}/{track.direction}/{k}"
        streams = np.random.SeedSequence([self.seed, zlib.crc32(name.encode())]).spawn(2)
        search_rng, oracle_rng = (np.random.Generator(np.random.SFC64(stream)) for stream in streams)
        oracle: ComparisonOracle = self.create(self.oracles[track.oracle]["oracle"], rng=oracle_rng, **oracle_settings)
        entry = self.entries[track.optimizer]
        x = np.broadcast_to(Ridge(k).start().astype(self.precision), (*batch, k))
        directions = Directions(track.direction, ambient=self.dimension)
        if entry.rule is not None:
            rule = self.create(entry.rule, step=step)
            return Search(x, rule=rule, directions=directions, rng=search_rng), oracle
        optimizer: Optimizer = self.create(entry.optimizer, x, step=step, directions=directions, rng=search_rng)
        return optimizer, oracle

    def create(self, node: Any, *arguments: Any, **more: Any) -> Any:
        """The object of a node's `_target_` with these arguments, which Hydra would convert if it got them."""
        return instantiate({**node, "_partial_": True}, allow=self.allow)(*arguments, **more)


def measure_all(experiment: Experiment, *, processes: int) -> list[Cell]:
    """Measure every cell, the largest first, in so many processes, with a progress bar."""
    jobs = [(track, k) for track in experiment.tracks() for k in experiment.entries[track.optimizer].active]
    bar = ProgressBar(total=len(jobs), desc="ridge", unit="cell")
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
    from pbrl.ridge import report  # not at the top, because the worker processes need no matplotlib

    settings: dict[str, Any] = OmegaConf.to_container(config.experiment, resolve=True)  # type: ignore[assignment]
    try:
        experiment = Experiment(**settings, allow=list(config.allow))
    except (ValueError, TypeError) as error:
        raise SystemExit(f"pbrl.ridge: {error}") from None
    cells = measure_all(experiment, processes=config.processes)
    folder = Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    report.write_csv(cells, folder / "table.csv")
    report.draw(cells, experiment, folder)
    report.show(cells)
    print(f"Table and figures are in {folder}.")
