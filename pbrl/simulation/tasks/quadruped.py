"""A four-legged robot that walks or runs, from any orientation: `dm_control.suite.quadruped`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mujoco
import numpy as np
from dm_control.mujoco.wrapper.mjbindings import enums

from pbrl.simulation.native import ZZ, Physics, compiled
from pbrl.simulation.tasks.tolerance import inf, linear, tolerance
from pbrl.types import Float64

TASKS = ("walk", "run")
WRITES_MODEL = False


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    torso: int  # body
    velocity: int  # sensor: velocity of the torso in its own frame
    hinge_qpos: tuple[int, ...]
    hinge_qvel: tuple[int, ...]
    imu: tuple[int, ...]  # sensors: gyroscope and accelerometer
    force_torque: tuple[int, ...]  # sensors at the toes
    desired_speed: float  # metres per second


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
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


def initialize_episode(task: Any, physics: Any) -> None:
    """dm_control's start: any orientation, at the lowest of the heights 0, 1, 2 ... cm that has no contacts.

    dm_control computes all forces at every height it tries, which takes as long as 150 control steps. Here they are
    computed at the last one only; to find it, collisions are enough.
    """
    orientation = task.random.randn(4)
    orientation /= np.linalg.norm(orientation)
    model, data, height = physics.model.ptr, physics.data.ptr, 0.0
    root = int(model.joint("root").qposadr[0])
    data.qpos[root : root + 7] = 0.0, 0.0, height, *orientation
    while True:
        mujoco.mj_kinematics(model, data)
        mujoco.mj_collision(model, data)
        if data.ncon == 0:
            break
        height += 0.01
        data.qpos[root + 2] = height
    with physics.reset_context():
        data.qpos[root : root + 7] = 0.0, 0.0, height, *orientation


@compiled
def torso_upright(physics: Physics, c: Constants) -> float:
    """The vertical part of the torso's z axis: 1 is upright."""
    return physics.xmat[c.torso, ZZ]


@compiled
def forward_velocity(physics: Physics, c: Constants) -> float:
    """Velocity of the torso along its own x axis."""
    return physics.sensordata[c.velocity]


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
    obs[i] = torso_upright(physics, c)
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
    upright = tolerance(torso_upright(physics, c), bounds=(1.0, inf), margin=2.0, sigmoid=linear, value_at_margin=0.0)
    move = tolerance(
        forward_velocity(physics, c),
        bounds=(c.desired_speed, inf),
        margin=c.desired_speed,
        sigmoid=linear,
        value_at_margin=0.5,
    )
    return upright * move
