"""The ledger: what it charges, what it refuses, what it remembers, and what the oracle and the agent get to see."""

import gc
import weakref
from collections import Counter
from copy import deepcopy

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from numpy.testing import assert_array_equal
from teachers import RATIONAL

from oracles.panel import Panel
from pbrl.ledger import Budget, BudgetError, Ledger, YardstickBudget
from pbrl.normaliser import Normaliser
from pbrl.run import checkpoint
from pbrl.run.preference_log import PreferenceLog, read
from pbrl.types import Answers, Behaviour, Clips, Pairs, Preferences, Reason
from tests.fake_simulator import POLICY, FakeSimulator

PARAMETERS = np.array([[0.0], [1.0]], np.float32)
HOW = {"mean_actions": False, "common_start": False, "keep": ()}
STEPS = 20


class Recorder:
    """A rational teacher that keeps the questions it was asked."""

    sees = "rewards"

    def __init__(self):
        self.teacher, self.questions = RATIONAL(rng=np.random.default_rng(0)), []
        self.state_dict, self.load_state_dict = self.teacher.state_dict, self.teacher.load_state_dict

    def compare(self, question):
        self.questions.append(question)
        return self.teacher.compare(question)


class Watcher:
    """Stands in for a person: looks at films, always prefers the second, and knows no true sums."""

    sees = "behaviour"

    def __init__(self):
        self.questions = []

    def compare(self, question):
        self.questions.append(question)
        n = len(question)
        return Answers(
            preferences=Preferences(
                probability=np.ones(n), score=np.ones(n), label=np.ones(n), answered=np.ones(n, bool)
            ),
            reason=np.full(n, Reason.ANSWERED, np.uint8),
            first_sum=np.full(n, np.nan),
            second_sum=np.full(n, np.nan),
            bits=np.ones(n, np.int64),
            tau=np.nan,
        )

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert state == {}


def ledger(*, simulator=None, oracle=None, trajectories=8, pairs=4, bits=None, remember=None, **traits):
    return Ledger(
        simulator=simulator or FakeSimulator(),
        oracle=oracle or RATIONAL(rng=np.random.default_rng(0), **traits),
        trajectories_per_iteration=trajectories,
        pairs_per_iteration=pairs,
        bits_per_iteration=bits,
        remember=remember,
    )


def collect(budget, count=8, **how):
    return budget.collect(POLICY, PARAMETERS, np.arange(count) % 2, **(HOW | how))


def whole(first=(0, 2, 4, 6), second=(1, 3, 5, 7), experts=1):
    return Pairs.whole(np.array(first), np.array(second), experts=experts)


def clips(first, second, steps):
    """Pairs of clips, each given by (trajectory, step)."""
    one, other = (
        Clips(trajectory=np.array([each[0] for each in side]), step=np.array([each[1] for each in side]))
        for side in (first, second)
    )
    return Pairs(first=one, second=other, steps=steps)


def through_a_checkpoint(books, folder, **made):
    """Another ledger that continues from the state of this one, saved and loaded."""
    checkpoint.save(folder, 0, {"ledger": books.state_dict()})
    loaded = checkpoint.load(folder)
    assert loaded is not None
    resumed = ledger(**made)
    resumed.load_state_dict(loaded[1]["ledger"])
    return resumed


# Charging


def test_an_iteration_is_counted():
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    preferences = budget.compare(whole())
    assert books.counts() == {
        "trajectories": 8,
        "env_steps": 8 * STEPS,
        "pairs_asked": 4,
        "pairs_answered": 4,
        "pairs_skipped": 0,
        "pairs_equal": 0,
        "bits": 4,
    }
    assert preferences.label.tolist() == [1, 1, 1, 1]  # the second policy earns one more per step
    assert (budget.trajectories_left, budget.pairs_left, budget.bits_left) == (0, 0, 0)
    budget = books.open_iteration(1)
    assert (budget.trajectories_left, budget.pairs_left, budget.bits_left) == (8, 4, 4)
    collect(budget)
    budget.compare(whole())
    assert books.counts()["trajectories"] == 16
    assert books.counts()["bits"] == 8


def test_steps_are_counted_until_each_trajectory_ended():
    class Short(FakeSimulator):
        def collect(self, *args, **how):
            collected = super().collect(*args, **how)
            collected.lengths[:] = np.arange(len(collected))
            return collected

    books = ledger(simulator=Short())
    collect(books.open_iteration(0))
    assert books.counts()["env_steps"] == 0 + 1 + 2 + 3 + 4 + 5 + 6 + 7


