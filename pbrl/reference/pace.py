"""How long runs take, from those that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pbrl.reference.protocol import PlannedRun
from pbrl.report.shipped import ShippedRun


def hours(runs: Sequence[PlannedRun], finished: Iterable[ShippedRun], workers: int) -> float | None:
    """Hours that the rest of these runs takes, several at a time; None while nothing is known.

    An agent's pace on a task is that of its fastest finished run there: the others shared their machine. Of an agent
    that has none, it is the mean of the others' on that task, or else of all.
    """
    fastest: dict[tuple[str, str], float] = {}  # seconds an iteration, of an agent on a task
    for each in finished:
        key = each.name[:2]
        fastest[key] = min(each.seconds_per_iteration, fastest.get(key, np.inf))
    if not fastest:
        return None

    def pace(task: str, agent: str) -> float:
        on_task = [seconds for (where, _), seconds in fastest.items() if where == task]
        return fastest.get((task, agent), float(np.mean(on_task or [*fastest.values()])))

    seconds: list[float] = [pace(*run.name[:2]) * max(0, run.settings["iterations"] - recorded(run)) for run in runs]
    return sum(seconds) / 3600 / workers


def recorded(run: PlannedRun) -> int:
    """The number of iterations that a run has recorded so far."""
    path = run.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
