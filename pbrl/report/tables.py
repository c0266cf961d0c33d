"""The tables of a report: returns, learning speed, statistics over tasks and robustness."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from pbrl.report import stats
from pbrl.report.runs import YARDSTICK, RecordedRun
from pbrl.report.stats import Estimate
from pbrl.types import Float64

RATIONAL = "rational"


@dataclass(frozen=True)
class Bootstrap:
    """How all intervals are made."""

    resamples: int
    seed: int

    def __call__(self, statistic: Callable[..., Float64], *scores: stats.Benchmark, **how: Any) -> Estimate:
        """A statistic with its interval."""
        return stats.estimate(statistic, *scores, resamples=self.resamples, seed=self.seed, **how)


@dataclass(frozen=True)
class Table:
    """A table as it is shown, and the numbers behind it."""

    name: str  # of its files
    title: str
    columns: Sequence[str]
    rows: list[list[str]] = field(default_factory=list)
    records: list[dict[str, object]] = field(default_factory=list)
    keys: int = 1  # how many of the columns say what a row is about
    best: set[tuple[int, int]] = field(default_factory=set)  # rows and columns of the cells in bold


def names(runs: Iterable[RecordedRun], attribute: str) -> list[str]:
    """All agents, tasks or teachers, in order."""
    return sorted({getattr(run, attribute) for run in runs})


def select(runs: Iterable[RecordedRun], **wanted: str) -> list[RecordedRun]:
    """The runs of an agent, task or teacher."""
    return [run for run in runs if all(getattr(run, key) == value for key, value in wanted.items())]


def agents_of(runs: Iterable[RecordedRun]) -> list[RecordedRun]:
    """The runs that are ranked: all but the yardsticks'."""
    return [run for run in runs if not run.yardstick]


def scores(runs: Sequence[RecordedRun], tasks: Sequence[str]) -> stats.Benchmark:
    """The score of each run, by task."""
    return [np.array([run.score for run in select(runs, task=task)]) for task in tasks]


