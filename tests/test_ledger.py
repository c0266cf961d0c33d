"""The ledger: what it charges, what it refuses, and that no true reward gets past it."""

import dataclasses
import json

import numpy as np
import pytest
from teachers import RATIONAL

from oracles.panel import Panel
from oracles.teacher import Teacher
from pbrl.ledger import BudgetError, Ledger
from pbrl.run.preference_log import PreferenceLog, read
from pbrl.types import Behaviour, Pairs, Preferences
from tests.fake_simulator import POLICY, FakeSimulator

PARAMETERS = np.array([[0.0], [1.0]], np.float32)
HOW = {"mean_actions": False, "common_start": False, "keep": ()}


def ledger(*, simulator=None, oracle=None, trajectories=8, pairs=4, **traits):
    return Ledger(
        simulator=simulator or FakeSimulator(),
        oracle=oracle or RATIONAL(rng=np.random.default_rng(0), **traits),
        trajectories_per_iteration=trajectories,
        pairs_per_iteration=pairs,
    )


def collect(budget, count=8, **how):
    return budget.collect(POLICY, PARAMETERS, np.arange(count) % 2, **(HOW | how))


def pairs_of(behaviour, first=(0, 2, 4, 6), second=(1, 3, 5, 7), **clips):
    return Pairs(behaviour=behaviour, first=np.array(first), second=np.array(second), **clips)


# Charging


def test_an_iteration_is_counted():
    books = ledger()
    behaviour = collect(books.open_iteration(0))
    preferences = books.compare(pairs_of(behaviour))
    assert books.counts() == {
        "trajectories": 8,
        "env_steps": 8 * 20,
        "pairs_asked": 4,
        "pairs_answered": 4,
        "pairs_skipped": 0,
        "pairs_equal": 0,
        "bits": 4,
    }
    assert preferences.label.tolist() == [1, 1, 1, 1]  # the second policy earns one more per step
    books.compare(pairs_of(collect(books.open_iteration(1))))
    assert books.counts()["trajectories"] == 16
    assert books.counts()["bits"] == 8


def test_skips_and_equals_are_charged_in_full():
    books = ledger(eps_skip=1.0)
    behaviour = collect(books.open_iteration(0))
    books.compare(pairs_of(behaviour, first=(0, 0), second=(2, 1)))  # two poor ones; one good one
    counts = books.counts()
    assert (counts["pairs_asked"], counts["pairs_answered"], counts["pairs_skipped"], counts["bits"]) == (
        2,
        1,
        1,
        1,
    )
    books = ledger(eps_equal=0.9)
    behaviour = collect(books.open_iteration(0))
    books.compare(pairs_of(behaviour, first=(0, 0), second=(0, 1)))
    counts = books.counts()
    assert (counts["pairs_answered"], counts["pairs_equal"], counts["bits"]) == (2, 1, 2)
    assert books.open_iteration(1).pairs_left == 4


def test_an_iteration_may_go_back_and_forth():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator)
    budget = books.open_iteration(5)
    for k in range(4):
        assert (budget.trajectories_left, budget.pairs_left) == (8 - 2 * k, 4 - k)
        behaviour = collect(budget, 2, mean_actions=True, common_start=True, keep=("actions",))
        assert behaviour.start[:, 1].tolist() == [2 * k, 2 * k + 1]
        books.compare(pairs_of(behaviour, first=(0,), second=(1,)))
    assert simulator.calls == [(5, 2 * k, 2, True, True, ("actions",)) for k in range(4)]
    assert (budget.trajectories_left, budget.pairs_left) == (0, 0)


def test_each_answering_expert_is_a_bit():
    books = ledger(tau=1.0)
    behaviour = collect(books.open_iteration(0))
    preferences = books.compare(pairs_of(behaviour, experts=10))
    assert set(np.rint(preferences.probability * 10) / 10) <= set(np.arange(11) / 10)
    assert (books.counts()["pairs_asked"], books.counts()["bits"]) == (4, 40)
    panel = Panel(teacher=RATIONAL, members=5, vote="mean", rng=np.random.default_rng(0))
    books = ledger(oracle=panel)
    books.compare(pairs_of(collect(books.open_iteration(0))))
    assert (books.counts()["pairs_asked"], books.counts()["bits"]) == (4, 20)


