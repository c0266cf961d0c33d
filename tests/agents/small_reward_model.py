"""A small ensemble, pairs of clips to ask about, and what a member makes of them by torch's own layers."""

import numpy as np
import torch

from agents.reward_model import RewardModel
from pbrl.types import Clips, Pairs
from tests.agents.toy import ACT, OBS

SETTINGS = {
    "members": 3,
    "hidden": [8, 8],
    "hidden_gain": 2**0.5,
    "output_gain": 1.0,
    "output": "tanh",
    "learning_rate": 1e-2,
    "batch_pairs": 128,
    "gradient_steps": None,
    "passes": 1,
    "stop_at_accuracy": None,
    "max_gradient_norm": None,
    "buffer_iterations": None,
}


def reward_model(seed=0, **changes):
    return RewardModel(obs_size=OBS, act_size=ACT, rng=np.random.default_rng(seed), **(SETTINGS | changes))


def random_pairs(collected, n, *, steps=None, seed=0):
    """Pairs of clips of any two trajectories."""
    rng = np.random.default_rng(seed)
    latest = 0 if steps is None else collected.actions.shape[1] - steps

    def clips(rows):
        return Clips(trajectory=collected.number[rows], step=rng.integers(0, latest + 1, size=n))

    first = rng.integers(len(collected), size=n)
    second = (first + rng.integers(1, len(collected), size=n)) % len(collected)
    return Pairs(first=clips(first), second=clips(second), steps=steps)


def differences_by_hand(member, collected, pairs):
    """How much more a network would reward the second of each pair [P], one clip at a time, with torch's own layers."""

    def total(clips, pair):
        row = int(clips.trajectory[pair] - collected.number[0])
        begin = int(clips.step[pair])
        end = min(int(collected.lengths[row]), begin + (pairs.steps or collected.actions.shape[1]))
        inputs = np.concatenate([collected.observations[row, begin:end], collected.actions[row, begin:end]], axis=1)
        return member(torch.from_numpy(inputs)).sum()

    return torch.stack([total(pairs.second, pair) - total(pairs.first, pair) for pair in range(len(pairs))])