def test_skips_and_equals_are_charged_in_full():
    books = ledger(eps_skip=1.0)
    budget = books.open_iteration(0)
    collect(budget)
    answers = budget.compare(whole((0, 0), (2, 1)))  # two poor ones; one good one
    assert answers.answered.tolist() == [False, True]
    counts = books.counts()
    assert (counts["pairs_asked"], counts["pairs_answered"], counts["pairs_skipped"]) == (2, 1, 1)
    assert counts["bits"] == 1
    assert (budget.pairs_left, budget.bits_left) == (2, 2)
    books = ledger(eps_equal=0.9)
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole((0, 0), (0, 1)))
    counts = books.counts()
    assert (counts["pairs_answered"], counts["pairs_equal"], counts["bits"]) == (2, 1, 2)


def test_an_iteration_may_go_back_and_forth():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator)
    budget = books.open_iteration(5)
    for k in range(4):
        assert (budget.trajectories_left, budget.pairs_left) == (8 - 2 * k, 4 - k)
        behaviour = collect(budget, 2, mean_actions=True, common_start=True, keep=("actions",))
        assert behaviour.start[:, 1].tolist() == behaviour.number.tolist() == [2 * k, 2 * k + 1]
        budget.compare(whole([2 * k], [2 * k + 1]))
    assert simulator.calls == [(5, 2 * k, 2, True, True, ("actions",)) for k in range(4)]
    assert (budget.trajectories_left, budget.pairs_left) == (0, 0)


def test_iterations_that_collect_nothing_or_ask_nothing():
    books = ledger()
    books.open_iteration(0)
    assert books.iteration_metrics() == {}
    assert books.observations() is None
    collect(books.open_iteration(1))
    assert set(books.iteration_metrics()) == {"return_mean", "return_std", "diverged"}
    budget = books.open_iteration(2)
    budget.compare(whole())  # about the trajectories of iteration 1
    assert "return_mean" not in books.iteration_metrics()
    assert books.iteration_metrics()["teacher_error_rate"] == 0.0
    books.open_iteration(7)  # iterations may be left out
    counts = books.counts()
    assert (counts["trajectories"], counts["pairs_asked"]) == (8, 4)


def test_numbers_count_through_the_run_and_streams_through_the_iteration():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator, remember=64)
    numbers = []
    for iteration, counts in enumerate([(3, 5), (), (8,), (1, 1)]):
        budget = books.open_iteration(iteration)
        numbers += [number for count in counts for number in collect(budget, count).number.tolist()]
    assert numbers == list(range(18))
    assert [call[:2] for call in simulator.calls] == [(0, 0), (0, 3), (2, 0), (3, 0), (3, 1)]


@pytest.mark.parametrize("pairs", [8, 128])
def test_pairs_may_be_fewer_or_more_than_half_the_trajectories(pairs, rng):
    books = ledger(trajectories=64, pairs=pairs)
    budget = books.open_iteration(0)
    collect(budget, 64)
    budget.compare(whole(*rng.integers(64, size=(2, pairs))))
    assert books.counts()["pairs_asked"] == pairs
    assert_refuses(books, budget, whole([0], [1]), f"asked about 1 pairs with 0 left of {pairs} in iteration 0")


def test_each_answering_expert_is_a_bit():
    books = ledger(tau=1.0, bits=40)
    budget = books.open_iteration(0)
    collect(budget)
    shares = budget.compare(whole(experts=10)).probability * 10
    assert_array_equal(shares, np.rint(shares))
    assert (books.counts()["pairs_asked"], books.counts()["bits"]) == (4, 40)
    assert (budget.pairs_left, budget.bits_left) == (0, 0)


def test_each_member_of_a_panel_is_a_bit():
    panel = Panel(teacher=RATIONAL, members=5, vote="mean", rng=np.random.default_rng(0))
    books = ledger(oracle=panel, bits=25)
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole([0, 2], [1, 3]))
    assert (books.counts()["pairs_asked"], books.counts()["bits"], budget.bits_left) == (2, 10, 15)
    assert_refuses(
        books, budget, whole([0, 2], [1, 3], experts=2), "asked for 20 answers to 2 pairs with 15 left of 25"
    )


# Refusing: the message says what was asked and what is left, and nothing is charged


def assert_refuses(books, budget, pairs, message):
    def state():
        left = (budget.trajectories_left, budget.pairs_left, budget.bits_left)
        return books.counts(), books.oracle.state_dict(), books.iteration_metrics(), left

    before = state()
    with pytest.raises(BudgetError, match=message):
        budget.compare(pairs)
    assert state() == before


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
    assert collect(budget, 2).number.tolist() == [6, 7]


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
def test_assignments_that_make_no_sense_are_refused(assignment, message):
    books = ledger()
    budget = books.open_iteration(0)
    with pytest.raises(BudgetError, match=message):
        budget.collect(POLICY, PARAMETERS, assignment, **HOW)
    assert books.counts()["trajectories"] == 0
    assert budget.trajectories_left == 8


