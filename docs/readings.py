"""Measure the choices on which the paper is silent, and write the tables of docs/readings.md.

    python docs/readings.py run  [--jobs 2] [--folder runs/readings] [--only cheetah_run/ncrs ...]
    python docs/readings.py table

`run` makes the runs that docs/readings.csv lacks, and adds each when it is finished; `table` is made of that file.

For the search agents, a fractional factorial design: 16 runs, each with its own seed, in which every choice is made
both ways equally often, against all others. So each of the 16 runs speaks about every choice, and an effect is the
difference of two means of 8 runs. On the walker, whose physics is seven times as dear, which of the two agents it is
is one more choice. What lets PPO-RLHF learn well is a design of the same kind; apart from it, the gradient
agents differ from their defaults in one choice at a time.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np
from scipy import stats

from pbrl.run.files import write_atomically
from pbrl.run.record import columns, read

FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ["env", "agent", "name", "seed", "iterations", "overrides", "evaluation", "collected"]
WRITING = Lock()  # the file

ITERATIONS = {"cheetah_run": 100, "walker_walk": 31}
EXPLORATION = {  # of the search agents while they collect
    "mean actions": ["agent.collect=mean"],
    "std 0.1": ["agent.policy.initial_log_std=-2.3"],
    "std 0.3": ["agent.policy.initial_log_std=-1.2"],
    "std 1": ["agent.policy.initial_log_std=0.0"],
}
CLIPS = {  # what PPO-RLHF compares
    "whole trajectories": [],
    "clips of 500 steps": ["agent.clip_steps=500"],
    "clips of 200 steps": ["agent.clip_steps=200"],
    "clips of 50 steps": ["agent.clip_steps=50"],
}
OBSERVATIONS = {"as they are": [], "normalised": ["normalise_observations=true"]}
MINIBATCHES = {
    "1 pass of 10 minibatches, lr 3e-4 after warm-up": [],
    "4 passes of 64 minibatches, lr 6e-4": ["ppo@agent.ppo=minibatches"],
}
PAIRS_KEPT = {"of 10 iterations": [], "all": ["agent.reward_model.buffer_iterations=null"]}
ONE_AT_A_TIME = {
    "dpo": {
        "default": [],
        "mean": ["agent.log_ratio=mean"],
        "beta1": ["agent.beta=1"],
        "std.3": ["agent.policy.initial_log_std=-1.2"],
    },
    "ppo_rlhf": {
        "default": [],
        "tanh": ["agent.reward_model.output=tanh"],
        "raw": ["agent.standardise=false"],
        "buffer1": ["agent.reward_model.buffer_iterations=1"],
    },
}


@dataclass(frozen=True)
class Job:
    """One run of `pbrl.train`."""

    study: str  # which table it belongs to
    env: str
    agent: str
    name: str
    seed: int
    iterations: int
    overrides: list[str]
    levels: dict[str, str] = field(default_factory=dict)  # choice -> what was chosen

    @property
    def key(self) -> str:
        """What it is called in the file."""
        return f"{self.env}/{self.agent}/{self.name}/{self.seed}"

    def folder(self, root: Path) -> Path:
        """Where the run lives."""
        return root / self.env / self.agent / self.name / f"seed_{self.seed}"


def factorial(env: str, agents: list[str]) -> Iterator[Job]:
    """Two bits choose the exploration, one the gain and one the start; the others are sums of bits.

    The last is which of two agents it is or, where there is but ZPG, its M.
    """
    for n, (a, b, c, d) in enumerate(itertools.product((0, 1), repeat=4)):
        exploration = list(EXPLORATION)[2 * a + b]
        gain, common, tau = ("0.01", "1.0")[c], ("false", "true")[d], ("1", "20")[a ^ c ^ d]
        levels = {"exploration": exploration, "output gain": gain, "common start": common, "tau": tau}
        overrides = [f"agent.policy.output_gain={gain}", f"agent.common_start={common}", f"oracle.tau={tau}"]
        agent = agents[(b ^ c ^ d) % len(agents)]
        if len(agents) > 1:
            levels["agent"] = agent
        elif agent == "zpg":
            levels["M"] = ("10", "1")[b ^ c ^ d]
            overrides.append(f"agent.experts={levels['M']}")
        overrides += EXPLORATION[exploration]
        yield Job(f"{' and '.join(agents)} on {env}", env, agent, f"f{n:02d}", n, ITERATIONS[env], overrides, levels)


def reward_factorial() -> Iterator[Job]:
    """What lets PPO-RLHF learn well: two bits choose the clips, one each the observations and the minibatches."""
    for n, (a, b, c, d) in enumerate(itertools.product((0, 1), repeat=4)):
        clips = list(CLIPS)[2 * a + b]
        observations, minibatches = list(OBSERVATIONS)[c], list(MINIBATCHES)[d]
        members, kept = ("1", "3")[a ^ c ^ d], list(PAIRS_KEPT)[b ^ c ^ d]
        levels = {"compared": clips, "observations": observations, "PPO": minibatches, "members": members}
        overrides = [*CLIPS[clips], *OBSERVATIONS[observations], *MINIBATCHES[minibatches], *PAIRS_KEPT[kept]]
        overrides.append(f"agent.reward_model.members={members}")
        levels["pairs kept"] = kept
        name, study = f"r{n:02d}", "what lets ppo_rlhf learn on cheetah_run"
        yield Job(study, "cheetah_run", "ppo_rlhf", name, 2000 + n, 41, overrides, levels)


def jobs() -> Iterator[Job]:
    """All runs."""
    yield from factorial("cheetah_run", ["ncrs"])
    yield from factorial("cheetah_run", ["zpg"])
    yield from factorial("walker_walk", ["ncrs", "zpg"])
    for agent, variants in ONE_AT_A_TIME.items():
        for seed, (name, overrides) in itertools.product(range(2), variants.items()):
            iterations = {"dpo": 41, "ppo_rlhf": 31}[agent]
            yield Job(f"{agent} on cheetah_run", "cheetah_run", agent, name, seed, iterations, overrides)
    yield from reward_factorial()


def run(job: Job, root: Path) -> None:
    """Train, with one thread, and add the result to the file."""
    folder = job.folder(root)
    settings = {
        "env": job.env,
        "agent": job.agent,
        "seed": job.seed,
        "iterations": job.iterations,
        "folder": folder,
        "threads": 1,
        "evaluation.every": 10,
        "preference_log": "false",
        "wandb.mode": "disabled",
    }
    command = [sys.executable, "-m", "pbrl.train", *(f"{key}={value}" for key, value in settings.items())]
    done = subprocess.run([*command, *job.overrides], capture_output=True, text=True, check=False)
    print(folder, "done" if done.returncode == 0 else done.stderr[-500:], flush=True)
    if done.returncode == 0:
        add(job, *final(folder))


def final(folder: Path) -> tuple[float, float]:
    """The mean of the last two evaluations of the incumbent, and of the last five iterations' collected returns."""
    metrics = columns(read(folder / "metrics.jsonl"))
    evaluations = metrics["eval_return"]
    return float(evaluations[np.isfinite(evaluations)][-2:].mean()), float(metrics["return_mean"][-5:].mean())


