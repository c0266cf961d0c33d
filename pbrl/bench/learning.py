"""How fast the learners are, compared with plain products of matrices.

A learner's floating-point operations are those that its mathematics needs: for each row and weight two in a pass
forward, six in a pass forward and back. The limit is the product of a hidden layer, for a pair of trajectories, with
the weights of the next, made in every thread at the same time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from pbrl.bench.turns import ratio
from pbrl.run.training import build_agent
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers
from pbrl.types import Behaviour, Pairs, Preferences

Contender = Callable[[], float]  # works once, returns GFlop/s
_LIMIT = "matrix product"
_FORWARD, _FORWARD_AND_BACK = 2, 6  # operations for each row and weight
_PRODUCTS = 20  # of each thread, to measure the limit


def contenders(
    task: str, agents: Mapping[str, Any], *, trajectories: int, steps: int, threads: int | None, width: int
) -> dict[str, Contender]:
    """All that take turns, the limit first. They learn from random numbers in the shapes of the task."""
    simulator = Simulator(task, seed=0, threads=threads, steps=steps)
    torch.set_num_threads(simulator.threads)
    experience = random_experience(simulator, trajectories)
    found = {_LIMIT: matrix_product(2 * steps, width)}
    settings = {"allow": (), "normalise_observations": False}
    offered = {"rng": np.random.default_rng(0), "trajectories": trajectories, "pairs": trajectories // 2}
    for name, learners in (("dpo", {"DPO": dpo}), ("ppo_rlhf", {"reward model": reward_model, "PPO": ppo})):
        if name in agents:
            agent = build_agent({"agent": agents[name], **settings}, simulator, **offered)
            found |= {what: learner(agent, agents[name], *experience) for what, learner in learners.items()}
    return found


def random_experience(simulator: Simulator, trajectories: int) -> tuple[Behaviour, Pairs, Preferences]:
    """Trajectories of random numbers, each in one pair, and answers to all pairs."""
    rng, N, T = np.random.default_rng(0), trajectories, simulator.steps
    behaviour = Behaviour(
        policy=np.zeros(N, np.int64),
        lengths=np.full(N, T),
        diverged=np.zeros(N, np.bool_),
        start=np.zeros((N, 3), np.int64),
        number=np.arange(N),
        observations=rng.standard_normal((N, T + 1, simulator.obs_size), np.float32),
        actions=rng.standard_normal((N, T, simulator.act_size), np.float32),
    )
    probability = rng.random(N // 2)
    preferences = Preferences(
        probability=probability,
        score=2 * probability - 1,
        label=np.round(probability),
        answered=np.ones(N // 2, np.bool_),
    )
    return behaviour, Pairs.whole(np.arange(0, N // 2 * 2, 2), np.arange(1, N, 2)), preferences


def matrix_product(rows: int, width: int) -> Contender:
    """[rows, width] times [width, width]."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(rows, width, generator=generator), torch.randn(width, width, generator=generator)
    threads = torch.get_num_threads()

    def multiply(_: int) -> None:
        product = torch.empty(rows, width)
        for _ in range(_PRODUCTS):
            torch.mm(x, weights, out=product)

    def run() -> None:
        with workers() as pool:
            list(pool.map(multiply, range(threads)))

    return lambda: timed(_FORWARD * rows * width * width * _PRODUCTS * threads, run)


def dpo(agent: Any, node: Mapping[str, Any], behaviour: Behaviour, pairs: Pairs, preferences: Preferences) -> Contender:
    """DPO on all pairs. The reference needs no pass for the pairs of the first batch."""
    batch = min(node["batch_pairs"], len(pairs))
    passes = _FORWARD_AND_BACK * node["gradient_steps"] * batch + _FORWARD * (len(pairs) - batch)
    operations = passes * 2 * behaviour.actions.shape[1] * count_weights(agent.policy.sizes)  # type: ignore[union-attr]
    return lambda: timed(operations, lambda: agent.learn(behaviour, pairs, preferences))


def reward_model(
    agent: Any, node: Mapping[str, Any], behaviour: Behaviour, pairs: Pairs, preferences: Preferences
) -> Contender:
    """Fitting the reward model to all pairs."""
    model, settings = agent.reward_model, node["reward_model"]
    sizes = (agent.policy.obs_size + agent.policy.act_size, *settings["hidden"], 1)
    rows = 2 * behaviour.actions.shape[1] * min(settings["batch_pairs"], len(pairs))  # type: ignore[union-attr]
    passes = settings["members"] * settings["gradient_steps"]
    model.remember(behaviour, pairs, preferences)

    def run() -> None:
        with workers() as pool:
            model.fit(pool)

    return lambda: timed(_FORWARD_AND_BACK * passes * rows * count_weights(sizes), run)


def ppo(agent: Any, node: Mapping[str, Any], behaviour: Behaviour, *_: Any) -> Contender:
    """One pass of PPO over all steps, after one forward for values and probabilities."""
    policy, settings = agent.policy, node["ppo"]
    critic = (policy.obs_size, *settings["critic_hidden"], 1)
    rewards = np.random.default_rng(0).standard_normal(behaviour.actions.shape[:2], np.float32)  # type: ignore[union-attr]

    def run() -> None:
        with workers() as pool:
            agent.ppo.update(behaviour, rewards, pool)

    weights = count_weights(policy.sizes) + count_weights(critic)
    return lambda: timed((_FORWARD + _FORWARD_AND_BACK) * rewards.size * weights, run)


def count_weights(sizes: Sequence[int]) -> int:
    """How many weights a network with layers of these widths has."""
    return sum(inputs * outputs for inputs, outputs in pairwise(sizes))


def timed(operations: float, work: Callable[[], Any]) -> float:
    """GFlop/s of one piece of work."""
    begin = time.perf_counter()
    work()
    return operations / (time.perf_counter() - begin) / 1e9


def rows_of(task: str, speeds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The table: medians over the turns."""
    return [
        {
            "task": task,
            "what": what,
            "gflop_per_second": round(statistics.median(measured), 2),
            "ratio_to_limit": round(ratio(measured, speeds[_LIMIT]), 3),
        }
        for what, measured in speeds.items()
    ]
