"""A planar biped that stands, walks or runs: `dm_control.suite.walker`."""

from __future__ import annotations

from typing import Any, NamedTuple

from dm_control.suite import walker

from pbrl.simulation.native import XX, XZ, ZZ, Physics, Z, compiled, fill
from pbrl.simulation.tasks.tolerance import inf, linear, tolerance
from pbrl.types import Float64

TASKS = ("stand", "walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    torso: int  # body
    velocity: int  # sensor: velocity of the centre of mass
    stand_height: float  # metres
    move_speed: float  # metres per second; 0 for standing


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    return Constants(
        torso=model.name2id("torso", "body"),
        velocity=int(model.sensor_adr[model.name2id("torso_subtreelinvel", "sensor")]),
        stand_height=float(walker._STAND_HEIGHT),
        move_speed=float(environment.task._move_speed),
    )


@compiled
def torso_height(physics: Physics, c: Constants) -> float:
    """Metres above the ground."""
    return physics.xpos[c.torso, Z]


@compiled
def torso_upright(physics: Physics, c: Constants) -> float:
    """The vertical part of the torso's z axis: 1 is upright."""
    return physics.xmat[c.torso, ZZ]


@compiled
def horizontal_velocity(physics: Physics, c: Constants) -> float:
    """Of the centre of mass."""
    return physics.sensordata[c.velocity]


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Orientations of all bodies in the plane, height of the torso, velocities."""
    i = 0
    for body in range(1, len(physics.xmat)):
        obs[i], obs[i + 1] = physics.xmat[body, XX], physics.xmat[body, XZ]
        i += 2
    obs[i] = torso_height(physics, c)
    fill(obs, i + 1, physics.qvel)


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Upright and high, times fast if the task is to move."""
    standing = tolerance(torso_height(physics, c), bounds=(c.stand_height, inf), margin=c.stand_height / 2)
    upright = (1 + torso_upright(physics, c)) / 2
    stand_reward = (3 * standing + upright) / 4
    if c.move_speed == 0:
        return stand_reward
    move_reward = tolerance(
        horizontal_velocity(physics, c),
        bounds=(c.move_speed, inf),
        margin=c.move_speed / 2,
        sigmoid=linear,
        value_at_margin=0.5,
    )
    return stand_reward * (5 * move_reward + 1) / 6
