"""The end of a run: what was learnt and what it cost, as a table or in a line, and its learning curve."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.table import Table

from pbrl.run.files import write_atomically
from pbrl.types import Float64

CURVE = "curve.png"


def draw_curve(folder: Path, metrics: Mapping[str, Float64]) -> Path:
    """Write the learning curve to `curve.png`."""
    from matplotlib.figure import Figure  # here, so that a run starts sooner

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, style, label in (("return_mean", "-", "collected"), ("eval_return", "o-", "evaluated")):
        at, values = _known(metrics, name)
        axes.plot(at, values, style, label=f"{label} ({name})")
    axes.set(xlabel="iteration", ylabel="true return")
    axes.set_title(str(folder), parse_math=False)  # a $ in a name is no formula
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_atomically(folder / CURVE, picture.getvalue())
    return folder / CURVE


def line(metrics: Mapping[str, Float64]) -> str:
    """What was learnt, in a line."""
    first, last = _tenths(metrics)
    _, best, final = _evaluations(metrics)
    seconds = sum(np.nansum(metrics[name]) for name in metrics if name.startswith("seconds_"))
    return f"  return {first:.1f} -> {last:.1f}, evaluation {final:.1f} (best {best:.1f}), {seconds:,.0f} s"


def table(metrics: Mapping[str, Float64]) -> Table:
    """What was learnt, and what it cost."""
    rows = Table(show_header=False)
    rows.add_row("return, first and last tenth", " -> ".join(f"{x:.1f}" for x in _tenths(metrics)))
    rows.add_row("evaluation, first, best, last", " / ".join(f"{x:.1f}" for x in _evaluations(metrics)))
    for name in ("trajectories", "env_steps", "pairs_asked", "pairs_answered", "bits"):
        rows.add_row(name.replace("_", " "), f"{metrics[name][-1]:,.0f}")
    for name in ("collect", "ask", "learn", "evaluate"):
        seconds = np.nansum(metrics[f"seconds_{name}"])
        rows.add_row(f"seconds to {name}", f"{seconds:.1f} ({seconds / len(metrics['iteration']):.3f} per iteration)")
    return rows


def _known(metrics: Mapping[str, Float64], name: str) -> tuple[Float64, Float64]:
    """The iterations that have this number, and the number in each: an iteration may collect nothing."""
    values = metrics.get(name, np.full(len(metrics["iteration"]), np.nan))
    known = np.isfinite(values)
    return metrics["iteration"][known], values[known]


def _tenths(metrics: Mapping[str, Float64]) -> tuple[float, float]:
    """The mean return of the first tenth and of the last; nan if nothing was ever collected."""
    _, returns = _known(metrics, "return_mean")
    tenth = max(1, len(returns) // 10)
    return (float(returns[:tenth].mean()), float(returns[-tenth:].mean())) if len(returns) else (np.nan, np.nan)


def _evaluations(metrics: Mapping[str, Float64]) -> tuple[float, float, float]:
    """The first, the best and the last."""
    _, evaluations = _known(metrics, "eval_return")
    return float(evaluations[0]), float(evaluations.max()), float(evaluations[-1])
