"""PPO: advantages by hand, the actor as a flat vector, learning rates, and Stable-Baselines3 reading the result."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import RolloutBuffer

import pbrl.simulation.vector  # noqa: F401  # registers the environments
from agents.ppo import PPO, Rollout
from pbrl.ledger import read_only
from pbrl.policy import GaussianPolicy
from pbrl.threads import workers
from pbrl.types import Behaviour
from tests.agents.toy import ACT, OBS, STEPS, TRAJECTORIES, after_the_end, behaviour

SETTINGS = {
    "actor_learning_rate": 3e-4,
    "warmup_updates": 20,
    "critic_hidden": [8],
    "critic_hidden_gain": 2**0.5,
    "critic_output_gain": 1.0,
    "critic_learning_rate": 1e-3,
    "critic_weight": 0.5,
    "clip_range": 0.2,
    "entropy_bonus": 0.0,
    "gae_lambda": 0.5,
    "gamma": 0.8,
    "passes": 1,
    "gradient_steps": 10,
    "max_gradient_norm": 0.5,
    "adam_epsilon": 1e-5,
}
POLICY = partial(GaussianPolicy, hidden=[16, 12], hidden_gain=2**0.5, output_gain=1.0, initial_log_std=-0.3)
LENGTHS = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]


def make(obs=OBS, act=ACT, seed=0, **changes):
    return PPO(policy=POLICY(obs, act), rng=np.random.default_rng(seed), **(SETTINGS | changes))


def update(ppo, collected, rewards):
    with workers() as pool:
        return ppo.update(collected, rewards, pool)


def rewards_of(collected, seed=0):
    return np.random.default_rng(seed).standard_normal((len(collected), STEPS), np.float32)


def test_advantages_by_hand():
    """Three steps with gamma = 0.8, lambda = 0.5; the second trajectory ends by itself after two."""
    collected = Behaviour(
        policy=np.zeros(2, np.int64),
        lengths=np.array([3, 2]),
        diverged=np.zeros(2, bool),
        start=np.zeros((2, 3), np.int64),
        number=np.arange(2),
        observations=np.zeros((2, 4, OBS), np.float32),
        actions=np.zeros((2, 3, ACT), np.float32),
    )
    rewards = np.array([[1, 2, 3], [1, 2, 99]], np.float32)
    V = np.array([[0.5, 1, 2, 10], [0.5, 1, 77, 88]], np.float32)
    log_pi = np.zeros((2, 3), np.float32)
    rng = np.random.default_rng(0)
    rollout = Rollout(collected, collected.observations, rewards, V, log_pi, sb3=make().sb3, rng=rng)
    # delta = r + 0.8 V' - V:  first: 1.3, 2.6, 9 (V(s_3) = 10 bootstraps);  second: 1.3, 1 (no more after the end)
    np.testing.assert_allclose(rollout.advantages[:, 0], [1.3 + 0.4 * (2.6 + 0.4 * 9), 2.6 + 0.4 * 9, 9], rtol=1e-6)
    np.testing.assert_allclose(rollout.advantages[:2, 1], [1.3 + 0.4 * 1, 1], rtol=1e-6)
    np.testing.assert_allclose(rollout.returns[:, 0], rollout.advantages[:, 0] + [0.5, 1, 2])
    (batch,) = rollout.get()
    assert len(batch.advantages) == 5
    assert sorted(batch.old_values.tolist()) == [0.5, 0.5, 1, 1, 2]


def test_the_buffer_is_what_stable_baselines_would_have_collected():
    sb3, collected = make().sb3, behaviour()
    rewards, rng = rewards_of(collected), np.random.default_rng(1)
    V = rng.standard_normal((TRAJECTORIES, STEPS + 1), np.float32)
    log_pi = rng.standard_normal((TRAJECTORIES, STEPS), np.float32)
    ours = Rollout(collected, collected.observations, rewards, V, log_pi, sb3=sb3, rng=rng)
    theirs = RolloutBuffer(
        STEPS, sb3.observation_space, sb3.action_space, gae_lambda=0.5, gamma=0.8, n_envs=TRAJECTORIES
    )
    for t in range(STEPS):
        step = collected.observations[:, t], collected.actions[:, t], rewards[:, t], np.full(TRAJECTORIES, t == 0)
        theirs.add(*step, torch.from_numpy(V[:, t]), torch.from_numpy(log_pi[:, t]))
    theirs.compute_returns_and_advantage(torch.from_numpy(V[:, -1]), dones=np.zeros(TRAJECTORIES))
    for name in ("observations", "actions", "values", "log_probs", "advantages", "returns"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    batches = list(ours.get(64))
    assert [len(batch.returns) for batch in batches] == [64] * 5
    seen = torch.cat([batch.advantages for batch in batches]).sort().values
    np.testing.assert_array_equal(seen, np.sort(theirs.advantages.ravel()))


def test_the_actor_is_the_policy(rng):
    ppo = make()
    assert ppo.parameters.shape == (ppo.policy.size,)
    obs = rng.standard_normal((7, OBS), np.float32)
    distribution = ppo.network.get_distribution(torch.from_numpy(obs))
    np.testing.assert_allclose(
        ppo.policy.mean_actions(ppo.parameters, obs), distribution.distribution.mean.detach(), atol=1e-6
    )
    np.testing.assert_allclose(distribution.distribution.stddev[0].detach(), np.full(ACT, np.exp(-0.3)), rtol=1e-6)


def test_it_begins_with_the_policys_own_initialisation():
    np.testing.assert_array_equal(make(seed=4).parameters, POLICY(OBS, ACT).initial(np.random.default_rng(4)))


def test_values_and_log_probabilities_are_those_of_the_networks():
    ppo, collected = make(), behaviour()
    with workers() as pool:
        V, log_pi = ppo._evaluate(collected, collected.observations, pool)
    obs, actions = torch.from_numpy(collected.observations), torch.from_numpy(collected.actions)
    with torch.no_grad():
        values, log_prob, _ = ppo.network.evaluate_actions(obs[:, :-1].reshape(-1, OBS), actions.reshape(-1, ACT))
        last = ppo.network.predict_values(obs[:, -1])
    np.testing.assert_allclose(V[:, :-1].ravel(), values.ravel(), atol=1e-5)
    np.testing.assert_allclose(V[:, -1], last.ravel(), atol=1e-5)
    np.testing.assert_allclose(log_pi.ravel(), log_prob, atol=1e-4)


def test_learning_rates():
    """The actor's rises in twenty equal steps, the critic's is constant."""
    ppo, collected = make(gradient_steps=1), behaviour()
    metrics = [update(ppo, collected, rewards_of(collected)) for _ in range(22)]
    rates = [each["actor_learning_rate"] for each in metrics]
    np.testing.assert_allclose(rates[:20], 3e-4 * np.arange(1, 21) / 20)
    assert rates[20:] == [3e-4, 3e-4]
    assert {each["critic_learning_rate"] for each in metrics} == {1e-3}


def test_each_group_moves_at_its_own_rate():
    """Adam's first step has the size of the learning rate, whatever the gradient."""
    ppo, collected = make(gradient_steps=1, warmup_updates=1, adam_epsilon=1e-12), behaviour()
    actor, critic = ppo.network.action_net.weight, ppo.network.value_net.weight
    before = actor.detach().clone(), critic.detach().clone()
    update(ppo, collected, rewards_of(collected))
    np.testing.assert_allclose((actor.detach() - before[0]).abs(), 3e-4, rtol=1e-2)
    np.testing.assert_allclose((critic.detach() - before[1]).abs(), 1e-3, rtol=1e-2)


