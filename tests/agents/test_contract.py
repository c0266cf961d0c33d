"""What every agent must keep to, for every file in conf/agent, or one of your own: see docs/extending.md."""

import json

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from pbrl.ledger import BudgetError
from pbrl.run import checkpoint
from pbrl.run.settings import ConfigurationError, check_node
from pbrl.simulation.simulator import Simulator
from pbrl.types import Answers, Preferences, Reason
from tests.agents.toy import AGENTS, Trial, settings_of
from tests.toy_task import ToySimulator

SMALL = ("trajectories=8", "pairs=4")

pytestmark = pytest.mark.parametrize("agent", AGENTS)


class Listener:
    """Passes questions on to a teacher, and keeps them."""

    sees = "rewards"

    def __init__(self, teacher):
        self.teacher, self.questions = teacher, []
        self.state_dict, self.load_state_dict = teacher.state_dict, teacher.load_state_dict

    def compare(self, question):
        self.questions.append(question)
        return self.teacher.compare(question)


class Silent:
    """A teacher who skips every pair."""

    sees = "rewards"

    def compare(self, question):
        n, half = len(question), np.full(len(question), 0.5)
        return Answers(
            preferences=Preferences(probability=half, score=0 * half, label=half, answered=np.zeros(n, bool)),
            reason=np.full(n, Reason.SKIPPED, np.uint8),
            first_sum=question.rewards[question.first].sum(1),
            second_sum=question.rewards[question.second].sum(1),
            bits=np.zeros(n, np.int64),
            tau=1.0,
        )

    def state_dict(self):
        return {}


# The budget


@pytest.mark.parametrize(("trajectories", "pairs"), [(8, 4), (7, 5), (2, 1)])
def test_the_budget_is_kept_and_the_pairs_are_used_in_full(agent, trajectories, pairs):
    trial = Trial(agent, f"trajectories={trajectories}", f"pairs={pairs}")
    trial.run(2)
    counts = trial.ledger.counts()
    assert 0 < counts["trajectories"] <= 2 * trajectories
    assert counts["env_steps"] == 20 * counts["trajectories"]
    assert counts["pairs_asked"] == (0 if trial.ledger.yardstick else 2 * pairs)


@pytest.mark.parametrize("pairs", [8, 128])
def test_more_or_fewer_pairs_than_half_the_trajectories_are_used_in_full(agent, pairs):
    trial = Trial(agent, "trajectories=64", f"pairs={pairs}")
    trial.ledger.oracle = listener = Listener(trial.ledger.oracle)
    trial.run(1)
    assert trial.ledger.counts()["trajectories"] <= 64
    compared = [
        {question.rewards[row].tobytes() for row in pair}
        for question in listener.questions
        for pair in zip(question.first, question.second, strict=True)
    ]
    assert len(compared) == trial.ledger.counts()["pairs_asked"] == (0 if trial.ledger.yardstick else pairs)
    assert all(len(pair) == 2 for pair in compared), "a trajectory was compared with itself"


def test_spending_beyond_the_budget_is_refused(agent):
    trial = Trial(agent, *SMALL)
    budget = trial.ledger.open_iteration(0)
    trial.agent.iterate(budget)
    more = np.zeros(budget.trajectories_left + 1, np.int64)
    before = trial.ledger.counts()
    with pytest.raises(BudgetError, match=f"asked for {len(more)} trajectories with {len(more) - 1} left of 8"):
        budget.collect(
            trial.agent.policy,
            trial.agent.parameters[None],
            more,
            mean_actions=False,
            common_start=False,
            keep=(),
        )
    assert trial.ledger.counts() == before


# The same again


def test_same_seed_same_parameters_bit_for_bit(agent):
    one, same, other = Trial(agent, *SMALL), Trial(agent, *SMALL), Trial(agent, *SMALL, seed=1)
    assert json.dumps(one.run(3)) == json.dumps(same.run(3))
    other.run(3)
    assert_array_equal(one.agent.parameters, same.agent.parameters)
    assert (one.agent.parameters != other.agent.parameters).any()


def test_resumed_equals_uninterrupted(agent, tmp_path):
    uninterrupted = Trial(agent, *SMALL)
    expected = uninterrupted.run(5)[3:]
    first = Trial(agent, *SMALL)
    first.run(3)
    checkpoint.save(tmp_path, 2, {"agent": first.agent.state_dict(), "ledger": first.ledger.state_dict()})
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    # Nothing of another seed may survive the loading but the simulator, which has no state.
    resumed = Trial(agent, *SMALL, seed=9, simulator=ToySimulator(np.random.SeedSequence(0).spawn(3)[0]))
    resumed.agent.load_state_dict(loaded[1]["agent"])
    resumed.ledger.load_state_dict(loaded[1]["ledger"])
    resumed.next = 3
    assert json.dumps(resumed.run(2)) == json.dumps(expected)
    assert_array_equal(resumed.agent.parameters, uninterrupted.agent.parameters)
    assert resumed.ledger.counts() == uninterrupted.ledger.counts()


