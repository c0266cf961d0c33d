"""dm_control's reward shaping, `dm_control.utils.rewards.tolerance`, for one number in compiled code.

tolerance(speed, bounds=(c.run_speed, inf), margin=c.run_speed, sigmoid=linear, value_at_margin=0.0)
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pbrl.simulation.native import Physics, compiled

inf = math.inf
Sigmoid = Callable[[float, float], float]


@compiled
def gaussian(x: float, value_at_1: float) -> float:
    """Falls off like a bell."""
    scaled = x * math.sqrt(-2 * math.log(value_at_1))
    return math.exp(-0.5 * scaled**2)


@compiled
def linear(x: float, value_at_1: float) -> float:
    """Falls off in a straight line, never below 0."""
    scaled = x * (1 - value_at_1)
    return 1 - scaled if scaled < 1 else 0.0


@compiled
def quadratic(x: float, value_at_1: float) -> float:
    """Falls off like a parabola, never below 0."""
    scaled = x * math.sqrt(1 - value_at_1)
    return 1 - scaled**2 if scaled < 1 else 0.0


@compiled
def long_tail(x: float, value_at_1: float) -> float:
    """Falls off like 1 / (1 + x^2)."""
    scaled = x * math.sqrt(1 / value_at_1 - 1)
    return 1 / (scaled**2 + 1)


@compiled
def tolerance(
    x: float,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: float = 0.0,
    sigmoid: Sigmoid = gaussian,
    value_at_margin: float = 0.1,
) -> float:
    """1 within the bounds; outside, the sigmoid of the distance, which is `value_at_margin` at the margin."""
    lower, upper = bounds
    if lower <= x <= upper:
        return 1.0
    if margin == 0:
        return 0.0
    distance = lower - x if x < lower else x - upper
    return sigmoid(distance / margin, value_at_margin)


@compiled
def small_control(physics: Physics) -> float:
    """The mean over the actuators of how near the control is to 0."""
    total = 0.0
    for control in physics.ctrl:
        total += tolerance(control, margin=1.0, sigmoid=quadratic, value_at_margin=0.0)
    return total / len(physics.ctrl)
