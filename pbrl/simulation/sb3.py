"""The batched environments as Stable-Baselines3 wants them: `PPO("MlpPolicy", SB3Envs("walker_walk", 64))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from stable_baselines3.common.vec_env import VecEnv

from pbrl.simulation.tasks import Task
from pbrl.simulation.vector import BatchedEnv


class SB3Envs(VecEnv):
    """num_envs environments of a task. An ended episode is begun anew in the same step, as in SB3's own."""

    def __init__(self, task: str | Task, num_envs: int, **settings: Any) -> None:
        self.batch = BatchedEnv(num_envs, task, **settings)
        super().__init__(num_envs, self.batch.single_observation_space, self.batch.single_action_space)
        self._actions = np.zeros(self.batch.action_space.shape or ())

    def reset(self) -> Any:
        """Begin an episode in every environment, with the seeds of `seed` if there are new ones."""
        obs, _ = self.batch.reset(seed=self._seeds)
        self._reset_seeds()
        self._reset_options()
        return obs

    def step_async(self, actions: Any) -> None:
        """Remember the actions [num_envs, act]."""
        self._actions = actions

    def step_wait(self) -> tuple[Any, Any, Any, list[dict[str, Any]]]:
        """One control step: observations, rewards, whether episodes ended, and how."""
        obs, rewards, terminated, truncated, info = self.batch.step(self._actions)
        dones, infos = terminated | truncated, [dict[str, Any]() for _ in range(self.num_envs)]
        for i in np.flatnonzero(dones):
            infos[i] = {"terminal_observation": obs[i], "TimeLimit.truncated": bool(truncated[i])}
            if "diverged" in info:
                infos[i]["diverged"] = bool(info["diverged"][i])
        return self.batch.begin_ended() if dones.any() else obs, rewards, dones, infos

    def get_images(self) -> Sequence[Any]:
        """A picture of each environment, with render_mode="rgb_array"."""
        return self.batch.render() or []

    def close(self) -> None:
        """Stop the threads."""
        self.batch.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the batch, once for each environment: they are all alike."""
        return [getattr(self.batch, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:  # noqa: ARG002
        """Refused: the environments are one batch."""
        raise AttributeError(f"{attr_name}: the environments are one batch, whose attributes cannot be set one by one")

    def env_method(self, method_name: str, *_: Any, indices: Any = None, **__: Any) -> list[Any]:  # noqa: ARG002
        """Refused: the environments are one batch."""
        raise AttributeError(f"{method_name}: the environments are one batch, without methods of their own")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:  # noqa: ARG002
        """Never."""
        return [False for _ in self._get_indices(indices)]
