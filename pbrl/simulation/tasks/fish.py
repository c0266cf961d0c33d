"""A fish that rights itself or swims to a target: `dm_control.suite.fish`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from dm_control.suite import fish

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import gaussian
from pbrl.types import Float64

TASKS = ("upright", "swim")
WRITES_MODEL = True  # the target is moved by moving its geom in the model


class Constants(NamedTuple):
    """What dm_control knows by name."""

    torso: int  # body
    mouth: int  # geom
    target: int  # geom
    joint_qpos: tuple[int, ...]
    radii: float  # metres: of mouth and target together
    swims: bool


def constants(environment: Any) -> Constants:
    """Read them off dm_control's model and task."""
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
def _to_target(physics: Physics, c: Constants, axis: int) -> float:
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
    obs[i] = physics.xmat[c.torso, 8]
    i += 1
    if c.swims:
        for axis in range(3):
            obs[i] = _to_target(physics, c, axis)
            i += 1
    obs[i:] = physics.qvel


@compiled
def reward(physics: Physics, c: Constants) -> float:
    """Uprightness, or nearness to the target with some uprightness."""
    upright = physics.xmat[c.torso, 8]
    if not c.swims:
        return gaussian(upright, 1.0, 1.0, 1.0)
    x, y, z = _to_target(physics, c, 0), _to_target(physics, c, 1), _to_target(physics, c, 2)
    in_target = gaussian(math.sqrt(x**2 + y**2 + z**2), 0.0, c.radii, 2 * c.radii)
    return (7 * in_target + 0.5 * (upright + 1)) / 8
