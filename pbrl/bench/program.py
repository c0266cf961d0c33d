"""How fast everything is, in one run, as ratios to what limits it.

python -m pbrl.bench [short=true]
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from pbrl.bench import agents, collection, figure, learning, sac, teachers
from pbrl.bench.turns import ratio, take_turns
from pbrl.run.settings import instantiate
from pbrl.simulation import tasks


@hydra.main(config_path="pkg://conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Measure, print tables, write them as CSV."""
    if cfg.short:
        cfg.tasks, cfg.steps, cfg.alternations, cfg.sac.updates = ["walker_walk", "cheetah_run"], 100, 3, 20
    for task in [*cfg.tasks, *cfg.agents_tasks, *cfg.figure.tasks, cfg.sac.task]:
        try:
            tasks.find(task)
        except tasks.UnknownTaskError as error:
            raise SystemExit(f"pbrl.bench: {error}") from None
    output = Path(cfg.output)
    output.mkdir(parents=True, exist_ok=True)
    if cfg.tasks:
        measure_collection(cfg, output / "simulator.csv")
    if cfg.agents_tasks:
        iterations = measure_agents(cfg, output / "agents.csv")
        measure_learning(cfg, output / "learning.csv")
        if cfg.figure.tasks:
            extrapolate(cfg, iterations, output / "figure.csv")
    measure_sac(cfg, output / "sac.csv")
    measure_teacher(cfg)
    print(f"written to {output}: {', '.join(sorted(path.name for path in output.glob('*.csv')))}")


def measure_collection(cfg: DictConfig, path: Path) -> None:
    """Our simulator, the physics alone and other simulators, on every task."""
    table = new_table(
        "control steps per second (medians)", "task", "what", "steps/s", "of the limit", "pbrl is faster by"
    )
    settings = {name: cfg[name] for name in ("trajectories", "peer_trajectories", "steps", "threads", "hidden", "only")}
    rows, sentences = [], []
    for task in cfg.tasks:
        speeds = take_turns(collection.contenders(task, **settings), cfg.alternations, task)
        for row in collection.rows_of(task, speeds):
            rows.append(row)
            faster = ratio(speeds["pbrl"], speeds[row["what"]])
            numbers = f"{row['steps_per_second']:,}", f"{row['ratio_to_limit']:.2f}", f"{faster:.2f}x"
            table.add_row(task, row["what"], *numbers)
        table.add_section()
        write(path, rows)  # after each task: nothing measured is lost
        several = [f"{cfg.trajectories} policies, {how}" for how in (collection.EVERYWHERE, collection.RANK_1)]
        one = speeds.get("pbrl, one policy")
        sentences += [
            f"{task}: {name}, take {ratio(one, speeds[f'pbrl, {name}']):.2f} times as long as one"
            for name in several
            if one is not None and f"pbrl, {name}" in speeds
        ]
    Console().print(table)
    print(*sentences, sep="\n")


def measure_agents(cfg: DictConfig, path: Path) -> list[dict[str, Any]]:
    """Whole iterations of every agent."""
    iterations = [
        row
        for task in cfg.agents_tasks
        for row in agents.measure(
            task,
            container(cfg.agents),
            container(cfg.oracle),
            trajectories=cfg.trajectories,
            pairs=cfg.trajectories // 2,
            steps=cfg.steps,
            threads=cfg.threads,
            alternations=cfg.alternations,
        )
    ]
    write(path, iterations)
    title = f"one iteration of {cfg.trajectories} trajectories (medians)"
    table = new_table(title, "task", "agent", "collect, s", "ask, s", "learn, s", "whole / collection")
    for row in iterations:
        parts = [f"{row[f'seconds_{part}']:.3f}" for part in agents.PARTS]
        table.add_row(row["task"], row["agent"], *parts, f"{row['ratio_to_collection']:.2f}")
    Console().print(table)
    return iterations


def measure_learning(cfg: DictConfig, path: Path) -> None:
    """The learners beside a plain product of matrices."""
    rows = []
    for task in cfg.agents_tasks:
        running = learning.contenders(
            task,
            container(cfg.agents),
            trajectories=cfg.trajectories,
            steps=cfg.steps,
            threads=cfg.threads,
            width=cfg.hidden[0],
        )
        rows += learning.rows_of(task, take_turns(running, cfg.alternations, task))
    write(path, rows)
    table = new_table("learning (medians)", "task", "what", "GFlop/s", "of the limit")
    for row in rows:
        table.add_row(row["task"], row["what"], f"{row['gflop_per_second']:.1f}", f"{row['ratio_to_limit']:.2f}")
    Console().print(table)


def measure_sac(cfg: DictConfig, path: Path) -> None:
    """An update of SAC beside one of Stable-Baselines3's."""
    how = {"steps": cfg.steps, "threads": cfg.threads, "updates": cfg.sac.updates}
    speeds = take_turns(sac.contenders(cfg.sac.task, container(cfg.sac.agent), **how), cfg.alternations, "SAC")
    rows: list[dict[str, Any]] = [
        {
            "what": what,
            "updates_per_second": round(statistics.median(measured), 1),
            "pbrl_is_faster_by": round(ratio(speeds[what.replace(sac.THEIRS, sac.OURS)], measured), 3),
        }
        for what, measured in speeds.items()
    ]
    write(path, rows)
    table = new_table(f"updates of SAC on {cfg.sac.task} (medians)", "what", "updates/s", "pbrl is faster by")
    for row in rows:
        table.add_row(row["what"], f"{row['updates_per_second']:.1f}", f"{row['pbrl_is_faster_by']:.2f}x")
    Console().print(table)


def extrapolate(cfg: DictConfig, iterations: Sequence[dict[str, Any]], path: Path) -> None:
    """The hours that the paper's figure takes."""
    collecting = figure.collecting(
        cfg.figure.tasks,
        trajectories=cfg.trajectories,
        steps=cfg.steps,
        threads=cfg.threads,
        hidden=cfg.hidden,
        alternations=cfg.alternations,
    )
    hours = figure.hours(
        collecting,
        figure.learning(iterations),
        seeds=cfg.figure.seeds,
        iterations=cfg.figure.iterations * cfg.figure.steps / cfg.steps,  # all parts are linear in the steps
    )
    write(path, [{"agent": agent, "hours": round(number, 2)} for agent, number in hours.items()])
    parts = ", ".join(f"{agent} {number:.1f}" for agent, number in hours.items() if agent != "all")
    print(
        f"the figure's {len(cfg.figure.tasks)} tasks, {cfg.figure.seeds} seeds and {cfg.figure.iterations} iterations "
        f"take {hours['all']:.1f} hours on this machine, without evaluations ({parts})"
    )


def measure_teacher(cfg: DictConfig) -> None:
    """The teacher's comparisons."""
    teacher = instantiate(cfg.oracle, rng=np.random.default_rng(0))
    reading, comparing = teachers.seconds(
        teacher, rng=np.random.default_rng(1), repeats=cfg.alternations, **cfg.comparisons
    )
    print(
        f"{cfg.comparisons.pairs:,} comparisons of {cfg.comparisons.steps}-step clips take the teacher "
        f"{comparing:.3f} s, {reading:.3f} s of it to read the rewards"
    )


def container(node: DictConfig) -> Any:
    """A part of the configuration as plain dictionaries and lists."""
    return OmegaConf.to_container(node, resolve=True)


def new_table(title: str, *columns: str) -> Table:
    """A table whose words are on the left, its numbers on the right."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in ("task", "what", "agent") else "right")
    return table


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
