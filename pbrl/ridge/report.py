"""The results of the ridge experiment: the table in the terminal and as CSV, and three figures."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from scipy import stats

from pbrl.report.panels import panels
from pbrl.ridge.experiment import Cell, Experiment, Track
from pbrl.types import Float64

COLUMNS = ["optimizer", "oracle", "direction", "k"]
COLUMNS += ["iterations_mean", "iterations_low", "iterations_high", "comparisons_mean", "paper"]


def interval(values: Float64) -> tuple[float, float, float]:
    """Mean and 95 % interval of the mean (Student's t); NaN if a run never reached the target."""
    mean = float(values.mean())
    half = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values)))
    return mean, mean - half, mean + half


def exponent(cells: Sequence[Cell]) -> float:
    """Slope of log comparisons against log k, by least squares; NaN if a run never reached the target."""
    if len(cells) < 2:
        return math.nan
    k = np.log([cell.k for cell in cells])
    comparisons = np.log([cell.comparisons.mean() for cell in cells])
    return float(((k - k.mean()) * comparisons).sum() / ((k - k.mean()) ** 2).sum())


def by_track(cells: Sequence[Cell]) -> dict[Track, list[Cell]]:
    """The cells of each track, in order."""
    return {track: [cell for cell in cells if cell.track == track] for track in {cell.track: 0 for cell in cells}}


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    """One row per cell; numbers are empty if a seed never reached the target. `paper` counts comparisons."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for cell in cells:
            numbers = (*interval(cell.outcome.iterations), float(cell.comparisons.mean()))
            shown = ("" if math.isnan(number) else f"{number:.2f}" for number in numbers)
            track = (cell.track.optimizer, cell.track.oracle, cell.track.direction)
            writer.writerow((*track, cell.k, *shown, cell.paper or ""))


def show(cells: Sequence[Cell]) -> None:
    """Print the paper's table for both kinds of directions, then the comparisons of every optimiser."""
    console = Console(width=None if Console().is_terminal else 132)
    published = [cell for cell in cells if cell.paper]
    for direction in {cell.track.direction: 0 for cell in published}:
        chosen = [cell for cell in published if cell.track.direction == direction]
        for measured in by_track(chosen).values():
            console.print(paper_table(measured))
        console.print(verdict(chosen), "\n", sep="")
    for oracle in {cell.track.oracle: 0 for cell in cells}:
        console.print(peer_table([cell for cell in cells if cell.track.oracle == oracle]))
    console.print(
        "In brackets: c of the step c / k. Per cent: seeds that reached the target within the budget, if not all."
    )


def paper_table(cells: Sequence[Cell]) -> Table:
    """Iterations and comparisons beside the paper's, the average gradient norm beside its bound."""
    track = cells[0].track
    table = Table(title=f"{track.optimizer}, {track.oracle}, {track.direction} directions", title_justify="left")
    headings = ("k", "iterations [95 %]", "paper", "comparisons", "paper", "mean |grad f|", "theorem's bound")
    for heading in headings:
        table.add_column(heading, justify="right")
    for cell in cells:
        mean, low, high = interval(cell.outcome.iterations)
        iterations = arrived(cell) if math.isnan(mean) else f"{mean:,.0f} [{low:,.0f}, {high:,.0f}]"
        comparisons = "" if math.isnan(mean) else f"{cell.comparisons.mean():,.0f}"
        paper = cell.paper or 0
        theory = ("", "") if cell.bound is None else (f"{cell.average:.3f}", f"{cell.bound:.3f}")
        published = f"{math.ceil(paper / cell.votes):,}", f"{paper:,}"
        table.add_row(str(cell.k), iterations, published[0], comparisons, published[1], *theory)
    return table


def verdict(cells: Sequence[Cell]) -> str:
    """Whether one kind of directions reproduces the paper's numbers."""
    off = np.max([abs(cell.paper / cell.comparisons.mean() - 1) for cell in cells if cell.paper])  # NaN stays NaN
    slopes = (f"{track.oracle} {exponent(measured):.3f}" for track, measured in by_track(cells).items())
    if off <= 0.05:
        return f"Reproduces the paper: every number within {off:.1%}. Exponents of k: {', '.join(slopes)}."
    return "Does not reproduce the paper's table."


def peer_table(cells: Sequence[Cell]) -> Table:
    """Mean comparisons of every optimiser with one oracle."""
    active = sorted({cell.k for cell in cells})
    table = Table(title=f"Comparisons until the target, {cells[0].track.oracle}", title_justify="left")
    table.add_column("optimizer")
    for heading in (*(f"k = {k}" for k in active), "exponent"):
        table.add_column(heading, justify="right")
    for track, measured in by_track(cells).items():
        counts = {cell.k: f"{arrived(cell)} ({cell.size:g})" for cell in measured}
        slope = exponent(measured)
        row = [counts.get(k, "") for k in active]
        table.add_row(name(track), *row, "" if math.isnan(slope) else f"{slope:.2f}")
    return table