def test_steps_after_the_end_have_no_influence():
    collected = behaviour(lengths=LENGTHS)
    one, two = make(), make()
    metrics = update(one, collected, rewards_of(collected))
    other = np.where(np.arange(STEPS) < LENGTHS[:, None], rewards_of(collected), 50.0).astype(np.float32)
    assert update(two, after_the_end(collected, 3.0), other) == metrics
    np.testing.assert_array_equal(one.parameters, two.parameters)


def test_behaviour_is_read_only_and_no_warning_says_so():
    """As the ledger gives it. Torch warns once in a process, unless told to warn always."""
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        update(make(), read_only(behaviour()), rewards_of(behaviour()))
    finally:
        torch.set_warn_always(always)


def test_the_policy_goes_where_the_reward_is():
    ppo = make(warmup_updates=1, actor_learning_rate=1e-2)
    rng = np.random.default_rng(0)
    for _ in range(20):
        collected = behaviour()
        means = ppo.policy.mean_actions(ppo.parameters, collected.observations[:, :-1].reshape(-1, OBS))
        collected.actions[:] = means.reshape(collected.actions.shape)
        collected.actions[:] += np.exp(ppo.parameters[-ACT:]) * rng.standard_normal(collected.actions.shape, np.float32)
        update(ppo, collected, collected.actions[..., 0] - collected.actions[..., 1])
    mean = ppo.policy.mean_actions(ppo.parameters, np.zeros((1, OBS), np.float32))[0]
    assert mean[0] > 0.5
    assert mean[1] < -0.5


@pytest.mark.parametrize("setting", ["warmup_updates", "passes", "gradient_steps"])
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        make(**{setting: 0})


def test_threads_do_not_disturb_each_other_when_log_probabilities_are_computed():
    """Each trajectory is evaluated by itself, many at a time, many times over."""
    ppo, collected = make(), behaviour(n=64)
    theta = torch.from_numpy(ppo.parameters)
    expected = ppo.policy.log_probability(
        theta, torch.tensor(collected.observations[:, :-1]), torch.tensor(collected.actions)
    )
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            _, log_pi = ppo._evaluate(collected, collected.observations, pool)
            np.testing.assert_allclose(log_pi, expected, atol=1e-5)
