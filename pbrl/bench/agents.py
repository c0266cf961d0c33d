"""How long an agent's iteration takes, beside the collection in it, which no agent can do without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from pbrl.ledger import Ledger
from pbrl.run.settings import instantiate
from pbrl.simulation.simulator import Simulator
from pbrl.types import Agent

Turn = dict[str, float]  # seconds of an iteration's parts
PARTS = ("collect", "ask", "learn")


def iteration(simulator: Simulator, agent: Agent, ledger: Ledger) -> Callable[[int], Turn]:
    """One iteration of the runner, timed: all the while, and what the simulator takes of it."""

    def run(number: int) -> Turn:
        seconds = dict.fromkeys(("simulate", *PARTS), 0.0)

        def timed(part: str, work: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
            begin = time.perf_counter()
            result = work(*arguments, **settings)
            seconds[part] += time.perf_counter() - begin
            return result

        class Timed:
            """The simulator, with a clock."""

            steps = simulator.steps

            def collect(self, *arguments: Any, **settings: Any) -> Any:
                """Collect, and note how long it takes."""
                return timed("simulate", simulator.collect, *arguments, **settings)

        ledger.simulator = Timed()  # type: ignore[assignment]
        budget = ledger.open_iteration(number)
        while (pairs := timed("collect", agent.ask, budget)) is not None:
            preferences = timed("ask", ledger.compare, pairs)
            timed("learn", agent.tell, pairs, preferences)
        return seconds

    return run


def measure(cfg: DictConfig, agents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Medians over iterations, the agents taking turns; the first turn warms up, and does not count."""
    simulator = Simulator(cfg.agents_task, seed=0, threads=cfg.threads, steps=cfg.steps)
    torch.set_num_threads(simulator.threads)
    sizes = {"obs_size": simulator.obs_size, "act_size": simulator.act_size}
    runs = {}
    for name, settings in agents.items():
        policy = instantiate(settings.policy, **sizes)
        agent = instantiate(settings, policy=policy, rng=np.random.default_rng(0), trajectories=cfg.trajectories)
        ledger = Ledger(
            simulator=simulator,
            oracle=instantiate(cfg.oracle, rng=np.random.default_rng(1)),
            trajectories_per_iteration=cfg.trajectories,
            pairs_per_iteration=cfg.trajectories // 2,
        )
        runs[name] = iteration(simulator, agent, ledger)
    turns: dict[str, list[Turn]] = {name: [] for name in runs}
    for number in range(cfg.alternations + 1):
        for name, run in runs.items():
            turns[name].append(run(number))
    rows = []
    for name, (_, *counted) in turns.items():
        ratio = statistics.median(sum(turn[part] for part in PARTS) / turn["simulate"] for turn in counted)
        medians = {f"seconds_{part}": round(statistics.median(turn[part] for turn in counted), 4) for part in PARTS}
        rows.append({"task": cfg.agents_task, "agent": name, **medians, "ratio_to_collection": round(ratio, 3)})
    return rows