def arrived(cell: Cell) -> str:
    """Mean comparisons, or the share of seeds that reached the target if not all did."""
    mean = cell.comparisons.mean()
    return f"{np.isfinite(cell.comparisons).mean():.0%}" if math.isnan(mean) else f"{mean:,.0f}"


def draw(cells: Sequence[Cell], experiment: Experiment, folder: Path) -> None:
    """Draw comparisons against k, gradient norm against comparisons, success against noise: PNG and SVG."""
    oracles = {cell.track.oracle: 0 for cell in cells}
    active = sorted({cell.k for cell in cells})
    styles: dict[str, dict[str, Any]] = {}
    for cell in cells:
        i = len(styles)
        styles.setdefault(name(cell.track), {"color": f"C{i % 10}", "ls": "-" if i < 10 else "--"})

    figure, axes = panels(len(oracles))
    for oracle, axis in zip(oracles, axes, strict=True):
        for track, measured in by_track(cells).items():
            if track.oracle == oracle:
                draw_scaling(measured, axis, styles[name(track)])
        axis.set(title=oracle.replace("_", " "), xscale="log", yscale="log")
        axis.set(xlabel="intrinsic dimension k", ylabel="comparisons to the target")
        axis.set_xticks(active, [str(k) for k in active])
        axis.set_xticks([], minor=True)
        add_legend(axis)
    save(figure, folder / "comparisons_against_k")

    figure, axes = panels(len(oracles))
    for oracle, axis in zip(oracles, axes, strict=True):
        for cell in cells:
            if cell.track.oracle == oracle and cell.k == experiment.noise["k"]:
                draw_descent(cell, axis, styles[name(cell.track)])
        axis.axhline(experiment.target, color="black", lw=0.8, ls=":")
        axis.set(title=f"{oracle.replace('_', ' ')}, k = {experiment.noise['k']}", xscale="log", yscale="log")
        axis.set(xlabel="comparisons", ylabel="gradient norm, mean of the seeds")
        add_legend(axis)
    save(figure, folder / "gradient_norm")

    figure, (axis,) = panels(1)
    for cell in cells:
        if cell.success is not None:
            style = styles[name(cell.track)]
            axis.plot(experiment.noise["advantages"], cell.success, ".", label=name(cell.track), **style)
    axis.set(title=f"within {experiment.noise['budget']:,} comparisons, k = {experiment.noise['k']}")
    axis.set(xlabel="advantage p of the teacher", ylabel="share of the seeds that arrive")
    add_legend(axis)
    save(figure, folder / "success_against_noise")


def add_legend(axis: Axes) -> None:
    """A legend, if there is anything to name."""
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)


def draw_scaling(cells: Sequence[Cell], axis: Axes, style: Mapping[str, Any]) -> None:
    """Means and 95 % intervals where all seeds reached the target, the fitted slope, the paper's numbers as crosses."""
    complete = [cell for cell in cells if np.isfinite(cell.comparisons).all()]
    if not complete:
        return
    mean, low, high = np.array([interval(cell.comparisons) for cell in complete]).T
    slope = exponent(complete)
    label = name(cells[0].track) + ("" if math.isnan(slope) else f": $k^{{{slope:.2f}}}$")
    k = [cell.k for cell in complete]
    axis.errorbar(k, mean, yerr=(mean - low, high - mean), marker=".", capsize=2, label=label, **style)
    if cells[0].paper and cells[0].track.direction == "sphere":
        paper = [cell.paper or math.nan for cell in cells]
        axis.plot([cell.k for cell in cells], paper, "kx", label="the paper's table", zorder=3)


def draw_descent(cell: Cell, axis: Axes, style: Mapping[str, Any]) -> None:
    """Gradient norm against comparisons."""
    norm = cell.outcome.gradient_norm
    comparisons = np.arange(len(norm)) * cell.outcome.pairs_per_round * cell.votes
    axis.plot(comparisons[1:], norm[1:], lw=1, label=name(cell.track), **style)


def name(track: Track) -> str:
    """The name of a track in a panel."""
    return f"{track.optimizer}, {track.direction}"


def save(figure: Figure, path: Path) -> None:
    """Write PNG and SVG, the same bytes for the same numbers."""
    with mpl.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path.with_suffix(".png"), dpi=110)
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
