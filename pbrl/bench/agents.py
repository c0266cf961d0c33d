"""How long an agent's iteration takes, compared with the collection in it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch

from pbrl.bench.turns import take_turns
from pbrl.ledger import Ledger
from pbrl.run.settings import build
from pbrl.run.training import build_agent
from pbrl.simulation.simulator import Simulator
from pbrl.types import Agent

Turn = dict[str, float]  # seconds of an iteration's parts
PARTS = ("collect", "ask", "learn")


def iteration(agent: Agent, ledger: Ledger) -> Callable[[], Turn]:
    """The agent's next iteration, timed."""
    numbers = count()

    def run() -> Turn:
        budget = ledger.open_iteration(next(numbers))
        begin = time.perf_counter()
        agent.iterate(budget)
        whole = time.perf_counter() - begin
        return {**ledger.seconds, "learn": whole - sum(ledger.seconds.values()), "whole": whole}

    return run


def measure(
    task: str,
    agents: Mapping[str, Any],
    oracle: Mapping[str, Any],
    *,
    trajectories: int,
    pairs: int,
    steps: int,
    threads: int | None,
    alternations: int,
) -> list[dict[str, Any]]:
    """Medians over iterations; the agents take turns."""
    simulator = Simulator(task, seed=0, threads=threads, steps=steps)
    torch.set_num_threads(simulator.threads)
    runs = {}
    for name, node in agents.items():
        settings = {"agent": node, "allow": (), "normalise_observations": False}
        rng = np.random.default_rng(0)
        agent = build_agent(settings, simulator, rng=rng, trajectories=trajectories, pairs=pairs)
        ledger = Ledger(
            simulator=simulator,
            oracle=build(oracle, rng=np.random.default_rng(1)),
            trajectories_per_iteration=trajectories,
            pairs_per_iteration=pairs,
        )
        runs[name] = iteration(agent, ledger)
    return [{"task": task, **row} for row in medians(take_turns(runs, alternations, task))]


def medians(turns: Mapping[str, Sequence[Turn]]) -> list[dict[str, Any]]:
    """Each agent's seconds, and how many times as long as its collection an iteration takes."""
    rows = []
    for name, measured in turns.items():
        parts = {f"seconds_{part}": round(statistics.median(turn[part] for turn in measured), 4) for part in PARTS}
        ratio = statistics.median(turn["whole"] / turn["collect"] for turn in measured)
        rows.append({"agent": name, **parts, "ratio_to_collection": round(ratio, 3)})
    return rows
