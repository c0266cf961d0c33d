"""PPO + reward model: what an iteration does, what must not matter, and Stable-Baselines3 reading the result."""

import numpy as np
import pytest
import torch

from tests.agents.toy import (
    STEPS,
    TRAJECTORIES,
    StubBudget,
    Trial,
    after_the_end,
    behaviour,
    make,
    preferences,
)

Q = np.linspace(0.0, 1.0, TRAJECTORIES // 2)
NOBODY = np.zeros(len(Q), bool)


def everything(agent):
    """All numbers that the agent's next update starts from."""
    parts = [*agent.ppo.network.state_dict().values(), *agent.reward_model.weights]
    return torch.cat([part.detach().ravel() for part in parts]).numpy().copy()


def learnt_rewards(agent, collected):
    """r(s_t, a_t) of the reward model [N, T]."""
    inputs = np.concatenate([collected.observations[:, :-1], collected.actions], -1)
    return agent.reward_model.members[0](torch.from_numpy(inputs)).squeeze(-1).detach().numpy()


def iterate(agent, answers, collected=None):
    return agent.iterate(StubBudget(answers, collected=behaviour() if collected is None else collected))


def test_an_iteration_asks_about_random_disjoint_pairs_of_the_present_policy():
    agent, asked = make("ppo_rlhf"), []
    for _ in range(2):
        collected, before = behaviour(), agent.parameters
        budget = StubBudget(preferences(Q), collected=collected)
        agent.iterate(budget)
        ((parameters, assignment, how),) = budget.collections
        np.testing.assert_array_equal(parameters, before[None])
        assert assignment.tolist() == [0] * TRAJECTORIES
        assert how == {"mean_actions": False, "common_start": False, "keep": ("observations", "actions")}
        (pairs,) = budget.asked
        both = np.concatenate([pairs.first.trajectory, pairs.second.trajectory])
        assert sorted(both) == collected.number.tolist()
        asked.append(both.tolist())
    assert asked[0] != asked[1]


def test_no_update_before_the_first_answer_and_from_then_on_with_what_is_remembered():
    agent = make("ppo_rlhf")
    before = everything(agent)
    assert iterate(agent, preferences(Q, NOBODY), behaviour(0)) == {}
    np.testing.assert_array_equal(everything(agent), before)
    assert "reward_accuracy" in iterate(agent, preferences(Q), behaviour(1))
    before = everything(agent)
    assert "reward_accuracy" not in iterate(agent, preferences(Q, NOBODY), behaviour(2))
    assert (everything(agent) != before).any()


def test_what_was_skipped_and_steps_after_the_end_have_no_influence():
    collected = behaviour(lengths=np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)])
    answered = Q < 0.5
    one, two = make("ppo_rlhf"), make("ppo_rlhf")
    metrics = iterate(one, preferences(Q, answered), collected)
    other = preferences(np.where(answered, Q, 0.123), answered)
    assert iterate(two, other, after_the_end(collected, 3.0)) == metrics
    np.testing.assert_array_equal(everything(one), everything(two))


def test_an_iteration_in_which_everything_diverges_at_once_changes_no_policy():
    agent = make("ppo_rlhf")
    before = agent.parameters
    iterate(agent, preferences(Q), behaviour(lengths=np.zeros(TRAJECTORIES, np.int64)))
    np.testing.assert_array_equal(agent.parameters, before)


def test_accuracy_counts_the_decided_pairs_that_the_learnt_reward_orders_like_the_teacher():
    agent, collected = make("ppo_rlhf", reward_model__learning_rate=1e-12), behaviour()
    returns = learnt_rewards(agent, collected).sum(1)

    def answer(pairs):
        first, second = (returns[clips.trajectory - 100] for clips in (pairs.first, pairs.second))
        q = np.where(second > first, 0.9, 0.1)
        q[3] = 1 - q[3]  # one of four is wrong, and the others undecided
        return preferences(np.where(np.arange(len(q)) < 4, q, 0.5))

    assert iterate(agent, answer, collected)["reward_accuracy"] == pytest.approx(3 / 4)


def test_learnt_returns_are_noted_until_each_trajectory_ended():
    agent, collected = make("ppo_rlhf"), behaviour(lengths=np.r_[5, np.full(TRAJECTORIES - 1, STEPS)])
    budget = StubBudget(preferences(Q), collected=collected)
    agent.iterate(budget)
    lived = np.arange(STEPS) < collected.lengths[:, None]
    expected = (learnt_rewards(agent, collected) * lived).sum(1)
    np.testing.assert_allclose(budget.noted["reward"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("standardise", [True, False])
def test_ppo_sees_the_learnt_reward_standardised_or_as_it_is(standardise, monkeypatch):
    agent = make("ppo_rlhf", standardise=standardise)
    collected, seen = behaviour(lengths=np.r_[5, np.full(TRAJECTORIES - 1, STEPS)]), []
    monkeypatch.setattr(agent.ppo, "update", lambda _, rewards, __: seen.append(rewards) or {})
    iterate(agent, preferences(Q), collected)
    learnt = learnt_rewards(agent, collected)
    lived = np.arange(STEPS) < collected.lengths[:, None]
    expected = (learnt - learnt[lived].mean()) / learnt[lived].std() if standardise else learnt
    np.testing.assert_allclose(seen[0][lived], expected[lived], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
def test_same_seed_same_parameters_for_any_number_of_threads(threads):
    reference, trial = (Trial("ppo_rlhf", "trajectories=16", "pairs=8") for _ in range(2))
    reference.run(2)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        trial.run(2)
    finally:
        torch.set_num_threads(before)
    np.testing.assert_array_equal(everything(trial.agent), everything(reference.agent))


def test_loaded_it_has_everything_that_its_next_update_starts_from():
    """Also where the reward model's buffer has forgotten something."""
    agent, again = (make("ppo_rlhf", seed=seed, reward_model__buffer_iterations=2) for seed in (0, 5))
    for seed in range(3):
        iterate(agent, preferences(Q), behaviour(seed))
    again.load_state_dict(agent.state_dict())
    metrics, same_metrics = (iterate(each, preferences(Q), behaviour(3)) for each in (agent, again))
    assert metrics == same_metrics
    np.testing.assert_array_equal(everything(again), everything(agent))
    assert again.rng.bit_generator.state == agent.rng.bit_generator.state
