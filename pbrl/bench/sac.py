"""How long an update of soft actor-critic takes, compared with one of Stable-Baselines3's.

Both have networks and minibatches of the same size, and draw steps of random numbers from a buffer. Each is measured on
one thread, and on as many as there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
import stable_baselines3
import torch
from stable_baselines3.common.logger import Logger

import pbrl.simulation.vector  # noqa: F401  # registers the environments
from pbrl.bench.learning import random_experience
from pbrl.run.training import build_agent
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers

Contender = Callable[[], float]  # works once, returns updates per second
OURS, THEIRS = "pbrl", "Stable-Baselines3"
_TRAJECTORIES = 8  # in both buffers


def contenders(
    task: str, node: Mapping[str, Any], *, steps: int, threads: int | None, updates: int
) -> dict[str, Contender]:
    """All that take turns. node: the settings of `agent=sac_true`."""
    simulator = Simulator(task, seed=0, threads=threads, steps=steps)
    settings = {"agent": node, "allow": (), "normalise_observations": False}
    agent: Any = build_agent(settings, simulator, rng=np.random.default_rng(0), trajectories=1, pairs=1)
    behaviour, _, _ = random_experience(simulator, _TRAJECTORIES)
    assert behaviour.observations is not None
    assert behaviour.actions is not None
    rewards = np.random.default_rng(0).standard_normal((_TRAJECTORIES, steps), np.float32)
    ours, how = agent.sac, node["sac"]
    ours.replay.add(behaviour, rewards)
    theirs = stable_baselines3.SAC(
        "MlpPolicy",
        gymnasium.make(f"pbrl/{task}-v0"),
        batch_size=how["batch_size"],
        buffer_size=rewards.size,
        target_update_interval=how["target_every"],
        policy_kwargs={"net_arch": {"pi": list(node["policy"]["hidden"]), "qf": list(how["critic_hidden"])}},
        device="cpu",
    )
    theirs.set_logger(Logger(folder=None, output_formats=[]))
    assert theirs.replay_buffer is not None
    for row in range(_TRAJECTORIES):
        seen, done = behaviour.observations[row], behaviour.actions[row]
        for step in range(steps):
            reward = rewards[row, step : step + 1]
            theirs.replay_buffer.add(seen[step], seen[step + 1], done[step], reward, np.zeros(1), [{}])

    def learn() -> None:
        with workers() as pool:
            for _ in range(updates):
                ours.update(ours.replay.sample(ours.batch_size, ours.rng), pool.map)

    def learn_as_sb3() -> None:
        theirs.train(gradient_steps=updates, batch_size=theirs.batch_size)

    def per_second(work: Callable[[], None], on: int) -> Contender:
        def run() -> float:
            torch.set_num_threads(on)
            begin = time.perf_counter()
            work()
            return updates / (time.perf_counter() - begin)

        return run

    return {
        f"{who}, {n} {'thread' if n == 1 else 'threads'}": per_second(work, n)
        for n in sorted({1, simulator.threads})
        for who, work in ((OURS, learn), (THEIRS, learn_as_sb3))
    }
