"""A planar one-legged hopper that stands or hops: `dm_control.suite.hopper`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import hopper

from pbrl.simulation.native import Physics, Z, compiled, fill
from pbrl.simulation.tasks.tolerance import inf, linear, small_control, tolerance
from pbrl.types import Float64

TASKS = ("stand", "hop")
WRITES_MODEL = False


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    torso: int  # body
    foot: int  # body
    velocity: int  # sensor: velocity of the centre of mass
    touch_toe: int  # sensor
    touch_heel: int  # sensor
    stand_height: float  # metres from foot to torso
    hop_speed: float  # metres per second
    hopping: bool


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    velocity, toe, heel = (
        int(model.sensor_adr[model.name2id(name, "sensor")])
        for name in ("torso_subtreelinvel", "touch_toe", "touch_heel")
    )
    return Constants(
        torso=model.name2id("torso", "body"),
        foot=model.name2id("foot", "body"),
        velocity=velocity,
        touch_toe=toe,
        touch_heel=heel,
        stand_height=float(hopper._STAND_HEIGHT),
        hop_speed=float(hopper._HOP_SPEED),
        hopping=bool(environment.task._hopping),
    )


@compiled
def height(physics: Physics, c: Constants) -> float:
    """Of the torso above the foot."""
    return physics.xipos[c.torso, Z] - physics.xipos[c.foot, Z]


@compiled
def speed(physics: Physics, c: Constants) -> float:
    """Horizontal velocity of the centre of mass."""
    return physics.sensordata[c.velocity]


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Positions except the horizontal one, velocities, logarithm of the touch sensors at toe and heel."""
    i = fill(obs, 0, physics.qpos[1:])
    i = fill(obs, i, physics.qvel)
    obs[i] = math.log1p(physics.sensordata[c.touch_toe])
    obs[i + 1] = math.log1p(physics.sensordata[c.touch_heel])


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """High enough over the foot, times fast (hop) or gentle controls (stand)."""
    standing = tolerance(height(physics, c), bounds=(c.stand_height, 2.0))
    if c.hopping:
        return standing * tolerance(
            speed(physics, c), bounds=(c.hop_speed, inf), margin=c.hop_speed / 2, sigmoid=linear, value_at_margin=0.5
        )
    return standing * (small_control(physics) + 4) / 5
