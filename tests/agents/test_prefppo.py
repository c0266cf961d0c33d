"""PPO on a reward learnt from clips: it stops and goes on, passes of PPO, and SB3 with the task's own bounds."""

import gymnasium
import numpy as np
import pytest
import stable_baselines3
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import pbrl.simulation.vector  # noqa: F401  # registers the environments
from agents.ppo import Rollout
from pbrl.run.training import TrainingRun
from pbrl.simulation.simulator import Simulator
from pbrl.threads import workers
from tests.agents.small import behaviour


def training_run(*overrides, agent="prefppo", env="cheetah_run"):
    """A run of short episodes with small networks."""
    small = ["trajectories=4", "pairs=6", "env.steps=20", "threads=1", "preference_log=false"]
    with initialize_config_module("conf"):
        cfg = compose("train", overrides=[f"agent={agent}", f"env={env}", *small, *overrides])
    cfg.choices = cfg.name = cfg.folder = "any"
    cfg.agent.reward_model.hidden = cfg.agent.ppo.critic_hidden = cfg.agent.policy.hidden = [16, 16]
    return TrainingRun(OmegaConf.to_container(cfg, resolve=True))


SHORT = ("agent.pool=8", "agent.clip_steps=5", "agent.reward_model.passes=3")


def test_resumed_equals_uninterrupted_with_its_pool_and_its_count_of_questions():
    limited = (*SHORT, "agent.questions_in_all=16")
    run, again = training_run(*limited), training_run(*limited)
    for iteration in range(2):
        run.iterate(iteration)
    again.load_state_dict(run.state_dict())
    for iteration in (2, 3):
        for each in (run, again):
            each.iterate(iteration)
    np.testing.assert_array_equal(again.agent.parameters, run.agent.parameters)
    assert again.ledger.counts()["pairs_asked"] == run.ledger.counts()["pairs_asked"] == 16


def test_without_questions_left_it_learns_on_from_the_reward_it_has():
    run = training_run(*SHORT, "agent.questions_in_all=6")
    before = [run.iterate(0), run.agent.parameters.copy()]
    weights = [each.detach().clone() for each in run.agent.reward_model.weights]
    metrics = run.iterate(1)
    assert "reward_loss" in before[0]
    assert "reward_loss" not in metrics
    assert (run.agent.parameters != before[1]).any()
    assert all((one == two).all() for one, two in zip(weights, run.agent.reward_model.weights, strict=True))


def test_a_falling_schedule_follows_the_run_s_iterations():
    run = training_run(*SHORT, "agent.schedule=falling", "iterations=3")
    counts = []
    for iteration in range(3):
        run.iterate(iteration)
        counts.append(run.ledger.counts()["pairs_asked"])
    assert counts == [6, 6 + 4, 6 + 4 + 2]


def test_each_pass_of_ppo_takes_all_steps_in_another_order():
    collected, rng = behaviour(n=6, lengths=[12, 12, 12, 12, 5, 0]), np.random.default_rng(0)
    run = training_run(*SHORT)
    rewards, V = np.zeros((6, 12), np.float32), np.zeros((6, 13), np.float32)
    log_pi = np.arange(72, dtype=np.float32).reshape(6, 12)
    rollout = Rollout(collected, collected.observations, rewards, V, log_pi, sb3=run.agent.ppo.sb3, rng=rng)
    passes = [np.concatenate([batch.old_log_prob for batch in rollout.get(10)]) for _ in range(3)]
    lived = [*range(48), *range(48, 53)]
    assert all(sorted(each.tolist()) == lived for each in passes)
    assert not np.array_equal(passes[0], passes[1])


@pytest.mark.parametrize("passes", [1, 3])
def test_passes_multiply_the_gradient_steps_and_not_the_warm_up(passes):
    run = training_run(*SHORT, f"agent.ppo.passes={passes}", "agent.ppo.gradient_steps=4")
    ppo, steps = run.agent.ppo, []
    ppo.network.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    metrics = [run.iterate(iteration) for iteration in range(2)]
    assert len(steps) == 2 * 4 * passes
    rates = [each["actor_learning_rate"] for each in metrics]
    np.testing.assert_allclose(rates, 6e-4 * np.array([1, 2]) / 20)


@pytest.mark.parametrize("task", ["quadruped_walk", "cheetah_run"])
def test_stable_baselines_loads_it_with_the_task_s_environment_and_acts_within_its_bounds(task, tmp_path):
    run = training_run(*SHORT, env=task)
    run.iterate(0)
    ppo = run.agent.ppo
    ppo.network.action_net.bias.data[:] = 3.0  # beyond the bounds
    run.agent.save_sb3(tmp_path / "policy.zip")
    environment = gymnasium.make(f"pbrl/{task}-v0")
    loaded = stable_baselines3.PPO.load(tmp_path / "policy.zip", env=environment, device="cpu")
    obs, _ = environment.reset(seed=0)
    action, _ = loaded.predict(obs, deterministic=True)
    low, high = Simulator(task, seed=0).action_bounds
    ours = run.policy.mean_actions(run.agent.parameters, obs[None].astype(np.float32))[0]
    np.testing.assert_allclose(action, np.clip(ours, low, high), atol=1e-6)
    assert (ours > high).all()
    environment.step(action)
    environment.close()


def test_the_reward_of_a_step_is_that_of_the_ensemble_standardised():
    run, seen = training_run(*SHORT), []
    update = run.agent.ppo.update
    run.agent.ppo.update = lambda collected, rewards, pool: (
        seen.append((collected, rewards)) or update(collected, rewards, pool)
    )
    run.iterate(0)
    collected, rewards = seen[0]
    with workers() as pool:
        r = run.agent.reward_model.reward(collected, pool)
    np.testing.assert_allclose(rewards, (r - r.mean()) / r.std(), rtol=1e-4, atol=1e-5)
