"""A humanoid that stands, walks or runs: `dm_control.suite.humanoid`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import humanoid

from pbrl.simulation.native import ZX, ZZ, Physics, X, Y, Z, compiled, fill
from pbrl.simulation.tasks.tolerance import inf, linear, small_control, tolerance
from pbrl.types import Float64

TASKS = ("stand", "walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    head: int  # body
    torso: int  # body
    extremities: tuple[int, ...]  # bodies: hands and feet
    velocity: int  # sensor: velocity of the centre of mass
    stand_height: float  # metres
    move_speed: float  # metres per second; 0 for standing


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    return Constants(
        head=model.name2id("head", "body"),
        torso=model.name2id("torso", "body"),
        extremities=tuple(
            model.name2id(name, "body") for name in ("left_hand", "left_foot", "right_hand", "right_foot")
        ),
        velocity=int(model.sensor_adr[model.name2id("torso_subtreelinvel", "sensor")]),
        stand_height=float(humanoid._STAND_HEIGHT),
        move_speed=float(environment.task._move_speed),
    )


@compiled
def head_height(physics: Physics, c: Constants) -> float:
    """Metres above the ground."""
    return physics.xpos[c.head, Z]


@compiled
def torso_upright(physics: Physics, c: Constants) -> float:
    """The vertical part of the torso's z axis: 1 is upright."""
    return physics.xmat[c.torso, ZZ]


@compiled
def torso_to_limb(physics: Physics, c: Constants, limb: int, axis: int) -> float:
    """One coordinate, in the frame of the torso, of the vector from torso to limb."""
    total = 0.0
    for k in range(3):
        total += (physics.xpos[limb, k] - physics.xpos[c.torso, k]) * physics.xmat[c.torso, 3 * k + axis]
    return total


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Joint angles, head height, hands and feet from the torso, its tilt, centre of mass velocity, velocities."""
    i = fill(obs, 0, physics.qpos[7:])  # without the free joint of the root
    obs[i] = head_height(physics, c)
    i += 1
    for limb in c.extremities:
        for axis in range(3):
            obs[i] = torso_to_limb(physics, c, limb, axis)
            i += 1
    i = fill(obs, i, physics.xmat[c.torso, ZX : ZZ + 1])
    i = fill(obs, i, physics.sensordata[c.velocity : c.velocity + 3])
    fill(obs, i, physics.qvel)


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Head high, torso upright, gentle controls, and still or fast as the task asks."""
    standing = tolerance(head_height(physics, c), bounds=(c.stand_height, inf), margin=c.stand_height / 4)
    upright = tolerance(torso_upright(physics, c), bounds=(0.9, inf), margin=1.9, sigmoid=linear, value_at_margin=0.0)
    gentle = (4 + small_control(physics)) / 5
    x, y = physics.sensordata[c.velocity + X], physics.sensordata[c.velocity + Y]
    if c.move_speed == 0:
        still_x = tolerance(x, margin=2.0)
        still_y = tolerance(y, margin=2.0)
        return gentle * standing * upright * ((still_x + still_y) / 2)
    move = tolerance(
        math.sqrt(x**2 + y**2),
        bounds=(c.move_speed, inf),
        margin=c.move_speed,
        sigmoid=linear,
        value_at_margin=0.0,
    )
    return gentle * standing * upright * (5 * move + 1) / 6
