"""The costs of runs, and notes where agents that are compared had unequal budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from pbrl.report.runs import CHARGES, RecordedRun
from pbrl.report.tables import Table, names, select

UNITS = {"trajectories": "trajectory", "pairs_asked": "comparison", "env_steps": "environment step"}
EQUAL = 1.01  # budgets that differ by no more than this factor are called equal


def ledger(runs: Sequence[RecordedRun]) -> Table:
    """What a run of each agent cost on average, in total and per iteration."""
    headings = ["teacher", "agent", "runs", "iterations", *(charge.replace("_", " ") for charge in CHARGES)]
    table = Table("ledger", "What was charged, mean per run (per iteration)", headings, keys=2)
    for teacher in names(runs, "teacher"):
        for agent in names(select(runs, teacher=teacher), "agent"):
            group = select(runs, teacher=teacher, agent=agent)
            iterations = np.mean([run.iterations for run in group])
            charges = {charge: float(np.mean([run.metrics[charge][-1] for run in group])) for charge in CHARGES}
            cells = [f"{total:,.0f} ({total / iterations:,.0f})" for total in charges.values()]
            table.rows.append([teacher, agent, str(len(group)), f"{iterations:,.0f}", *cells])
            record = {"teacher": teacher, "agent": agent, "runs": len(group), "iterations": float(iterations)}
            table.records.append({**record, **charges})
    return table


def every_run(runs: Sequence[RecordedRun]) -> Table:
    """One row for each run."""
    table = Table("runs", "Runs", [])
    for run in runs:
        who = {"teacher": run.teacher, "task": run.task, "agent": run.agent, "seed": run.seed}
        state = {"iterations": run.iterations, "finished": run.finished}
        found = {"final_return": run.final_return, "score": run.score, "eval_return": run.eval_return}
        charges = {charge: int(run.metrics[charge][-1]) for charge in CHARGES}
        seconds = float(run.metrics["seconds"][-1])
        table.records.append({**who, **state, **found, **charges, "seconds": seconds, "folder": str(run.folder)})
    return table


def unequal_lengths(runs: Sequence[RecordedRun]) -> list[str]:
    """A note if agents ran for different numbers of iterations; otherwise empty."""
    return _notes(runs, "iterations", lambda run: run.iterations)


def unequal_budgets(runs: Sequence[RecordedRun], axis: str) -> list[str]:
    """Notes on costs that differ between agents at the same point of an axis; for seconds, per iteration."""
    unit = UNITS.get(axis, "iteration")
    notes = []
    for charge in CHARGES:
        if charge != axis:
            what = f"{charge.replace('_', ' ')} per {unit}"
            notes += _notes(runs, what, lambda run, charge=charge: _per(run, charge, axis))  # type: ignore[misc]
    return notes


def _per(run: RecordedRun, charge: str, axis: str) -> float:
    units = float(run.metrics[axis][-1]) if axis in UNITS else run.iterations
    return float(run.metrics[charge][-1]) / units if units else math.inf  # an agent may have asked nothing


def _notes(runs: Sequence[RecordedRun], what: str, measure: Callable[[RecordedRun], float]) -> list[str]:
    """One note for each set of tasks on which agents differ in the same way, on average over seeds."""
    found: dict[str, list[str]] = {}
    for task in names(runs, "task"):
        rates: dict[str, float] = {}
        for agent in names(select(runs, task=task), "agent"):
            rates[agent] = float(np.mean([measure(run) for run in select(runs, task=task, agent=agent)]))
        if max(rates.values()) > EQUAL * min(rates.values()):
            charged = ", ".join(f"{agent} {rate:{',.0f' if rate >= 1000 else '.4g'}}" for agent, rate in rates.items())
            found.setdefault(charged, []).append(task)
    everywhere = names(runs, "task")
    return [
        f"Unequal budgets, {what}: {charged}" + ("." if tasks == everywhere else f" ({', '.join(tasks)}).")
        for charged, tasks in found.items()
    ]
