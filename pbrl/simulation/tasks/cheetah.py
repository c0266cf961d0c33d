"""A planar cheetah that runs: `dm_control.suite.cheetah`."""

from __future__ import annotations

from typing import Any, NamedTuple

from dm_control.suite import cheetah

from pbrl.simulation.native import Physics, compiled, fill
from pbrl.simulation.tasks.tolerance import inf, linear, tolerance
from pbrl.types import Float64

TASKS = ("run",)
WRITES_MODEL = False


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    velocity: int  # sensor: velocity of the centre of mass
    run_speed: float  # metres per second


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    return Constants(
        velocity=int(model.sensor_adr[model.name2id("torso_subtreelinvel", "sensor")]),
        run_speed=float(cheetah._RUN_SPEED),
    )


@compiled
def speed(physics: Physics, c: Constants) -> float:
    """Horizontal velocity of the centre of mass."""
    return physics.sensordata[c.velocity]


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:  # noqa: ARG001
    """Positions except the horizontal one, velocities."""
    i = fill(obs, 0, physics.qpos[1:])
    fill(obs, i, physics.qvel)


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Speed, up to the running speed."""
    return tolerance(
        speed(physics, c), bounds=(c.run_speed, inf), margin=c.run_speed, sigmoid=linear, value_at_margin=0.0
    )
