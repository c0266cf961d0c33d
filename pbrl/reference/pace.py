"""How long runs take, from those that are finished."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from pbrl.reference.protocol import PlannedRun
from pbrl.report.shipped import ShippedRun


def hours(runs: Sequence[PlannedRun], finished: Iterable[ShippedRun], workers: int) -> float | None:
    """Hours that the rest of these runs takes, several at a time; None while nothing is known.

    An agent's pace on a task is that of its finished runs there; of an agent that has none, the mean of the others' on
    that task, or else of all.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for each in finished:
        task, agent, *_ = each.name
        for key in ((task, agent), (task, ""), ("", "")):
            seconds.setdefault(key, []).append(each.seconds_per_iteration)
    if not seconds:
        return None
    total = 0.0
    for run in runs:
        task, agent, *_ = run.name
        key = next(key for key in ((task, agent), (task, ""), ("", "")) if key in seconds)
        total += float(np.mean(seconds[key])) * max(0, run.settings["iterations"] - recorded(run))
    return total / 3600 / workers


def recorded(run: PlannedRun) -> int:
    """The number of iterations that a run has recorded so far."""
    path = run.folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0
