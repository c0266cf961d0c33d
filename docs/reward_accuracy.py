"""How well a reward model orders clips that it has not seen, against the number of comparisons that it learnt from.

    python docs/reward_accuracy.py run 0 1 2 3 4    # these seeds, as far as docs/reward_accuracy.csv lacks them
    python docs/reward_accuracy.py table            # of what is in the file, for docs/reward_learning.md

On cheetah_run with the rational teacher: 100 trajectories of as many random policies, and 100 of others to test on.
Rounds of questions about clips of 50 steps, by each sampler; after each round the ensemble of `agent=pebble` is fitted
as B-Pref does, in up to 50 passes over all pairs. The accuracy is the share of 2,000 pairs of unseen clips that have
the true order; pairs that are equal in truth do not count. Both samplers of a seed begin with the same trajectories and
are tested on the same pairs, so that their difference is taken seed by seed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from scipy import stats
from tqdm import tqdm

from agents.samplers import Questions, Round
from pbrl.ledger import Ledger
from pbrl.policy import GaussianPolicy
from pbrl.run.files import write_atomically
from pbrl.run.settings import build, instantiate
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers

TASK, TRAJECTORIES, CLIP, TESTED = "cheetah_run", 100, 50, 2000
ROUNDS = [20] * 5 + [100] * 4 + [500] * 3  # questions: 20, 40, ... 100, 200, ... 500, 1000, 1500, 2000
SHOWN = (20, 100, 500, 2000)
KEEP = ("observations", "actions")
SAMPLERS = ("uniform", "disagreement")
FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ["sampler", "seed", "pairs", "accuracy", "tested", "adam_steps"]


def node(*overrides: str) -> dict:
    """Settings of a run."""
    with initialize_config_module("conf"):
        return OmegaConf.to_container(compose("train", overrides=["agent=pebble", "oracle=rational", *overrides]))


def random_policies(simulator: Simulator, rng: np.random.Generator) -> tuple[GaussianPolicy, np.ndarray]:
    """Networks whose actions depend on the observation, so that behaviour differs between them."""
    sizes = {"hidden": [64], "hidden_gain": 2**0.5, "output_gain": 2.0, "initial_log_std": -1.0}
    policy = GaussianPolicy(simulator.obs_size, simulator.act_size, **sizes)
    return policy, np.stack([policy.initial(rng) for _ in range(TRAJECTORIES)])


def measure(sampler: str, seed: int) -> Iterator[list]:
    """One sequence of rounds: a line of the file after each of them."""
    settings = node(f"agent.sampler={sampler}", "agent.reward_model.gradient_steps=null")
    rng = np.random.default_rng([seed, 1])
    simulator, unseen = Simulator(TASK, seed=2 * seed, threads=1), Simulator(TASK, seed=2 * seed + 1, threads=1)
    teacher = build(settings["oracle"], rng=np.random.default_rng([seed, 2]))
    ledger = Ledger(
        simulator=simulator, oracle=teacher, trajectories_per_iteration=100, pairs_per_iteration=sum(ROUNDS)
    )
    budget = ledger.open_iteration(0)
    how = {"mean_actions": False, "common_start": False, "keep": KEEP}
    pool = budget.collect(*random_policies(simulator, np.random.default_rng([seed, 3])), np.arange(TRAJECTORIES), **how)
    test = unseen.collect(
        *random_policies(simulator, np.random.default_rng([seed, 4])), np.arange(TRAJECTORIES), iteration=0, keep=KEEP
    )
    sizes = {"obs_size": simulator.obs_size, "act_size": simulator.act_size}
    model = instantiate(settings["agent"]["reward_model"])(**sizes, rng=rng)
    limits = {"pool": None, "questions": None, "questions_in_all": None, "schedule": "constant", "iterations": None}
    questions = Questions(sampler=build(settings["agent"]["sampler"]), clip_steps=CLIP, rng=rng, **limits)
    questions.look_at(pool)
    draw = Round(
        pool=test, M=1, steps=CLIP, reward_model=model, rng=np.random.default_rng([seed, 5]), workers=None
    ).draw
    pairs = draw(TESTED)
    sums = [
        test.task_rewards[c.trajectory[:, None], c.step[:, None] + np.arange(CLIP)].sum(1)
        for c in (pairs.first, pairs.second)
    ]
    gap = sums[1] - sums[0]
    with workers() as threads:
        for asked in ROUNDS:
            questions.per_round = asked
            questions.ask(budget, model, threads)
            steps = model.fit(threads)["reward_steps"]
            right = (model.differences(test, pairs, threads).mean(axis=0) > 0) == (gap > 0)
            decided = np.abs(gap) > 1e-9
            yield [sampler, seed, questions.asked, f"{right[decided].mean():.4f}", decided.sum(), f"{steps:.0f}"]


def run(seeds: list[int]) -> None:
    """Measure what the file lacks. A sequence of rounds is added when it is whole, so that none is in it by half."""
    for seed, sampler in product(seeds, SAMPLERS):
        there = lines()
        if (sampler, str(seed)) in {(line["sampler"], line["seed"]) for line in there}:
            continue
        measured = list(tqdm(measure(sampler, seed), f"{sampler}, seed {seed}", total=len(ROUNDS), disable=None))
        rows = [COLUMNS, *(line.values() for line in there), *measured]
        write_atomically(FILE, "".join(",".join(map(str, row)) + "\n" for row in rows))
        print(f"{sampler}, seed {seed}: {', '.join(f'{line[3]} ({line[2]})' for line in measured)}", flush=True)


def lines() -> list[dict[str, str]]:
    """What the file has."""
    return list(csv.DictReader(FILE.read_text().splitlines())) if FILE.exists() else []


def table() -> None:
    """Accuracy by number of pairs, of both samplers and their difference, with 95 % intervals over seeds."""
    found = {(line["sampler"], int(line["seed"]), int(line["pairs"])): float(line["accuracy"]) for line in lines()}
    seeds = sorted({seed for _, seed, _ in found if all((sampler, seed, SHOWN[-1]) in found for sampler in SAMPLERS)})
    if len(seeds) < 2:
        raise SystemExit("an interval needs two seeds with both samplers: python docs/reward_accuracy.py run 0 1")
    first, second = SAMPLERS
    print(f"{len(seeds)} seeds:\n\n| pairs | {first} | {second} | difference |\n|--:|--:|--:|--:|")
    for pairs in SHOWN:
        one, other = (np.array([found[sampler, seed, pairs] for seed in seeds]) for sampler in SAMPLERS)
        cells = [f"{values.mean():.3f} ± {half_width(values):.3f}" for values in (one, other)]
        gain = other - one
        print(f"| {pairs:,} | {' | '.join(cells)} | {gain.mean():+.3f} ± {half_width(gain):.3f} |")


def half_width(values: np.ndarray) -> float:
    """Of the 95 % interval of a mean."""
    return float(stats.sem(values) * stats.t.ppf(0.975, len(values) - 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("seeds", nargs="*", type=int)
    chosen = parser.parse_args()
    if chosen.command == "run" and not chosen.seeds:
        parser.error("run needs seeds, such as 0 1 2 3 4")
    if chosen.command == "run":
        run(chosen.seeds)
    else:
        table()
