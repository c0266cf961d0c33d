"""A planar biped that stands, walks or runs: `dm_control.suite.walker`."""

from __future__ import annotations

from typing import Any, NamedTuple

from dm_control.suite import walker

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import gaussian, linear
from pbrl.types import Float64

TASKS = ("stand", "walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """What dm_control knows by name."""

    torso: int  # body
    velocity: int  # sensor: horizontal velocity of the centre of mass
    stand_height: float  # metres
    move_speed: float  # metres per second; 0 for standing


def constants(environment: Any) -> Constants:
    """Read them off dm_control's model and task."""
    model = environment.physics.model
    return Constants(
        torso=model.name2id("torso", "body"),
        velocity=int(model.sensor_adr[model.name2id("torso_subtreelinvel", "sensor")]),
        stand_height=float(walker._STAND_HEIGHT),
        move_speed=float(environment.task._move_speed),
    )


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Orientations of all bodies in the plane, height of the torso, velocities."""
    i = 0
    for body in range(1, len(physics.xmat)):
        obs[i], obs[i + 1] = physics.xmat[body, 0], physics.xmat[body, 2]
        i += 2
    obs[i] = physics.xpos[c.torso, 2]
    obs[i + 1 :] = physics.qvel


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Upright and high, times fast if the task is to move."""
    standing = gaussian(physics.xpos[c.torso, 2], c.stand_height, float("inf"), c.stand_height / 2)
    upright = (1 + physics.xmat[c.torso, 8]) / 2
    stand_reward = (3 * standing + upright) / 4
    if c.move_speed == 0:
        return stand_reward
    speed = physics.sensordata[c.velocity]
    move_reward = linear(speed, c.move_speed, float("inf"), c.move_speed / 2, 0.5)
    return stand_reward * (5 * move_reward + 1) / 6
