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
    axes.plot(metrics["iteration"], metrics["return_mean"], label="collected (return_mean)")
    evaluated = np.isfinite(metrics["eval_return"])
    axes.plot(metrics["iteration"][evaluated], metrics["eval_return"][evaluated], "o-", label="evaluated (eval_return)")
    axes.set(xlabel="iteration", ylabel="true return")
    axes.set_title(str(folder), parse_math=False)  # a $ in a name is no formula
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_atomically(folder / CURVE, picture.getvalue())
    return folder / CURVE


def line(metrics: Mapping[str, Float64]) -> str:
    """What was learnt, in a line."""
    first, last = _tenths(metrics["return_mean"])
    _, best, final = _evaluations(metrics["eval_return"])
    seconds = sum(np.nansum(metrics[name]) for name in metrics if name.startswith("seconds_"))
    return f"  return {first:.1f} -> {last:.1f}, evaluation {final:.1f} (best {best:.1f}), {seconds:,.0f} s"


def table(metrics: Mapping[str, Float64]) -> Table:
    """What was learnt, and what it cost."""
    rows = Table(show_header=False)
    returns = metrics["return_mean"]
    rows.add_row("return, first and last tenth", " -> ".join(f"{x:.1f}" for x in _tenths(returns)))
    evaluations = _evaluations(metrics["eval_return"])
    rows.add_row("evaluation, first, best, last", " / ".join(f"{x:.1f}" for x in evaluations))
    for name in ("trajectories", "env_steps", "pairs_asked", "pairs_answered", "bits"):
        rows.add_row(name.replace("_", " "), f"{metrics[name][-1]:,.0f}")
    for name in ("collect", "ask", "learn", "evaluate"):
        seconds = np.nansum(metrics[f"seconds_{name}"])
        rows.add_row(f"seconds to {name}", f"{seconds:.1f} ({seconds / len(returns):.3f} per iteration)")
    return rows


def _tenths(returns: Float64) -> tuple[float, float]:
    """The mean of the first tenth and of the last."""
    tenth = max(1, len(returns) // 10)
    return float(returns[:tenth].mean()), float(returns[-tenth:].mean())


def _evaluations(evaluations: Float64) -> tuple[float, float, float]:
    """The first, the best and the last."""
    known = evaluations[np.isfinite(evaluations)]
    return float(known[0]), float(known.max()), float(known[-1])
