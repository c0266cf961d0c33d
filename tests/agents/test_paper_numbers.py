"""The paper's hyperparameter table, and what this benchmark chose where it is silent: as conf/ composes them."""

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

POLICY = {"hidden": [256, 256], "hidden_gain": pytest.approx(2**0.5), "output_gain": 0.01}
PAPER = {
    "ncrs": {
        "step": {"maximum": 4e-2, "minimum": 4e-3, "decay": 480},
        "votes": None,  # all of an iteration's pairs
        "feedback": "score",
        "direction": "gaussian",
        "policy": {**POLICY, "initial_log_std": -1.2},  # silent: see docs/readings.md
    },
    "zpg": {
        "smoothing": 4.5e-2,
        "learning_rate": 2e-3,
        "experts": 1,  # silent: as many answers as every other agent has
        "policy": {**POLICY, "initial_log_std": -1.2},
    },
    "dpo": {
        "beta": 0.1,
        "learning_rate": 3e-4,
        "batch_pairs": 32,
        "gradient_steps": 5,
        "max_gradient_norm": 0.5,
        "policy": {**POLICY, "initial_log_std": 0.0},
    },
    "ppo_rlhf": {
        "reward_model": {
            "members": 1,
            "hidden": [256, 256],
            "learning_rate": 4e-3,
            "batch_pairs": 32,  # 64 trajectories
            "gradient_steps": 10,
            "max_gradient_norm": 0.5,
        },
        "ppo": {
            "actor_learning_rate": 3e-4,
            "warmup_updates": 20,
            "critic_hidden": [256, 256],
            "critic_learning_rate": 1e-3,
            "clip_range": 0.2,
            "gae_lambda": 0.95,
            "gamma": 0.99,
            "passes": 1,
            "gradient_steps": 10,
            "max_gradient_norm": 0.5,
        },
        "clip_steps": None,  # whole trajectories
        "policy": {**POLICY, "initial_log_std": 0.0},
    },
}


def chosen(settings, expected):
    """Those of the settings that the table has."""
    return {
        key: chosen(settings[key], value) if isinstance(value, dict) else settings[key]
        for key, value in expected.items()
    }


def test_the_papers_numbers_are_the_defaults():
    with initialize_config_module("conf"):  # all agents in one composition, which takes a while
        cfg = compose("train", [f"+agent@{name}={name}" for name in PAPER])
    assert (cfg.iterations, cfg.trajectories, cfg.pairs, cfg.bits) == (600, 64, 32, None)
    composed = {name: OmegaConf.to_container(cfg[name]) for name in PAPER}
    assert {name: chosen(composed[name], table) for name, table in PAPER.items()} == PAPER
    assert OmegaConf.to_container(cfg.agent) == composed["ncrs"]
