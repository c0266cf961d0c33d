"""A task that is not in DM Control's suite: a mass on a spring, to be held at a place; compiled, too."""

from __future__ import annotations

from typing import Any, NamedTuple

from dm_control import mujoco
from dm_control.rl import control
from dm_control.suite import base

from pbrl.simulation.native import Physics, compiled
from pbrl.simulation.tasks.tolerance import tolerance
from pbrl.types import Float64

MODEL = """
<mujoco>
  <option timestep="0.01"/>
  <worldbody>
    <body>
      <joint name="slide" type="slide" axis="1 0 0" stiffness="{stiffness}" damping="1"/>
      <geom size="0.1" mass="1"/>
    </body>
  </worldbody>
  <actuator><motor joint="slide" gear="10" ctrllimited="true" ctrlrange="-1 2"/></actuator>
</mujoco>
"""
WRITES_MODEL = False


class Hold(base.Task):
    """Hold the mass half a metre to the right."""

    def initialize_episode(self, physics: Any) -> None:
        physics.data.qpos[:] = self.random.uniform(-1, 1)
        super().initialize_episode(physics)

    def get_observation(self, physics: Any) -> dict[str, Any]:
        return {"position": physics.position(), "velocity": physics.velocity()}

    def get_reward(self, physics: Any) -> float:
        return float(tolerance(physics.data.qpos[0], bounds=(0.45, 0.55), margin=0.5))


def load(stiffness: float = 5.0) -> control.Environment:
    physics = mujoco.Physics.from_xml_string(MODEL.format(stiffness=stiffness))
    return control.Environment(physics, Hold(), time_limit=2.0, control_timestep=0.02)


class Constants(NamedTuple):
    target: float


def constants(environment: Any) -> Constants:  # noqa: ARG001
    return Constants(target=0.5)


@compiled
def observe(physics: Physics, c: Constants, obs: Float64) -> None:  # noqa: ARG001
    obs[0], obs[1] = physics.qpos[0], physics.qvel[0]


@compiled
def reward(physics: Physics, c: Constants) -> float:
    return tolerance(physics.qpos[0], bounds=(c.target - 0.05, c.target + 0.05), margin=0.5)
