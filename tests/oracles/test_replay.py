"""Answers from a log: the same ones once more, or another teacher's to the same pairs."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from teachers import RATIONAL

from oracles.panel import Panel
from oracles.replay import Replay, relabel
from pbrl.run.preference_log import SCHEMA, PreferenceLog, answers_of, questions, read
from pbrl.run.settings import ConfigurationError
from pbrl.types import Question, Reason


def ask(oracle, first, second, experts=1):
    question = Question.about_rewards(first, second, mean_return=10.0, episode_steps=10, experts=experts)
    return oracle.compare(question)


@pytest.fixture
def replay(recorded_log):
    return Replay(log=str(recorded_log[0]), rng=np.random.default_rng(0))


def assert_same(one, other):
    np.testing.assert_equal(vars(one.preferences), vars(other.preferences))
    np.testing.assert_array_equal(one.reason, other.reason)
    np.testing.assert_array_equal(one.bits, other.bits)
    assert one.tau == other.tau


def test_the_same_questions_get_the_same_answers(replay, recorded_log):
    folder, rewards, first, second = recorded_log
    logged = [answers_of(question) for question in questions(read(folder))]
    assert {*logged[0].reason} == {*Reason}
    assert_same(ask(replay, rewards[first], rewards[second]), logged[0])
    assert_same(ask(replay, rewards[first], rewards[second], experts=4), logged[1])
    with pytest.raises(
        ConfigurationError, match=r"there is no question 2 in .*: the log ends before this run, after 2"
    ):
        ask(replay, rewards[first], rewards[second])


def test_other_questions_are_refused_and_do_not_count(replay, recorded_log):
    _, rewards, first, second = recorded_log
    with pytest.raises(
        ConfigurationError, match=r"is about 40 pairs for 1 experts, this one about 39 for 1: .* another run"
    ):
        ask(replay, rewards[first[1:]], rewards[second[1:]])
    with pytest.raises(
        ConfigurationError, match=r"is about 40 pairs for 1 experts, this one about 40 for 2: .* another run"
    ):
        ask(replay, rewards[first], rewards[second], experts=2)
    other = rewards.copy()
    other[first[0], 3] += 1e-9
    with pytest.raises(
        ConfigurationError, match=r"question 0 in .* has other clips: pair 0 has the true returns .* another run"
    ):
        ask(replay, other[first], other[second])
    assert replay.state_dict() == {"question": 0}


def assert_refused(folder, message):
    with pytest.raises(ConfigurationError, match=message):
        Replay(log=str(folder), rng=np.random.default_rng(0))


def test_a_missing_log_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        assert_refused(tmp_path / folder, f"there is no preference log in {tmp_path / folder}: set oracle.log")


def test_an_empty_log_is_refused(tmp_path):
    pq.write_table(SCHEMA.empty_table(), tmp_path / f"{0:012d}.parquet")
    assert_refused(tmp_path, f"the preference log in {tmp_path} is empty")


def test_what_is_no_log_is_refused(tmp_path):
    part = tmp_path / f"{0:012d}.parquet"
    part.write_bytes(b"not Parquet at all")
    assert_refused(tmp_path, f"the preference log in {tmp_path} is empty")  # such a file is ignored, with a warning
    pq.write_table(pa.table({"iteration": pa.array([1], pa.int32())}), part)
    assert_refused(tmp_path, f"the preference log in {tmp_path} has no values for question, ")


def test_a_log_shorter_than_the_checkpoint_is_refused(replay, recorded_log):
    _, rewards, first, second = recorded_log
    replay.load_state_dict({"question": 7})
    with pytest.raises(ConfigurationError, match=r"there is no question 7 in .*: the log ends before this run"):
        ask(replay, rewards[first], rewards[second])


def test_there_is_nothing_to_calibrate(replay):
    assert not hasattr(replay, "calibrate")
    assert not hasattr(replay, "needs_calibration")


@pytest.mark.parametrize("traits", [{}, {"tau": 1.0, "eps_mistake": 0.2, "eps_skip": 0.5, "eps_equal": 0.2}])
def test_relabelling_is_asking_the_other_teacher(recorded_log, tmp_path, traits):
    folder, rewards, first, second = recorded_log
    relabel(read(folder), RATIONAL(**traits, rng=np.random.default_rng(1)), PreferenceLog(tmp_path))
    relabelled, original = read(tmp_path), read(folder)
    kept = ["iteration", "question", "first", "second", "clip_steps", "experts", "first_sum", "second_sum"]
    assert relabelled.select(kept).equals(original.select(kept))
    teacher = RATIONAL(**traits, rng=np.random.default_rng(1))
    for question, experts in zip(questions(relabelled), (1, 4), strict=True):
        asked = ask(teacher, rewards[first], rewards[second], experts=experts)
        assert_same(answers_of(question), asked)


def test_a_panel_can_relabel(recorded_log, tmp_path):
    panel = Panel(teacher=RATIONAL, members=3, vote="mean", rng=np.random.default_rng(1))
    relabel(read(recorded_log[0]), panel, PreferenceLog(tmp_path))
    assert read(tmp_path)["bits"].to_pylist() == [3] * 40 + [12] * 40


def test_a_myopic_teacher_cannot_judge_by_sums(recorded_log, tmp_path):
    myopic = RATIONAL(gamma=0.9, rng=np.random.default_rng(1))
    with pytest.raises(ValueError, match=r"keeps sums, not steps: .* gamma = 0.9"):
        relabel(read(recorded_log[0]), myopic, PreferenceLog(tmp_path))
    assert len(read(tmp_path)) == 0
