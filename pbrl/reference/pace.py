"""How long runs take, from those that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pbrl.reference.protocol import PlannedRun
from pbrl.report.runs import NotARunError, load
from pbrl.report.shipped import ShippedRun, seconds_per_iteration

Name = tuple[str, str, str, int]  # task, agent, teacher, seed


def hours(runs: Sequence[PlannedRun], finished: Iterable[ShippedRun], workers: int) -> float | None:
    """Hours that the rest of these runs takes, several at a time; None while nothing is known.

    An agent's pace on a task is that of its fastest finished run there: the others shared their machine. Without one it
    is that of its fastest unfinished run, or else the median of the others' on that task, or of all.
    """
    fastest = fastest_paces((each.name, each.seconds_per_iteration) for each in finished)
    begun = [run for run in runs if run.name[:2] not in fastest]
    fastest |= fastest_paces((run.name, seconds) for run in begun if (seconds := pace_so_far(run)) is not None)
    if not fastest:
        return None

    def pace(task: str, agent: str) -> float:
        on_task = [seconds for (where, _), seconds in fastest.items() if where == task]
        return fastest.get((task, agent), float(np.median(on_task or [*fastest.values()])))

    rest = [pace(*run.name[:2]) * max(0, run.settings["iterations"] - recorded(run)) for run in runs]
    return float(sum(rest)) / 3600 / workers


def fastest_paces(paces: Iterable[tuple[Name, float]]) -> dict[tuple[str, str], float]:
    """The fewest seconds an iteration of each agent on each task."""
    fastest: dict[tuple[str, str], float] = {}
    for (task, agent, *_), seconds in paces:
        fastest[task, agent] = min(seconds, fastest.get((task, agent), np.inf))
    return fastest


def pace_so_far(run: PlannedRun) -> float | None:
    """Seconds an iteration of a run that is not finished; None where its folder has none."""
    try:
        return seconds_per_iteration(load(run.folder))
    except (NotARunError, OSError):  # it may be moved aside at this moment
        return None


def recorded(run: PlannedRun) -> int:
    """The number of iterations that a run has recorded so far."""
    path = run.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
