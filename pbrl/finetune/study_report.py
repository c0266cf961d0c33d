"""The answer of the study: its table of settings, the figure, and the exponent of every method.

    python -m pbrl.finetune.study_report runs_finetune_study

Reads what `python -m pbrl.finetune.study` has left so far. Four targets, each against the k that the same quantity
gives: `loss` and `half`, shares of SGD's reduction of the validation loss; `gain`, a share of its gain over the
majority class in smoothed accuracy; `best`, the paper's: above SGD's best accuracy. A run that did not arrive is
censored, and `pbrl.finetune.trend` counts it as that.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from pbrl.finetune.d90 import D90, d90
from pbrl.finetune.study import METHODS
from pbrl.finetune.trend import Trend, fit
from pbrl.report import page
from pbrl.report.figures import styles
from pbrl.report.files import Output
from pbrl.report.tables import Table
from pbrl.types import Float64

RESAMPLES = 2000  # of the interval of k
TARGETS = {
    "loss": "80 % of SGD's reduction of the loss",
    "half": "50 % of SGD's reduction of the loss",
    "gain": "95 % of SGD's gain in accuracy, smoothed",
    "best": "SGD's best accuracy, exceeded",
}


@dataclass(frozen=True)
class Measured:
    """A setting, and what its seeds found."""

    name: str
    pieces: Sequence[dict[str, Any]]  # one for each seed
    by_loss: D90
    by_accuracy: D90

    def dimension(self, target: str) -> D90:
        """The intrinsic dimension in terms of the quantity that the target is about."""
        return self.by_loss if target in ("loss", "half") else self.by_accuracy

    def k(self, target: str) -> float:
        """d90; never more than D."""
        return min(self.dimension(target).value, self.size)

    def decides(self, target: str) -> bool:
        """Whether there is something to learn: SGD gains, and most seeds start short of the target."""
        if target in ("loss", "half"):
            short = [piece["start_loss"] > piece["targets"][target] for piece in self.pieces]
        else:
            short = [piece["start"] < piece["targets"]["gain"] for piece in self.pieces]
        return math.isfinite(self.k(target)) and 2 * sum(short) > len(short)

    @property
    def size(self) -> int:
        """D, the number of tuned weights."""
        return int(self.pieces[0]["size"])

    def taken(self, method: str, target: str) -> tuple[Float64, Float64]:
        """The iterations of each run, and whether it arrived; of a censored run those in which it could have."""
        runs = [piece["searches"][method] for piece in self.pieces]
        most = [math.inf if target in ("loss", "half") else piece["accuracy_iterations"] for piece in self.pieces]
        taken = [float(run[target] or min(run["iterations"], last)) for run, last in zip(runs, most, strict=True)]
        return np.array(taken), np.array([run[target] is not None for run in runs])


def collect(root: Path) -> list[Measured]:
    """All settings with at least one measured seed, by k."""
    found = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        pieces = [json.loads(path.read_text()) for path in sorted(folder.glob("measure_*.json"))]
        if pieces:
            found.append(Measured(folder.name, pieces, dimension(pieces, "loss"), dimension(pieces, "accuracy")))
    return sorted(found, key=lambda each: each.k("loss"))


def dimension(pieces: Sequence[dict[str, Any]], quantity: str) -> D90:
    """d90 of what is gained: by a loss from its start, by an accuracy over the majority class."""

    def gained(piece: dict[str, Any], name: str) -> float:
        value = piece["subspaces"][name][quantity]
        return float(piece["start_loss"] - value if quantity == "loss" else value - piece["majority"])

    runs = {int(d): [gained(piece, d) for piece in pieces] for d in pieces[0]["subspaces"] if d != "full"}
    full = [gained(piece, "full") for piece in pieces]
    return d90(runs, full=full, majority=0.0, resamples=RESAMPLES, seed=0)[1]


def trend_of(measured: Sequence[Measured], method: str, target: str, *, against: str = "k") -> Trend | None:
    """The trend of a method over the settings that decide; None if there are too few. against: k or D."""
    rows = [(each, *each.taken(method, target)) for each in measured if each.decides(target)]
    if len(rows) < 4:
        return None
    places = [each.k(target) if against == "k" else float(each.size) for each, _, _ in rows]
    x = np.concatenate([np.full(len(taken), place) for place, (_, taken, _) in zip(places, rows, strict=True)])
    setting = np.concatenate([np.full(len(taken), float(i)) for i, (_, taken, _) in enumerate(rows)])
    try:
        return fit(x, np.concatenate([row[1] for row in rows]), np.concatenate([row[2] for row in rows]), setting)
    except ValueError:
        return None


def reliability(measured: Sequence[Measured], target: str) -> float:
    """The share of the variance of log k that is not its own error; by so much an exponent is flattened."""
    decide = [each for each in measured if each.decides(target)]
    ends = [(each.dimension(target).low, min(each.dimension(target).high, each.size)) for each in decide]
    errors = [(math.log(high / low) / 3.92) ** 2 for low, high in ends if math.isfinite(low)]
    spread = float(np.var(np.log([each.k(target) for each in decide]))) if decide else 0.0
    return float(1 - np.mean(errors) / spread) if errors and spread else math.nan


def in_words(taken: Float64, arrived: Float64) -> str:
    """The median with the range of the runs; one that did not arrive counts as longer than all that did."""
    order = np.argsort(np.where(arrived, taken, np.inf), kind="stable")
    words = [f"{taken[i]:,.0f}" if arrived[i] else f"> {taken[i]:,.0f}" for i in order]
    if len(words) == 1:
        return words[0]
    middle = words[(len(words) - 1) // 2]  # of an even number the shorter one
    return f"{middle} ({words[0]} to {words[-1]})"


def table_of_settings(measured: Sequence[Measured]) -> Table:
    """One line for each setting."""
    columns = ["setting", "D", "k", "k of the accuracy", "start", "SGD's accuracy", "SGD", *METHODS, "seeds"]
    made = Table("settings", f"Iterations to {TARGETS['loss']}: median of the seeds (shortest to longest)", columns)
    for each in measured:
        sgd = [piece["sgd"]["loss"] for piece in each.pieces]
        start = np.mean([piece["start"] for piece in each.pieces])
        accuracy = np.mean([piece["sgd"]["accuracy"] for piece in each.pieces])
        made.rows.append([
            each.name + ("" if each.decides("loss") else " (left out)"),
            f"{each.size}", str(each.by_loss), str(each.by_accuracy), f"{start:.3f}", f"{accuracy:.3f}",
            in_words(np.array(sgd, float), np.array([when is not None for when in sgd])),
            *(in_words(*each.taken(method, "loss")) for method in METHODS), str(len(each.pieces)),
        ])  # fmt: skip
        for piece in each.pieces:
            made.records.append(record(each, piece))
    return made


def record(each: Measured, piece: dict[str, Any]) -> dict[str, object]:
    """The numbers of one seed."""
    ends = {"": "value", "_low": "low", "_high": "high"}
    kept = ("loss", "half", "gain", "best", "lr", "accuracy", "lowest_loss")
    return {
        "setting": each.name,
        "seed": piece["seed"],
        "D": each.size,
        **{f"k_loss{end}": getattr(each.by_loss, part) for end, part in ends.items()},
        **{f"k_accuracy{end}": getattr(each.by_accuracy, part) for end, part in ends.items()},
        **{key: piece[key] for key in ("majority", "start", "start_loss")},
        **{f"sgd_{key}": piece["sgd"][key] for key in kept},
        **{f"{method}_{key}": run[key] for method, run in piece["searches"].items() for key in kept},
        "iterations": piece["searches"]["ncrs"]["iterations"],  # made by each search; nothing in `loss`: not arrived
    }


def table_of_trends(measured: Sequence[Measured]) -> Table:
    """The exponents of every method, for all targets, against k and against D."""
    columns = ["target", "method", "against", "exponent", "95 % interval", "between", "settings", "runs", "censored"]
    made = Table("trends", "Iterations grow as k to the power of the exponent", columns, keys=3)
    for target in TARGETS:
        for method in METHODS:
            for against in ("k", "D"):
                found = trend_of(measured, method, target, against=against)
                if found is None:
                    continue
                interval = f"{found.low:.2f} to {found.high:.2f}"
                counts = [str(number) for number in (found.settings, found.runs, found.censored)]
                exponent, between = f"{found.exponent:.2f}", f"{found.between:.2f}"
                made.rows.append([target, method, against, exponent, interval, between, *counts])
                made.records.append({"target": target, "method": method, "against": against, **vars(found)})
    return made


def who_is_first(measured: Sequence[Measured], target: str) -> list[str]:
    """NCRS beside the others on the same seeds, at equal numbers of evaluations: two in every iteration."""
    lines = []
    for other in METHODS[1:]:
        ours, theirs = (
            np.concatenate([np.where(arrived, taken, np.inf) for taken, arrived in pairs])
            for pairs in ([each.taken(m, target) for each in measured if each.decides(target)] for m in ("ncrs", other))
        )
        first, later = int((ours < theirs).sum()), int((ours > theirs).sum())
        both = np.isfinite(ours) & np.isfinite(theirs)
        ratio = f"{np.exp(np.mean(np.log(ours[both] / theirs[both]))):.2f}" if both.any() else "-"
        lines.append(
            f"ncrs is at its target before {other} in {first} of {first + later} runs that differ; where both arrive, "
            f"it takes {ratio} times the iterations (geometric mean)"
        )
    return lines


def draw(measured: Sequence[Measured]) -> Figure:
    """Iterations against k, a panel for each method and target: every run a point, hollow if censored."""
    targets, looks = ("loss", "half"), styles(METHODS)
    figure = Figure(figsize=(12, 7.5), layout="constrained")
    axes = figure.subplots(len(targets), len(METHODS), sharex=True, sharey=True, squeeze=False)
    for (row, target), (column, method) in itertools.product(enumerate(targets), enumerate(METHODS)):
        axis, colour = axes[row, column], looks[method]["color"]
        decide = [each for each in measured if each.decides(target)]
        k = np.array([each.k(target) for each in decide for _ in each.pieces])
        taken, arrived = (np.concatenate(each) for each in zip(*(s.taken(method, target) for s in decide), strict=True))
        axis.plot(k[arrived], taken[arrived], "o", ms=3.5, color=colour, alpha=0.7)
        axis.plot(k[~arrived], taken[~arrived], "o", ms=3.5, color=colour, mfc="none")
        title = method
        if found := trend_of(measured, method, target):
            ends = np.array([k.min(), k.max()])
            axis.plot(ends, np.exp(found.intercept) * ends**found.exponent, color=colour)
            title = f"{method}: k to the power of {found.exponent:.2f} [{found.low:.2f}, {found.high:.2f}]"
        axis.set(xscale="log", yscale="log", title=title)
        axis.xaxis.set_major_formatter("{x:,.0f}")
        axis.yaxis.set_major_formatter("{x:,.0f}")
        if column == 0:
            axis.set_ylabel(f"iterations to {TARGETS[target]}", fontsize=9)
    figure.supxlabel("intrinsic dimension k = d90 of a setting")
    return figure


def report(root: Path) -> None:
    """Read what is there, print it, and write it to the folder `report`."""
    measured = collect(root) if root.is_dir() else []
    if not measured:
        raise SystemExit(f"pbrl.finetune.study_report: {root} has no measured settings of pbrl.finetune.study")
    output = Output(root / "report", Console(width=None if Console().is_terminal else 200))
    found = output.table(table_of_settings(measured), show=True) + output.table(table_of_trends(measured), show=True)
    flattened = reliability(measured, "loss")
    notes = [
        *who_is_first(measured, "loss"),
        f"The error of k itself flattens the exponents of `loss`, to about {flattened:.2f} of what they would be.",
    ]
    for note in notes:
        output.say(note)
        found += page.paragraph(note)
    found += output.figure(
        "study", draw(measured), "Every point is a run; a hollow one did not arrive in its iterations."
    )
    output.write_csv()
    written = page.page("pbrl: iterations and intrinsic dimension", "", {"The study": found})
    (output.folder / "index.html").write_text(written, encoding="utf-8")
    output.say(f"The page is {output.folder / 'index.html'}; figures and tables are beside it.", "bold")


def main() -> None:
    """Read the command line."""
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m pbrl.finetune.study_report", description=description)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("runs_finetune_study"))
    try:
        report(parser.parse_args().folder)
    except OSError as error:
        raise SystemExit(f"pbrl.finetune.study_report: {error.strerror}: {error.filename}") from None


if __name__ == "__main__":
    main()
