"""The paper's figure: return against iterations, or against what was paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
# What can be drawn: a column of the record, and the label of its axis.
QUANTITIES = {"return_mean": "return", "eval_return": "return", "teacher_error_rate": "share of answers"}
PANEL = (2.9, 1.8)  # inches, without the words around it
THOUSANDS = {1e9: " G", 1e6: " M", 1e3: " k"}


class Curve(NamedTuple):
    """A mean over runs, with its 95 % interval."""

    at: Float64  # [n] the costs
    mean: Float64  # [n]
    low: Float64  # [n]; nan for a single run
    high: Float64  # [n]
    complete: Bool  # [n] whether all runs have got that far


class Plot(NamedTuple):
    """The curves of a figure, by task and agent, and what its axes say."""

    curves: Mapping[str, Mapping[str, Curve]]
    x: str
    y: str
    whole: bool  # whether the horizontal axis counts something
    top: float  # the highest value that is possible


def curve(runs: Sequence[RecordedRun], axis: str, quantity: str = "return_mean", smooth: int = 1) -> Curve:
    """The mean of a quantity at every cost.

    The costs are those of the run that reached the highest; other runs are interpolated between their iterations.
    smooth: each value is the mean of the last so many of its run.
    """
    known = [np.isfinite(run.metrics[quantity]) for run in runs]
    costs = [run.metrics[axis][each] for run, each in zip(runs, known, strict=True)]
    values = [_smoothed(run.metrics[quantity][each], smooth) for run, each in zip(runs, known, strict=True)]
    farthest = max(costs, key=lambda cost: float(cost[-1]))
    at = farthest[farthest >= max(cost[0] for cost in costs)]
    if all(run.finished for run in runs):  # then the curve ends with the cheapest run
        at = at[at <= min(cost[-1] for cost in costs)]
    returns = np.array([np.interp(at, cost, value, right=np.nan) for cost, value in zip(costs, values, strict=True)])
    mean, margin = np.nanmean(returns, axis=0), stats.margin_of_mean(returns)
    lowest, highest = _possible(runs, quantity)
    low, high = (np.clip(mean + side * margin, lowest, highest) for side in (-1, 1))
    return Curve(at, mean, low, high, np.isfinite(returns).all(axis=0))


def plot(runs: Sequence[RecordedRun], axis: str, quantity: str = "return_mean", smooth: int = 1) -> Plot:
    """The curve of every agent on every task."""
    drawn = {
        task: {
            agent: curve(select(runs, task=task, agent=agent), axis, quantity, smooth)
            for agent in names(select(runs, task=task), "agent")
        }
        for task in names(runs, "task")
    }
    top = 1.0 if quantity == "teacher_error_rate" else max(run.maximum for run in runs)
    return Plot(drawn, AXES[axis], QUANTITIES[quantity], whole=axis != "seconds", top=top)


def _smoothed(values: Float64, width: int) -> Float64:
    """The mean of the last `width` values at each, of as many as there are at the beginning."""
    sums = np.concatenate([[0.0], values.cumsum()])
    ends = np.arange(1, len(values) + 1)
    begins = np.maximum(ends - width, 0)
    return np.asarray((sums[ends] - sums[begins]) / (ends - begins))


def _possible(runs: Sequence[RecordedRun], quantity: str) -> tuple[float, float]:
    """The lowest and highest value that a quantity can have: an interval ends there."""
    if quantity == "teacher_error_rate":
        return 0.0, 1.0
    if min(float(np.nanmin(run.metrics[quantity])) for run in runs) < 0:
        return -np.inf, np.inf  # LQR's returns are negative
    return 0.0, max(run.maximum for run in runs)


def draw_curves(
    runs: Sequence[RecordedRun],
    axis: str,
    looks: Looks,
    *,
    title: str,
    notes: Sequence[str],
) -> Figure:
    """The paper's figure: a panel for each task, a line with its interval for each agent."""
    return draw(plot(runs, axis), looks, title=title, notes=notes)


def draw(plot: Plot, looks: Looks, *, title: str, notes: Sequence[str]) -> Figure:
    """A panel for each task, a line with its interval for each agent."""
    tasks = list(plot.curves)
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
            for agent, each in plot.curves[task].items():
                lines[agent] = _draw_curve(panel, each, looks[agent])
            panel.set_ylim(bottom=min(0.0, panel.dataLim.y0))
            panel.xaxis.set_major_locator(MaxNLocator(5, integer=plot.whole))
            panel.xaxis.set_major_formatter(_tick)
        for panel in panels[len(tasks) :]:
            panel.remove()
        for panel in panels[: len(tasks)][-columns:]:
            panel.set_xlabel(plot.x)
        for panel in panels[: len(tasks) : columns]:
            panel.set_ylabel(plot.y)
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


def _draw_curve(panel: Axes, curve: Curve, look: Mapping[str, Any]) -> Any:
    """Solid as far as all seeds have come, dotted beyond; a single point as a point."""
    at, mean, low, high, complete = curve
    whole = int(complete.sum())  # first the complete part, then the rest
    (line,) = panel.plot(at[:whole], mean[:whole], lw=1.4, marker="." if whole == 1 else None, **look)
    if whole < len(at):
        panel.plot(at[max(whole - 1, 0) :], mean[max(whole - 1, 0) :], lw=1.1, color=look["color"], ls=":")
    panel.fill_between(at, low, high, color=look["color"], alpha=0.2, lw=0)
    return line
