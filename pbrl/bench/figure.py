"""How long the paper's figure takes on this machine: tasks x agents x seeds x iterations."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pbrl.bench.collection import collection, policy_of
from pbrl.bench.turns import take_turns
from pbrl.simulation.simulator import Simulator


def collecting(
    tasks: Sequence[str],
    *,
    trajectories: int,
    steps: int,
    threads: int | None,
    hidden: Sequence[int],
    alternations: int,
) -> dict[str, float]:
    """Seconds that an iteration's collection takes on each task."""
    running = {}
    for task in tasks:
        simulator = Simulator(task, seed=0, threads=threads, steps=steps)
        policy = policy_of(simulator, hidden)
        running[task] = collection(simulator, policy, policy.initial(np.random.default_rng(0))[None], trajectories)
    speeds = take_turns(running, alternations, "the figure")
    return {task: trajectories * steps / statistics.median(measured) for task, measured in speeds.items()}


def learning(iterations: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds that each agent's iteration takes beside its collection: the mean over the tasks that it was timed on."""
    seconds: dict[str, list[float]] = {}
    for row in iterations:
        seconds.setdefault(row["agent"], []).append(row["seconds_ask"] + row["seconds_learn"])
    return {agent: statistics.mean(measured) for agent, measured in seconds.items()}


def hours(
    collecting: Mapping[str, float], learning: Mapping[str, float], *, seeds: int, iterations: int
) -> dict[str, float]:
    """Hours of each agent's runs, one after the other, and of all."""
    found = {
        agent: sum(collect + learn for collect in collecting.values()) * seeds * iterations / 3600
        for agent, learn in learning.items()
    }
    return {**found, "all": sum(found.values())}
