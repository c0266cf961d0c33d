"""What a set of runs has to say in numbers: returns, statistics and robustness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from pbrl.report import stats
from pbrl.report.runs import RecordedRun
from pbrl.report.stats import Estimate
from pbrl.types import Float64

RATIONAL = "rational"


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are made."""

    resamples: int
    seed: int

    def __call__(self, statistic: Callable[..., Float64], *scores: stats.Benchmark, **how: Any) -> Estimate:
        """A statistic with its interval."""
        return stats.estimate(statistic, *scores, resamples=self.resamples, seed=self.seed, **how)


@dataclass(frozen=True)
class Table:
    """A table as shown, and the numbers behind it."""

    name: str  # of its files
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    records: list[dict[str, object]] = field(default_factory=list)
    keys: int = 1  # how many of the columns say what a row is about


def names(runs: Iterable[RecordedRun], attribute: str) -> list[str]:
    """All agents, tasks or teachers, in order."""
    return sorted({getattr(run, attribute) for run in runs})


def select(runs: Iterable[RecordedRun], **wanted: str) -> list[RecordedRun]:
    """The runs of an agent, task or teacher."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in wanted.items())]


def scores(runs: Sequence[RecordedRun], tasks: Sequence[str]) -> stats.Benchmark:
    """The score of each run, by task."""
    return [np.array([run.score for run in select(runs, task=task)]) for task in tasks]


def shared_tasks(runs: Sequence[RecordedRun]) -> list[str]:
    """Tasks that every agent has runs of: only over these are agents compared."""
    agents = names(runs, "agent")
    return [task for task in names(runs, "task") if names(select(runs, task=task), "agent") == agents]


def shown(estimate: Estimate, digits: int = 3) -> str:
    """An estimate in words."""
    if math.isnan(estimate.value):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:.{digits}f} (one seed: no interval)"
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def numbers(estimate: Estimate) -> dict[str, object]:
    """An estimate as columns of a CSV file."""
    return {"value": float(estimate.value), "low": float(estimate.low), "high": float(estimate.high)}


def returns(runs: Sequence[RecordedRun], teacher: str, quantity: str, title: str) -> Table:
    """Mean and standard error of the runs' final or evaluated return: tasks by agents."""
    agents = names(runs, "agent")
    table = Table(quantity, title, ["task", *agents])
    for task in names(runs, "task"):
        row = [task]
        for agent in agents:
            group = select(runs, task=task, agent=agent)
            values = np.array([getattr(run, quantity) for run in group])
            values = values[np.isfinite(values)]
            mean = values.mean() if len(values) else math.nan
            error = float(stats.standard_error(values)) if len(values) else math.nan
            unfinished = sum(not run.finished for run in group)
            spread = f" ± {error:.1f}" if len(values) > 1 else " (one seed)"
            row.append(f"{mean:.1f}{spread}{' *' if unfinished else ''}" if len(values) else "-")
            record = {"teacher": teacher, "task": task, "agent": agent, "seeds": len(values), "unfinished": unfinished}
            table.records.append({**record, "mean": float(mean), "standard_error": error})
        table.rows.append(row)
    return table


def aggregates(runs: Sequence[RecordedRun], teacher: str, bootstrap: Bootstrap) -> Table:
    """Interquartile mean and optimality gap of every agent over the tasks that all have."""
    table = Table("aggregates", "Over all tasks", ["agent", "interquartile mean", "optimality gap", "runs"])
    tasks = shared_tasks(runs)
    for agent in names(runs, "agent") if tasks else []:
        benchmark = scores(select(runs, agent=agent), tasks)
        every = np.concatenate(benchmark)
        possible = (0, 1) if every.min() >= 0 and every.max() <= 1 else (-math.inf, math.inf)  # LQR's are negative
        middle = bootstrap(stats.interquartile_mean, benchmark, bounds=possible)
        gap = bootstrap(stats.optimality_gap, benchmark, bounds=(0, possible[1]))
        count = sum(len(task) for task in benchmark)
        table.rows.append([agent, shown(middle), shown(gap), str(count)])
        for statistic, estimate in (("interquartile_mean", middle), ("optimality_gap", gap)):
            record = {"teacher": teacher, "agent": agent, "statistic": statistic, "tasks": len(tasks), "runs": count}
            table.records.append({**record, **numbers(estimate)})
    return table


def improvement(runs: Sequence[RecordedRun], teacher: str, bootstrap: Bootstrap) -> Table:
    """How probably a run of one agent beats a run of another, for every two agents that share a task."""
    table = Table("improvement", "Probability of improvement", ["of", "over", "probability", "tasks"], keys=2)
    for first, second in combinations(names(runs, "agent"), 2):
        two = select(runs, agent=first) + select(runs, agent=second)
        if tasks := shared_tasks(two):
            arms = (scores(select(two, agent=agent), tasks) for agent in (first, second))
            estimate = bootstrap(stats.probability_of_improvement, *arms, bounds=(0, 1))
            table.rows.append([first, second, shown(estimate, 2), str(len(tasks))])
            record = {"teacher": teacher, "agent": first, "over": second, "tasks": len(tasks)}
            table.records.append({**record, **numbers(estimate)})
    return table


def robustness(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> Table:
    """Every agent's mean score with every teacher as a share of its own with the rational one, on shared tasks."""
    teachers = names(runs, "teacher")
    teachers.sort(key=lambda teacher: (teacher != RATIONAL, teacher))
    table = Table("robustness", "Final return relative to the rational teacher", ["agent", *teachers])
    for agent in names(runs, "agent"):
        row = [agent]
        for teacher in teachers:
            ours, reference = (select(runs, agent=agent, teacher=each) for each in (teacher, RATIONAL))
            tasks = [task for task in names(ours, "task") if task in names(reference, "task")]
            if not tasks:
                row.append("-")
                continue
            if teacher == RATIONAL:
                estimate = Estimate(*(np.array(1.0) for _ in range(3)))  # by definition
                row.append("1")
            else:
                estimate = bootstrap(stats.relative_score, scores(ours, tasks), scores(reference, tasks))
                row.append(shown(estimate, 2))
            table.records.append({"agent": agent, "teacher": teacher, "tasks": len(tasks), **numbers(estimate)})
        table.rows.append(row)
    return table
