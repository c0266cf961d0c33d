"""PPO + reward model: what must not matter, that it can stop and go on, and that it learns."""

import numpy as np
import pytest
import stable_baselines3
import torch

from pbrl.simulation.simulator import Simulator
from tests.agents.toy import (
    OBS,
    STEPS,
    TARGET,
    TRAJECTORIES,
    after_the_end,
    behaviour,
    make,
    pairs_of,
    preferences,
    toy_ledger,
    train,
)

Q = np.linspace(0.0, 1.0, TRAJECTORIES // 2)
NOBODY = np.zeros(len(Q), bool)
SMALL = {"reward_model__hidden": [16, 16], "ppo__critic_hidden": [16, 16]}


def everything(agent):
    """All numbers that the agent's next update starts from."""
    parts = [*agent.ppo.network.state_dict().values(), *agent.reward_model.network.state_dict().values()]
    return torch.cat([part.ravel() for part in parts]).numpy().copy()


def test_no_update_before_the_first_answer_and_from_then_on_with_what_is_remembered():
    agent = make("ppo_rlhf", **SMALL)
    before = everything(agent)
    assert agent.tell(pairs_of(behaviour(0)), preferences(Q, NOBODY)) == {}
    np.testing.assert_array_equal(everything(agent), before)
    assert "reward_accuracy" in agent.tell(pairs_of(behaviour(1)), preferences(Q))
    before = everything(agent)
    assert "reward_accuracy" not in agent.tell(pairs_of(behaviour(2)), preferences(Q, NOBODY))
    assert (everything(agent) != before).any()


def test_what_was_skipped_and_steps_after_the_end_have_no_influence():
    collected = behaviour(lengths=np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)])
    answered = Q < 0.5
    one, two = make("ppo_rlhf", **SMALL), make("ppo_rlhf", **SMALL)
    metrics = one.tell(pairs_of(collected), preferences(Q, answered))
    other = preferences(np.where(answered, Q, 0.123), answered)
    assert two.tell(pairs_of(after_the_end(collected, 3.0)), other) == metrics
    np.testing.assert_array_equal(everything(one), everything(two))


def test_an_iteration_in_which_everything_diverges_at_once_changes_the_reward_model_only():
    agent = make("ppo_rlhf", **SMALL)
    before = agent.parameters
    agent.tell(pairs_of(behaviour(lengths=np.zeros(TRAJECTORIES, np.int64))), preferences(Q))
    np.testing.assert_array_equal(agent.parameters, before)


def test_accuracy_counts_the_decided_pairs_that_the_learnt_reward_orders_like_the_teacher():
    agent = make("ppo_rlhf", **SMALL, reward_model__learning_rate=1e-12)
    collected, q = behaviour(), np.full(TRAJECTORIES // 2, 0.5)
    agent.tell(pairs_of(collected), preferences(q))
    inputs = np.concatenate([collected.observations[:, :-1], collected.actions], -1)
    returns = agent.reward_model.network(torch.from_numpy(inputs)).sum((1, 2)).detach().numpy()
    first, second = returns.reshape(2, -1)
    q[:4] = np.where(second > first, 0.9, 0.1)[:4]
    q[3] = 1 - q[3]
    assert agent.tell(pairs_of(collected), preferences(q))["reward_accuracy"] == pytest.approx(3 / 4)


@pytest.mark.parametrize("standardise", [True, False])
def test_ppo_sees_the_learnt_reward_standardised_or_as_it_is(standardise, monkeypatch):
    agent = make("ppo_rlhf", **SMALL, standardise=standardise)
    collected, seen = behaviour(lengths=np.r_[5, np.full(TRAJECTORIES - 1, STEPS)]), []
    monkeypatch.setattr(agent.ppo, "update", lambda _, rewards, __: seen.append(rewards) or {})
    agent.tell(pairs_of(collected), preferences(Q))
    inputs = torch.from_numpy(np.concatenate([collected.observations[:, :-1], collected.actions], -1))
    learnt = agent.reward_model.network(inputs).squeeze(-1).detach().numpy()
    lived = np.arange(STEPS) < collected.lengths[:, None]
    expected = (learnt - learnt[lived].mean()) / learnt[lived].std() if standardise else learnt
    np.testing.assert_allclose(seen[0][lived], expected[lived], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_same_seed_same_parameters_for_any_number_of_threads(threads):
    reference, agent = make("ppo_rlhf", **SMALL), make("ppo_rlhf", **SMALL)
    train(reference, toy_ledger(), range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        train(agent, toy_ledger(), range(2))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(everything(agent), everything(reference))


def test_continuing_equals_not_stopping():
    settings = {**SMALL, "reward_model__buffer_iterations": 2}
    agent, ledger = make("ppo_rlhf", **settings), toy_ledger()
    train(agent, ledger, range(2))
    state, books = agent.state_dict(), ledger.state_dict()
    _, metrics = train(agent, ledger, range(2, 4))
    again, ledger = make("ppo_rlhf", **settings, seed=5), toy_ledger()
    again.load_state_dict(state)
    ledger.load_state_dict(books)
    _, same_metrics = train(again, ledger, range(2, 4))
    assert metrics == same_metrics
    np.testing.assert_array_equal(everything(again), everything(agent))
    assert again.rng.bit_generator.state == agent.rng.bit_generator.state


def test_in_the_simulator():
    simulator = Simulator("cheetah_run", seed=0, steps=20)
    agent, again = (make("ppo_rlhf", simulator=simulator, **SMALL) for _ in range(2))
    for each in (agent, again):
        _, metrics = train(each, toy_ledger(simulator=simulator), range(2))
    assert all(np.isfinite(list(each.values())).all() for each in metrics)
    np.testing.assert_array_equal(everything(agent), everything(again))


def test_learns_and_stable_baselines_has_it_too(tmp_path):
    faster = {"ppo__actor_learning_rate": 3e-3, "ppo__warmup_updates": 1, "ppo__gamma": 0.5}
    agent = make("ppo_rlhf", initial_log_std=-1.0, **SMALL, **faster)
    returns, _ = train(agent, toy_ledger(), range(18))
    assert np.mean(returns[-3:]) > 0.5 * np.mean(returns[:2])
    obs = np.zeros((1, OBS), np.float32)
    mean = agent.policy.mean_actions(agent.parameters, obs)
    np.testing.assert_allclose(mean[0], TARGET, atol=0.4)
    agent.save_sb3(tmp_path / "policy.zip")
    action, _ = stable_baselines3.PPO.load(tmp_path / "policy.zip", device="cpu").predict(obs, deterministic=True)
    np.testing.assert_allclose(action, np.clip(mean, -1, 1), atol=1e-6)
