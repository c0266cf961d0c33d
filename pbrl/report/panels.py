"""Figures of several panels side by side."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure with so many panels side by side."""
    figure = Figure(figsize=(6 * count, 4.5), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])
