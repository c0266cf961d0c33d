"""A planar one-legged hopper that stands or hops: `dm_control.suite.hopper`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import hopper

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import linear, quadratic
from pbrl.types import Float64

TASKS = ("stand", "hop")
WRITES_MODEL = False


class Constants(NamedTuple):
    """What dm_control knows by name."""

    torso: int  # body
    foot: int  # body
    velocity: int  # sensor: horizontal velocity of the centre of mass
    touch_toe: int  # sensor
    touch_heel: int  # sensor
    stand_height: float  # metres from foot to torso
    hop_speed: float  # metres per second
    hopping: bool


def constants(environment: Any) -> Constants:
    """Read them off dm_control's model and task."""
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
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Positions but the horizontal one, velocities, logarithm of what toe and heel feel."""
    positions, velocities = len(physics.qpos) - 1, len(physics.qvel)
    obs[:positions] = physics.qpos[1:]
    obs[positions : positions + velocities] = physics.qvel
    obs[positions + velocities] = math.log1p(physics.sensordata[c.touch_toe])
    obs[positions + velocities + 1] = math.log1p(physics.sensordata[c.touch_heel])


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """High enough over the foot, times fast (hop) or gentle controls (stand)."""
    height = physics.xipos[c.torso, 2] - physics.xipos[c.foot, 2]
    standing = 1.0 if c.stand_height <= height <= 2 else 0.0
    if c.hopping:
        speed = physics.sensordata[c.velocity]
        return standing * linear(speed, c.hop_speed, float("inf"), c.hop_speed / 2, 0.5)
    small_control = 0.0
    for control in physics.ctrl:
        small_control += quadratic(control, 0.0, 0.0, 1.0, 0.0)
    return standing * (small_control / len(physics.ctrl) + 4) / 5
