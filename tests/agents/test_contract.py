"""What every agent must keep to, for every file in conf/agent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from numpy.testing import assert_array_equal
from omegaconf import DictConfig, OmegaConf
from scipy import stats
from toy_task import ToySimulator

from pbrl.ledger import BudgetError, Ledger
from pbrl.run import checkpoint
from pbrl.run.settings import ConfigurationError, check_node, choices
from pbrl.simulation.simulator import Simulator
from pbrl.types import Behaviour, Pairs, Trajectories

AGENTS = choices("agent")
Context = Callable[[], AbstractContextManager[None]]


def configuration(agent: str, oracle: str = "irrational") -> DictConfig:
    with initialize_config_module("conf"):
        return compose("train", overrides=[f"agent={agent}", f"oracle={oracle}", "env=cheetah_run"])


class Trial:
    """An agent, a teacher and a ledger on the toy task or a real one, as the runner would compose them."""

    def __init__(
        self, agent: str, *, seed: int = 0, oracle: str = "irrational", simulator: Any = None, **settings: Any
    ) -> None:
        cfg = configuration(agent, oracle)
        cfg.agent.policy.hidden = [16, 16]
        OmegaConf.set_struct(cfg, False)
        for name, value in settings.items():
            OmegaConf.update(cfg.agent, name.replace("__", "."), value)
        simulating, teaching, learning = np.random.SeedSequence(seed).spawn(3)
        self.simulator = simulator or ToySimulator(simulating)
        sizes = {"obs_size": self.simulator.obs_size, "act_size": self.simulator.act_size}
        self.agent = instantiate(
            cfg.agent,
            policy=instantiate(cfg.agent.policy, **sizes),
            rng=np.random.default_rng(learning),
            trajectories=64,
        )
        self.ledger = Ledger(
            simulator=self.simulator,
            oracle=instantiate(cfg.oracle, rng=np.random.default_rng(teaching)),
            trajectories_per_iteration=64,
            pairs_per_iteration=32,
        )
        self.next = 0

    def run(
        self, iterations: int, after_answer: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> list[float]:
        """Some iterations; the mean return of each."""
        returns = []
        for _ in range(iterations):
            budget = self.ledger.open_iteration(self.next)
            while (pairs := self.agent.ask(budget)) is not None:
                preferences = self.ledger.compare(pairs)
                with after_answer():
                    metrics = self.agent.tell(pairs, preferences)
                assert all(isinstance(value, float | int) and np.isfinite(value) for value in metrics.values()), metrics
            returns.append(self.ledger.iteration_metrics()["return_mean"])
            self.next += 1
        return returns


@pytest.mark.parametrize("agent", AGENTS)
def test_the_budget_is_used_and_kept(agent: str) -> None:
    trial = Trial(agent)
    trial.run(3)
    counts = trial.ledger.counts()
    assert counts["trajectories"] == 3 * 64
    assert counts["pairs_asked"] == 3 * 32
    assert counts["env_steps"] == 3 * 64 * 20
    assert counts["bits"] == 3 * 32 * getattr(trial.agent, "experts", 1)


@pytest.mark.parametrize("agent", AGENTS)
def test_same_seed_same_parameters_bit_for_bit(agent: str) -> None:
    one, same, other = Trial(agent), Trial(agent), Trial(agent, seed=1)
    for trial in (one, same, other):
        trial.run(3)
    assert_array_equal(one.agent.parameters, same.agent.parameters)
    assert (one.agent.parameters != other.agent.parameters).any()


@pytest.mark.parametrize("agent", AGENTS)
def test_continued_from_a_checkpoint_equals_uninterrupted(agent: str, tmp_path: Any) -> None:
    uninterrupted = Trial(agent)
    uninterrupted.run(5)
    first = Trial(agent)
    first.run(3)
    checkpoint.save(tmp_path, 2, {"agent": first.agent.state_dict(), "ledger": first.ledger.state_dict()})
    first.run(2)  # what is saved must not change when the run goes on
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    second = Trial(agent, seed=9)  # nothing of it may survive the loading but the simulator, which has no state
    second.simulator = second.ledger.simulator = uninterrupted.simulator
    second.agent.load_state_dict(loaded[1]["agent"])
    second.ledger.load_state_dict(loaded[1]["ledger"])
    second.next = 3
    second.run(2)
    assert_array_equal(second.agent.parameters, uninterrupted.agent.parameters)
    assert second.ledger.counts() == uninterrupted.ledger.counts()


@pytest.mark.parametrize("agent", AGENTS)
def test_true_rewards_are_out_of_reach(agent: str) -> None:
    """NaN in them once the teacher has answered changes nothing; nothing that holds them was handed out."""
    clean, poisoned = Trial(agent), Trial(agent)
    seen: list[Behaviour] = []
    ask = poisoned.agent.ask

    def watched(budget: Any) -> Pairs | None:
        pairs: Pairs | None = ask(budget)
        seen.extend([pairs.behaviour] if pairs else [])
        return pairs

    poisoned.agent.ask = watched

    @contextmanager
    def poison() -> Iterator[None]:
        collections = poisoned.ledger._collections
        true = [rewards.copy() for _, rewards in collections]
        for _, rewards in collections:
            rewards[:] = np.nan
        yield
        for (_, rewards), values in zip(collections, true, strict=True):
            rewards[:] = values

    for _ in range(3):
        clean.run(1)
        poisoned.run(1, after_answer=poison)
    assert_array_equal(clean.agent.parameters, poisoned.agent.parameters)
    assert seen
    assert not any(isinstance(behaviour, Trajectories) for behaviour in seen)


@pytest.mark.parametrize("agent", AGENTS)
def test_a_teacher_who_skips_everything_teaches_nothing_about_pairs(agent: str) -> None:
    """All pairs unanswered: the run goes on, and agents stay where they are."""
    trial = Trial(agent, oracle="skip")
    trial.ledger.oracle.eps_skip = 1.0
    rewards = trial.simulator.collect

    def constant(*arguments: Any, **settings: Any) -> Trajectories:
        collected: Trajectories = rewards(*arguments, **settings)
        collected.task_rewards[:] = 1.0  # all returns equal the mean return: max(U1, U2) > margin is false
        return collected

    trial.simulator.collect = constant
    before = trial.agent.parameters.copy()
    trial.run(2)
    assert trial.ledger.counts()["pairs_answered"] == 0
    assert_array_equal(trial.agent.parameters, before)


@pytest.mark.parametrize("agent", AGENTS)
def test_it_runs_on_a_real_task(agent: str) -> None:
    simulator = Simulator("cheetah_run", seed=0, steps=10)
    trial = Trial(agent, simulator=simulator)
    trial.run(2)
    assert np.isfinite(trial.agent.parameters).all()
    assert trial.agent.parameters.dtype == np.float32


@pytest.mark.parametrize("agent", [name for name in AGENTS if name != "random"])
def test_it_learns_the_toy_task(agent: str) -> None:
    """Every agent beats the floor, with the settings of its file: permutation test over seeds."""
    iterations, seeds = (15, 5) if agent in ("dpo", "ppo_rlhf") else (50, 8)  # gradients cost more, and vary less
    # Algorithm 1 stands on answers that are right with a fixed margin, however small the gap.
    oracle = "mistake" if agent == "ncrs_single" else "irrational"

    def final(name: str, seed: int) -> float:
        trial = Trial(name, seed=seed, oracle=oracle)
        trial.run(iterations if name == agent else 1)
        evaluation, rows = ToySimulator(np.random.SeedSequence(1000 + seed)), np.zeros(16, np.int64)
        parameters = trial.agent.parameters[None]
        return float(
            evaluation.collect(trial.agent.policy, parameters, rows, iteration=0, mean_actions=True).returns.mean()
        )

    learnt, floor = ([final(name, seed) for seed in range(seeds)] for name in (agent, "random"))
    result = stats.permutation_test(
        (learnt, floor), lambda x, y: np.mean(x) - np.mean(y), alternative="greater", rng=np.random.default_rng(0)
    )
    assert result.pvalue < 0.01, (learnt, floor)


@pytest.mark.parametrize("agent", AGENTS)
def test_wrong_keys_fail_by_name(agent: str) -> None:
    node = OmegaConf.to_container(configuration(agent).agent, resolve=True)
    assert isinstance(node, dict)
    check_node(node, "agent")
    with pytest.raises(ConfigurationError, match=r"agent\.surplus is a setting that nobody reads"):
        check_node({**node, "surplus": 1}, "agent")
    for key, value in node.items():
        if key.startswith("_") or key == "policy":
            continue
        without = {other: each for other, each in node.items() if other != key}
        with pytest.raises(ConfigurationError, match=rf"agent\.{key} is missing"):
            check_node(without, "agent")
        if isinstance(value, bool | int | float | str):
            with pytest.raises(ConfigurationError, match=rf"agent\.{key} must be .*, not 'nonsense'"):
                check_node({**node, key: "nonsense"}, "agent")


@pytest.mark.parametrize("agent", AGENTS)
def test_spending_beyond_the_budget_is_refused(agent: str) -> None:
    trial = Trial(agent)
    trial.ledger.trajectories_per_iteration = 64
    budget = trial.ledger.open_iteration(0)
    while trial.agent.ask(budget) is not None and budget.trajectories_left:
        pass
    with pytest.raises(BudgetError, match="asked for 1 trajectories with 0 left"):
        budget.collect(
            trial.agent.policy,
            trial.agent.parameters[None],
            np.zeros(1, np.int64),
            mean_actions=False,
            common_start=False,
            keep=(),
        )
