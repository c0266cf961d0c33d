"""The report of the fine-tuning experiment: the paper's figure, its numbers, the sweeps, and one HTML page.

    python -m pbrl.finetune.report runs_finetune

For each setting and method: the hyperparameters with the lowest validation loss in the sweep (runs without a target),
and, from the runs with a target, the iterations until SGD's accuracy was exceeded. A run that used all its iterations
before that is censored: the table counts it separately, and the figure shows its number of iterations as a lower bound.
Every run has a line in a second table, which says why it is not in the first, and a learning curve.
Everything is written to <folder>/report, in the formats of `pbrl.report`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter
from rich.console import Console
from scipy import stats

from pbrl.finetune.d90 import D90
from pbrl.finetune.dimension import read_off
from pbrl.finetune.runs import Hyperparameters, TuningRecord, find_all, losses
from pbrl.report import page
from pbrl.report.figures import styles
from pbrl.report.files import Output, file_name
from pbrl.report.panels import panels
from pbrl.report.tables import Table
from pbrl.run.command_line import wrapped
from pbrl.types import Float64

RESAMPLES = 2000  # of the bootstrap of d90
Sweep = dict[Hyperparameters, float]  # hyperparameters -> lowest validation loss


@dataclass(frozen=True)
class Cell:
    """One method in one setting."""

    task: str
    setting: str
    method: str
    chosen: Hyperparameters
    target: float  # SGD's best accuracy; of SGD itself: the mean best accuracy
    iterations: Float64  # [runs] until the target was exceeded, or until SGD's best; nan: censored
    budget: int  # iterations allowed for a run
    best: Float64  # [runs] best accuracy
    majority: float  # accuracy of always predicting the majority class; nan: not known
    dimension: tuple[D90, D90] | None  # d90 of the accuracy, and of its gain
    size: float  # D, the number of tuned weights, an upper limit of d90; infinite: not known

    @property
    def censored(self) -> int:
        """How many runs never exceeded the target."""
        return int(np.isnan(self.iterations).sum())


def interval(values: Float64) -> tuple[float, float, float]:
    """Mean and its 95 % interval (Student's t); nan for fewer than two runs."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def counts(values: Float64) -> tuple[float, float, float]:
    """Geometric mean of counts and its 95 % interval, from `interval` of their logarithms: never below 0."""
    mean, low, high = np.exp(interval(np.log(values)))
    return float(mean), float(low), float(high)


def collect(every: Sequence[TuningRecord], root: Path) -> tuple[list[Cell], dict[tuple[str, str, str], Sweep]]:
    """The results of all runs in a folder: cells of the table, and sweeps by task, setting and method."""
    groups: dict[tuple[str, str, str], list[TuningRecord]] = defaultdict(list)
    for run in every:
        groups[run.task, run.setting, run.method].append(run)
    sweeps = {key: losses(runs) for key, runs in groups.items()}
    cells = [cell for key, runs in groups.items() if (cell := _cell(root, key, runs, sweeps[key]))]
    return sorted(cells, key=lambda cell: (cell.task, cell.setting, cell.method)), sweeps


def _cell(root: Path, key: tuple[str, str, str], runs: Sequence[TuningRecord], sweep: Sweep) -> Cell | None:
    task, setting, method = key
    chosen = chosen_of(method, runs, sweep)
    measured = [run for run in runs if why_not_counted(run, chosen) == ""]
    if chosen is None or not measured:
        return None
    target = measured[0].target
    if target is None:
        target = float(np.mean([run.best_accuracy for run in measured]))
    taken = [float(run.iterations_to_best) if method == "sgd" else run.reached(target) for run in measured]
    path = root / task / setting / "intrinsic_dimension.json"
    found = json.loads(path.read_text()) if path.exists() else None
    return Cell(
        task,
        setting,
        method,
        chosen,
        target,
        np.array(taken),
        int(measured[0].settings["iterations"]),
        np.array([run.best_accuracy for run in measured]),
        found["majority"] if found else math.nan,
        read_off(found, RESAMPLES) if found else None,
        found.get("size", math.inf) if found else math.inf,
    )


def chosen_of(method: str, runs: Sequence[TuningRecord], sweep: Sweep) -> Hyperparameters | None:
    """The hyperparameters whose runs are counted: SGD's best, and of others those of their runs with a target."""
    if method == "sgd":
        return min(sweep, key=lambda choice: sweep[choice]) if sweep else None
    return next((run.hyperparameters for run in runs if run.finished and run.target is not None), None)


def why_not_counted(run: TuningRecord, chosen: Hyperparameters | None) -> str:
    """Why a run is not among those whose iterations to SGD's accuracy are counted; empty if it is."""
    if not run.finished:
        return "unfinished"
    if run.method != "sgd" and run.target is None:
        return "no target"
    return "" if run.hyperparameters == chosen else "other lr or mu"


def every_run(runs: Sequence[TuningRecord], sweeps: Mapping[tuple[str, str, str], Sweep]) -> Table:
    """One line for each run."""
    columns = ["setting", "method", "seed", "lr", "mu", "target", "iterations", "best accuracy", "not counted above"]
    made = Table("runs", "Every run", columns, keys=2)
    for run in runs:
        key = run.task, run.setting, run.method
        group = [each for each in runs if (each.task, each.setting, each.method) == key]
        why = why_not_counted(run, chosen_of(run.method, group, sweeps[key]))
        lr, mu = run.hyperparameters
        ended = f" ({run.ended})" if run.ended else ""
        numbers = [f"{lr:g}", "-" if mu is None else f"{mu:g}", "-" if run.target is None else f"{run.target:.3f}"]
        made_of = f"{run.iterations:,} of {run.settings['iterations']:,}{ended}"
        name = f"{run.task}/{run.setting}"
        made.rows.append([name, run.method, str(run.seed), *numbers, made_of, f"{run.best_accuracy:.3f}", why])
        about = {"task": run.task, "setting": run.setting, "method": run.method, "seed": run.seed, "lr": lr, "mu": mu}
        state = {"target": run.target, "iterations": run.iterations, "ended": run.ended, "not_counted": why}
        made.records.append({**about, **state, "best_accuracy": run.best_accuracy, "folder": str(run.folder)})
    return made


def draw_curves(runs: Sequence[TuningRecord]) -> dict[str, Figure]:
    """The learning curves of each setting: validation accuracy against iterations, a line for each run."""
    drawn = {}
    for task, setting in sorted({(run.task, run.setting) for run in runs}):
        here = [run for run in runs if (run.task, run.setting) == (task, setting) and len(run.iteration)]
        if not here:
            continue
        looks = styles(sorted({run.method for run in here}))
        figure, (axis,) = panels(1)
        for run in here:
            first = run.method not in axis.get_legend_handles_labels()[1]
            label, colour = run.method if first else None, looks[run.method]["color"]
            axis.plot(run.iteration, run.accuracy, ".-", lw=1, ms=3, alpha=0.8, color=colour, label=label)
        axis.set(xlabel="iteration", ylabel="validation accuracy", title=f"{task}, {setting}")
        axis.legend()
        drawn[file_name("curves", task, setting)] = figure
    return drawn


def table(cells: Sequence[Cell]) -> Table:
    """One line for each setting and method."""
    columns = ["setting", "method", "d90 of the gain", "lr", "mu", "target", "iterations", "best accuracy", "runs"]
    made = Table("finetune", "Iterations to SGD's best accuracy: geometric mean (95 % interval)", columns, keys=2)
    for cell in cells:
        lr, mu = cell.chosen
        best, low, high = interval(cell.best)
        made.rows.append([
            f"{cell.task}/{cell.setting}",
            cell.method,
            "-" if cell.dimension is None else str(cell.dimension[1]),
            f"{lr:g}",
            "-" if mu is None else f"{mu:g}",
            f"{cell.target:.3f}",
            in_words(cell),
            f"{best:.3f}" + ("" if math.isnan(low) else f" ({low:.3f} to {high:.3f})"),
            str(len(cell.iterations)),
        ])  # fmt: skip
        made.records.append(record(cell))
    return made


def record(cell: Cell) -> dict[str, object]:
    """The numbers of a line."""
    arrived = cell.iterations[np.isfinite(cell.iterations)]
    mean, low, high = counts(arrived) if len(arrived) else (math.nan,) * 3
    none = (math.nan,) * 3
    accuracy, gain = [(d.value, d.low, d.high) for d in cell.dimension] if cell.dimension else (none, none)
    return {
        "task": cell.task, "setting": cell.setting, "method": cell.method, "lr": cell.chosen[0], "mu": cell.chosen[1],
        "target": cell.target, "runs": len(cell.iterations), "censored": cell.censored, "budget": cell.budget,
        "iterations": mean, "low": low, "high": high, "best_accuracy": float(cell.best.mean()),
        "majority": cell.majority, "d90": accuracy[0], "d90_gain": gain[0], "d90_gain_low": gain[1],
        "d90_gain_high": gain[2],
    }  # fmt: skip


def in_words(cell: Cell) -> str:
    """The number of iterations in words, and how many runs did not reach the target."""
    runs = len(cell.iterations)
    if cell.censored == runs:
        return f"none of {runs} runs within {cell.budget}"
    mean, low, high = counts(cell.iterations[np.isfinite(cell.iterations)])
    words = f"{mean:.0f}" + ("" if math.isnan(low) else f" ({low:.0f} to {high:.0f})")
    return words + (f", and {cell.censored} of {runs} runs not within {cell.budget}" if cell.censored else "")


def taken(cell: Cell) -> Float64:
    """The iterations of each run [runs]; of a censored run its budget, a lower bound."""
    return np.where(np.isnan(cell.iterations), cell.budget, cell.iterations)


def trends(cells: Sequence[Cell]) -> list[str]:
    """For each method: the exponent with which its iterations grow with k, by least squares over the settings."""
    lines = []
    for method in sorted({cell.method for cell in cells} - {"sgd"}):
        placed = [cell for cell in cells if cell.method == method and math.isfinite(_place(cell))]
        k = np.log([_place(cell) for cell in placed])
        if len(set(k)) < 3:
            continue
        fit = stats.linregress(k, [np.log(taken(cell)).mean() for cell in placed])
        half = float(stats.t.ppf(0.975, len(k) - 2)) * fit.stderr
        censored = sum(cell.censored for cell in placed)
        bound = f"; {censored} of {sum(len(c.iterations) for c in placed)} runs are censored" if censored else ""
        lines.append(
            f"{method}: iterations ~ k^{fit.slope:.2f} (95 % interval {fit.slope - half:.2f} to "
            f"{fit.slope + half:.2f}, {len(k)} settings{bound}); the theory says k^1"
        )
    return lines


def draw_dimensions(cells: Sequence[Cell]) -> Figure | None:
    """The paper's figure: iterations to SGD's accuracy against d90, a line for each method, 95 % bands.

    Settings with an unknown k are left out. Censored runs count with their whole budget, so a hollow point is a lower
    bound.
    """
    figure, (axis,) = panels(1)
    placed = [cell for cell in cells if math.isfinite(_place(cell))]
    for method, look in styles(sorted({cell.method for cell in placed})).items():
        points = sorted((cell for cell in placed if cell.method == method), key=_place)
        k = [_place(cell) for cell in points]
        mean, low, high = np.array([counts(taken(cell)) for cell in points]).T
        axis.plot(k, mean, label=method, **look)
        axis.fill_between(k, low, high, color=look["color"], alpha=0.2)
        for place, cell, value in zip(k, points, mean, strict=True):
            axis.plot(place, value, "o", color=look["color"], mfc="none" if cell.censored else None)
    axis.set(xscale="log", yscale="log", xlabel="intrinsic dimension k = d90", ylabel="iterations to SGD's accuracy")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.xaxis.set_minor_formatter(NullFormatter())
    if placed:
        figure.legend(title="hollow: some runs censored", loc="outside upper center", ncols=4)
    return figure if placed else None


def _place(cell: Cell) -> float:
    """k: d90 of the gain, or D if it is beyond the grid; nan or infinite if neither is known."""
    return min(cell.dimension[1].value, cell.size) if cell.dimension else math.nan


def draw_sweeps(sweeps: Mapping[tuple[str, str, str], Sweep]) -> dict[str, Figure]:
    """For each setting: lowest validation loss against lr, and over lr and mu for the methods with a radius."""
    drawn = {}
    for task, setting in sorted({key[:2] for key in sweeps}):
        here = {key[2]: sweep for key, sweep in sweeps.items() if key[:2] == (task, setting) and len(sweep) > 1}
        if not here:
            continue
        flat = {method: sweep for method, sweep in here.items() if all(mu is None for _, mu in sweep)}
        deep = {method: sweep for method, sweep in here.items() if method not in flat}
        figure, axes = panels(bool(flat) + len(deep))
        figure.suptitle(f"{task}, {setting}")
        if flat:
            for method, sweep in flat.items():
                lr = sorted(lr for lr, _ in sweep)
                axes[0].plot(lr, [_finite(sweep[each, None]) for each in lr], "o-", label=method)
            axes[0].set(xscale="log", xlabel="lr", ylabel="lowest validation loss")
            axes[0].legend()
        for axis, (method, sweep) in zip(axes[bool(flat) :], deep.items(), strict=True):
            _heat_map(axis, method, sweep)
        drawn[file_name("sweep", task, setting)] = figure
    return drawn


def _heat_map(axis: Axes, method: str, sweep: Sweep) -> None:
    lr, mu = sorted({lr for lr, _ in sweep}), sorted({mu for _, mu in sweep if mu is not None})
    values = np.array([[_finite(sweep.get((a, b), math.nan)) for b in mu] for a in lr])
    image = axis.imshow(values, origin="lower", aspect="auto", cmap="viridis_r")
    axis.set(title=method, xlabel="mu", ylabel="lr", xticks=range(len(mu)), yticks=range(len(lr)))
    axis.set_xticklabels([f"{each:g}" for each in mu])
    axis.set_yticklabels([f"{each:g}" for each in lr])
    for (row, column), value in np.ndenumerate(values):
        axis.text(column, row, "-" if math.isnan(value) else f"{value:.3f}", ha="center", va="center", fontsize=8)
    assert axis.figure is not None
    axis.figure.colorbar(image, ax=axis, label="lowest validation loss")


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan


def report(root: Path) -> None:
    """Read the runs in a folder, print their results, and write them to its folder `report`."""
    runs, left_out = find_all(root) if root.is_dir() else ([], {})
    remarks = [f"Left out: {folder}: {reason}" for folder, reason in left_out.items()]
    if not runs:
        raise SystemExit("\n  ".join([f"pbrl.finetune.report: {root} has no runs of pbrl.finetune", *remarks]))
    cells, sweeps = collect(runs, root)
    output = Output(root / "report", Console(width=None if Console().is_terminal else 160))
    found = output.table(table(cells), show=True)
    if not cells:
        output.say(nothing := "No run can be counted yet: that takes finished runs with a target, or of SGD.")
        found += page.paragraph(nothing, "warning")
    for trend in trends(cells):
        output.say(trend)
        found += page.paragraph(trend)
    if figure := draw_dimensions(cells):
        found += output.figure("intrinsic_dimension", figure, "Censored runs count with their whole budget.")
    curves = "".join(output.figure(name, figure, "A line for each run.") for name, figure in draw_curves(runs).items())
    curves += output.table(every_run(runs, sweeps), show=True)
    output.write_csv()
    tuning = "".join(output.figure(name, figure, "") for name, figure in draw_sweeps(sweeps).items())
    sections = {"Iterations and intrinsic dimension": found, "Every run": curves}
    sections |= {"Sweeps": tuning} if tuning else {}
    introduction = "".join(page.paragraph(remark, "warning") for remark in remarks)
    written = page.page("pbrl: fine-tuning by comparisons", introduction, sections)
    for remark in remarks:
        output.say(remark)
    (output.folder / "index.html").write_text(written, encoding="utf-8")
    output.say(f"The page is {output.folder / 'index.html'}; figures and tables are beside it.", "bold")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m pbrl.finetune.report",
        description=wrapped(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs_finetune"))
    try:
        report(parser.parse_args().folder)
    except OSError as error:
        raise SystemExit(f"pbrl.finetune.report: {error.strerror}: {error.filename}") from None


if __name__ == "__main__":
    main()
