"""What decides the return of a policy that has not learnt yet, and what the teacher sees of it.

    python docs/starts.py                  # three minutes of CPU time: the first two tables of docs/starts.md
    python docs/starts.py learnt RUN ...   # what finished runs have learnt, start by start

For each task of the paper's figure: 256 starts, and from each of them two trajectories with noise of their own, of the
first policy that the gradient agents have. Their correlation is the share of the variance of returns that the start
decides. Pairs are of trajectories from different starts; those with equal returns have no right answer.

`learnt` compares the first and the last policy of a run, one trajectory each from 256 common starts, with the noise
that they were trained with. Of an agent that takes a step or leaves it, as NCRS does, it also says what the steps taken
seemed to be worth in the comparisons that decided, and what they were.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pbrl.policy import Policy
from pbrl.run import preference_log, record
from pbrl.run.saved import load
from pbrl.run.settings import build
from pbrl.simulation.simulator import Simulator
from pbrl.types import Answers, Float32, Float64, Question

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
    return from_common_starts(simulator, policy, np.stack([parameters, parameters]))


def from_common_starts(simulator: Simulator, policy: Policy, parameters: Float32) -> Float64:
    """Rewards [policies, starts, step]."""
    arms = np.repeat(np.arange(len(parameters)), STARTS)
    collected = simulator.collect(policy, parameters, arms, iteration=0, common_start=True)
    return collected.task_rewards.reshape(len(parameters), STARTS, -1)


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


def first_and_last(run: str) -> Float64:
    """Returns [3, starts] of the first policy of a run, of the last, and of the first with other noise."""
    first, last = load(run, "first"), load(run)
    parameters = np.stack([first.parameters, last.parameters, first.parameters])
    return from_common_starts(Simulator(first.task, seed=SEED), first.policy, parameters).sum(axis=2)


def seen_gains(run: Path) -> tuple[Float64, Float64]:
    """The mean gap of each iteration's pairs where the step was taken, and the standard errors of all such means.

    Both are empty if the agent does not decide about one step in each iteration.
    """
    taken = np.array([row.get("accepted", np.nan) for row in record.read(run / "metrics.jsonl")])
    if not np.isin(taken, (0, 1)).all():
        return np.empty(0), np.empty(0)
    asked = preference_log.read(run / "preferences", ["first_sum", "second_sum"])
    gaps = (asked["second_sum"].to_numpy() - asked["first_sum"].to_numpy()).reshape(len(taken), -1)
    return gaps[taken == 1].mean(axis=1), gaps.std(axis=1, ddof=1) / np.sqrt(gaps.shape[1])


def print_learnt(runs: list[str]) -> None:
    """Print what each run has learnt, start by start, and what its steps were worth."""
    columns = ["run", "mean", "median", "the best tenth of the starts", "better from"]
    columns += ["steps taken", "each seemed to gain", "error of that", "gained"]
    print(f"| {' | '.join(columns)} |\n|---{'|--:' * (len(columns) - 1)}|")
    for run in runs:
        first, last, again = first_and_last(run)
        best = again >= np.quantile(again, 0.9)  # chosen by other trajectories than those that are shown
        returns = np.stack([first, last])
        cells = [
            f"{before:.0f} to {after:.0f}"
            for before, after in (returns.mean(axis=1), np.median(returns, axis=1), returns[:, best].mean(axis=1))
        ]
        cells.append(f"{(last > first).mean():.0%}")
        seen, errors = seen_gains(Path(run))
        if len(seen):
            cells += [f"{len(seen)}", f"{seen.mean():.1f}", f"{np.median(errors):.1f}"]
            cells.append(f"{(last - first).mean() / len(seen):.1f}")
        else:
            cells += ["-"] * 4
        print(f"| {run} | {' | '.join(cells)} |", flush=True)


def print_beginnings() -> None:
    """Print what the first policy earns, and what the teacher sees of it."""
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["learnt"])
    parser.add_argument("runs", nargs="*", help="folders of finished runs")
    chosen = parser.parse_args()
    if chosen.command and not chosen.runs:
        parser.error("learnt needs the folders of finished runs")
    if chosen.command:
        print_learnt(chosen.runs)
    else:
        print_beginnings()
