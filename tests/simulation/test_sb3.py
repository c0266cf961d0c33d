"""The batched environments for Stable-Baselines3: step by step what its own DummyVecEnv makes of single ones."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
import stable_baselines3
from numpy.testing import assert_array_equal
from stable_baselines3.common.vec_env import DummyVecEnv

import pbrl
from pbrl.simulation.sb3 import SB3Envs
from pbrl.simulation.vector import BatchedEnv

assert pbrl  # importing it registers the environments
TASK = "cartpole_swingup"  # starts without compiling


def test_it_is_what_sb3_makes_of_single_environments() -> None:
    """Episodes of 5 steps: begun anew in the same step, with the last observation in the info."""
    ours = SB3Envs(TASK, 3, threads=2, max_episode_steps=5)
    theirs = DummyVecEnv([lambda: gymnasium.make(f"pbrl/{TASK}-v0", max_episode_steps=5)] * 3)
    for envs in (ours, theirs):
        envs.seed(7)
    assert_array_equal(ours.reset(), np.asarray(theirs.reset(), np.float64))
    random = np.random.default_rng(0)
    for step in range(1, 13):
        actions = random.uniform(-1, 1, (3, 1))
        obs, rewards, dones, infos = ours.step(actions)
        expected, expected_rewards, expected_dones, expected_infos = theirs.step(actions)
        assert_array_equal(obs, expected)
        np.testing.assert_allclose(rewards, expected_rewards, rtol=1e-6)  # theirs are float32
        assert_array_equal(dones, expected_dones)
        assert dones.all() == (step % 5 == 0)
        for info, other in zip(infos, expected_infos, strict=True):
            assert ("terminal_observation" in info) == ("terminal_observation" in other)
            if "terminal_observation" in info:
                assert_array_equal(info["terminal_observation"], other["terminal_observation"])
                assert info["TimeLimit.truncated"] == other["TimeLimit.truncated"]
    ours.close()


def test_an_episode_that_ends_alone_leaves_the_others_where_they_are() -> None:
    one, two = (BatchedEnv(3, TASK, threads=2) for _ in range(2))
    for batch in (one, two):
        batch.reset(seed=0)
    actions = np.full((3, 1), 0.5)
    for _ in range(4):
        before = one.step(actions)[0]
        two.step(actions)
    one._arrays.resetting[1] = True  # as if its task had ended it
    obs = one.begin_ended()
    assert_array_equal(obs[[0, 2]], before[[0, 2]])
    assert (obs[1] != before[1]).any()
    after, twin = one.step(actions)[0], two.step(actions)[0]
    assert_array_equal(after[[0, 2]], twin[[0, 2]])
    assert (after[1] != twin[1]).any()
    assert one._arrays.elapsed.tolist() == [5, 1, 5]


def test_stable_baselines_trains_on_it() -> None:
    envs = SB3Envs(TASK, 4, max_episode_steps=8)
    model = stable_baselines3.PPO("MlpPolicy", envs, n_steps=16, batch_size=32, n_epochs=1, device="cpu", seed=0)
    before = model.policy.action_net.weight.detach().clone()
    model.learn(total_timesteps=64)
    assert model.num_timesteps == 64
    assert (model.policy.action_net.weight != before).any()
    assert envs.env_is_wrapped(gymnasium.Wrapper) == [False] * 4
    with pytest.raises(AttributeError, match="one batch"):
        envs.env_method("anything")
    envs.close()
