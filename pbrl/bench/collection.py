"""How fast collection is, compared with the physics alone and with other simulators.

The limit is open-loop physics: `mujoco.rollout` on the same number of threads, from the same states and with the same
actions as one of our collections, without policy, observation, reward or reset (but with the steps that dm_control
takes to settle a cheetah, which are physics). Once as the `mujoco` package runs it, and once with its timers stopped,
as they are in our collections.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count, pairwise
from typing import Any

import mujoco
import numpy as np
from mujoco import rollout

import pbrl.simulation.vector
from pbrl.bench.turns import ratio
from pbrl.policy import GaussianPolicy, LowRank
from pbrl.simulation import native, tasks
from pbrl.simulation.packing import pack
from pbrl.simulation.simulator import Simulator
from pbrl.simulation.worlds import flatten
from pbrl.types import Float32, Int64, Trajectories

Contender = Callable[[], float]  # runs once, returns control steps per second
EVERYWHERE, RANK_1 = "different everywhere", "different by rank 1"  # how the policies of a collection differ
_SETTLING = 200  # physics steps of dm_control's cheetah before each episode
_ENVPOOL = {"swimmer_swimmer6": "SwimmerSwimmer6-v1", "swimmer_swimmer15": "SwimmerSwimmer15-v1"}


def timed(steps: int, work: Callable[[], Any]) -> float:
    """Control steps per second of one piece of work."""
    begin = time.perf_counter()
    work()
    return steps / (time.perf_counter() - begin)


def collection(
    simulator: Simulator, policy: GaussianPolicy, parameters: Float32 | LowRank, trajectories: int
) -> Contender:
    """Our closed loop, from reset to last step, with sampled actions; one policy for each row of parameters."""
    arms = np.arange(trajectories) % len(parameters)
    turns = count()
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


def physics_limit(simulator: Simulator, collected: Trajectories, timers: bool) -> Contender:
    """The same physics in an open loop, with MuJoCo's timers or without."""
    trajectories = len(collected.returns)
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
        native.time_physics(timers)
        pool.rollout(model, data, starts, controls, state=states, sensordata=sensors)
        native.time_physics(False)

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


def batched_env(simulator: Simulator, collected: Trajectories) -> Contender:
    """Our gymnasium environment in a user's loop, with the same actions: other ones would be other physics."""
    assert collected.actions is not None
    envs = pbrl.simulation.vector.BatchedEnv(len(collected.actions), simulator.task, threads=simulator.threads)
    actions = collected.actions.swapaxes(0, 1).astype(np.float64)  # [T, n, act]

    def run() -> None:
        envs.reset(seed=0)
        for each in actions:
            envs.step(each)

    return lambda: timed(actions.shape[0] * actions.shape[1], run)


def policy_of(simulator: Simulator, hidden: Sequence[int]) -> GaussianPolicy:
    """The policy in every loop."""
    gains = {"hidden_gain": 2**0.5, "output_gain": 0.01, "initial_log_std": 0.0}
    return GaussianPolicy(simulator.obs_size, simulator.act_size, hidden=hidden, **gains)


def different(policy: GaussianPolicy, theta: Float32, count: int) -> dict[str, Float32 | LowRank]:
    """So many policies near theta, in two ways: different everywhere, and by a matrix of rank 1 in each layer."""
    rng = np.random.default_rng(1)
    everywhere = rng.standard_normal((count, policy.size), np.float32)
    parts = []
    for inputs, outputs in pairwise(policy.sizes):
        column, row = (
            rng.standard_normal((count, inputs, 1), np.float32),
            rng.standard_normal((count, 1, outputs), np.float32),
        )
        parts += [(column @ row).reshape(count, -1), rng.standard_normal((count, outputs), np.float32)]
    rank_1 = np.concatenate([*parts, rng.standard_normal((count, policy.act_size), np.float32)], axis=1)
    return {EVERYWHERE: theta + 0.04 * everywhere, RANK_1: LowRank.around(policy, theta, np.float32(0.04) * rank_1, 1)}


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
    policy = policy_of(simulator, hidden)
    rng = np.random.default_rng(0)
    theta = policy.initial(rng)
    parameters = theta + 0.04 * rng.standard_normal((2, policy.size), np.float32)
    common = (simulator, policy, parameters)
    collected = simulator.collect(policy, parameters, np.arange(trajectories) % 2, iteration=0, keep=["actions"])
    found = {
        "physics limit": physics_limit(simulator, collected, timers=True),
        "physics limit, no timers": physics_limit(simulator, collected, timers=False),
        "pbrl": collection(*common, trajectories),
    }
    if simulator.threads > 1:
        single = Simulator(task, seed=0, threads=1, steps=steps)
        found["pbrl, 1 thread"] = collection(single, policy, parameters, trajectories // simulator.threads)
    found["pbrl, one policy"] = collection(simulator, policy, parameters[:1], trajectories)
    for what, policies in different(policy, theta, trajectories).items():
        found[f"pbrl, {trajectories} policies, {what}"] = collection(simulator, policy, policies, trajectories)
    found["pbrl, half the trajectories"] = collection(*common, trajectories // 2)
    found["pbrl.simulation.vector"] = batched_env(simulator, collected)
    found["dm_control loop"] = dm_control_loop(*common, peer_trajectories)
    if importlib.util.find_spec("envpool"):
        found["EnvPool"] = envpool_loop(*common, trajectories)
    if importlib.util.find_spec("stable_baselines3") and importlib.util.find_spec("shimmy"):
        found["SB3 over shimmy"] = sb3_loop(*common, peer_trajectories)
    wanted = found if only is None else ["physics limit", "pbrl", *only]
    return {what: run for what, run in found.items() if what in wanted}


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