def test_thresholds_scale_with_the_iterations_mean_return_so_far():
    asked = []

    class Listener(Teacher):
        def compare(self, first, second, **question):
            asked.append(question)
            return super().compare(first, second, **question)

    simulator = FakeSimulator()
    books = ledger(simulator=simulator, oracle=Listener(**RATIONAL.keywords, rng=np.random.default_rng(0)))
    budget = books.open_iteration(0)
    everything = FakeSimulator().collect(None, PARAMETERS, np.arange(8) % 2, iteration=0, first_trajectory=0, **HOW)
    for k in (1, 2):
        books.compare(pairs_of(collect(budget, 4), first=(0,), second=(1,)))
        assert asked[-1]["mean_return"] == pytest.approx(everything.returns[: 4 * k].mean())
        assert asked[-1]["episode_steps"] == 20


def test_clips_are_cut_where_the_pairs_say():
    rewards = FakeSimulator().collect(None, PARAMETERS, np.arange(8) % 2, iteration=0, first_trajectory=0, **HOW)
    rewards = rewards.task_rewards
    books = ledger()
    behaviour = collect(books.open_iteration(0))
    first_step, second_step = np.array([0, 3, 15]), np.array([15, 2, 0])
    preferences = books.compare(
        pairs_of(behaviour, (0, 2, 4), (2, 4, 0), first_step=first_step, second_step=second_step, clip_steps=5)
    )
    for pair, (i, j, s, t) in enumerate(zip((0, 2, 4), (2, 4, 0), first_step, second_step, strict=True)):
        assert preferences.label[pair] == float(rewards[j, t : t + 5].sum() > rewards[i, s : s + 5].sum())


# Refusing: an error that says what was asked and what is allowed; nothing is charged


def assert_refuses(books, pairs, message):
    before = (books.counts(), books.oracle.state_dict(), books.pairs_left)
    with pytest.raises(ValueError, match=message):
        books.compare(pairs)
    assert (books.counts(), books.oracle.state_dict(), books.pairs_left) == before


def test_more_trajectories_than_left_are_refused_before_simulating():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator)
    budget = books.open_iteration(0)
    collect(budget, 6)
    before = books.counts()
    with pytest.raises(BudgetError, match="asked for 3 trajectories with 2 left of 8 in iteration 0"):
        collect(budget, 3)
    assert books.counts() == before
    assert len(simulator.calls) == 1
    collect(budget, 2)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (np.array([], dtype=int), r"N >= 1 policy numbers, not int64 \(0,\)"),
        (np.array([0.0, 1.0]), "not float64"),
        (np.array([[0, 1]]), r"not int64 \(1, 2\)"),
        (np.array([0, 2]), r"in 0 .. 1, the policies given, not 0 .. 2"),
        (np.array([-1, 0]), r"not -1 .. 0"),
    ],
)
def test_senseless_assignments_are_refused(assignment, message):
    books = ledger()
    budget = books.open_iteration(0)
    with pytest.raises(BudgetError, match=message):
        budget.collect(POLICY, PARAMETERS, assignment, **HOW)
    assert books.counts()["trajectories"] == 0


def test_more_pairs_than_left_are_refused():
    books = ledger()
    behaviour = collect(books.open_iteration(0))
    books.compare(pairs_of(behaviour, (0, 2, 4), (1, 3, 5)))
    assert_refuses(books, pairs_of(behaviour, (0, 2), (1, 3)), "asked about 2 pairs with 1 left of 4 in iteration 0")
    books.compare(pairs_of(behaviour, (6,), (7,)))
    assert_refuses(books, pairs_of(behaviour, (6,), (7,)), "asked about 1 pairs with 0 left")


