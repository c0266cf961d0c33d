"""dm_control's reward shaping, `dm_control.utils.rewards.tolerance`, for one number in compiled code."""

from __future__ import annotations

import math

from pbrl.simulation.native import compiled


@compiled
def _distance(x: float, lower: float, upper: float, margin: float) -> float:
    """How far x lies outside [lower, upper], in margins; 0 inside."""
    if lower <= x <= upper:
        return 0.0
    return (lower - x if x < lower else x - upper) / margin


@compiled
def gaussian(x: float, lower: float, upper: float, margin: float, value_at_margin: float = 0.1) -> float:
    """1 within the bounds, falling off like a bell."""
    scaled = _distance(x, lower, upper, margin) * math.sqrt(-2 * math.log(value_at_margin))
    return math.exp(-0.5 * scaled**2)


@compiled
def linear(x: float, lower: float, upper: float, margin: float, value_at_margin: float) -> float:
    """1 within the bounds, falling off in a straight line, never below 0."""
    scaled = _distance(x, lower, upper, margin) * (1 - value_at_margin)
    return 1 - scaled if scaled < 1 else 0.0


@compiled
def quadratic(x: float, lower: float, upper: float, margin: float, value_at_margin: float) -> float:
    """1 within the bounds, falling off like a parabola, never below 0."""
    scaled = _distance(x, lower, upper, margin) * math.sqrt(1 - value_at_margin)
    return 1 - scaled**2 if scaled < 1 else 0.0


@compiled
def long_tail(x: float, lower: float, upper: float, margin: float, value_at_margin: float = 0.1) -> float:
    """1 within the bounds, falling off like 1 / (1 + distance^2)."""
    scaled = _distance(x, lower, upper, margin) * math.sqrt(1 / value_at_margin - 1)
    return 1 / (scaled**2 + 1)
