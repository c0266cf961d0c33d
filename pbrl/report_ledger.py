"""What runs were charged, and whether agents that are compared were charged the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbrl.report_tables import Table, names, select
from pbrl.runs import CHARGES, Run

UNITS = {"trajectories": "trajectory", "pairs_asked": "comparison", "env_steps": "environment step"}
EQUAL = 1.01  # budgets that differ by no more than this factor are called equal


def ledger(runs: Sequence[Run]) -> Table:
    """What an agent was charged for a run on average, in all and per iteration."""
    headings = ["teacher", "agent", "runs", "iterations", *(charge.replace("_", " ") for charge in CHARGES)]
    table = Table("ledger", "What was charged, mean per run (per iteration)", headings)
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


def every_run(runs: Sequence[Run]) -> Table:
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


def unequal_budgets(runs: Sequence[Run], axis: str | None) -> list[str]:
    """What agents were charged unequally for, at the same place of an axis or (None) in all; nothing if equally."""
    found: dict[str, list[str]] = {}
    for charge in CHARGES:
        for task in names(runs, "task") if charge != axis else []:
            rates: dict[str, float] = {}
            for agent in names(select(runs, task=task), "agent"):
                group = select(runs, task=task, agent=agent)
                rates[agent] = float(np.mean([run.metrics[charge][-1] / _units(run, axis) for run in group]))
            if max(rates.values()) > EQUAL * min(rates.values()):
                charged = ", ".join(
                    f"{agent} {rate:{',.0f' if rate >= 1000 else '.4g'}}" for agent, rate in rates.items()
                )
                found.setdefault(f"{charge.replace('_', ' ')} {_per(axis)}: {charged}", []).append(task)
    everywhere = names(runs, "task")
    return [
        f"Unequal budgets, {line}" + ("." if tasks == everywhere else f" ({', '.join(tasks)}).")
        for line, tasks in found.items()
    ]


def _per(axis: str | None) -> str:
    return "in all" if axis is None else f"per {UNITS.get(axis, 'iteration')}"


def _units(run: Run, axis: str | None) -> float:
    if axis is None:
        return 1.0
    return float(run.metrics[axis][-1]) if axis in UNITS else run.iterations
