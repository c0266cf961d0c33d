"""The end of a run: a table of what was learnt and what it cost, and its learning curve."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from pbrl.run.files import write_atomically

CURVE = "curve.png"


def summarise(folder: Path, metrics: dict[str, Any]) -> None:
    """Print the table, and write the learning curve to `curve.png`."""
    from matplotlib.figure import Figure  # here, so that a run starts sooner

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(metrics["iteration"], metrics["return_mean"], label="collected (return_mean)")
    evaluated = np.isfinite(metrics["eval_return"])
    axes.plot(metrics["iteration"][evaluated], metrics["eval_return"][evaluated], "o-", label="evaluated (eval_return)")
    axes.set(xlabel="iteration", ylabel="true return", title=str(folder))
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=150, format="png")
    write_atomically(folder / CURVE, picture.getvalue())
    table = Table(title=str(folder), show_header=False)
    returns, evaluations = metrics["return_mean"], metrics["eval_return"][np.isfinite(metrics["eval_return"])]
    tenth = max(1, len(returns) // 10)
    table.add_row("return, first and last tenth", f"{returns[:tenth].mean():.1f} -> {returns[-tenth:].mean():.1f}")
    table.add_row(
        "evaluation, first, best, last",
        " / ".join(f"{x:.1f}" for x in (evaluations[0], evaluations.max(), evaluations[-1])),
    )
    for name in ("trajectories", "env_steps", "pairs_asked", "pairs_answered", "bits"):
        table.add_row(name.replace("_", " "), f"{metrics[name][-1]:,.0f}")
    for name in ("collect", "ask", "learn", "evaluate"):
        seconds = np.nansum(metrics[f"seconds_{name}"])
        table.add_row(f"seconds to {name}", f"{seconds:.1f} ({seconds / len(returns):.3f} per iteration)")
    table.add_row("the curve", str(folder / CURVE))
    Console().print(table)
