"""Timings that can be compared on a machine that is never quiet.

They vary by a third there. So all contenders take turns, and a ratio is taken within each turn; tables show medians.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from pbrl.run.terminal import ProgressBar

Measured = TypeVar("Measured")


def take_turns(
    contenders: Mapping[str, Callable[[], Measured]], alternations: int, title: str
) -> dict[str, list[Measured]]:
    """What each contender measured, turn by turn. Before the first turn, each runs once to compile and warm up."""
    for run in contenders.values():
        run()
    measured: dict[str, list[Measured]] = {what: [] for what in contenders}
    turns = [what for _ in range(alternations) for what in contenders]
    for what in ProgressBar(turns, desc=f"{title:15s}", unit="run", leave=False):
        measured[what].append(contenders[what]())
    return measured


def ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    """How many times as fast as another: the median of the ratios within each turn."""
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))