def test_more_pairs_than_left_are_refused():
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole([0, 2, 4], [1, 3, 5]))
    assert_refuses(books, budget, whole([0, 2], [1, 3]), "asked about 2 pairs with 1 left of 4 in iteration 0")
    budget.compare(whole([6], [7]))
    assert_refuses(books, budget, whole([6], [7]), "asked about 1 pairs with 0 left of 4 in iteration 0")


def test_more_answers_than_left_are_refused():
    books = ledger(bits=6)
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole([0], [1], experts=3))
    assert_refuses(
        books,
        budget,
        whole([0, 2], [1, 3], experts=2),
        "asked for 4 answers to 2 pairs with 3 left of 6 in iteration 0",
    )
    budget.compare(whole([0], [1], experts=3))
    assert budget.pairs_left == 2
    assert_refuses(books, budget, whole([0], [1]), "asked for 1 answers to 1 pairs with 0 left")


def test_trajectories_that_were_not_paid_for_are_refused():
    books = ledger()
    budget = books.open_iteration(0)
    assert_refuses(books, budget, whole([0], [1]), "asked about trajectory 1, but 0 have been paid for")
    collect(budget, 6)
    assert_refuses(books, budget, whole([0, 1], [2, 6]), "asked about trajectory 6, but 6 have been paid for")


def test_trajectories_of_earlier_iterations_until_they_are_forgotten():
    simulator, oracle = FakeSimulator(), Recorder()
    books = ledger(simulator=simulator, oracle=oracle, remember=10)
    for iteration in range(3):
        budget = books.open_iteration(iteration)
        collect(budget, 4)
    budget.compare(whole([2, 11], [5, 3]))  # of all three iterations
    question = oracle.questions[-1]
    assert_array_equal(question.rewards[question.first], simulator.rewards[[2, 11]])
    assert_array_equal(question.rewards[question.second], simulator.rewards[[5, 3]])
    assert_refuses(
        books,
        budget,
        whole([2], [1]),
        r"trajectory 1, which is forgotten: only 2 .. 11 are remembered \(remember=10\)",
    )
    collect(budget, 1)
    assert_refuses(books, budget, whole([2], [3]), r"trajectory 2, which is forgotten: only 3 .. 12")
    budget.compare(whole([3], [12]))


def test_a_large_collection_makes_several_small_ones_forgotten():
    books = ledger(remember=8)
    for iteration in range(5):
        collect(books.open_iteration(iteration), 1)
    budget = books.open_iteration(5)
    collect(budget, 7)
    assert_refuses(books, budget, whole([3], [11]), "trajectory 3, which is forgotten: only 4 .. 11 are remembered")
    budget.compare(whole([4], [11]))


def test_two_iterations_are_remembered_unless_told_otherwise():
    books = ledger()
    for iteration in range(3):
        budget = books.open_iteration(iteration)
        collect(budget)
    budget.compare(whole([8], [23]))
    assert_refuses(books, budget, whole([8], [7]), "trajectory 7, which is forgotten: only 8 .. 23")


@pytest.mark.parametrize(("step", "steps"), [(0, 21), (11, 10), (19, 2), (20, 1), (10**6, 1)])
def test_clips_that_end_after_the_trajectory_are_refused(step, steps):
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    message = f"a clip of {steps} steps from step {step} ends after the trajectory, which has 20"
    assert_refuses(books, budget, clips([(0, step)], [(1, 0)], steps), message)
    assert_refuses(books, budget, clips([(0, 0)], [(1, step)], steps), message)


def test_rewards_that_are_not_numbers_are_refused():
    class Broken(FakeSimulator):
        def collect(self, *args, **how):
            trajectories = super().collect(*args, **how)
            trajectories.task_rewards[3, 7] = np.nan
            return trajectories

    books = ledger(simulator=Broken())
    budget = books.open_iteration(0)
    collect(budget)
    before = books.counts(), books.oracle.state_dict()
    with pytest.raises(ValueError, match="clip 3 sum to nan: all must be finite"):
        budget.compare(whole())
    assert (books.counts(), books.oracle.state_dict()) == before
    assert (budget.pairs_left, budget.bits_left) == (4, 4)


@pytest.mark.parametrize("end", ["the next iteration", "a resume"])
def test_the_budget_of_a_past_iteration_is_void(end):
    books = ledger()
    past = books.open_iteration(3)
    collect(past, 2)
    if end == "a resume":
        books.load_state_dict(books.state_dict())
    else:
        collect(books.open_iteration(4), 2)
    before = books.counts()
    for spend in (
        lambda: collect(past, 1),
        lambda: past.compare(whole([0], [1])),
        lambda: past.note(loss=1.0),
    ):
        with pytest.raises(BudgetError, match="the budget of iteration 3 is void"):
            spend()
    assert books.counts() == before
    assert "loss" not in books.iteration_metrics()


