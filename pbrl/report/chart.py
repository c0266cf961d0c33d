"""Curves that one can point at and switch off: their data as JSON in the page, drawn by `chart.js`.

The script is part of the page, which loads nothing from outside. A browser without scripts shows the PNG instead.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.report.curves import Curve, Plot
from pbrl.report.figures import Looks
from pbrl.report.text import printable
from pbrl.types import Float64

SCRIPT = (Path(__file__).parent / "chart.js").read_text()
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()  # the only script that may run
MOST_POINTS = 200  # of a curve in the page; the PNG and SVG files have all
DIGITS = 5  # significant


def chart(plot: Plot, looks: Looks, *, png: bytes, name: str) -> str:
    """The panels of `curves.draw`, for chart.js to draw."""
    panels = [
        {"title": task, "lines": [_line(agent, each, looks[agent]) for agent, each in lines.items()]}
        for task, lines in plot.curves.items()
    ]
    data = {"x": plot.x, "y": plot.y, "whole": plot.whole, "top": plot.top, "panels": panels}
    picture = f'<img alt="{html.escape(name)}" src="data:image/png;base64,{base64.b64encode(png).decode()}">'
    return (
        f'<div class="chart"><script type="application/json">{in_script(data)}</script>'
        f"<noscript>{picture}</noscript></div>"
    )


def legend(looks: Looks, agents: Sequence[str]) -> str:
    """Buttons that switch agents on and off, in view as long as their curves are."""
    buttons = []
    for agent in agents:
        text, colour = html.escape(printable(agent)), looks[agent]["color"]
        shade = "currentColor" if colour == "#000000" else colour
        swatch = f'<i style="background: {shade}"></i>'
        buttons.append(f'<button type="button" data-agent="{text}" aria-pressed="true">{swatch}{text}</button>')
    return f'<div class="legend" hidden>{"".join(buttons)}</div>\n'


def in_script(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the script element that it stands in, whatever the names in it are."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _line(agent: str, curve: Curve, look: Mapping[str, Any]) -> dict[str, Any]:
    """One curve, with at most so many points, the last among them."""
    count = len(curve.at)
    kept = np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int))
    numbers = {"x": curve.at, "y": curve.mean, "low": curve.low, "high": curve.high}
    about = {"agent": printable(agent), "colour": look["color"], "dash": look["linestyle"]}
    return {**about, "solid": int(curve.complete[kept].sum()), **{key: _rounded(v[kept]) for key, v in numbers.items()}}


def _rounded(values: Float64) -> list[float | None]:
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values.tolist()]