def test_a_saved_state_does_not_change_when_the_run_continues(agent, tmp_path):
    trial, files = Trial(agent, *SMALL), []
    trial.run(2)
    state = trial.agent.state_dict()
    for _ in range(2):
        checkpoint.save(tmp_path, 0, state)
        files.append([(tmp_path / "000000" / name).read_bytes() for name in ("state.json", "arrays.safetensors")])
        trial.run(2)
    assert files[0] == files[1]


# Preferences alone


class Poisoned:
    """A budget that replaces all true rewards by NaN once the teacher has answered, until its next answer."""

    def __init__(self, budget, simulator, true):
        self.budget, self.simulator, self.true = budget, simulator, true

    def __getattr__(self, name):
        return getattr(self.budget, name)

    def compare(self, pairs):
        collections = self.simulator.collected
        self.true += [collected.task_rewards.copy() for collected in collections[len(self.true) :]]
        for collected, rewards in zip(collections, self.true, strict=True):
            collected.task_rewards[:] = rewards
        preferences = self.budget.compare(pairs)
        for collected in collections:
            collected.task_rewards[:] = np.nan
        return preferences


def test_true_rewards_are_out_of_reach(agent):
    clean, poisoned, true = Trial(agent, *SMALL), Trial(agent, *SMALL), []
    clean.run(3)
    poisoned.run(3, wrap=lambda budget: Poisoned(budget, poisoned.simulator, true))
    # A yardstick, which is given true rewards, asks nothing: see the next test.
    assert np.isnan(poisoned.simulator.collected[-1].task_rewards).all() != poisoned.ledger.yardstick
    assert_array_equal(clean.agent.parameters, poisoned.agent.parameters)


def test_a_teacher_who_skips_everything_teaches_nothing(agent):
    """The run goes on, and what becomes of the policy does not depend on the true rewards, but for yardsticks."""

    class Opposite(ToySimulator):
        def collect(self, *args, **how):
            collected = super().collect(*args, **how)
            collected.task_rewards[:] *= -1
            return collected

    one = Trial(agent, *SMALL, oracle=Silent(), simulator=ToySimulator(3))
    other = Trial(agent, *SMALL, oracle=Silent(), simulator=Opposite(3))
    metrics = [*one.run(3), *other.run(3)]
    assert all(np.isfinite(value) for each in metrics for value in each.values())
    expected = 0 if one.ledger.yardstick else 12
    assert one.ledger.counts()["pairs_skipped"] == one.ledger.counts()["pairs_asked"] == expected
    assert (one.agent.parameters == other.agent.parameters).all() != one.ledger.yardstick


# Learning


def test_it_runs_on_a_real_task_and_its_metrics_are_numbers(agent):
    trial = Trial(agent, *SMALL, simulator=Simulator("cheetah_run", seed=0, steps=10))
    for metrics in trial.run(2):
        assert all(type(name) is str for name in metrics)
        assert all(isinstance(value, float | int) and np.isfinite(value) for value in metrics.values()), metrics
    assert np.isfinite(trial.agent.parameters).all()
    assert trial.agent.parameters.dtype == np.float32
    assert trial.agent.parameters.shape == (trial.agent.policy.size,)


# Settings


def changed(node, path, change):
    """A copy of the settings in which the node at a path is changed."""
    if not path:
        return change(node)
    return {**node, path[0]: changed(node[path[0]], path[1:], change)}


def described(node, path=()):
    """The path of every node that describes an object, and the node."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield path, node
        for key, value in node.items():
            yield from described(value, (*path, key))


def test_wrong_missing_and_mistyped_settings_fail_by_name(agent):
    settings, allow = (settings_of(agent)[key] for key in ("agent", "allow"))
    check_node(settings, "agent", allow=allow)
    nodes = dict(described(settings))
    assert {(), ("policy",)} <= {*nodes}
    for path, node in nodes.items():
        name = r"\.".join(("agent", *path))
        with pytest.raises(ConfigurationError, match=rf"^{name}\.surplus: unknown setting"):
            check_node(changed(settings, path, lambda it: {**it, "surplus": 1}), "agent", allow=allow)
        for key, value in node.items():
            if key.startswith("_") or (path, key) == ((), "policy"):  # what the runner makes of it is offered
                continue
            if not node.get("_partial_"):  # the owner of a partial one may add what is missing
                without = changed(settings, path, lambda it, key=key: {k: v for k, v in it.items() if k != key})
                with pytest.raises(ConfigurationError, match=rf"^{name}\.{key} is missing"):
                    check_node(without, "agent", allow=allow)
            if value is None or isinstance(value, bool | int | float | str):
                wrong = 17 if isinstance(value, str) else "nonsense"
                mistyped = changed(settings, path, lambda it, key=key, wrong=wrong: {**it, key: wrong})
                with pytest.raises(ConfigurationError, match=rf"^{name}\.{key} must be .*, not {wrong!r}"):
                    check_node(mistyped, "agent", allow=allow)
