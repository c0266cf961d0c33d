"""A humanoid that stands, walks or runs: `dm_control.suite.humanoid`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import humanoid

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import gaussian, linear, quadratic
from pbrl.types import Float64

TASKS = ("stand", "walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """What dm_control knows by name."""

    head: int  # body
    torso: int  # body
    extremities: tuple[int, ...]  # bodies: hands and feet
    velocity: int  # sensor: velocity of the centre of mass
    stand_height: float  # metres
    move_speed: float  # metres per second; 0 for standing


def constants(environment: Any) -> Constants:
    """Read them off dm_control's model and task."""
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
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Joint angles, head height, hands and feet from the torso, its tilt, centre of mass velocity, velocities."""
    joints = len(physics.qpos) - 7
    obs[:joints] = physics.qpos[7:]
    obs[joints] = physics.xpos[c.head, 2]
    i = joints + 1
    for limb in c.extremities:
        for axis in range(3):
            total = 0.0
            for k in range(3):
                total += (physics.xpos[limb, k] - physics.xpos[c.torso, k]) * physics.xmat[c.torso, 3 * k + axis]
            obs[i] = total
            i += 1
    obs[i : i + 3] = physics.xmat[c.torso, 6:9]
    obs[i + 3 : i + 6] = physics.sensordata[c.velocity : c.velocity + 3]
    obs[i + 6 :] = physics.qvel


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Head high, torso upright, gentle controls, and still or fast as the task asks."""
    standing = gaussian(physics.xpos[c.head, 2], c.stand_height, float("inf"), c.stand_height / 4)
    upright = linear(physics.xmat[c.torso, 8], 0.9, float("inf"), 1.9, 0.0)
    small_control = 0.0
    for control in physics.ctrl:
        small_control += quadratic(control, 0.0, 0.0, 1.0, 0.0)
    small_control = (4 + small_control / len(physics.ctrl)) / 5
    x, y = physics.sensordata[c.velocity], physics.sensordata[c.velocity + 1]
    if c.move_speed == 0:
        dont_move = (gaussian(x, 0.0, 0.0, 2.0) + gaussian(y, 0.0, 0.0, 2.0)) / 2
        return small_control * standing * upright * dont_move
    move = linear(math.sqrt(x**2 + y**2), c.move_speed, float("inf"), c.move_speed, 0.0)
    return small_control * standing * upright * (5 * move + 1) / 6
