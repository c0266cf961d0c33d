"""PPO on a reward learnt from clips: it stops and goes on, passes of PPO, and SB3 with the task's own bounds."""

import json

import numpy as np
import pytest

import pbrl.simulation.vector  # noqa: F401  # registers the environments
from agents.ppo import Rollout
from pbrl.threads import workers
from tests.agents.toy import STEPS, TRAJECTORIES, Trial, behaviour, make

SMALL = ("trajectories=4", "pairs=6", "agent.pool=8", "agent.clip_steps=5", "agent.reward_model.passes=3")


def test_resumed_equals_uninterrupted_with_its_pool_and_its_count_of_questions():
    limited = (*SMALL, "agent.questions_in_all=16")
    one, again = Trial("prefppo", *limited), Trial("prefppo", *limited)
    one.run(2)
    again.agent.load_state_dict(one.agent.state_dict())
    again.ledger.load_state_dict(one.ledger.state_dict())
    again.next = 2
    assert json.dumps(one.run(2)) == json.dumps(again.run(2))
    np.testing.assert_array_equal(again.agent.parameters, one.agent.parameters)
    assert one.ledger.counts()["pairs_asked"] == 16


def test_without_questions_left_it_learns_on_from_the_reward_it_has():
    trial = Trial("prefppo", *SMALL, "agent.questions_in_all=6")
    (first,) = trial.run(1)
    parameters = trial.agent.parameters
    weights = [each.detach().clone() for each in trial.agent.reward_model.weights]
    (second,) = trial.run(1)
    assert "reward_loss" in first
    assert "reward_loss" not in second
    assert (trial.agent.parameters != parameters).any()
    assert all((one == two).all() for one, two in zip(weights, trial.agent.reward_model.weights, strict=True))


def test_each_pass_of_ppo_takes_all_steps_in_another_order():
    lengths = np.r_[5, 0, np.full(TRAJECTORIES - 2, STEPS)]
    collected, rng = behaviour(lengths=lengths), np.random.default_rng(0)
    rewards, V = np.zeros((TRAJECTORIES, STEPS), np.float32), np.zeros((TRAJECTORIES, STEPS + 1), np.float32)
    log_pi = np.arange(TRAJECTORIES * STEPS, dtype=np.float32).reshape(TRAJECTORIES, STEPS)
    sb3 = make("prefppo").ppo.sb3
    rollout = Rollout(collected, collected.observations, rewards, V, log_pi, sb3=sb3, rng=rng)
    passes = [np.concatenate([batch.old_log_prob for batch in rollout.get(10)]) for _ in range(3)]
    lived = log_pi[np.arange(STEPS) < lengths[:, None]].tolist()
    assert all(sorted(each.tolist()) == lived for each in passes)
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("passes", [1, 3])
def test_passes_multiply_the_gradient_steps_and_not_the_warm_up(passes):
    ppo = {"ppo__passes": passes, "ppo__gradient_steps": 4, "ppo__warmup_updates": 20}
    trial, steps = Trial("prefppo", *SMALL, **ppo), []
    trial.agent.ppo.network.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    metrics = trial.run(2)
    assert len(steps) == 2 * 4 * passes
    rates = [each["actor_learning_rate"] for each in metrics]
    np.testing.assert_allclose(rates, trial.agent.ppo.actor_learning_rate * np.array([1, 2]) / 20)


@pytest.mark.parametrize("agent", ["prefppo", "ppo_true"])
def test_ppo_that_learns_well_makes_four_passes_at_its_full_rate_from_the_start(agent):
    ppo = make(agent).ppo
    assert (ppo.sb3.n_epochs, ppo.warmup_updates, ppo.actor_learning_rate) == (4, 1, 6e-4)


def test_the_reward_of_a_step_is_that_of_the_ensemble_standardised(monkeypatch):
    trial, seen = Trial("prefppo", *SMALL), []
    monkeypatch.setattr(trial.agent.ppo, "update", lambda *given: seen.append(given) or {})
    trial.run(1)
    collected, rewards, _ = seen[0]
    with workers() as pool:
        r = trial.agent.reward_model.reward(collected, pool)
    np.testing.assert_allclose(rewards, (r - r.mean()) / r.std(), rtol=1e-4, atol=1e-5)
