"""What a learnt reward makes of behaviour that it was not learnt from.

    python docs/learnt_rewards.py RUN POLICY_RUN ...

RUN is a finished run of an agent with a reward model. The last policy of each POLICY_RUN, of the same task, acts
without noise from the same eight starts. Where the learnt reward prefers the policy of RUN to a truly better one, it
has misled the agent; where it prefers the better one, too, the agent has not learnt to do what its reward asks for.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from agents.reward_model import RewardModel
from pbrl.run import checkpoint
from pbrl.run.folder import read_settings
from pbrl.run.saved import load
from pbrl.run.settings import ConfigurationError, build
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers

SEED, STARTS = 910, 8


def reward_model(run: Path, simulator: Simulator) -> RewardModel:
    """As the run has left it."""
    found = checkpoint.load(run / "checkpoint")
    settings = read_settings(run)["agent"]
    if found is None or "reward_model" not in settings:
        raise SystemExit(f"{run} has no learnt reward: name a run of pebble, prefppo or ppo_rlhf that has a checkpoint")
    rng, sizes = np.random.default_rng(SEED), {"obs_size": simulator.obs_size, "act_size": simulator.act_size}
    model: RewardModel = build(settings["reward_model"])(rng=rng, **sizes)
    model.load_state_dict(found[1]["agent"]["reward_model"])
    return model


def main(run: str, *others: str) -> None:
    """Print the table."""
    simulator = Simulator(load(run).task, seed=SEED)
    model = reward_model(Path(run), simulator)
    print("| policy of | true return | learnt return | correlation, step by step |\n|---|--:|--:|--:|")
    for each in others:
        saved, arms, keep = load(each), np.zeros(STARTS, np.int64), ("observations", "actions")
        if saved.task != simulator.task:
            raise SystemExit(f"{each} is of {saved.task}, and the reward of {simulator.task}")
        how = {"iteration": 0, "mean_actions": True, "keep": keep}
        seen = simulator.collect(saved.policy, saved.parameters[None], arms, **how)
        as_float32 = {name: np.asarray(getattr(seen, name), np.float32) for name in keep}
        with workers() as pool:
            learnt = model.reward(replace(seen, **as_float32), pool)
        step_by_step = np.corrcoef(learnt.ravel(), seen.task_rewards.ravel())[0, 1]
        means = seen.returns.mean(), learnt.sum(axis=1).mean()
        print(f"| {each} | {means[0]:.0f} | {means[1]:.0f} | {step_by_step:.2f} |")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    try:
        main(*sys.argv[1:])
    except (ConfigurationError, checkpoint.CheckpointError) as error:
        raise SystemExit(f"docs/learnt_rewards.py: {error}") from None
