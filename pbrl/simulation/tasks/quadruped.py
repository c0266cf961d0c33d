"""A four-legged robot that walks or runs, from any orientation: `dm_control.suite.quadruped`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from dm_control.mujoco.wrapper.mjbindings import enums

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import linear
from pbrl.types import Float64

TASKS = ("walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """What dm_control knows by name."""

    torso: int  # body
    velocity: int  # sensor: velocity of the torso in its own frame
    hinge_qpos: tuple[int, ...]
    hinge_qvel: tuple[int, ...]
    imu: tuple[int, ...]  # sensors: gyroscope and accelerometer
    force_torque: tuple[int, ...]  # sensors at the toes
    desired_speed: float  # metres per second


def constants(environment: Any) -> Constants:
    """Read them off dm_control's model and task."""
    model = environment.physics.model

    def sensors(*kinds: int) -> tuple[int, ...]:
        return tuple(
            int(address) + i
            for kind, address, size in zip(model.sensor_type, model.sensor_adr, model.sensor_dim, strict=True)
            if kind in kinds
            for i in range(size)
        )

    hinges = np.flatnonzero(model.jnt_type == enums.mjtJoint.mjJNT_HINGE)
    return Constants(
        torso=model.name2id("torso", "body"),
        velocity=int(model.sensor_adr[model.name2id("velocimeter", "sensor")]),
        hinge_qpos=tuple(int(address) for address in model.jnt_qposadr[hinges]),
        hinge_qvel=tuple(int(address) for address in model.jnt_dofadr[hinges]),
        imu=sensors(enums.mjtSensor.mjSENS_GYRO, enums.mjtSensor.mjSENS_ACCELEROMETER),
        force_torque=sensors(enums.mjtSensor.mjSENS_FORCE, enums.mjtSensor.mjSENS_TORQUE),
        desired_speed=float(environment.task._desired_speed),
    )


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Joints, muscles, velocity and uprightness of the torso, its inertial sensors, forces at the toes."""
    i = 0
    for joint in c.hinge_qpos:
        obs[i] = physics.qpos[joint]
        i += 1
    for joint in c.hinge_qvel:
        obs[i] = physics.qvel[joint]
        i += 1
    for activation in physics.act:
        obs[i] = activation
        i += 1
    for axis in range(3):
        obs[i] = physics.sensordata[c.velocity + axis]
        i += 1
    obs[i] = physics.xmat[c.torso, 8]
    i += 1
    for sensor in c.imu:
        obs[i] = physics.sensordata[sensor]
        i += 1
    for sensor in c.force_torque:
        obs[i] = math.asinh(physics.sensordata[sensor])
        i += 1


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Upright times fast."""
    upright = linear(physics.xmat[c.torso, 8], 1.0, float("inf"), 2.0, 0.0)
    speed = physics.sensordata[c.velocity]
    return upright * linear(speed, c.desired_speed, float("inf"), c.desired_speed, 0.5)
