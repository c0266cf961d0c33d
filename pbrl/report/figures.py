"""The figures of a report: what they share, statistics and robustness. Curves are in `pbrl.report.curves`."""

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
from pbrl.report.runs import YARDSTICK, RecordedRun
from pbrl.report.tables import Bootstrap, Table, names, scores, select, shared_tasks
from pbrl.report.text import digest

Looks = Mapping[str, Mapping[str, Any]]  # by agent

# Okabe and Ito's colours, which colour-blind people can tell apart, without the yellow that is invisible on white.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000"]
DASHES = ["-", "--", "-."]
LOOKS = [(colour, dash) for dash in DASHES for colour in COLOURS]
# The suite's own agents: no two look the same, and as few as can be of one figure share a colour.
OWN_COLOURS = {"ncrs": 0, "zpg": 1, "dpo": 2, "ppo_rlhf": 3, "ncrs_single": 4, "pes": 5, "random": 6}
OWN_LOOKS = {name: LOOKS[i] for name, i in OWN_COLOURS.items()} | {
    "ncrs_adaptive": (COLOURS[0], "-."),
    "prefppo": (COLOURS[3], "-."),
    "pebble": (COLOURS[4], "-."),
    f"sac_true{YARDSTICK}": (COLOURS[6], "-."),
    f"ppo_true{YARDSTICK}": (COLOURS[1], "-."),
}
REFERENCE = " (reference)"  # after the name of an agent of the reference: its colour, dashed
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
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}


@dataclass(frozen=True)
class Drawing:
    """A figure in both formats."""

    png: bytes
    svg: bytes