def test_nothing_is_left_of_a_past_iteration():
    """Nothing can be collected or compared with its budget, so none of its numbers may say otherwise."""
    books = ledger()
    past = books.open_iteration(0)
    books.open_iteration(1)
    assert (past.trajectories_left, past.pairs_left, past.bits_left) == (0, 0, 0)


def test_an_iteration_has_one_budget():
    books = ledger()
    books.open_iteration(4)
    for iteration in (0, 4):
        with pytest.raises(BudgetError, match=f"iteration {iteration} has had its budget: 4 was the last"):
            books.open_iteration(iteration)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"trajectories": 0}, "trajectories_per_iteration must be at least 1, not 0"),
        ({"pairs": -1}, "pairs_per_iteration must be at least 1, not -1"),
        ({"bits": 0}, "bits_per_iteration must be at least 1, not 0"),
        ({"remember": 7}, "remember must be at least 8, not 7"),
    ],
)
def test_budgets_that_make_no_sense_fail_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        ledger(**settings)


# What the oracle sees


def test_the_oracle_gets_the_rewards_of_the_trajectories_asked_about_and_no_others():
    simulator, oracle = FakeSimulator(), Recorder()
    budget = ledger(simulator=simulator, oracle=oracle).open_iteration(0)
    collect(budget, keep=("observations", "actions"))
    budget.compare(whole([5, 0, 5], [2, 5, 2], experts=1))
    (question,) = oracle.questions
    assert question.rewards.shape == (3, STEPS)  # trajectories 0, 2 and 5, each once
    assert_array_equal(question.rewards[question.first], simulator.rewards[[5, 0, 5]])
    assert_array_equal(question.rewards[question.second], simulator.rewards[[2, 5, 2]])
    assert (question.steps, question.episode_steps, question.experts) == (STEPS, STEPS, 1)
    assert question.film is None


def test_the_oracle_gets_the_rewards_of_the_clips_asked_about_and_no_others():
    simulator, oracle = FakeSimulator(), Recorder()
    budget = ledger(simulator=simulator, oracle=oracle).open_iteration(0)
    collect(budget)
    first, second = [(0, 0), (3, 15), (0, 0), (0, 1)], [(7, 4), (3, 0), (0, 1), (6, 15)]
    preferences = budget.compare(clips(first, second, 5))
    (question,) = oracle.questions
    assert question.rewards.shape == (len({*first, *second}), 5)  # each clip once
    expected = [np.stack([simulator.rewards[n, t : t + 5] for n, t in side]) for side in (first, second)]
    assert_array_equal(question.rewards[question.first], expected[0])
    assert_array_equal(question.rewards[question.second], expected[1])
    assert (question.steps, question.episode_steps) == (5, STEPS)
    assert_array_equal(preferences.label, (expected[1].sum(1) > expected[0].sum(1)).astype(float))


def test_a_clip_of_all_steps_is_the_whole_trajectory():
    answers = []
    for pairs in (whole(), clips([(n, 0) for n in (0, 2, 4, 6)], [(n, 0) for n in (1, 3, 5, 7)], STEPS)):
        budget = ledger(tau=30.0, eps_mistake=0.3).open_iteration(0)
        collect(budget)
        answers.append(budget.compare(pairs))
    np.testing.assert_equal(vars(answers[0]), vars(answers[1]))


def test_an_oracle_that_looks_at_behaviour_gets_films_and_no_rewards():
    simulator, oracle = FakeSimulator(), Watcher()
    books = ledger(simulator=simulator, oracle=oracle)
    for iteration in range(2):
        budget = books.open_iteration(iteration)
        collect(budget, 4)
    first, second = [(6, 3), (1, 0)], [(1, 3), (6, 3)]
    budget.compare(clips(first, second, 5))
    (question,) = oracle.questions
    assert question.rewards is None
    assert question.mean_return is None
    film = question.film
    assert type(film.trajectories) is Behaviour
    assert film.trajectories.observations is None
    assert len(film.trajectories) == len(film.step) == 3  # each clip once
    actions = np.concatenate([each.actions for each in simulator.collected])
    starts = np.concatenate([each.start for each in simulator.collected])
    for rows, side in ((question.first, first), (question.second, second)):
        assert [*zip(film.trajectories.number[rows], film.step[rows], strict=True)] == side
        numbers = [number for number, _ in side]
        assert_array_equal(film.trajectories.actions[rows], actions[numbers])
        assert_array_equal(film.trajectories.start[rows], starts[numbers])
    arrays = [array for array in vars(film.trajectories).values() if array is not None]
    assert not any(np.shares_memory(array, each.task_rewards) for array in arrays for each in simulator.collected)


