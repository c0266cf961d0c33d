"""How fast collection is, compared with the physics alone and with other simulators.

    python -m pbrl.bench [short=true]

Timings on a shared machine vary by a third. So all contenders take turns, and a ratio is taken within each turn; the
table shows medians. The limit is open-loop physics: `mujoco.rollout` on the same number of threads, from the
same states and with the same actions as one of our collections, without policy, observation, reward or reset (but
with the steps that dm_control takes to settle a cheetah, which are physics).
"""

from __future__ import annotations

import csv
import importlib.util
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import mujoco
import numpy as np
from mujoco import rollout
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import pbrl.simulation.vector
from pbrl.bench.agents import PARTS, measure
from pbrl.bench.teachers import seconds
from pbrl.policy import GaussianPolicy
from pbrl.run.settings import instantiate
from pbrl.simulation import native, tasks
from pbrl.simulation.packing import pack
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.worlds import flatten
from pbrl.types import Float32, Int64

Contender = Callable[[], float]  # runs once, returns control steps per second
_SETTLING = 200  # physics steps of dm_control's cheetah before each episode
_ENVPOOL = {"swimmer_swimmer6": "SwimmerSwimmer6-v1", "swimmer_swimmer15": "SwimmerSwimmer15-v1"}


def timed(steps: int, work: Callable[[], Any]) -> float:
    """Control steps per second of one piece of work."""
    begin = time.perf_counter()
    work()
    return steps / (time.perf_counter() - begin)


def collection(simulator: Simulator, policy: GaussianPolicy, parameters: Float32, trajectories: int) -> Contender:
    """Our closed loop, from reset to last step, with sampled actions; one policy for each row of parameters."""
    arms = np.arange(trajectories) % len(parameters)
    turns = iter(range(1_000_000))
    return lambda: timed(
        trajectories * simulator.steps,
        lambda: simulator.collect(policy, parameters, arms, iteration=next(turns)),
    )


def actor(policy: GaussianPolicy, parameters: Float32) -> Callable[[Float32, Int64], Float32]:
    """The policy for other loops, as fast as we have it: sampled actions [n, act] for observations [n, obs]."""
    packed, rng = pack(policy, parameters), np.random.default_rng(0)

    def act(obs: Float32, arms: Int64) -> Float32:
        actions = np.empty((len(obs), policy.act_size), np.float32)
        native.act(packed, arms, obs, rng.standard_normal((len(obs), 1, policy.act_size), np.float32), 0, actions)
        return actions

    return act


def physics_limit(simulator: Simulator, policy: GaussianPolicy, parameters: Float32, trajectories: int) -> Contender:
    """The same physics in an open loop."""
    arms = np.arange(trajectories) % 2
    collected = simulator.collect(policy, parameters, arms, iteration=0, keep=["actions"])
    environment = tasks.load(simulator.task)
    model, sub_steps = environment.physics.model.ptr, environment._n_sub_steps
    low, high, *_ = native.dynamics(environment)
    full = mujoco.mjtState.mjSTATE_FULLPHYSICS
    starts = np.stack([next(simulator.replay(collected, row)).get_state(full) for row in range(trajectories)])
    controls = np.repeat(np.clip(collected.actions, low, high).astype(np.float64), sub_steps, axis=1)  # type: ignore[arg-type]
    if simulator.task == "cheetah_run":
        controls = np.concatenate([np.zeros((trajectories, _SETTLING, controls.shape[2])), controls], axis=1)
    data = [mujoco.MjData(model) for _ in range(simulator.threads)]
    states = np.empty((*controls.shape[:2], starts.shape[1]))
    sensors = np.empty((*controls.shape[:2], model.nsensordata))
    pool = rollout.Rollout(nthread=simulator.threads)

    def run() -> None:
        pool.rollout(model, data, starts, controls, state=states, sensordata=sensors)

    return lambda: timed(trajectories * simulator.steps, run)


def dm_control_loop(simulator: Simulator, policy: GaussianPolicy, parameters: Float32, trajectories: int) -> Contender:
    """What dm_control's documentation shows, one process, with the same policy."""
    environment, act, first = tasks.load(simulator.task), actor(policy, parameters), np.zeros(1, np.int64)

    def run() -> None:
        for _ in range(trajectories):
            step = environment.reset()
            for _ in range(simulator.steps):
                obs = flatten(step.observation).astype(np.float32)
                step = environment.step(act(obs[None], first)[0])

    return lambda: timed(trajectories * simulator.steps, run)