def paired_scores(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> stats.Paired:
    """The scores of both [2, seeds], for each task and the seeds that both have of it."""
    first, second = ({(run.task, run.seed): run.score for run in runs} for runs in (ours, theirs))
    both = sorted(first.keys() & second.keys())
    of_task = ([each for each in both if each[0] == task] for task in dict.fromkeys(task for task, _ in both))
    return [np.array([[scores[each] for each in shared] for scores in (first, second)]) for shared in of_task]


def shared_tasks(runs: Sequence[RecordedRun]) -> list[str]:
    """Tasks that every agent has runs of. Statistics over tasks compare agents on these only."""
    agents = names(runs, "agent")
    return [task for task in names(runs, "task") if names(select(runs, task=task), "agent") == agents]


def shown(estimate: Estimate, digits: int = 3) -> str:
    """An estimate as text: 0.52 [0.48, 0.57]."""
    if math.isnan(estimate.value):
        return "-"
    if math.isnan(estimate.low):
        return f"{estimate.value:.{digits}f} (one seed)"
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def numbers(estimate: Estimate) -> dict[str, object]:
    """An estimate as columns of a CSV file."""
    return {"value": float(estimate.value), "low": float(estimate.low), "high": float(estimate.high)}


def mean(benchmark: stats.Benchmark) -> Float64:
    """The mean over the runs of one task."""
    return np.asarray(benchmark[0].mean(axis=-1))


def returns(runs: Sequence[RecordedRun], teacher: str, quantity: str, title: str, bootstrap: Bootstrap) -> Table:
    """Mean over seeds of the runs' final or evaluated return: tasks by agents.

    The highest mean of a task is in bold; "≈" marks agents whose mean is within its interval.
    """
    agents = names(runs, "agent")
    table = Table(quantity, title, ["task", *agents])
    for task in names(runs, "task"):
        found: dict[str, Estimate] = {}
        marks: dict[str, str] = {}
        for agent in agents:
            group = select(runs, task=task, agent=agent)
            values = np.array([getattr(run, quantity) for run in group])
            values = values[np.isfinite(values)]
            nothing = Estimate(*(np.array(math.nan) for _ in range(3)))
            found[agent] = bootstrap(mean, [values]) if len(values) else nothing
            unfinished = sum(not run.finished for run in group)
            marks[agent] = " *" if unfinished and len(values) else ""
            error = float(stats.standard_error(values)) if len(values) else math.nan
            record = {"teacher": teacher, "task": task, "agent": agent, "seeds": len(values), "unfinished": unfinished}
            record |= {"mean": float(found[agent].value), "low": float(found[agent].low)}
            table.records.append({**record, "high": float(found[agent].high), "standard_error": error})
        ranked = names(agents_of(runs), "agent")
        known = [agent for agent in ranked if not math.isnan(found[agent].value)]
        if len(known) > 1:
            best = max(known, key=lambda agent: float(found[agent].value))
            table.best.add((len(table.rows), 1 + agents.index(best)))
            for agent in known:
                if agent != best and found[agent].value >= found[best].low:
                    marks[agent] = f" ≈{marks[agent]}"
        table.rows.append([task, *(shown(found[agent], 1) + marks[agent] for agent in agents)])
    return table


def normalised(
    runs: Sequence[RecordedRun], teacher: str, yardstick: Sequence[RecordedRun], bootstrap: Bootstrap
) -> Table:
    """Final returns as a share of the task's maximum, and of what the yardstick had at the same number of steps.

    The yardstick's mean over its seeds counts as known: the interval is that of the agent's seeds.
    """
    name = yardstick[0].agent.removesuffix(YARDSTICK)
    columns = ["task", "agent", "of the maximum", f"of {name} at as many steps", "seeds"]
    table = Table("normalised", f"Final return as a share of {name}'s", columns, keys=2)
    for task in names(runs, "task"):
        measured = select(yardstick, task=task)
        for agent in names(select(runs, task=task), "agent"):
            group = select(runs, task=task, agent=agent)
            shares = np.array([run.final_return / _return_at_steps_of(run, measured) for run in group])
            known = shares[np.isfinite(shares)]
            share = bootstrap(mean, [known]) if len(known) else Estimate(*(np.array(math.nan) for _ in range(3)))
            score = bootstrap(mean, [np.array([run.score for run in group])])
            table.rows.append([task, agent, shown(score), shown(share), f"{len(known)} of {len(group)}"])
            record = {"teacher": teacher, "task": task, "agent": agent, "yardstick": name, "seeds": len(known)}
            table.records.append({**record, "score": float(score.value), **numbers(share)})
    return table


def _return_at_steps_of(run: RecordedRun, yardstick: Sequence[RecordedRun]) -> float:
    """The yardstick's mean return over the steps of a run's final return; nan if it did not get that far."""
    last = run.metrics["env_steps"][-max(1, len(run.metrics["env_steps"]) // 10) :]
    returns = []
    for each in yardstick:
        known = np.isfinite(each.metrics["return_mean"])
        steps, found = (each.metrics[name][known] for name in ("env_steps", "return_mean"))
        returns.append(np.interp(last, steps, found, right=np.nan))
    return float(np.mean(returns)) if returns else math.nan


def at_steps(
    runs: Sequence[RecordedRun], yardstick: Sequence[RecordedRun], steps: Sequence[int], bootstrap: Bootstrap
) -> Table:
    """Evaluated returns after some numbers of steps, and as a share of the yardstick's mean after as many.

    Between two evaluations a return is on the line through them; where a run was not evaluated, it has none.
    """
    name = yardstick[0].agent.removesuffix(YARDSTICK)
    columns = ["task", "agent", *(f"{n:,} steps{what}" for n in steps for what in ("", f", of {name}")), "seeds"]
    table = Table("at_steps", f"Evaluated return after so many steps, and as a share of {name}'s", columns, keys=2)
    for task in names(runs, "task"):
        known = [_evaluated_at(run, steps) for run in select(yardstick, task=task)]
        whole = np.mean(known, axis=0) if known else np.full(len(steps), np.nan)
        for agent in names(select(runs, task=task), "agent"):
            group = np.array([_evaluated_at(run, steps) for run in select(runs, task=task, agent=agent)])
            cells = []
            for n, returns, at_yardstick in zip(steps, group.T, whole, strict=True):
                value, share = (bootstrap(mean, [values]) for values in (returns, returns / at_yardstick))
                cells += [shown(value, 1), shown(share, 2)]
                record = {"task": task, "agent": agent, "yardstick": name, "seeds": len(group), "steps": n}
                table.records.append({**record, "return": float(value.value), **numbers(share)})
            table.rows.append([task, agent, *cells, f"{len(group)}"])
    return table


def _evaluated_at(run: RecordedRun, steps: Sequence[int]) -> Float64:
    """The evaluated return after each of these numbers of steps; nan before the first and after the last evaluation."""
    evaluations = run.metrics.get("eval_return", np.full(len(run.metrics["env_steps"]), np.nan))
    known = np.isfinite(evaluations)
    if not known.any():
        return np.full(len(steps), np.nan)
    return np.interp(steps, run.metrics["env_steps"][known], evaluations[known], left=np.nan, right=np.nan)


def speed(runs: Sequence[RecordedRun], teacher: str, threshold: float, bootstrap: Bootstrap) -> Table:
    """How fast agents learn: the area under the curve, and the iterations until a return is reached.

    The area is the mean of a run's scores over its iterations. The iterations are a median over seeds, where a run
    that does not reach the threshold counts as the slowest.
    """
    columns = ["task", "agent", "area under the curve", f"iterations to {threshold:g}", "seeds that reach it"]
    title = f"Learning speed: area under the curve, and iterations to a score of {threshold:g}"
    table = Table("speed", title, columns, keys=2)
    for task in names(runs, "task"):
        for agent in names(select(runs, task=task), "agent"):
            group = select(runs, task=task, agent=agent)
            area = bootstrap(mean, [np.array([np.nanmean(run.scores) for run in group])])
            first = np.array([_iterations_to(run, threshold) for run in group])
            reached = int(np.isfinite(first).sum())
            median = float(np.sort(first)[(len(first) - 1) // 2])  # of an even number, the lower one: never half of inf
            cell = f"{median:,.0f}" if math.isfinite(median) else "-"
            table.rows.append([task, agent, shown(area), cell, f"{reached} of {len(group)}"])
            record = {"teacher": teacher, "task": task, "agent": agent, "seeds": len(group), "threshold": threshold}
            area_record = {f"area_{name}": value for name, value in numbers(area).items()}
            iterations = median if math.isfinite(median) else math.nan
            table.records.append({**record, **area_record, "iterations": iterations, "reached": reached})
    return table


def _iterations_to(run: RecordedRun, threshold: float) -> float:
    """The number of iterations up to the first whose score is at least the threshold; inf if there is none."""
    reached = np.flatnonzero(run.scores >= threshold)
    return float(run.metrics["iteration"][reached[0]] + 1) if len(reached) else math.inf


def headline(table: Table, teacher: str) -> str:
    """The result over all tasks in a sentence, from the table of `aggregates`; empty if there are not two agents."""
    middle = [record for record in table.records if record["statistic"] == "interquartile_mean"]
    if len(middle) < 2:
        return ""
    first, *others = sorted(middle, key=lambda record: -_number(record["value"]))
    tasks = f"{first['tasks']} task{'' if first['tasks'] == 1 else 's'}"
    interval = "" if math.isnan(_number(first["low"])) else f" [{first['low']:.3f}, {first['high']:.3f}]"
    close = [str(record["agent"]) for record in others if _number(record["value"]) >= _number(first["low"])]
    sentence = (
        f"With the {teacher} teacher, {first['agent']} has the highest interquartile mean over {tasks}: "
        f"{first['value']:.3f}{interval}"
    )
    if math.isnan(_number(first["low"])):
        return f"{sentence}, from single seeds."
    return f"{sentence}. Within this interval: {', '.join(close) or 'no other agent'}."


def _number(value: object) -> float:
    assert isinstance(value, int | float)
    return float(value)


def aggregates(runs: Sequence[RecordedRun], teacher: str, bootstrap: Bootstrap) -> Table:
    """Interquartile mean and optimality gap of every agent, over the tasks that all agents have."""
    table = Table("aggregates", "Over all tasks", ["agent", "interquartile mean", "optimality gap", "runs"])
    tasks = shared_tasks(runs)
    middles: list[float] = []
    for agent in names(runs, "agent") if tasks else []:
        benchmark = scores(select(runs, agent=agent), tasks)
        every = np.concatenate(benchmark)
        possible = (0, 1) if every.min() >= 0 and every.max() <= 1 else (-math.inf, math.inf)  # LQR's are negative
        middle = bootstrap(stats.interquartile_mean, benchmark, bounds=possible)
        gap = bootstrap(stats.optimality_gap, benchmark, bounds=(0, possible[1]))
        count = sum(len(task) for task in benchmark)
        table.rows.append([agent, shown(middle), shown(gap), str(count)])
        middles.append(float(middle.value))
        for statistic, estimate in (("interquartile_mean", middle), ("optimality_gap", gap)):
            record = {"teacher": teacher, "agent": agent, "statistic": statistic, "tasks": len(tasks), "runs": count}
            table.records.append({**record, **numbers(estimate)})
    if len(middles) > 1:
        best = middles.index(max(middles))
        table.best.add((best, 1))
        lowest = _number(table.records[2 * best]["low"])  # of the interval of the best
        for row, found in zip(table.rows, middles, strict=True):
            if row is not table.rows[best] and found >= lowest:
                row[1] += " ≈"
    return table


def improvement(runs: Sequence[RecordedRun], teacher: str, bootstrap: Bootstrap) -> Table:
    """The probability that a run of one agent beats a run of another, for every two agents that share a task.

    Of the two, the one that wins more often comes first.
    """
    table = Table("improvement", "Probability of improvement", ["of", "over", "probability", "tasks"], keys=2)
    found = []
    for pair in combinations(names(runs, "agent"), 2):
        two = select(runs, agent=pair[0]) + select(runs, agent=pair[1])
        if tasks := shared_tasks(two):
            arms = {agent: scores(select(two, agent=agent), tasks) for agent in pair}
            first, second = pair if stats.probability_of_improvement(*arms.values()) >= 0.5 else pair[::-1]
            found.append((first, second, len(tasks), arms[first], arms[second]))
    for first, second, shared, *both in sorted(found, key=lambda each: each[:2]):
        estimate = bootstrap(stats.probability_of_improvement, *both, bounds=(0, 1))
        table.rows.append([first, second, shown(estimate, 2), str(shared)])
        record = {"teacher": teacher, "agent": first, "over": second, "tasks": shared}
        table.records.append({**record, **numbers(estimate)})
    return table


def robustness(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> Table:
    """Mean scores with each teacher, as a share of the same agent's with the rational one, on shared seeds of tasks."""
    teachers = names(runs, "teacher")
    teachers.sort(key=lambda teacher: (teacher != RATIONAL, teacher))
    table = Table("robustness", "Final return relative to the rational teacher", ["agent", *teachers])
    for agent in names(runs, "agent"):
        row = [agent]
        for teacher in teachers:
            scores = paired_scores(*(select(runs, agent=agent, teacher=each) for each in (teacher, RATIONAL)))
            if not scores:
                row.append("-")
                continue
            if teacher == RATIONAL:
                estimate = Estimate(*(np.array(1.0) for _ in range(3)))  # by definition, even where it is not positive
                row.append("1")
            else:
                estimate = bootstrap(stats.relative_score, scores)
                row.append(shown(estimate, 2))
            table.records.append({"agent": agent, "teacher": teacher, "tasks": len(scores), **numbers(estimate)})
        table.rows.append(row)
    return table