def test_where_the_oracle_does_not_know_the_truth_the_record_still_does():
    """A person sees no rewards: the ledger adds the true sums to the answers, for the record and the log."""
    books = ledger(oracle=Watcher())
    budget = books.open_iteration(0)
    collect(budget)
    assert budget.compare(whole()).label.tolist() == [1, 1, 1, 1]
    metrics = books.iteration_metrics()
    (answers,) = books._answers
    worse = answers.second_sum < answers.first_sum
    assert metrics["teacher_error_rate"] == worse.sum() / (answers.second_sum != answers.first_sum).sum()
    assert all(np.isfinite(value) for value in metrics.values()), metrics


def test_thresholds_follow_the_mean_return_of_as_many_trajectories_as_an_iteration_has():
    simulator, oracle = FakeSimulator(), Recorder()
    books = ledger(simulator=simulator, oracle=oracle, remember=100, pairs=8)

    def asked():
        budget.compare(whole([0], [1]))
        return oracle.questions[-1].mean_return

    for iteration in range(3):
        budget = books.open_iteration(iteration)
        if iteration:
            assert asked() == pytest.approx(simulator.rewards.sum(1)[-8:].mean())
        for _ in range(2):  # in several goes
            collect(budget, 3)
            assert asked() == pytest.approx(simulator.rewards.sum(1)[-8:].mean())


# What the agent sees


@pytest.mark.parametrize("oracle", [Recorder, Watcher])
@pytest.mark.parametrize("normalise", [False, True])
def test_agents_receive_what_they_asked_to_keep_and_no_rewards(oracle, normalise, monkeypatch):
    """Whatever the oracle and the observations' normaliser need."""
    monkeypatch.setattr(POLICY, "normaliser", Normaliser(3) if normalise else None)
    budget = ledger(oracle=oracle()).open_iteration(0)
    received = {keep: collect(budget, 2, keep=keep) for keep in ((), ("observations",), ("actions",))}
    assert {type(behaviour) for behaviour in received.values()} == {Behaviour}
    kept = {
        keep: tuple(name for name in ("observations", "actions") if getattr(behaviour, name) is not None)
        for keep, behaviour in received.items()
    }
    assert kept == {keep: keep for keep in received}
    preferences = budget.compare(whole([0], [1]))
    assert type(preferences) is Preferences
    assert set(vars(preferences)) == {"probability", "score", "label", "answered"}


def test_behaviour_cannot_be_written_to():
    behaviour = collect(ledger().open_iteration(0), keep=("observations", "actions"))
    for name, array in vars(behaviour).items():
        with pytest.raises(ValueError, match="read-only"):
            array[0] = array[1]
        with pytest.raises(AttributeError):
            setattr(behaviour, name, array)


def test_what_was_returned_does_not_change_with_the_rewards():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator, tau=1.0)
    budget = books.open_iteration(0)
    behaviour = collect(budget, keep=("observations", "actions"))
    preferences = budget.compare(whole())
    before = [{name: np.copy(value) for name, value in vars(given).items()} for given in (behaviour, preferences)]
    metrics = books.iteration_metrics()
    simulator.collected[0].task_rewards[:] = np.nan
    np.testing.assert_equal([vars(behaviour), vars(preferences)], before)
    assert books.iteration_metrics() == metrics


def test_what_agents_do_to_their_answers_changes_neither_record_nor_log(tmp_path):
    books = ledger(eps_mistake=1.0)
    books.preference_log = PreferenceLog(tmp_path)
    budget = books.open_iteration(0)
    collect(budget)
    preferences = budget.compare(whole())
    before = books.iteration_metrics()
    for array in vars(preferences).values():
        array[:] = 1
    assert books.iteration_metrics() == before
    books.close()
    assert read(tmp_path)["label"].to_pylist() == [0, 0, 0, 0]


def test_the_log_names_trajectories_by_their_number(tmp_path):
    books = ledger(pairs=8)
    books.preference_log = PreferenceLog(tmp_path)
    collect(books.open_iteration(0))
    budget = books.open_iteration(1)
    collect(budget, 2)
    budget.compare(clips([(9, 3)], [(1, 15)], 5))
    budget.compare(whole([8], [0]))
    books.close()
    table = read(tmp_path)
    expected = {"iteration": [1, 1], "first": [9, 8], "second": [1, 0], "first_step": [3, 0], "second_step": [15, 0]}
    expected |= {"clip_steps": [5, STEPS], "episode_steps": [STEPS, STEPS]}
    assert {name: table[name].to_pylist() for name in expected} == expected


