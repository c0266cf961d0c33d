"""A trained policy, read from the folder of its run.

from pbrl import load

policy = load("runs/walker_walk/ncrs/irrational/seed_0")       # or which="best", "first"
action = policy.act(obs)                                       # [act] for [obs], [n, act] for [n, obs]
policy.save_sb3("policy.zip")                                  # for stable_baselines3.PPO.load
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import Box
from safetensors import SafetensorError

from pbrl.policy import GaussianPolicy, Policy
from pbrl.run.folder import check_task_and_policy, read_settings
from pbrl.run.policy_file import KEPT, read_policy
from pbrl.run.settings import ConfigurationError
from pbrl.run.training import build_policy, task_of
from pbrl.simulation.simulator import Simulator
from pbrl.types import Float32, Float64


@dataclass(frozen=True)
class SavedPolicy:
    """What a run has learnt. It takes observations as the environment gives them: a normaliser is folded in."""

    task: str
    iteration: int  # after which it was kept; -1: before the first
    policy: Policy
    parameters: Float32  # [size]
    action_bounds: tuple[Float64, Float64]  # lowest and highest [act]

    def act(self, obs: Any, rng: np.random.Generator | None = None) -> Float32:
        """The actions [act] for an observation [obs], or [n, act] for [n, obs], within the task's bounds.

        rng: the source of their noise, as in training; None: no noise.
        """
        rows = np.array(obs, np.float32, ndmin=2)
        if rows.ndim != 2 or rows.shape[1] != self.policy.obs_size:
            shape = list(np.shape(obs))
            raise ValueError(f"{self.task} has {self.policy.obs_size} observations, but these have shape {shape}")
        if rng is None:
            actions = self.policy.mean_actions(self.parameters, rows)
        else:
            noise = torch.from_numpy(rng.standard_normal((len(rows), self.policy.act_size), np.float32))
            with torch.no_grad():
                theta, inputs = torch.from_numpy(self.parameters), torch.from_numpy(rows)
                actions = self.policy.sample(theta, inputs, noise)[0].numpy()
        actions = np.clip(actions, *self.action_bounds).astype(np.float32)
        return actions if np.ndim(obs) == 2 else actions[0]

    def save_sb3(self, path: str | Path) -> None:
        """Write a file that `stable_baselines3.PPO.load` opens, to act or to train on; its critic is a new one."""
        if not isinstance(self.policy, GaussianPolicy):
            raise ValueError(f"Stable-Baselines3 has no policy like {type(self.policy).__name__}")
        import stable_baselines3  # here, for those who only act

        no_environment: Any = None
        ppo = stable_baselines3.PPO(
            "MlpPolicy",
            no_environment,
            policy_kwargs={"net_arch": list(self.policy.sizes[1:-1])},  # tanh, as ours
            device="cpu",
            _init_setup_model=False,
        )
        # The spaces of pbrl.simulation.vector.
        ppo.observation_space = Box(-np.inf, np.inf, (self.policy.obs_size,), np.float64)
        ppo.action_space = Box(*self.action_bounds, dtype=np.float64)
        ppo.n_envs = 1
        ppo._setup_model()
        network: Any = ppo.policy
        linear = [each for each in network.mlp_extractor.policy_net if isinstance(each, torch.nn.Linear)]
        with torch.no_grad():
            for layer, (weights, bias) in zip(
                [*linear, network.action_net],
                self.policy.network.layers(torch.from_numpy(self.parameters)),
                strict=True,
            ):
                layer.weight.copy_(weights.T)
                layer.bias.copy_(bias)
            network.log_std.copy_(torch.from_numpy(self.parameters[-self.policy.act_size :]))
        ppo.save(path)


def load(run: str | Path, which: str = "last", *, allow: Sequence[str] = ()) -> SavedPolicy:
    """The policy that a run has learnt, from its folder.

    which: the last, the best (of the highest evaluation) or the first, before anything was learnt. allow: packages of
    your own whose classes the run may use. Nothing else that a folder names is imported.
    """
    folder = Path(run)
    if which not in KEPT:
        raise ValueError(f"which must be one of {', '.join(KEPT)}, not {which!r}")
    settings, path = read_settings(folder), folder / KEPT[which]
    check_task_and_policy(settings)
    if not path.exists():
        raise ConfigurationError(f"{folder} has no {path.name}: a run leaves it with each of its checkpoints")
    try:
        iteration, parameters = read_policy(path)
    except (SafetensorError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(f"{path} is not a policy that pbrl.train has written: {error}") from None
    simulator = Simulator(task_of(settings["env"], allow), seed=0, threads=1)
    policy = build_policy(settings["agent"]["policy"], simulator, allow=allow)
    if parameters.shape != (policy.size,):
        raise ConfigurationError(f"{path} has {parameters.size} parameters, but the policy of its run {policy.size}")
    return SavedPolicy(simulator.task, iteration, policy, parameters, simulator.action_bounds)