def test_what_this_iteration_did_not_pay_for_is_refused():
    books = ledger()
    budget = books.open_iteration(0)
    behaviour = collect(budget)
    unpaid = "trajectories that iteration {} did not pay for"
    assert_refuses(books, pairs_of(dataclasses.replace(behaviour)), unpaid.format(0))
    books.open_iteration(1)
    assert_refuses(books, pairs_of(behaviour), unpaid.format(1))
    with pytest.raises(BudgetError, match="the budget of iteration 0 is void"):
        collect(budget)
    for iteration in (0, 1):
        with pytest.raises(BudgetError, match=f"iteration {iteration} has had its budget: 1 was the last"):
            books.open_iteration(iteration)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"first": (0, 8), "second": (1, 2)}, r"first must be in 0 .. 7, not 0 .. 8"),
        ({"first": (0, 1), "second": (-1, 2)}, r"second must be in 0 .. 7, not -1 .. 2"),
        ({"first": (0.0, 1.0), "second": (1, 2)}, r"first must be one integer .*, not float64"),
        ({"first": (0, 1), "second": (1,)}, r"second must be one integer for each .*, not int64 \(1,\)"),
        ({"first": (), "second": ()}, r"at least one pair"),
        ({"experts": 0}, "experts must be at least 1, not 0"),
        ({"clip_steps": 5}, "clips need first_step, second_step and clip_steps"),
    ],
)
def test_senseless_pairs_are_refused(pairs, message):
    books = ledger()
    behaviour = collect(books.open_iteration(0))
    assert_refuses(books, pairs_of(behaviour, **pairs), message)


@pytest.mark.parametrize(
    ("first_step", "clip_steps", "message"),
    [
        (0, 21, r"clip_steps must be in 1 .. 20, the trajectory's steps, not 21"),
        (0, 0, r"clip_steps must be in 1 .. 20, .* not 0"),
        (11, 10, r"first_step must be in 0 .. 10, not 11 .. 11"),
        (-1, 10, r"first_step must be in 0 .. 10, not -1 .. -1"),
    ],
)
def test_clips_outside_the_trajectory_are_refused(first_step, clip_steps, message):
    books = ledger()
    behaviour = collect(books.open_iteration(0))
    steps = {"first_step": np.full(4, first_step), "second_step": np.zeros(4, int), "clip_steps": clip_steps}
    assert_refuses(books, pairs_of(behaviour, **steps), message)


def test_rewards_that_are_not_numbers_are_refused():
    class Broken(FakeSimulator):
        def collect(self, *args, **how):
            trajectories = super().collect(*args, **how)
            trajectories.task_rewards[3, 7] = np.nan
            return trajectories

    books = ledger(simulator=Broken())
    behaviour = collect(books.open_iteration(0))
    assert_refuses(books, pairs_of(behaviour), "clip 3 sum to nan: all must be finite")


def test_nothing_can_be_asked_before_the_first_iteration():
    elsewhere = collect(ledger().open_iteration(0))
    assert_refuses(ledger(), pairs_of(elsewhere), "did not pay for")


@pytest.mark.parametrize("budget", [{"trajectories": 0}, {"pairs": -1}])
def test_budgets_are_positive(budget):
    with pytest.raises(ValueError, match=r"_per_iteration must be at least 1, not (0|-1)"):
        ledger(**budget)


# No leak


def test_agents_receive_types_without_rewards():
    books = ledger()
    behaviour = collect(books.open_iteration(0), keep=("observations", "actions"))
    preferences = books.compare(pairs_of(behaviour))
    assert type(behaviour) is Behaviour
    assert type(preferences) is Preferences
    assert {field.name for field in dataclasses.fields(Behaviour)} == set(vars(behaviour))
    assert not any("reward" in name or "return" in name for name in vars(behaviour))
    assert set(vars(preferences)) == {"probability", "score", "label", "answered"}


def test_what_was_returned_does_not_change_with_the_rewards():
    kept = []

    class Keeper(FakeSimulator):
        def collect(self, *args, **how):
            kept.append(super().collect(*args, **how))
            return kept[-1]

    books = ledger(simulator=Keeper(), tau=1.0)
    behaviour = collect(books.open_iteration(0), keep=("observations", "actions"))
    preferences = books.compare(pairs_of(behaviour))
    before = [{name: np.copy(value) for name, value in vars(given).items()} for given in (behaviour, preferences)]
    metrics = books.iteration_metrics()["teacher_error_rate"]
    kept[0].task_rewards[:] = np.nan
    np.testing.assert_equal([vars(behaviour), vars(preferences)], before)
    assert not any(np.shares_memory(kept[0].task_rewards, array) for array in vars(preferences).values())
    assert books.iteration_metrics()["teacher_error_rate"] == metrics