def test_observations_of_the_iteration_until_each_trajectory_ended(monkeypatch):
    class Short(FakeSimulator):
        def collect(self, *args, **how):
            collected = super().collect(*args, **how)
            collected.lengths[:2] = [0, 3]
            return collected

    monkeypatch.setattr(POLICY, "normaliser", Normaliser(3))
    simulator = Short()
    books = ledger(simulator=simulator)
    collect(books.open_iteration(0), 4)
    collect(books.open_iteration(1), 3)
    obs = simulator.collected[1].observations
    assert_array_equal(books.observations(), np.concatenate([obs[0, :1], obs[1, :4], obs[2, : STEPS + 1]]))


# The record


def test_metrics_tell_the_truth_about_the_iteration():
    simulator = FakeSimulator()
    books = ledger(simulator=simulator, eps_mistake=1.0)
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole([0, 0], [1, 0]))  # one order to be mistaken about, and one tie
    assert books.iteration_metrics() == {
        "return_mean": pytest.approx(simulator.rewards.sum(1).mean()),
        "return_std": pytest.approx(simulator.rewards.sum(1).std()),
        "diverged": 0,
        "teacher_error_rate": 1.0,
        "teacher_confidence": 0.5,
        "teacher_tau": 0.0,
    }
    books.open_iteration(1)
    assert books.iteration_metrics() == {}


def test_unanswered_pairs_have_no_error_rate():
    books = ledger(eps_skip=1.0)
    budget = books.open_iteration(0)
    collect(budget)
    budget.compare(whole([0], [2]))
    metrics = books.iteration_metrics()
    assert "teacher_error_rate" not in metrics
    assert "teacher_confidence" not in metrics


def test_numbers_are_noted_as_they_are():
    books = ledger()
    budget = books.open_iteration(0)
    budget.note(loss=1.5, updates=3)
    budget.note(loss=np.float32(0.5))
    assert books.iteration_metrics() == {"loss": 0.5, "updates": 3.0}
    books.open_iteration(1)
    assert books.iteration_metrics() == {}


def test_an_array_is_noted_as_its_correlation_with_the_true_returns():
    class Known(FakeSimulator):
        def collect(self, *args, **how):
            collected = super().collect(*args, **how)
            collected.task_rewards[:] = 0
            collected.task_rewards[:, 0] = [(1, 2), (3, 6)][len(self.calls) - 1]
            return collected

    books = ledger(simulator=Known(), trajectories=4)
    budget = books.open_iteration(0)
    for _ in range(2):  # of all of the iteration's trajectories, in the order they were collected
        collect(budget, 2)
    returns = np.array([1.0, 2.0, 3.0, 6.0])
    budget.note(linear=3 * returns + 1, opposite=(-returns).astype(np.float32), reward=np.array([0.0, 0.0, 0.0, 1.0]))
    budget.note(constant=np.ones(4))
    metrics = books.iteration_metrics()
    assert metrics["linear_correlation"] == pytest.approx(1)
    assert metrics["opposite_correlation"] == pytest.approx(-1)
    # deviations (-2, -1, 0, 3) and (-1, -1, -1, 3) / 4: 12 / 4 over sqrt(14 * 12 / 16)
    assert metrics["reward_correlation"] == pytest.approx(3 / np.sqrt(10.5))
    assert set(metrics) == {
        *("return_mean", "return_std", "diverged"),
        *("linear_correlation", "opposite_correlation", "reward_correlation"),
    }  # with a constant there is none


def test_a_correlation_with_what_is_not_a_number_is_left_out():
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    budget.note(reward=np.r_[np.nan, np.arange(7.0)])
    assert all(np.isfinite(value) for value in books.iteration_metrics().values()), books.iteration_metrics()


@pytest.mark.parametrize("shape", [(7,), (9,), (8, 1), (0,)])
def test_an_array_of_another_shape_is_refused_by_name(shape):
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    with pytest.raises(ValueError, match=r"reward has shape \(.*\): it must be one number, or one for each of the 8"):
        budget.note(reward=np.zeros(shape))
    assert not any("reward" in name for name in books.iteration_metrics())


def test_calibration_is_not_charged_and_is_recorded():
    simulator, own = FakeSimulator(), FakeSimulator(seed=1)
    books = ledger(simulator=simulator, tau={"error_rate": 0.2})
    budget = books.open_iteration(3)
    books.calibrate(own, None, PARAMETERS[1], trajectories=32, mean_actions=False)
    assert own.calls == [(3, 0, 32, False, False, ())]
    assert simulator.calls == []
    assert set(books.counts().values()) == {0}
    assert budget.trajectories_left == 8
    collect(budget)
    budget.compare(whole())
    assert books.iteration_metrics()["teacher_tau"] == books.oracle.temperature.solution[0]
    unasked = FakeSimulator()
    ledger().calibrate(unasked, None, PARAMETERS[1], trajectories=32, mean_actions=False)
    assert unasked.calls == []


