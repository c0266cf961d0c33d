"""A chain of links that swims to a target in the plane: `dm_control.suite.swimmer`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from pbrl.simulation.native import Physics, X, Y, compiled, fill
from pbrl.simulation.tasks.tolerance import long_tail, tolerance
from pbrl.types import Float64

TASKS = ("swimmer6", "swimmer15")
WRITES_MODEL = True  # the target is moved by moving its geom in the model


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    head: int  # body
    nose: int  # geom
    target: int  # geom
    target_size: float  # metres


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    target = model.name2id("target", "geom")
    return Constants(
        head=model.name2id("head", "body"),
        nose=model.name2id("nose", "geom"),
        target=target,
        target_size=float(model.geom_size[target, 0]),
    )


@compiled
def nose_to_target(physics: Physics, c: Constants, axis: int) -> float:
    """One coordinate, in the frame of the head, of the vector from nose to target."""
    total = 0.0
    for i in range(3):
        total += (physics.geom_xpos[c.target, i] - physics.geom_xpos[c.nose, i]) * physics.xmat[c.head, 3 * i + axis]
    return total


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Joint angles, where the target is, each link's velocity in its own frame."""
    i = fill(obs, 0, physics.qpos[3:])
    obs[i], obs[i + 1] = nose_to_target(physics, c, X), nose_to_target(physics, c, Y)
    i += 2
    for link in range(12, len(physics.sensordata), 6):  # after the head's: velocity [3], angular velocity [3]
        obs[i] = physics.sensordata[link]
        obs[i + 1] = physics.sensordata[link + 1]
        obs[i + 2] = physics.sensordata[link + 5]
        i += 3


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Nearness of the nose to the target."""
    distance = math.hypot(nose_to_target(physics, c, X), nose_to_target(physics, c, Y))
    return tolerance(distance, bounds=(0.0, c.target_size), margin=5 * c.target_size, sigmoid=long_tail)
