"""Does our PPO learn as Stable-Baselines3's own `learn` does? Both on the true reward of cheetah_run.

    python docs/ppo_check.py run 3000 3001 3002    # these seeds, as far as docs/ppo_check.csv lacks them
    python docs/ppo_check.py table                 # of what is in the file, for docs/readings.md

Ours is `agent=ppo_true` with normalised observations, on trajectories that are collected whole. Theirs is `PPO.learn`
on `pbrl.simulation.sb3.SB3Envs`, which makes every step and every update itself, with VecNormalize for observations
and rewards. Networks, steps and minibatches are the same. Theirs has no warm-up, one learning rate, and one clip of
both gradients together.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
import tempfile
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_module
from scipy import stats
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecMonitor, VecNormalize
from tqdm import tqdm

from pbrl.run.files import write_atomically
from pbrl.run.record import columns, read
from pbrl.simulation.sb3 import SB3Envs
from pbrl.train import train

TASK, TRAJECTORIES, STEPS, ITERATIONS = "cheetah_run", 64, 1000, 40
SHOWN = (10, 20, 40)  # iterations
FILE = Path(__file__).with_suffix(".csv")
COLUMNS = ["learner", "seed", *(f"return_{iteration}" for iteration in SHOWN)]


def ours(seed: int, *, passes: int, warmup: int) -> list[float]:
    """Mean return of each iteration of `agent=ppo_true`."""
    ppo = [f"agent.ppo.passes={passes}", f"agent.ppo.warmup_updates={warmup}"]
    settings = [f"seed={seed}", f"iterations={ITERATIONS}", "normalise_observations=true", *ppo]
    quiet = ["threads=1", "wandb.mode=disabled", "preference_log=false"]
    with tempfile.TemporaryDirectory() as folder:
        made = train(overrides=["agent=ppo_true", f"env={TASK}", *settings, *quiet, f"folder={folder}/run"])
        return columns(read(made / "metrics.jsonl"))["return_mean"].tolist()


class Returns(BaseCallback):
    """The mean return of the episodes of each rollout, all of which end with it."""

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.bar = tqdm(total=ITERATIONS, disable=None)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        assert self.model.ep_info_buffer is not None
        assert len(self.model.ep_info_buffer) == TRAJECTORIES
        self.means.append(float(np.mean([episode["r"] for episode in self.model.ep_info_buffer])))
        self.bar.update()


def theirs(seed: int) -> list[float]:
    """Mean return of each iteration of Stable-Baselines3's `PPO.learn`."""
    with initialize_config_module("conf"):
        ppo = compose("train", overrides=["agent=ppo_true"]).agent.ppo
    envs = VecNormalize(VecMonitor(SB3Envs(TASK, TRAJECTORIES, threads=1)), gamma=ppo.gamma)
    hidden = list(ppo.critic_hidden)
    model = PPO(
        "MlpPolicy",
        envs,
        learning_rate=ppo.actor_learning_rate,
        n_steps=STEPS,
        batch_size=TRAJECTORIES * STEPS // ppo.gradient_steps,
        n_epochs=1,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        clip_range=ppo.clip_range,
        max_grad_norm=ppo.max_gradient_norm,
        policy_kwargs={"net_arch": {"pi": hidden, "vf": hidden}},
        stats_window_size=TRAJECTORIES,
        seed=seed,
        device="cpu",
    )
    returns = Returns()
    model.learn(ITERATIONS * TRAJECTORIES * STEPS, callback=returns)
    return returns.means


LEARNERS = {
    "`ppo_true`, rate warmed up over 20 iterations": partial(ours, passes=1, warmup=20),
    "`ppo_true` without warm-up": partial(ours, passes=1, warmup=1),
    "Stable-Baselines3": theirs,
    "`ppo_true` without warm-up, 4 passes": partial(ours, passes=4, warmup=1),
}


def run(seeds: list[int]) -> None:
    """Measure what the file lacks."""
    for learner, seed in product(LEARNERS, seeds):
        there = lines()
        if (learner, str(seed)) in {(line["learner"], line["seed"]) for line in there}:
            continue
        returns = LEARNERS[learner](seed)
        row = [learner, seed, *(f"{np.mean(returns[end - 5 : end]):.1f}" for end in SHOWN)]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *(line.values() for line in there), row])
        write_atomically(FILE, out.getvalue())
        print(*row, file=sys.stderr, flush=True)


def lines() -> list[dict[str, str]]:
    """What the file has."""
    return list(csv.DictReader(FILE.read_text().splitlines())) if FILE.exists() else []


def table() -> None:
    """Mean return of the five iterations that end with the 10th, 20th and 40th; 95 % intervals over seeds."""
    heads = " | ".join(f"iteration {each}" for each in SHOWN)
    print(f"| | seeds | {heads} |\n|---|--:|{'--:|' * len(SHOWN)}")
    for learner in LEARNERS:
        found = [line for line in lines() if line["learner"] == learner]
        values = np.array([[float(line[f"return_{each}"]) for each in SHOWN] for line in found])
        if len(found) < 2:
            raise SystemExit("an interval needs two seeds of every learner: python docs/ppo_check.py run 3000 3001")
        half = stats.sem(values) * stats.t.ppf(0.975, len(found) - 1)
        cells = [f"{mean:.0f} ± {width:.0f}" for mean, width in zip(values.mean(0), half, strict=True)]
        print(f"| {learner} | {len(found)} | {' | '.join(cells)} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "table"])
    parser.add_argument("seeds", nargs="*", type=int)
    chosen = parser.parse_args()
    if chosen.command == "run" and not chosen.seeds:
        parser.error("run needs seeds, such as 3000 3001 3002")
    if chosen.command == "run":
        run(chosen.seeds)
    else:
        table()
