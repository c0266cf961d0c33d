"""`from pbrl import load`: what a run has learnt, in one line; and training from Python."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import stable_baselines3
import yaml

from pbrl import load
from pbrl.policy import GaussianPolicy
from pbrl.run.policy_file import save_policy
from pbrl.run.record import read
from pbrl.run.saved import SavedPolicy
from pbrl.run.settings import ConfigurationError
from pbrl.seeds import streams
from pbrl.simulation.simulator import Simulator
from pbrl.train import train

TINY = [
    *("env=cartpole_balance", "env.steps=20", "trajectories=8", "pairs=4", "agent.policy.hidden=[8,8]"),
    *("evaluation.every=1", "evaluation.trajectories=2", "threads=1", "wandb.mode=disabled", "iterations=5"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose policies take observations that its network does not: they are normalised."""
    folder = tmp_path_factory.mktemp("runs") / "seed_0"
    assert train(overrides=[*TINY, f"folder={folder}", "normalise_observations=true"]) == folder
    return folder


def evaluation(policy: SavedPolicy, simulator: Simulator, iteration: int) -> float:
    """The mean return of two episodes, as `pbrl.train` evaluates."""
    rows = np.zeros(2, np.int64)
    collected = simulator.collect(policy.policy, policy.parameters[None], rows, iteration=iteration, mean_actions=True)
    return float(collected.returns.mean())


def test_training_from_python_is_the_command(finished: Path) -> None:
    assert [row["iteration"] for row in read(finished / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    settings = yaml.safe_load((finished / "config.yaml").read_text())
    assert settings["choices"] == {"agent": "ncrs", "env": "cartpole_balance", "oracle": "irrational"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["agent=ncsr"], "did you mean ncrs"),
        (["agent.vots=3"], "did you mean agent.votes?"),
        (["iterations=0"], "iterations must be"),
        (["experiment=paper"], "a sweep of many runs"),
    ],
)
def test_settings_that_make_no_sense_raise(overrides: list[str], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence.replace("?", r"\?")):
        train(overrides=overrides)


def test_first_best_and_last_are_what_the_record_says(finished: Path) -> None:
    rows = read(finished / "metrics.jsonl")
    best = max(rows, key=lambda row: row["eval_return"] or 0.0)
    policies = {which: load(finished, which) for which in ("first", "best", "last")}
    iterations = {which: policy.iteration for which, policy in policies.items()}
    assert iterations == {"first": -1, "best": best["iteration"], "last": 4}
    names = ("simulation", "teacher", "agent", "evaluation", "calibration")
    simulator = Simulator("cartpole_balance", seed=streams(0, *names)["evaluation"], steps=20)
    for which in ("best", "last"):
        row = rows[iterations[which]]
        assert evaluation(policies[which], simulator, iterations[which]) == pytest.approx(row["eval_return"], rel=1e-5)
    assert not np.array_equal(policies["first"].parameters, policies["last"].parameters)


def test_it_acts_in_the_environment_as_in_the_simulator(finished: Path) -> None:
    policy = load(finished)
    simulator = Simulator("cartpole_balance", seed=3, steps=20)
    collected = simulator.collect(
        policy.policy, policy.parameters[None], np.zeros(2, np.int64), iteration=0, mean_actions=True,
        keep=["observations", "actions"],
    )  # fmt: skip
    assert collected.observations is not None
    assert collected.actions is not None
    expected = np.clip(collected.actions, -1, 1)
    for row in range(2):
        np.testing.assert_allclose(policy.act(collected.observations[row, :-1]), expected[row], atol=1e-4)
    np.testing.assert_allclose(policy.act(collected.observations[0, 0].astype(float)), expected[0, 0], atol=1e-4)
    noisy = policy.act(collected.observations[0], np.random.default_rng(0))
    again = policy.act(collected.observations[0], np.random.default_rng(0))
    assert (noisy == again).all()
    assert (noisy[:-1] != expected[0]).any()
    assert np.abs(noisy).max() <= 1
    with pytest.raises(ValueError, match=r"cartpole_balance has 5 observations, but these have shape \[4\]"):
        policy.act(np.zeros(4))


def test_stable_baselines_opens_its_export_and_acts_the_same(finished: Path, tmp_path: Path) -> None:
    environment = gymnasium.make("pbrl/cartpole_balance-v0")
    policy = load(finished)
    policy.save_sb3(tmp_path / "policy.zip")
    model = stable_baselines3.PPO.load(tmp_path / "policy.zip", env=environment, device="cpu")
    obs = np.random.default_rng(0).normal(0, 3, (50, 5))
    np.testing.assert_allclose(model.predict(obs, deterministic=True)[0], policy.act(obs), atol=1e-6)
    assert np.ptp(policy.act(obs)) > 1e-3
    np.testing.assert_array_equal(model.policy.log_std.detach(), policy.parameters[-1:])
    environment.close()


def test_the_export_has_the_tasks_bounds(tmp_path: Path) -> None:
    """The quadruped's are not -1 and 1."""
    simulator = Simulator("quadruped_walk", seed=0, steps=2)
    gains = {"hidden_gain": 1.0, "output_gain": 1.0, "initial_log_std": 0.0}
    policy = GaussianPolicy(simulator.obs_size, simulator.act_size, hidden=[8], **gains)
    parameters = policy.initial(np.random.default_rng(0))
    parameters[-2 * policy.act_size : -policy.act_size] = 3.0  # the last biases: beyond the bounds
    saved = SavedPolicy("quadruped_walk", 0, policy, parameters, simulator.action_bounds)
    saved.save_sb3(tmp_path / "policy.zip")
    environment = gymnasium.make("pbrl/quadruped_walk-v0")
    model = stable_baselines3.PPO.load(tmp_path / "policy.zip", env=environment, device="cpu")
    obs, _ = environment.reset(seed=0)
    action, _ = model.predict(obs, deterministic=True)
    np.testing.assert_allclose(action, saved.act(obs), atol=1e-6)
    assert not np.allclose(simulator.action_bounds[1], 1)
    environment.close()


def test_what_cannot_be_loaded_says_why(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="which must be one of last, best, first, not 'lats'"):
        load(finished, "lats")
    with pytest.raises(ConfigurationError, match=r"config\.yaml is not a file"):
        load(tmp_path)
    run = shutil.copytree(finished, tmp_path / "seed_0")
    save_policy(run / "policy.safetensors", np.zeros(7, np.float32), iteration="4")
    with pytest.raises(ConfigurationError, match="has 7 parameters, but the policy of its run"):
        load(run)
    (run / "policy.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="a run leaves it with each of its checkpoints"):
        load(run)
    (run / "policy.safetensors").write_bytes(pickle.dumps("no policy"))
    with pytest.raises(ConfigurationError, match=r"is not a policy that pbrl\.train has written"):
        load(run)
    settings = yaml.safe_load((run / "config.yaml").read_text())
    for group in ("env", "agent"):
        (run / "config.yaml").write_text(yaml.safe_dump({**settings, group: {"a": 1}}))
        with pytest.raises(ConfigurationError, match=f"the run's config.yaml has no {group}"):
            load(run, "best")
    settings["agent"]["policy"]["_target_"] = "os.system"
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ConfigurationError, match=r"names .os\.system., which is not of"):
        load(run, "best")
