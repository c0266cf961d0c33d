"""The paper's figure: return against iterations, or against what was paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pbrl.report import stats
from pbrl.report.figures import STYLE, Looks, add_legend, add_title, short
from pbrl.report.runs import RecordedRun
from pbrl.report.tables import names, select
from pbrl.types import Bool, Float64

# What a return can be drawn against: a column of the record, and the label of its axis.
AXES = {
    "iteration": "iteration",
    "trajectories": "trajectories",
    "pairs_asked": "comparisons asked",
    "env_steps": "environment steps",
    "seconds": "seconds to collect, ask and learn",
}
PANEL = (2.9, 1.8)  # inches, without the words around it
THOUSANDS = {1e9: " G", 1e6: " M", 1e3: " k"}


def curve(
    runs: Sequence[RecordedRun], axis: str, quantity: str = "return_mean"
) -> tuple[Float64, Float64, Float64, Bool]:
    """Mean return and standard error at every cost, and whether all runs have reached it.

    The costs are those of the run that reached the highest; other runs are interpolated between their iterations.
    """
    known = [np.isfinite(run.metrics[quantity]) for run in runs]
    costs = [run.metrics[axis][each] for run, each in zip(runs, known, strict=True)]
    values = [run.metrics[quantity][each] for run, each in zip(runs, known, strict=True)]
    farthest = max(costs, key=lambda cost: float(cost[-1]))
    at = farthest[farthest >= max(cost[0] for cost in costs)]
    if all(run.finished for run in runs):  # then the curve ends with the cheapest run
        at = at[at <= min(cost[-1] for cost in costs)]
    returns = np.array([np.interp(at, cost, value, right=np.nan) for cost, value in zip(costs, values, strict=True)])
    return at, np.nanmean(returns, axis=0), stats.standard_error(returns), np.isfinite(returns).all(axis=0)


def draw_curves(
    runs: Sequence[RecordedRun],
    axis: str,
    looks: Looks,
    *,
    title: str,
    notes: Sequence[str],
    quantity: str = "return_mean",
) -> Figure:
    """The paper's figure: a panel for each task, a line with its standard error for each agent."""
    tasks = names(runs, "task")
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    left, right, between = 0.75, 0.25, (0.6, 0.6)  # inches
    with mpl.rc_context(STYLE):
        width = max(5.0, left + right + PANEL[0] * columns + between[0] * (columns - 1))
        figure = Figure(figsize=(width, 1))
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        lines = {}
        for panel, task in zip(panels, tasks, strict=False):
            panel.set_title(short(task), y=1.0)
            for agent in names(select(runs, task=task), "agent"):
                group = select(runs, task=task, agent=agent)
                lines[agent] = _draw_curve(panel, *curve(group, axis, quantity), looks[agent])
            panel.set_ylim(bottom=min(0.0, panel.dataLim.y0))
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=axis != "seconds"))
            panel.xaxis.set_major_formatter(_tick)
        for panel in panels[len(tasks) :]:
            panel.remove()
        for panel in panels[: len(tasks)][-columns:]:
            panel.set_xlabel(AXES[axis])
        for panel in panels[: len(tasks) : columns]:
            panel.set_ylabel("return")
        # Everything is placed in inches: matplotlib's own layout takes longer than drawing the curves.
        top = 0.65 + add_title(figure, title)
        bottom = 0.65 + add_legend(figure, dict(sorted(lines.items())), notes, outside=False)
        height = top + bottom + PANEL[1] * rows + between[1] * (rows - 1)
        panel_width = (width - left - right - between[0] * (columns - 1)) / columns
        figure.set_size_inches(width, height)
        figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
        figure.subplots_adjust(wspace=between[0] / panel_width, hspace=between[1] / PANEL[1])
        for panel in panels[: len(tasks)]:
            panel.xaxis.set_label_coords(0.5, -0.3 / PANEL[1])
            panel.yaxis.set_label_coords(-0.55 / panel_width, 0.5)
    return figure


def _tick(value: float, _: int | None = None) -> str:
    """A number on an axis: 0.5, 20, 1.5 k, 2 M."""
    for unit, suffix in THOUSANDS.items():
        if abs(value) >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:g}"


def _draw_curve(
    panel: Axes, at: Float64, mean: Float64, error: Float64, complete: Bool, look: Mapping[str, Any]
) -> Any:
    """Solid as far as all seeds have come, dotted beyond; a single point as a point."""
    whole = int(complete.sum())  # first the complete part, then the rest
    (line,) = panel.plot(at[:whole], mean[:whole], lw=1.4, marker="." if whole == 1 else None, **look)
    if whole < len(at):
        panel.plot(at[max(whole - 1, 0) :], mean[max(whole - 1, 0) :], lw=1.1, color=look["color"], ls=":")
    panel.fill_between(at, mean - error, mean + error, color=look["color"], alpha=0.2, lw=0)
    return line
