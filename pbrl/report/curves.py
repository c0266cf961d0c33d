"""The paper's figure: return against iterations, or against what was paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pbrl.report import stats
from pbrl.report.figures import STYLE, Looks, add_legend
from pbrl.report.runs import Run
from pbrl.report.tables import names, select
from pbrl.types import Bool, Float64

# What a return can be drawn against: a column of the record, and how an axis calls it.
AXES = {
    "iteration": "iteration",
    "trajectories": "trajectories",
    "pairs_asked": "comparisons asked",
    "env_steps": "environment steps",
    "seconds": "seconds to collect, ask and learn",
}
PANEL = (3.7, 2.7)  # inches


def curve(runs: Sequence[Run], axis: str) -> tuple[Float64, Float64, Float64, Bool]:
    """Mean return and standard error at every cost, and whether all runs have got there.

    The costs are those of the run that has got farthest; other runs are interpolated between their iterations.
    """
    costs = [run.metrics[axis] for run in runs]
    farthest = max(costs, key=lambda cost: float(cost[-1]))
    at = farthest[farthest >= max(cost[0] for cost in costs)]
    if all(run.finished for run in runs):  # then nothing more will come
        at = at[at <= min(cost[-1] for cost in costs)]
    returns = np.array([np.interp(at, run.metrics[axis], run.metrics["return_mean"], right=np.nan) for run in runs])
    return at, np.nanmean(returns, axis=0), stats.standard_error(returns), np.isfinite(returns).all(axis=0)


def draw_curves(runs: Sequence[Run], axis: str, looks: Looks, *, title: str, notes: Sequence[str]) -> Figure:
    """The paper's figure: a panel for each task, a line with its standard error for each agent."""
    tasks = names(runs, "task")
    across = min(3, len(tasks))
    down = -(-len(tasks) // across)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(PANEL[0] * across, 5), PANEL[1] * down + 1.2))
        panels = figure.subplots(down, across, squeeze=False).ravel()
        lines = {}
        for panel, task in zip(panels, tasks, strict=False):
            panel.set_title(task, y=1.0)
            for agent in names(select(runs, task=task), "agent"):
                group = select(runs, task=task, agent=agent)
                lines[agent] = _draw_curve(panel, *curve(group, axis), looks[agent])
            panel.set_ylim(bottom=min(0.0, panel.dataLim.y0))
            panel.locator_params(axis="x", nbins=5)
            panel.xaxis.set_major_formatter(EngFormatter(sep=" "))
            # Left to itself, matplotlib measures every tick's label to place these: a quarter of all drawing.
            panel.xaxis.set_label_coords(0.5, -0.16)
            panel.yaxis.set_label_coords(-0.15, 0.5)
        for panel in panels[len(tasks) :]:
            panel.remove()
        for panel in panels[: len(tasks)][-across:]:
            panel.set_xlabel(AXES[axis])
        for panel in panels[: len(tasks) : across]:
            panel.set_ylabel("return")
        figure.suptitle(title)
        below = add_legend(figure, dict(sorted(lines.items())), notes, outside=False)
        _margins(figure, left=0.7, right=0.2, top=0.65, bottom=below + 0.6, between=(0.5, 0.55))
    return figure


def _margins(
    figure: Figure, *, left: float, right: float, top: float, bottom: float, between: tuple[float, float]
) -> None:
    """Room for words, in inches. Matplotlib's own layout takes longer than drawing the curves."""
    width, height = figure.get_size_inches()
    grid = figure.axes[0].get_subplotspec().get_gridspec()  # type: ignore[union-attr]
    panel_width = (width - left - right - between[0] * (grid.ncols - 1)) / grid.ncols
    panel_height = (height - top - bottom - between[1] * (grid.nrows - 1)) / grid.nrows
    figure.subplots_adjust(left / width, bottom / height, 1 - right / width, 1 - top / height)
    figure.subplots_adjust(wspace=between[0] / panel_width, hspace=between[1] / panel_height)


def _draw_curve(
    panel: Axes, at: Float64, mean: Float64, error: Float64, complete: Bool, look: Mapping[str, Any]
) -> Any:
    """Solid as far as all seeds are there, dotted beyond; a lone point as a point."""
    whole = int(complete.sum())  # complete, then not
    (line,) = panel.plot(at[:whole], mean[:whole], lw=1.4, marker="." if whole == 1 else None, **look)
    if whole < len(at):
        panel.plot(at[max(whole - 1, 0) :], mean[max(whole - 1, 0) :], lw=1.1, color=look["color"], ls=":")
    panel.fill_between(at, mean - error, mean + error, color=look["color"], alpha=0.2, lw=0)
    return line
