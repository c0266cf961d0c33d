"""A fish that rights itself or swims to a target: `dm_control.suite.fish`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import fish

from pbrl.simulation.native import ZZ, Physics, X, Y, Z, compiled, fill
from pbrl.simulation.tasks.tolerance import tolerance
from pbrl.types import Float64

TASKS = ("upright", "swim")
WRITES_MODEL = True  # the target is moved by moving its geom in the model


class Constants(NamedTuple):
    """Numbers of dm_control's model and task."""

    torso: int  # body
    mouth: int  # geom
    target: int  # geom
    joint_qpos: tuple[int, ...]
    radii: float  # metres: of mouth and target together
    swims: bool


def constants(environment: Any) -> Constants:
    """Read them from dm_control."""
    model = environment.physics.model
    mouth, target = model.name2id("mouth", "geom"), model.name2id("target", "geom")
    return Constants(
        torso=model.name2id("torso", "body"),
        mouth=mouth,
        target=target,
        joint_qpos=tuple(int(model.jnt_qposadr[model.name2id(joint, "joint")]) for joint in fish._JOINTS),
        radii=float(model.geom_size[[mouth, target], 0].sum()),
        swims=isinstance(environment.task, fish.Swim),
    )


@compiled
def torso_upright(physics: Physics, c: Constants) -> float:
    """The vertical part of the torso's z axis: 1 is upright."""
    return physics.xmat[c.torso, ZZ]


@compiled
def mouth_to_target(physics: Physics, c: Constants, axis: int) -> float:
    """One coordinate, in the frame of the mouth, of the vector from mouth to target."""
    total = 0.0
    for i in range(3):
        gap = physics.geom_xpos[c.target, i] - physics.geom_xpos[c.mouth, i]
        total += gap * physics.geom_xmat[c.mouth, 3 * i + axis]
    return total


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:
    """Joint angles, uprightness, where the target is if there is one, velocities."""
    i = 0
    for joint in c.joint_qpos:
        obs[i] = physics.qpos[joint]
        i += 1
    obs[i] = torso_upright(physics, c)
    i += 1
    if c.swims:
        for axis in range(3):
            obs[i] = mouth_to_target(physics, c, axis)
            i += 1
    fill(obs, i, physics.qvel)


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Uprightness, or nearness to the target with some uprightness."""
    upright = torso_upright(physics, c)
    if not c.swims:
        return tolerance(upright, bounds=(1.0, 1.0), margin=1.0)
    x, y, z = mouth_to_target(physics, c, X), mouth_to_target(physics, c, Y), mouth_to_target(physics, c, Z)
    distance = math.sqrt(x**2 + y**2 + z**2)
    in_target = tolerance(distance, bounds=(0.0, c.radii), margin=2 * c.radii)
    return (7 * in_target + 0.5 * (upright + 1)) / 8
