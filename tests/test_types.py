"""Clips, pairs, behaviour and answers: what they accept, and what they are by hand."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbrl.types import Answers, Behaviour, Clips, Pairs, Preferences, Question, Reason, Trajectories, join
from tests.fake_simulator import FakeSimulator

STEPS = 6
WHOLE_NUMBERS = st.lists(st.integers(0, 2**40), min_size=1, max_size=8)


def clips(trajectory, step=None):
    step = np.zeros(len(trajectory), np.int64) if step is None else step
    return Clips(trajectory=np.array(trajectory), step=np.array(step))


def trajectories(n=5, *, first=0, lengths=None):
    """N trajectories of 6 steps; observation, action and reward of a step are 100 times its trajectory, and it."""
    number = first + np.arange(n)
    value = 100 * number[:, None] + np.arange(STEPS + 1)
    return Trajectories(
        policy=number % 2,
        lengths=np.full(n, STEPS) if lengths is None else np.array(lengths),
        diverged=np.zeros(n, bool),
        start=np.stack([np.zeros_like(number), number, number], axis=1),
        number=number,
        observations=value[..., None].astype(np.float32),
        actions=value[:, :-1, None].astype(np.float32),
        task_rewards=value[:, :-1].astype(np.float64),
    )


# Clips and pairs


@given(WHOLE_NUMBERS, st.sampled_from([np.int32, np.int64, np.uint8, np.uint32]), st.data())
def test_clips_keep_what_they_were_given(numbers, dtype, data):
    numbers = np.array([number % np.iinfo(dtype).max for number in numbers], dtype)
    given_clips = Clips(trajectory=numbers, step=numbers[::-1])
    assert given_clips.trajectory.dtype == given_clips.step.dtype == np.int64
    assert given_clips.trajectory.tolist() == numbers.tolist()
    rows = data.draw(st.lists(st.integers(0, len(numbers) - 1), max_size=5))
    taken = given_clips[np.array(rows, np.int64)]
    assert len(taken) == len(rows)
    assert taken.trajectory.tolist() == [numbers[row] for row in rows]
    assert taken.step.tolist() == [numbers[::-1][row] for row in rows]


def test_clips_do_not_change_with_the_arrays_they_were_made_of():
    numbers = np.arange(3)
    made = Clips(trajectory=numbers, step=numbers)
    numbers[:] = 7
    assert made.trajectory.tolist() == made.step.tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["trajectory", "step"])
@pytest.mark.parametrize("values", [[-1, 0], [0.0, 1.0], [True, False], [[0, 1]], ["0", "1"], 3])
def test_clips_are_named_by_whole_numbers(name, values):
    with pytest.raises(ValueError, match=f"{name} must be whole numbers >= 0"):
        Clips(**({"trajectory": np.arange(2), "step": np.arange(2)} | {name: np.array(values)}))


def test_each_clip_has_a_trajectory_and_a_step():
    with pytest.raises(ValueError, match="3 trajectories for 2 steps"):
        Clips(trajectory=np.arange(3), step=np.arange(2))


@given(WHOLE_NUMBERS, WHOLE_NUMBERS)
def test_a_pair_is_two_clips(first, second):
    if len(first) != len(second):
        with pytest.raises(ValueError, match=f"got {len(first)} first and {len(second)} second"):
            Pairs.whole(np.array(first), np.array(second))
        return
    pairs = Pairs.whole(np.array(first), np.array(second), experts=3)
    assert len(pairs) == len(first)
    assert (pairs.steps, pairs.experts) == (None, 3)
    assert pairs.first.trajectory.tolist() == first
    assert pairs.second.trajectory.tolist() == second
    assert not pairs.first.step.any()
    assert not pairs.second.step.any()


def test_there_is_at_least_one_pair():
    with pytest.raises(ValueError, match="got 0 first and 0 second"):
        Pairs.whole(np.array([], np.int64), np.array([], np.int64))


@given(st.integers(0, 5), st.integers(0, 5))
def test_whole_trajectories_begin_at_their_beginning(first, second):
    one, other = clips([0], [first]), clips([1], [second])
    assert Pairs(first=one, second=other, steps=2).first.step.tolist() == [first]
    if first or second:
        with pytest.raises(ValueError, match="begin at step 0: give `steps`"):
            Pairs(first=one, second=other)


@pytest.mark.parametrize("name", ["steps", "experts"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2"])
def test_steps_and_experts_are_counted(name, value):
    with pytest.raises(ValueError, match=f"{name} must be a whole number of at least 1, not {value!r}"):
        Pairs(first=clips([0]), second=clips([1]), **{name: value})


# Behaviour


def test_rows_of_trajectories_by_number():
    behaviour = trajectories(4, first=10)
    assert behaviour.rows(np.array([12, 10, 12, 13])).tolist() == [2, 0, 2, 3]
    assert behaviour.rows(np.array([[12], [10]])).tolist() == [[2], [0]]
    with pytest.raises(KeyError, match=r"trajectories \[9, 14\] are not here: 10 .. 13 are"):
        behaviour.rows(np.array([14, 10, 9]))


@given(st.sets(st.integers(0, 9), min_size=1), st.data())
def test_rows_find_what_was_taken(rows, data):
    taken = trajectories(10, first=5).take(np.array(sorted(rows)))
    wanted = data.draw(st.lists(st.sampled_from(taken.number.tolist()), max_size=6))
    found = taken.rows(np.array(wanted, np.int64))
    assert taken.number[found].tolist() == wanted
    assert taken.observations[found, 0, 0].tolist() == [100 * number for number in wanted]


@given(st.permutations([0, 1, 2]), st.lists(st.integers(1, 4), min_size=3, max_size=3))
def test_collections_are_joined_in_the_order_of_their_numbers(order, sizes):
    parts = [trajectories(n, first=sum(sizes[:part])) for part, n in enumerate(sizes)]
    joined = join([parts[part] for part in order])
    assert type(joined) is Trajectories
    assert joined.number.tolist() == list(range(sum(sizes)))
    assert joined.returns.tolist() == [value for part in parts for value in part.returns]


def test_what_was_not_kept_stays_so_when_joined():
    parts = [dataclasses.replace(trajectories(2, first=first), actions=None) for first in (0, 2)]
    assert join(parts).actions is None
    assert join(parts).observations.shape == (4, STEPS + 1, 1)


@given(st.lists(st.tuples(st.integers(20, 24), st.integers(0, STEPS - 2)), min_size=1, max_size=6))
def test_clips_are_cut_where_they_begin(chosen):
    lengths = [6, 5, 3, 1, 0]
    number, step = zip(*chosen, strict=True)
    obs, actions, lived = trajectories(5, first=20, lengths=lengths).cut(clips(number, step), 2)
    expected = [[100 * n + s, 100 * n + s + 1] for n, s in chosen]
    assert obs[..., 0].tolist() == actions[..., 0].tolist() == expected
    assert lived.tolist() == [len({s, s + 1} & {*range(lengths[n - 20])}) for n, s in chosen]


def test_whole_trajectories_are_cut_with_all_their_steps():
    obs, actions, lived = trajectories(3, lengths=[6, 2, 0]).cut(clips([2, 1]), None)
    assert obs[..., 0].tolist() == actions[..., 0].tolist() == [[100 * n + t for t in range(STEPS)] for n in (2, 1)]
    assert lived.tolist() == [0, 2]


@pytest.mark.parametrize("name", ["observations", "actions"])
def test_nothing_is_cut_from_what_was_not_kept(name):
    with pytest.raises(AssertionError, match="collect with keep="):
        dataclasses.replace(trajectories(), **{name: None}).cut(clips([0]), 2)


@pytest.mark.parametrize("keep", [(), ("actions",), ("observations", "actions")])
def test_behaviour_has_no_rewards_and_what_is_kept(keep):
    true = trajectories(3)
    behaviour = true.without_rewards(np.array([7, 8, 9]), keep)
    assert type(behaviour) is Behaviour
    assert behaviour.number.tolist() == [7, 8, 9]
    assert {name for name in ("observations", "actions") if getattr(behaviour, name) is not None} == {*keep}
    assert not any(
        array is not None and np.shares_memory(array, true.task_rewards) for array in vars(behaviour).values()
    )


def test_the_return_is_the_sum_of_the_rewards():
    assert trajectories(2).returns.tolist() == [0 + 1 + 2 + 3 + 4 + 5, 600 + 15]


# Questions and answers


def test_a_question_about_rewards():
    first, second = np.arange(6.0).reshape(2, 3), -np.arange(6.0).reshape(2, 3)
    question = Question.about_rewards(first, second, mean_return=3.0, episode_steps=9, experts=4)
    assert question.rewards[question.first].tolist() == first.tolist()
    assert question.rewards[question.second].tolist() == second.tolist()
    assert (len(question), question.steps, question.episode_steps, question.experts) == (2, 3, 9, 4)
    assert question.mean_return == 3.0
    assert question.film is None


@pytest.mark.parametrize(("first", "second"), [((2, 3), (2, 4)), ((2, 3), (1, 3)), ((3,), (3,))])
def test_clips_of_a_question_are_of_one_length(first, second):
    with pytest.raises(ValueError, match=r"rewards must be \[pairs, steps\]"):
        Question.about_rewards(np.zeros(first), np.zeros(second), mean_return=0.0, episode_steps=9)


def test_an_answer_is_right_or_wrong_where_it_takes_a_side_and_the_truth_has_one():
    label, first, second = np.array(
        [
            (1.0, 0.0, 2.0),  # right
            (0.0, 0.0, 2.0),  # wrong
            (0.0, 2.0, 0.0),  # right
            (1.0, 2.0, 0.0),  # wrong
            (0.5, 0.0, 2.0),  # takes no side
            (1.0, 2.0, 2.0),  # there is none
            (1.0, np.nan, np.nan),  # nobody knows
        ]
    ).T
    given_answers = Answers(
        preferences=Preferences(probability=label, score=2 * label - 1, label=label, answered=np.ones(7, bool)),
        reason=np.full(7, Reason.ANSWERED, np.uint8),
        first_sum=first,
        second_sum=second,
        bits=np.ones(7, np.int64),
        tau=1.0,
    )
    assert given_answers.decided.tolist() == [True, True, True, True, False, False, False]
    assert given_answers.wrong.tolist() == [False, True, False, True, False, False, False]


def test_the_fake_simulator_is_reproducible_and_tells_trajectories_apart():
    how = {"mean_actions": False, "common_start": False, "keep": ("actions",)}
    one, other = (
        FakeSimulator().collect(None, np.zeros((1, 1)), np.zeros(4, int), iteration=3, first_trajectory=2, **how)
        for _ in range(2)
    )
    np.testing.assert_array_equal(one.task_rewards, other.task_rewards)
    assert len({*one.actions[:, 0, 0].tolist()}) == len({*one.returns.tolist()}) == 4