def envpool_loop(simulator: Simulator, policy: GaussianPolicy, parameters: Float32, trajectories: int) -> Contender:
    """EnvPool on the same number of threads, with the same policy."""
    import envpool

    name = _ENVPOOL.get(simulator.task, "".join(word.capitalize() for word in simulator.task.split("_")) + "-v1")
    pool = envpool.make(
        name, env_type="dm", num_envs=trajectories, num_threads=simulator.threads, max_episode_steps=1000, seed=0
    )
    keys = list(tasks.load(simulator.task).observation_spec())
    act = actor(policy, parameters)
    arms = np.repeat([0, 1], [trajectories - trajectories // 2, trajectories // 2])
    low, high, *_ = native.dynamics(tasks.load(simulator.task))

    def run() -> None:
        step = pool.reset()
        for _ in range(simulator.steps):
            parts = [np.asarray(getattr(step.observation, key)).reshape(trajectories, -1) for key in keys]
            obs = np.concatenate(parts, axis=1).astype(np.float32)
            step = pool.step(np.clip(act(obs, arms), low, high).astype(np.float64))

    return lambda: timed(trajectories * simulator.steps, run)


def sb3_loop(simulator: Simulator, policy: GaussianPolicy, parameters: Float32, trajectories: int) -> Contender:  # noqa: ARG001
    """The usual choice today: Stable-Baselines3's PPO collecting from shimmy's environments."""
    import gymnasium
    from shimmy.dm_control_compatibility import DmControlCompatibilityV0
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    def make() -> Any:
        return gymnasium.wrappers.FlattenObservation(DmControlCompatibilityV0(tasks.load(simulator.task)))

    steps = min(simulator.steps, 200)  # so slow that fewer steps are enough to measure it
    envs = DummyVecEnv([make] * trajectories)
    learner = PPO(
        "MlpPolicy",
        envs,
        n_steps=steps,
        batch_size=steps * trajectories,
        policy_kwargs={"net_arch": [*policy.sizes[1:-1]]},
        device="cpu",
    )
    _, callback = learner._setup_learn(1)

    def run() -> None:
        learner.collect_rollouts(envs, callback, learner.rollout_buffer, learner.n_steps)

    return lambda: timed(trajectories * steps, run)


def batched_env(simulator: Simulator, trajectories: int) -> Contender:
    """Our gymnasium environment with a user's loop of random actions."""
    envs = pbrl.simulation.vector.BatchedEnv(trajectories, simulator.task, threads=simulator.threads)
    random = np.random.default_rng(0).uniform(-1, 1, (10, trajectories, simulator.act_size))

    def run() -> None:
        envs.reset(seed=0)
        for t in range(simulator.steps):
            envs.step(random[t % 10])

    return lambda: timed(trajectories * simulator.steps, run)


def contenders(
    task: str,
    *,
    trajectories: int,
    peer_trajectories: int,
    steps: int,
    threads: int | None,
    hidden: Sequence[int],
    only: Collection[str] | None,
) -> dict[str, Contender]:
    """All that take turns on a task, the limit first; `only` these, beside the limit and ours."""
    simulator = Simulator(task, seed=0, threads=threads, steps=steps)
    gains = {"hidden_gain": 2**0.5, "output_gain": 0.01, "initial_log_std": 0.0}
    policy = GaussianPolicy(simulator.obs_size, simulator.act_size, hidden=hidden, **gains)
    rng = np.random.default_rng(0)
    theta = policy.initial(rng)
    parameters = np.stack([theta, theta + 0.04 * rng.standard_normal(policy.size).astype(np.float32)])
    common = (simulator, policy, parameters)
    found = {"physics limit": physics_limit(*common, trajectories), "pbrl": collection(*common, trajectories)}
    if simulator.threads > 1:
        single = Simulator(task, seed=0, threads=1, steps=steps)
        found["pbrl, 1 thread"] = collection(single, policy, parameters, trajectories // simulator.threads)
    found["pbrl, one policy"] = collection(simulator, policy, parameters[:1], trajectories)
    found["pbrl, half the trajectories"] = collection(*common, trajectories // 2)
    found["pbrl.simulation.vector, random actions"] = batched_env(simulator, trajectories)
    found["dm_control loop"] = dm_control_loop(*common, peer_trajectories)
    if importlib.util.find_spec("envpool"):
        found["EnvPool"] = envpool_loop(*common, trajectories)
    if importlib.util.find_spec("stable_baselines3") and importlib.util.find_spec("shimmy"):
        found["SB3 over shimmy"] = sb3_loop(*common, peer_trajectories)
    wanted = found if only is None else ["physics limit", "pbrl", *only]
    return {what: run for what, run in found.items() if what in wanted}


def take_turns(running: Mapping[str, Contender], alternations: int, title: str) -> dict[str, list[float]]:
    """Speeds of each contender, one for each turn. Before the first, each runs once to compile and warm up."""
    for run in running.values():
        run()
    speeds: dict[str, list[float]] = {what: [] for what in running}
    turns = [what for _ in range(alternations) for what in running]
    for what in tqdm(turns, desc=f"{title:15s}", unit="run", leave=False):
        speeds[what].append(running[what]())
    return speeds


def ratio(speeds: Sequence[float], others: Sequence[float]) -> float:
    """How many times as fast as another: the median of the ratios within each turn."""
    return statistics.median(one / other for one, other in zip(speeds, others, strict=True))


def rows_of(task: str, speeds: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """The table of one task: medians over its turns."""
    return [
        {
            "task": task,
            "what": what,
            "steps_per_second": round(statistics.median(measured)),
            "ratio_to_limit": round(ratio(measured, speeds["physics limit"]), 3),
        }
        for what, measured in speeds.items()
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """A table as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@hydra.main(config_path="pkg://conf", config_name="bench")
def main(cfg: DictConfig) -> None:
    """Measure, print a table, write it as CSV."""
    if cfg.short:
        cfg.tasks, cfg.steps, cfg.alternations = ["walker_walk", "cheetah_run"], 100, 3
    for task in [*cfg.tasks, cfg.agents_task]:
        try:
            tasks.find(task)
        except tasks.UnknownTaskError as error:
            raise SystemExit(f"pbrl.bench: {error}") from None
    output = Path(cfg.output)
    output.mkdir(parents=True, exist_ok=True)
    table = Table(title="control steps per second (medians)")
    for column in ("task", "what", "steps/s", "of the limit", "pbrl is faster by"):
        table.add_column(column, justify="left" if column in ("task", "what") else "right")
    settings = ("trajectories", "peer_trajectories", "steps", "threads", "hidden", "only")
    rows = []
    for task in cfg.tasks:
        running = contenders(task, **{name: cfg[name] for name in settings})
        speeds = take_turns(running, cfg.alternations, task)
        for row in rows_of(task, speeds):
            rows.append(row)
            faster = ratio(speeds["pbrl"], speeds[row["what"]])
            numbers = f"{row['steps_per_second']:,}", f"{row['ratio_to_limit']:.2f}", f"{faster:.2f}x"
            table.add_row(task, row["what"], *numbers)
        table.add_section()
        write(output / "simulator.csv", rows)  # after each task: nothing measured is lost
    if cfg.tasks:
        Console().print(table)
    iterations = measure(
        cfg.agents_task,
        OmegaConf.to_container(cfg.agents, resolve=True),  # type: ignore[arg-type]
        OmegaConf.to_container(cfg.oracle, resolve=True),  # type: ignore[arg-type]
        trajectories=cfg.trajectories,
        pairs=cfg.trajectories // 2,
        steps=cfg.steps,
        threads=cfg.threads,
        alternations=cfg.alternations,
    )
    write(output / "agents.csv", iterations)
    table = Table(title=f"one iteration of {cfg.trajectories} trajectories on {cfg.agents_task} (medians)")
    for column in ("agent", "collect, s", "ask, s", "learn, s", "whole / collection"):
        table.add_column(column, justify="left" if column == "agent" else "right")
    for row in iterations:
        parts = [f"{row[f'seconds_{part}']:.3f}" for part in PARTS]
        table.add_row(row["agent"], *parts, f"{row['ratio_to_collection']:.2f}")
    Console().print(table)
    print(f"written to {output}: {'simulator.csv, ' if cfg.tasks else ''}agents.csv")
    teacher = instantiate(cfg.oracle, rng=np.random.default_rng(0))
    reading, comparing = seconds(teacher, rng=np.random.default_rng(1), repeats=cfg.alternations, **cfg.comparisons)
    print(
        f"{cfg.comparisons.pairs:,} comparisons of {cfg.comparisons.steps}-step clips take the teacher "
        f"{comparing:.3f} s, {reading:.3f} s of it to read the rewards"
    )