def test_what_agents_do_to_their_answers_does_not_reach_the_books(tmp_path):
    books = ledger(eps_mistake=1.0)
    books.preference_log = PreferenceLog(tmp_path)
    preferences = books.compare(pairs_of(collect(books.open_iteration(0))))
    before = books.iteration_metrics()
    for array in vars(preferences).values():
        array[:] = 1
    assert books.iteration_metrics() == before
    books.close()
    assert read(tmp_path)["label"].to_pylist() == [0, 0, 0, 0]


# Metrics


def test_metrics_tell_the_truth_about_the_iteration():
    books = ledger(eps_mistake=1.0)
    behaviour = collect(books.open_iteration(0))
    returns = FakeSimulator().collect(None, PARAMETERS, np.arange(8) % 2, iteration=0, first_trajectory=0, **HOW)
    assert set(books.iteration_metrics()) == {"return_mean", "return_std", "diverged"}
    books.compare(pairs_of(behaviour, (0, 0), (1, 0)))  # one order to be mistaken about, and one tie
    metrics = books.iteration_metrics()
    assert metrics["return_mean"] == pytest.approx(returns.returns.mean())
    assert metrics["return_std"] == pytest.approx(returns.returns.std())
    assert metrics["diverged"] == 0
    assert metrics["teacher_error_rate"] == 1.0
    assert metrics["teacher_confidence"] == 0.5
    assert metrics["teacher_tau"] == 0.0
    books.open_iteration(1)
    assert books.iteration_metrics() == {}


def test_unanswered_pairs_have_no_error_rate():
    books = ledger(eps_skip=1.0)
    behaviour = collect(books.open_iteration(0))
    books.compare(pairs_of(behaviour, (0,), (2,)))
    metrics = books.iteration_metrics()
    assert "teacher_error_rate" not in metrics
    assert "teacher_confidence" not in metrics


def test_calibration_is_not_charged_and_is_recorded():
    simulator, own = FakeSimulator(), FakeSimulator(seed=1)
    books = ledger(simulator=simulator, tau={"error_rate": 0.2})
    budget = books.open_iteration(3)
    books.calibrate(own, None, PARAMETERS[1], trajectories=32, mean_actions=False)
    assert own.calls == [(3, 0, 32, False, False, ())]
    assert simulator.calls == []
    assert set(books.counts().values()) == {0}
    books.compare(pairs_of(collect(budget)))
    tau = books.iteration_metrics()["teacher_tau"]
    assert tau == books.oracle.temperature.solution[0]
    unasked = FakeSimulator()
    ledger().calibrate(unasked, None, PARAMETERS[1], trajectories=32, mean_actions=False)
    assert unasked.calls == []


# State


def test_a_restored_ledger_goes_on_as_if_nothing_had_happened():
    def iterate(books, iteration):
        preferences = books.compare(pairs_of(collect(books.open_iteration(iteration)), experts=3))
        return preferences.probability.tolist()

    through = ledger(tau=20.0, eps_mistake=0.2)
    iterate(through, 0)
    state = json.loads(json.dumps(through.state_dict()))
    resumed = ledger(tau=20.0, eps_mistake=0.2)
    resumed.load_state_dict(state)
    assert resumed.counts() == through.counts()
    with pytest.raises(BudgetError, match="iteration 0 has had its budget"):
        resumed.open_iteration(0)
    assert iterate(resumed, 1) == iterate(through, 1)
    assert resumed.state_dict() == through.state_dict()


def test_a_learnt_reward_is_correlated_with_the_true_one():
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget, 8)
    true = books._collections[0][1].sum(axis=1)
    assert books.iteration_metrics(3 * true + 1)["reward_correlation"] == pytest.approx(1)
    assert books.iteration_metrics(-true)["reward_correlation"] == pytest.approx(-1)
    assert "reward_correlation" not in books.iteration_metrics(np.ones(8))
    assert "reward_correlation" not in books.iteration_metrics()
