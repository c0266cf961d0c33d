"""How well a reward model orders clips that it has not seen, against the number of comparisons that it learnt from.

    python docs/reward_accuracy.py 0 1 2 3 4 > docs/reward_accuracy.csv    # seeds; adds a line as soon as it is known

On cheetah_run with the rational teacher: 100 trajectories of as many random policies, and 100 of others to test on.
Rounds of questions about clips of 50 steps, by each sampler; after each round the ensemble of `agent=pebble` is fitted
as B-Pref does, in up to 50 passes over all pairs. The accuracy is the share of 2,000 pairs of unseen clips that have
the true order; pairs that are equal in truth do not count.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from agents.samplers import Questions, Round
from pbrl.ledger import Ledger
from pbrl.policy import GaussianPolicy
from pbrl.run.settings import build, instantiate
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers

TASK, TRAJECTORIES, CLIP, TESTED = "cheetah_run", 100, 50, 2000
ROUNDS = [20] * 5 + [100] * 4 + [500] * 3  # questions: 20, 40, ... 100, 200, ... 500, 1000, 1500, 2000
SHOWN = (20, 100, 500, 2000)
KEEP = ("observations", "actions")


def node(*overrides: str) -> dict:
    """Settings of a run."""
    with initialize_config_module("conf"):
        return OmegaConf.to_container(compose("train", overrides=["agent=pebble", "oracle=rational", *overrides]))


def random_policies(simulator: Simulator, rng: np.random.Generator) -> tuple[GaussianPolicy, np.ndarray]:
    """Networks whose actions depend on the observation, so that behaviour differs between them."""
    sizes = {"hidden": [64], "hidden_gain": 2**0.5, "output_gain": 2.0, "initial_log_std": -1.0}
    policy = GaussianPolicy(simulator.obs_size, simulator.act_size, **sizes)
    return policy, np.stack([policy.initial(rng) for _ in range(TRAJECTORIES)])


def measure(sampler: str, seed: int) -> None:
    """One sequence of rounds."""
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
            if questions.asked in SHOWN:
                decided = np.abs(gap) > 1e-9
                print(
                    f"{sampler},{seed},{questions.asked},{right[decided].mean():.4f},{decided.sum()},{steps:.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("sampler,seed,pairs,accuracy,tested,adam_steps", flush=True)
    for seed in map(int, sys.argv[1:]):
        for sampler in ("uniform", "disagreement"):
            measure(sampler, seed)