# State


def test_a_resumed_ledger_continues_as_if_nothing_had_happened(tmp_path):
    made = {"tau": 20.0, "eps_mistake": 0.2, "bits": 12}

    def iterate(books, iteration):
        budget = books.open_iteration(iteration)
        numbers = collect(budget).number
        pairs = whole(numbers[:4], numbers[4:] - (8 if iteration else 0), experts=3)  # with the iteration before
        return budget.compare(pairs).probability.tolist()

    uninterrupted = ledger(**made)
    iterate(uninterrupted, 0)
    resumed = through_a_checkpoint(uninterrupted, tmp_path, **made)
    assert resumed.counts() == uninterrupted.counts()
    with pytest.raises(BudgetError, match="iteration 0 has had its budget"):
        resumed.open_iteration(0)
    assert iterate(resumed, 1) == iterate(uninterrupted, 1)
    np.testing.assert_equal(resumed.state_dict(), uninterrupted.state_dict())


def test_a_resumed_ledger_remembers_and_forgets_the_same_trajectories(tmp_path):
    simulator, oracle = FakeSimulator(), Recorder()
    books = ledger(simulator=simulator, remember=10)
    for iteration in range(2):
        collect(books.open_iteration(iteration), 6)
    resumed = through_a_checkpoint(books, tmp_path, simulator=simulator, oracle=oracle, remember=10)
    budget = resumed.open_iteration(2)
    pairs = clips([(2, 3), (11, 0)], [(5, 15), (2, 3)], 5)
    budget.compare(pairs)
    question = oracle.questions[-1]
    rewards = simulator.rewards
    assert_array_equal(question.rewards[question.first], [rewards[2, 3:8], rewards[11, :5]])
    assert_array_equal(question.rewards[question.second], [rewards[5, 15:], rewards[2, 3:8]])
    assert question.mean_return == pytest.approx(rewards.sum(1)[-8:].mean())
    assert_refuses(resumed, budget, whole([1], [2]), "trajectory 1, which is forgotten: only 2 .. 11")
    assert_refuses(resumed, budget, whole([2], [12]), "asked about trajectory 12, but 12 have been paid for")
    assert collect(budget, 3).number.tolist() == [12, 13, 14]
    assert_refuses(resumed, budget, whole([4], [5]), "trajectory 4, which is forgotten: only 5 .. 14")
    budget.compare(whole([5], [14]))


def test_films_of_trajectories_from_before_a_resume(tmp_path):
    simulator, oracle = FakeSimulator(), Watcher()
    books = ledger(simulator=simulator, oracle=Watcher())
    collect(books.open_iteration(0))
    resumed = through_a_checkpoint(books, tmp_path, simulator=simulator, oracle=oracle)
    resumed.open_iteration(1).compare(whole([5], [3]))
    film = oracle.questions[-1].film
    assert film.trajectories.number.tolist() == [3, 5]
    assert_array_equal(film.trajectories.actions, simulator.collected[0].actions[[3, 5]])
    assert_array_equal(film.trajectories.start, simulator.collected[0].start[[3, 5]])


def test_a_ledger_that_has_collected_nothing_is_resumed(tmp_path):
    resumed = through_a_checkpoint(ledger(), tmp_path)
    assert collect(resumed.open_iteration(0)).number.tolist() == list(range(8))


def test_a_saved_state_does_not_change_when_the_run_continues():
    books = ledger()
    budget = books.open_iteration(0)
    collect(budget)
    state = books.state_dict()
    counts, rewards = dict(state["counts"]), state["remembered"]["task_rewards"].copy()
    budget.compare(whole())
    collect(books.open_iteration(1))
    assert state["counts"] == counts
    assert_array_equal(state["remembered"]["task_rewards"], rewards)


def test_a_ledger_that_is_no_longer_used_is_freed():
    """A sweep's jobs may share a process: what one run remembered must not stay for the next."""
    books = ledger()
    collect(books.open_iteration(0))
    gone = weakref.ref(books)
    del books
    gc.collect()
    assert gone() is None


# Any sequence of collections, comparisons, iterations and resumes


