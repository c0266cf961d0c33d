"""What decides the return of a policy that has not learnt yet, and what the teacher sees of it.

    python docs/starts.py    # three minutes of CPU time: the tables of docs/starts.md

For each task of the paper's figure: 256 starts, and from each of them two trajectories with noise of their own, of the
first policy that the gradient agents have. Their correlation is the share of the variance of returns that the start
decides. Pairs are of trajectories from different starts; those with equal returns have no right answer.
"""

from __future__ import annotations

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pbrl.run.settings import build
from pbrl.simulation.simulator import Simulator
from pbrl.types import Answers, Float64, Question

TASKS = ("cheetah_run", "hopper_stand", "walker_stand", "walker_walk", "walker_run", "quadruped_walk")
SEED, STARTS, PAIRS = 900, 256, 20_000
RESAMPLES = 2000


def node(*overrides: str) -> dict:
    """Settings of a run."""
    with initialize_config_module("conf"):
        return OmegaConf.to_container(compose("train", overrides=["agent=random", *overrides]))


def two_from_each_start(task: str) -> Float64:
    """Rewards [2, starts, step]."""
    simulator = Simulator(task, seed=SEED)
    policy = build(node()["agent"]["policy"], obs_size=simulator.obs_size, act_size=simulator.act_size)
    parameters = policy.initial(np.random.default_rng([SEED, 1]))
    collected = simulator.collect(
        policy, np.stack([parameters, parameters]), np.repeat([0, 1], STARTS), iteration=0, common_start=True
    )
    return collected.task_rewards.reshape(2, STARTS, -1)


def by_the_start(returns: Float64) -> tuple[float, float, float]:
    """Correlation of the two returns [2, starts] of a start, with a 95 % interval from a bootstrap over starts."""
    rng = np.random.default_rng([SEED, 2])
    resampled = rng.integers(STARTS, size=(RESAMPLES, STARTS))
    found = [float(np.corrcoef(returns[:, rows])[0, 1]) for rows in resampled]
    low, high = np.quantile(found, [0.025, 0.975])
    return float(np.corrcoef(returns)[0, 1]), float(low), float(high)


def answers(rewards: Float64, gamma: float) -> Answers:
    """What the irrational teacher says of pairs from different starts, from rewards [starts, step]."""
    teacher = build(node("oracle=irrational", f"oracle.gamma={gamma}")["oracle"], rng=np.random.default_rng([SEED, 3]))
    rng = np.random.default_rng([SEED, 4])
    first = rng.integers(STARTS, size=PAIRS)
    second = (first + rng.integers(1, STARTS, size=PAIRS)) % STARTS
    steps, mean_return = rewards.shape[1], float(rewards.sum(axis=1).mean())
    return teacher.compare(
        Question(first=first, second=second, steps=steps, episode_steps=steps, rewards=rewards, mean_return=mean_return)
    )


def main() -> None:
    """Print the two tables."""
    returned = ["| task | mean | std | median | 90 % below | no reward | last reward at | share of the start |"]
    answered = ["| task | pairs that differ | wrong | confidence | wrong, gamma 1 | confidence, gamma 1 |"]
    for table in (returned, answered):
        table.append("|---|" + "--:|" * (table[0].count("|") - 2))
    for task in TASKS:
        rewards = two_from_each_start(task)
        returns = rewards.sum(axis=2)
        correlation, low, high = by_the_start(returns)
        last = max(int(np.flatnonzero(each)[-1]) + 1 for each in rewards.reshape(2 * STARTS, -1) if each.any())
        median, ninety = np.quantile(returns, [0.5, 0.9])
        returned.append(
            f"| {task} | {returns.mean():.1f} | {returns.std():.1f} | {median:.1f} | {ninety:.1f} "
            f"| {(returns == 0).mean():.0%} | step {last} | {correlation:.2f} [{low:.2f}, {high:.2f}] |"
        )
        said = [answers(rewards[0], gamma) for gamma in (0.9, 1.0)]
        shares = " | ".join(
            f"{each.wrong[each.decided].mean():.2f} | {np.abs(each.preferences.score).mean():.3f}" for each in said
        )
        answered.append(f"| {task} | {said[0].decided.mean():.0%} | {shares} |")
    print("\n".join([*returned, "", *answered]))


if __name__ == "__main__":
    main()