def render(figure: Figure, name: str) -> Drawing:
    """Draw a figure in both formats: the same bytes for the same numbers. `savefig` would draw everything twice."""
    png, svg = io.BytesIO(), io.BytesIO()
    with mpl.rc_context({**STYLE, "svg.hashsalt": name}):
        figure.set_dpi(130)
        FigureCanvasAgg(figure).print_png(png)  # type: ignore[no-untyped-call]
        figure.set_layout_engine("none")  # the layout is done
        FigureCanvasSVG(figure).print_svg(svg, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return Drawing(png.getvalue(), svg.getvalue())


def styles(agents: Sequence[str]) -> Looks:
    """A colour and a dash for each agent, chosen by its name so that it looks the same in every report.

    Only if two names choose the same look, or there are more agents than looks, does it depend on the others.
    """
    others = [look for look in LOOKS if look not in OWN_LOOKS.values()]
    taken = {name: look for name, look in OWN_LOOKS.items() if name in agents}
    dashed = {f"{name}{REFERENCE}": LOOKS[len(COLOURS) + i] for name, i in OWN_COLOURS.items()}
    taken |= {name: look for name, look in dashed.items() if name in agents}
    for agent in sorted({*agents} - {*taken}):
        first = int(digest(agent), 16) % len(others)
        order = others[first:] + others[:first]
        free = [look for look in [*order, *LOOKS] if look not in taken.values()]
        taken[agent] = free[0] if free else order[0]
    return {agent: {"color": taken[agent][0], "linestyle": taken[agent][1]} for agent in agents}


def short(name: str, longest: int = 40) -> str:
    """A name that fits into a figure."""
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


def add_title(figure: Figure, title: str) -> float:
    """A title above the panels, in as many lines as it needs; the inches of the lines after the first."""
    lines = textwrap.wrap(title, int(figure.get_size_inches()[0] * 9)) or [""]
    figure.suptitle("\n".join(lines))
    return 0.2 * (len(lines) - 1)


def add_legend(figure: Figure, lines: Mapping[str, Any], notes: Sequence[str], *, outside: bool = True) -> float:
    """A legend below the panels, with notes above it; the inches that it takes."""
    width = figure.get_size_inches()[0]
    wrapped = [line for note in notes for line in textwrap.wrap(note, int(width * 14))]
    entries = [short(name) for name in lines]
    widest = 0.6 + 0.085 * max(map(len, entries), default=0)  # inches
    rows = -(-len(lines) // max(1, int(width / widest)))
    if lines or wrapped:
        legend = figure.legend(
            lines.values(),
            entries,
            loc="outside lower center" if outside else "lower center",
            ncols=-(-len(lines) // max(1, rows)),  # rows are filled as evenly as possible
            title="\n".join(wrapped) or None,
        )
        legend.get_title().set(color=WARNING, fontsize="small")
    return 0.15 * len(wrapped) + 0.25 * rows + 0.05


def _finish(figure: Figure, lines: Mapping[str, Any], *, title: str, notes: Sequence[str]) -> Figure:
    """Add title, notes and legend, and as much height as they take from the panels."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + add_title(figure, title) + add_legend(figure, lines, notes))
    return figure


def profiles(
    runs: Sequence[RecordedRun], looks: Looks, bootstrap: Bootstrap, *, title: str, notes: Sequence[str]
) -> Figure:
    """Performance profiles: the share of runs above each score, over the tasks that all agents have."""
    tasks = shared_tasks(runs)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6, 3.9), layout="constrained")
        panel = figure.subplots()
        lines = {}
        for agent in names(runs, "agent"):
            benchmark = scores(select(runs, agent=agent), tasks)
            share = bootstrap(lambda each: stats.profile(each, THRESHOLDS), benchmark, bounds=(0, 1))
            (lines[agent],) = panel.step(THRESHOLDS, share.value, where="post", lw=1.6, **looks[agent])
            panel.fill_between(THRESHOLDS, share.low, share.high, step="post", color=looks[agent]["color"], alpha=0.15)
        panel.set(xlabel="score τ (return / maximum)", ylabel="share of runs above τ", xlim=(0, 1), ylim=(-0.02, 1.02))
        return _finish(figure, lines, title=title, notes=notes)


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
            panel.locator_params(axis="x", nbins=5)
            panel.set_yticks(range(len(agents)), map(short, agents))
        return _finish(figure, {}, title=title, notes=notes)


def improvement(table: Table, looks: Looks, *, title: str, notes: Sequence[str]) -> Figure:
    """The probability that one agent beats another, for every two agents."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(6.5, 1.6 + 0.32 * len(table.records)), layout="constrained")
        panel = figure.subplots()
        for row, record in enumerate(table.records):
            _dot(panel, record, row, looks[str(record["agent"])]["color"])
        panel.axvline(0.5, color="#888888", lw=1, ls=":")
        panel.set(xlabel="probability that a run of the first beats one of the second", xlim=(-0.02, 1.02))
        panel.set_ylim(len(table.records) - 0.5, -0.5)
        pairs = [f"{short(str(each['agent']), 30)} over {short(str(each['over']), 30)}" for each in table.records]
        panel.set_yticks(range(len(pairs)), pairs)
        return _finish(figure, {}, title=title, notes=notes)


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
        labels = [textwrap.fill(teacher, 16) for teacher in teachers]
        height = 1.1 + 0.55 * len(agents) + 0.17 * max(text.count("\n") + 1 for text in labels)
        figure = Figure(figsize=(2.5 + 1.25 * len(teachers), height), layout="constrained")
        panel = figure.subplots()
        top = max(1.0, float(np.nanmax(values)))
        image = panel.imshow(values, cmap="cividis", vmin=0, vmax=top, aspect="auto")
        for (row, column), value in np.ndenumerate(values):
            colour = "black" if np.isnan(value) or value > 0.6 * top else "white"
            panel.text(
                column, row, "none" if np.isnan(value) else f"{value:.2f}", ha="center", va="center", color=colour
            )
        panel.set_xticks(range(len(teachers)), labels)
        panel.set_yticks(range(len(agents)), [short(agent) for agent in agents])
        panel.spines[:].set_visible(False)
        figure.colorbar(image, label="share of the return\nwith the rational teacher")
    return figure