class AnySequence(RuleBasedStateMachine):
    """Whatever is asked in whatever order: the budget is kept, and what was refused was not charged."""

    @initialize(
        trajectories=st.integers(1, 6), pairs=st.integers(1, 6), bits=st.integers(1, 12), remember=st.integers(0, 9)
    )
    def begin(self, trajectories, pairs, bits, remember):
        self.limits = {"trajectories": trajectories, "pairs": pairs, "bits": bits}
        self.made = {**self.limits, "remember": trajectories + remember}
        self.simulator = FakeSimulator(steps=5)
        self.books = ledger(simulator=self.simulator, oracle=Recorder(), **self.made)
        self.spent, self.collected, self.total, self.iteration, self.budget = Counter(), 0, Counter(), -1, None

    @rule(skip=st.integers(1, 3))
    def open_iteration(self, skip):
        self.iteration += skip
        self.budget, self.spent = self.books.open_iteration(self.iteration), Counter()

    @precondition(lambda self: self.budget is not None)
    @rule(n=st.integers(1, 7))
    def collect(self, n):
        if self.spent["trajectories"] + n > self.limits["trajectories"]:
            with pytest.raises(BudgetError, match=f"asked for {n} trajectories with"):
                collect(self.budget, n)
            return
        assert collect(self.budget, n).number.tolist() == list(range(self.collected, self.collected + n))
        self.spent["trajectories"] += n
        self.collected += n

    @precondition(lambda self: self.budget is not None)
    @rule(data=st.data(), steps=st.none() | st.integers(1, 6), experts=st.integers(1, 3), n=st.integers(1, 4))
    def compare(self, data, steps, experts, n):
        number = st.integers(max(0, self.collected - self.made["remember"] - 1), self.collected)
        step = st.just(0) if steps is None else st.integers(0, 5)
        first, second = (
            data.draw(st.lists(st.tuples(number, step), min_size=n, max_size=n)) for _ in ("first", "second")
        )
        one, other = (
            Clips(trajectory=np.array([n for n, _ in side]), step=np.array([t for _, t in side]))
            for side in (first, second)
        )
        pairs = Pairs(first=one, second=other, steps=steps, experts=experts)
        asked = {*first, *second}
        allowed = (
            self.spent["pairs"] + n <= self.limits["pairs"]
            and self.spent["bits"] + n * experts <= self.limits["bits"]
            and all(self.collected - self.made["remember"] <= number < self.collected for number, _ in asked)
            and all(begin + (5 if steps is None else steps) <= 5 for _, begin in asked)
        )
        if not allowed:
            with pytest.raises(BudgetError):
                self.budget.compare(pairs)
            return
        assert len(self.budget.compare(pairs)) == n
        question, rewards = self.books.oracle.questions[-1], self.simulator.rewards
        for rows, side in ((question.first, first), (question.second, second)):
            expected = [rewards[number, begin : begin + question.steps] for number, begin in side]
            assert_array_equal(question.rewards[rows], expected)
        self.spent.update(pairs=n, bits=n * experts)
        self.total.update(pairs=n, bits=n * experts)

    @rule()
    def resume(self):
        state = deepcopy(self.books.state_dict())
        self.books = ledger(simulator=self.simulator, oracle=Recorder(), **self.made)
        self.books.load_state_dict(state)
        self.budget = None

    @invariant()
    def the_counts_add_up(self):
        counts = self.books.counts()
        assert counts["trajectories"] == self.collected
        assert counts["env_steps"] == 5 * self.collected
        assert counts["pairs_asked"] == self.total["pairs"]
        assert counts["pairs_answered"] + counts["pairs_skipped"] == counts["pairs_asked"]
        assert counts["bits"] == self.total["bits"]
        if self.budget is not None:
            left = {name: getattr(self.budget, f"{name}_left") for name in self.limits}
            assert left == {name: limit - self.spent[name] for name, limit in self.limits.items()}
            assert min(left.values()) >= 0


TestAnySequence = AnySequence.TestCase
TestAnySequence.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


# Yardsticks


def test_true_rewards_are_for_yardsticks_alone():
    books, simulator = ledger(), FakeSimulator()
    budget = books.open_iteration(0)
    behaviour = collect(budget)
    assert type(budget) is Budget
    assert not hasattr(budget, "true_rewards")
    with pytest.raises(BudgetError, match="for yardsticks alone"):
        YardstickBudget.true_rewards(budget, behaviour)

    how = {"oracle": RATIONAL(rng=np.random.default_rng(0)), "trajectories_per_iteration": 8, "pairs_per_iteration": 4}
    books = Ledger(simulator=simulator, yardstick=True, remember=8, **how)
    budget = books.open_iteration(0)
    behaviour = collect(budget)
    true = books._remembered[-1].task_rewards
    rewards = budget.true_rewards(behaviour.take(np.array([5, 2])))
    assert_array_equal(rewards, true[[5, 2]])
    assert not np.shares_memory(rewards, true)
    collect(later := books.open_iteration(1))
    with pytest.raises(BudgetError, match="is void"):
        budget.true_rewards(behaviour)
    with pytest.raises(BudgetError, match="which is forgotten"):
        later.true_rewards(behaviour)
