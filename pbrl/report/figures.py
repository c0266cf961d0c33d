"""The figures of a report: what all have in common, statistics and robustness. Curves are in `pbrl.report.curves`."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from pbrl.report import stats
from pbrl.report.runs import Run
from pbrl.report.tables import Bootstrap, Table, names, scores, select, shared_tasks

Looks = Mapping[str, Mapping[str, Any]]  # by agent

# Okabe and Ito's colours, which colour-blind people can tell apart, without the yellow that nobody sees on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
DASHES = ["-", "--", "-."]
WARNING = "#B03A00"
THRESHOLDS = np.linspace(0.0, 1.0, 101)
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "axes.titlesize": "medium",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
}


@dataclass(frozen=True)
class Drawing:
    """A figure in both formats."""

    png: bytes
    svg: bytes


def render(figure: Figure, name: str) -> Drawing:
    """Both formats, the same bytes for the same numbers. `savefig` would do, but draws everything twice."""
    png, svg = io.BytesIO(), io.BytesIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
        figure.set_layout_engine("none")  # it has done its work
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return Drawing(png.getvalue(), svg.getvalue())


def styles(agents: Sequence[str]) -> Looks:
    """A look for each agent, the same in all figures."""
    count = len(COLOURS)
    return {
        agent: {"color": COLOURS[i % count], "linestyle": DASHES[i // count % len(DASHES)]}
        for i, agent in enumerate(agents)
    }


def add_legend(figure: Figure, lines: Mapping[str, Any], notes: Sequence[str], *, outside: bool = True) -> float:
    """Below the panels, under what a reader must know; the inches it takes."""
    width = figure.get_size_inches()[0]
    said = [line for note in notes for line in textwrap.wrap(note, int(width * 14))]
    rows = -(-len(lines) // max(1, int(width / 1.6)))
    if lines or said:
        legend = figure.legend(
            lines.values(),
            lines.keys(),
            loc="outside lower center" if outside else "lower center",
            ncols=-(-len(lines) // max(1, rows)),  # filled column by column: as even as can be
            title="\n".join(said) or None,
        )
        legend.get_title().set(color=WARNING, fontsize="small")
    return 0.17 * len(said) + 0.25 * rows


def profiles(runs: Sequence[Run], looks: Looks, bootstrap: Bootstrap, *, title: str, notes: Sequence[str]) -> Figure:
    """Performance profiles: the share of runs that score more than each threshold, over the tasks that all have."""
    tasks = shared_tasks(runs)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        panel = figure.subplots()
        lines = {}
        for agent in names(runs, "agent"):
            benchmark = scores(select(runs, agent=agent), tasks)
            share = bootstrap(lambda each: stats.profile(each, THRESHOLDS), benchmark, bounds=(0, 1))
            (lines[agent],) = panel.step(THRESHOLDS, share.value, where="post", lw=1.6, **looks[agent])
            panel.fill_between(THRESHOLDS, share.low, share.high, step="post", color=looks[agent]["color"], alpha=0.15)
        panel.set(xlabel="score τ (return / maximum)", ylabel="share of runs above τ", xlim=(0, 1), ylim=(-0.02, 1.02))
        figure.suptitle(title)
        add_legend(figure, lines, notes)
    return figure


def aggregates(table: Table, looks: Looks, *, title: str, notes: Sequence[str]) -> Figure:
    """Interquartile mean and optimality gap with their intervals."""
    kinds = {
        "interquartile_mean": "interquartile mean (higher is better)",
        "optimality_gap": "optimality gap (lower is better)",
    }
    agents = list(dict.fromkeys(str(record["agent"]) for record in table.records))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8, 1.6 + 0.36 * len(agents)), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, (kind, label) in zip(panels, kinds.items(), strict=True):
            for record in table.records:
                if record["statistic"] == kind:
                    _dot(panel, record, agents.index(str(record["agent"])), looks[str(record["agent"])]["color"])
            panel.set(xlabel=label, ylim=(len(agents) - 0.5, -0.5))
            panel.set_yticks(range(len(agents)), agents)
        figure.suptitle(title)
        add_legend(figure, {}, notes)
    return figure


def improvement(table: Table, looks: Looks, *, title: str, notes: Sequence[str]) -> Figure:
    """The probability that one agent beats another, for every two."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 1.6 + 0.32 * len(table.records)), layout="constrained")
        panel = figure.subplots()
        for row, record in enumerate(table.records):
            _dot(panel, record, row, looks[str(record["agent"])]["color"])
        panel.axvline(0.5, color="#888888", lw=1, ls=":")
        panel.set(xlabel="probability that a run of the first beats one of the second", xlim=(-0.02, 1.02))
        panel.set_ylim(len(table.records) - 0.5, -0.5)
        panel.set_yticks(range(len(table.records)), [f"{each['agent']} over {each['over']}" for each in table.records])
        figure.suptitle(title)
        add_legend(figure, {}, notes)
    return figure


def _dot(panel: Axes, record: Mapping[str, Any], row: int, colour: str) -> None:
    panel.plot([record["low"], record["high"]], [row, row], color=colour, lw=5, alpha=0.35, solid_capstyle="butt")
    panel.plot(record["value"], row, "o", color=colour, ms=6)


def robustness(table: Table) -> Figure:
    """The matrix agent by teacher."""
    agents, teachers = [row[0] for row in table.rows], list(table.columns[1:])
    values = np.full((len(agents), len(teachers)), np.nan)
    for record in table.records:
        values[agents.index(str(record["agent"])), teachers.index(str(record["teacher"]))] = record["value"]
    with mpl.rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(2.5 + 1.25 * len(teachers), 1.3 + 0.55 * len(agents)), layout="constrained")
        panel = figure.subplots()
        top = max(1.0, float(np.nanmax(values)))
        image = panel.imshow(values, cmap="cividis", vmin=0, vmax=top, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            colour = "black" if np.isnan(value) or value > 0.6 * top else "white"
            panel.text(
                column, row, "none" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=colour
            )
        panel.set_xticks(range(len(teachers)), [textwrap.fill(teacher, 16) for teacher in teachers])
        panel.set_yticks(range(len(agents)), agents)
        panel.spines[:].set_visible(False)
        figure.colorbar(image, label="share of the return\nwith the rational teacher")
    return figure
