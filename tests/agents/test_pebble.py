"""PEBBLE: the entropy of states by hand, and what an iteration does in which order."""

import numpy as np
import pytest
from hydra import compose, initialize_config_module

from agents.pebble import neighbour_distance
from pbrl.threads import workers
from tests.agents.toy import STEPS, StubBudget, behaviour, make, preferences


def naive_distance(states, k):
    """One state after the other: sort the distances to all others."""
    found = []
    for row, state in enumerate(states.astype(np.float64)):
        others = np.delete(states.astype(np.float64), row, axis=0)
        found.append(np.sort(np.sqrt(((others - state) ** 2).sum(1)))[min(k, len(others)) - 1])
    return np.array(found)


@pytest.mark.parametrize(("n", "k"), [(700, 5), (30, 1), (4, 5), (2, 5)])
def test_the_entropy_of_a_state_by_hand(n, k, rng):
    states = rng.standard_normal((n, 3), np.float32)
    states[-1] = states[0]  # twice the same
    with workers() as pool:
        np.testing.assert_allclose(neighbour_distance(states, k, pool), naive_distance(states, k), atol=1e-6)
        assert neighbour_distance(states[:1], k, pool).tolist() == [0.0]
        assert neighbour_distance(states[:0], k, pool).shape == (0,)


def answer(pairs):
    return preferences(np.linspace(0, 1, len(pairs)))


def unanswered(pairs):
    return preferences(np.full(len(pairs), 0.5), answered=np.zeros(len(pairs), bool))


class Listener:
    """Replaces methods of an agent's parts by ones that note their names, and the buffer's rewards at that time."""

    def __init__(self, agent, monkeypatch):
        self.calls, self.rewards = [], []
        for part, name in ((agent.sac, "learn"), (agent.sac, "reset_critics"), (agent.sac, "update")):
            monkeypatch.setattr(part, name, self.note(agent, name))
        for part, name in ((agent.sac, "collect"), (agent.questions, "ask"), (agent.reward_model, "fit")):
            monkeypatch.setattr(part, name, self.note(agent, name, getattr(part, name)))

    def note(self, agent, name, call=lambda *_: {}):
        def noted(*given):
            self.calls.append(name)
            self.rewards.append(agent.sac.replay.rewards[: len(agent.sac.replay)].copy())
            return call(*given)

        return noted


def test_an_iteration_in_order(monkeypatch):
    agent = make("pebble", unsupervised_trajectories=2, trajectories=3)
    listener = Listener(agent, monkeypatch)
    turn = ["collect", "learn"]
    agent.iterate(StubBudget(answer, trajectories=3, pairs=4))
    assert listener.calls == [*turn, *turn, "ask", "fit", "reset_critics", *["update"] * 5, *turn]
    listener.calls.clear()
    agent.iterate(StubBudget(answer, trajectories=3, pairs=4, first=103))  # the critics stay
    assert listener.calls == [*turn, *turn, "ask", "fit", *turn]


def test_first_it_learns_from_the_entropy_of_states_then_from_what_the_teacher_rewards(monkeypatch):
    agent = make("pebble", unsupervised_trajectories=2)
    listener = Listener(agent, monkeypatch)
    agent.iterate(StubBudget(answer, trajectories=3, pairs=4))
    replay = agent.sac.replay
    learnt_from = [rewards for name, rewards in zip(listener.calls, listener.rewards, strict=True) if name == "learn"]
    states = replay.observations[:2, :-1].reshape(-1, replay.observations.shape[-1])
    expected = naive_distance(states, 5)
    np.testing.assert_allclose(learnt_from[1].ravel(), expected / expected.std(), rtol=1e-4)
    with workers() as pool:
        learnt = agent.reward_model.reward(replay.behaviour(), pool)
    np.testing.assert_allclose(learnt_from[2], learnt, atol=1e-6)
    np.testing.assert_allclose(replay.rewards[:3], learnt, atol=1e-6)


def test_every_new_reward_is_given_to_all_that_was_ever_done_also_after_the_buffer_has_wrapped():
    agent = make("pebble", sac__buffer_trajectories=5, unsupervised_trajectories=2)
    for iteration in range(3):
        agent.iterate(StubBudget(answer, trajectories=3, pairs=4, first=100 + 3 * iteration))
    with workers() as pool:
        learnt = agent.reward_model.reward(agent.sac.replay.behaviour(), pool)
    assert agent.sac.replay.added == 9
    np.testing.assert_allclose(agent.sac.replay.rewards, learnt, atol=1e-6)


def test_as_long_as_the_teacher_says_nothing_it_explores_and_then_waits(monkeypatch):
    agent = make("pebble", unsupervised_trajectories=2)
    listener = Listener(agent, monkeypatch)
    agent.iterate(StubBudget(unanswered, trajectories=3, pairs=4))
    assert listener.calls == ["collect", "learn", "collect", "learn", "ask", "collect"]


def test_learnt_returns_are_noted_for_all_trajectories_of_the_iteration():
    agent, budget = make("pebble", unsupervised_trajectories=2), StubBudget(answer, trajectories=3, pairs=4)
    agent.iterate(budget)
    np.testing.assert_allclose(budget.noted["reward"], agent.sac.replay.rewards[:3].sum(1))


def test_steps_after_the_end_are_no_states_and_are_not_learnt_from():
    agent = make("pebble", unsupervised_trajectories=2)
    collected = behaviour(n=1, lengths=[7])
    agent.sac.replay.add(collected, np.ones((1, STEPS), np.float32))
    with workers() as pool:
        agent._reward_entropy(pool)
    rewards = agent.sac.replay.rewards[0]
    expected = naive_distance(collected.observations[0, :7], 5)
    np.testing.assert_allclose(rewards, np.r_[expected / expected.std(), np.zeros(STEPS - 7)], rtol=1e-4)
    batch = agent.sac.replay.sample(200, np.random.default_rng(0))
    assert len({tuple(obs) for obs in batch.obs.tolist()}) == 7


@pytest.mark.parametrize("setting", ["unsupervised_trajectories", "neighbours"])
def test_settings_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=setting):
        make("pebble", **{setting: 0})


@pytest.mark.parametrize(
    ("task", "steps", "questions", "rate"),
    [("walker_walk", 500, 500, 5e-4), ("cheetah_run", 1000, 1000, 5e-4), ("quadruped_walk", 1020, 1000, 1e-4)],
)
def test_b_prefs_protocol(task, steps, questions, rate):
    with initialize_config_module("conf"):
        cfg = compose("train", overrides=["experiment=bpref", f"env={task}"])
    assert cfg.iterations * cfg.trajectories == steps  # thousands
    assert cfg.agent.questions_in_all == questions
    assert cfg.agent.questions_in_all / cfg.pairs == 10  # rounds
    assert cfg.agent.sac.actor_learning_rate == cfg.agent.sac.critic_learning_rate == rate
    assert cfg.agent.unsupervised_trajectories < cfg.trajectories