def lines() -> dict[str, dict[str, str]]:
    """What the file has, by key."""
    rows = csv.DictReader(FILE.read_text().splitlines())
    return {"/".join(row[name] for name in COLUMNS[:4]): row for row in rows}


def add(job: Job, evaluated: float, collected: float) -> None:
    """Add a finished run to the file."""
    what = [job.env, job.agent, job.name, job.seed, job.iterations, " ".join(job.overrides)]
    row = dict(zip(COLUMNS, [*what, f"{evaluated:.1f}", f"{collected:.1f}"], strict=True))
    with WRITING:
        there = lines()
        order = {each.key: place for place, each in enumerate(jobs())}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            row for _, row in sorted({**there, job.key: row}.items(), key=lambda each: order.get(each[0], len(order)))
        )
        write_atomically(FILE, text.getvalue())


def main_effects(results: list[tuple[Job, float]]) -> Iterator[dict[str, str]]:
    """Each level's mean over the runs that had it, and its effect against the choice's first level.

    Least squares on all choices at once; intervals at 95 % from the residuals.
    """
    levels: dict[str, list[str]] = {}
    for job, _ in results:
        for choice, level in job.levels.items():
            if level not in levels.setdefault(choice, []):
                levels[choice].append(level)
    contrasts = [(choice, level) for choice, offered in levels.items() for level in offered[1:]]
    X = np.array([[1.0, *(float(job.levels[choice] == level) for choice, level in contrasts)] for job, _ in results])
    y = np.array([value for _, value in results])
    effects, *_ = np.linalg.lstsq(X, y, rcond=None)
    freedom = len(y) - X.shape[1]
    half = np.full(len(effects), np.nan)
    if freedom > 2:  # else there is nothing to judge the scatter by
        variance = ((y - X @ effects) ** 2).sum() / freedom * np.linalg.inv(X.T @ X).diagonal()
        half = stats.t.ppf(0.975, freedom) * np.sqrt(variance)
    interval = [f" ± {width:.0f}" if np.isfinite(width) else "" for width in half]
    difference = {key: f"{effects[1 + i]:+.0f}{interval[1 + i]}" for i, key in enumerate(contrasts)}
    for choice, offered in levels.items():
        for level in offered:
            mean = np.mean([value for job, value in results if job.levels[choice] == level])
            yield {
                "choice": choice,
                "level": level,
                "mean": f"{mean:.0f}",
                "effect": difference.get((choice, level), ""),
            }


def markdown(rows: list[dict[str, str]]) -> str:
    """A table."""
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *(list(row.values()) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table() -> None:
    """Print all tables."""
    found = lines()
    there = [
        (job, (float(found[job.key]["evaluation"]), float(found[job.key]["collected"])))
        for job in jobs()
        if job.key in found
    ]
    for study, group in itertools.groupby(there, key=lambda each: each[0].study):
        results = list(group)
        print(f"\n### {study}: {len(results)} runs of {results[0][0].iterations} iterations\n")
        if results[0][0].levels:
            print(markdown(list(main_effects([(job, evaluated) for job, (evaluated, _) in results]))))
            continue
        by_name: dict[str, list[tuple[float, float]]] = {}
        for job, values in results:
            by_name.setdefault(job.name, []).append(values)
        rows = []
        for name, seeds in by_name.items():
            evaluated, collected = zip(*seeds, strict=True)
            row = {"variant": name}
            for kind, values in (("evaluated", evaluated), ("collected", collected)):
                row |= {kind: ", ".join(f"{value:.0f}" for value in values), f"mean {kind}": f"{np.mean(values):.0f}"}
            rows.append(row)
        print(markdown(rows))


def main() -> None:
    """Run, or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("--folder", type=Path, default=Path("runs/readings"))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, of one thread each")
    parser.add_argument("--only", nargs="*", default=[""], help="beginnings of env/agent/name/seed")
    options = parser.parse_args()
    if options.what == "table":
        table()
        return
    there = lines()
    wanted = [job for job in jobs() if job.key.startswith(tuple(options.only)) and job.key not in there]
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda job: run(job, options.folder), wanted))


if __name__ == "__main__":
    main()
