"""The preference log: what it keeps, and that interruptions neither lose nor repeat a comparison."""

import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from teachers import RATIONAL

from oracles.replay import Replay
from pbrl.ledger import Ledger
from pbrl.run import preference_log
from pbrl.run.preference_log import SCHEMA, PreferenceLog, answers_of, questions, read
from pbrl.types import Pairs
from tests.fake_simulator import POLICY, FakeSimulator

ITERATIONS = 6
TEACHER = partial(RATIONAL, tau=5.0, gamma=0.9, eps_mistake=0.2, eps_skip=0.5, eps_equal=0.8)


class Run:
    """A run that compares twice per iteration and may die anywhere."""

    def __init__(self, folder, state=None, oracle=None):
        self.ledger = Ledger(
            simulator=FakeSimulator(steps=7),
            oracle=oracle or TEACHER(rng=np.random.default_rng(3)),
            trajectories_per_iteration=8,
            pairs_per_iteration=8,
            preference_log=PreferenceLog(folder),
        )
        self.iteration = 0
        if state is not None:
            self.iteration, books = json.loads(state)
            self.ledger.load_state_dict(books)

    def iterate(self, times=1):
        for _ in range(times):
            budget = self.ledger.open_iteration(self.iteration)
            for experts in (1, 3):
                behaviour = budget.collect(
                    POLICY,
                    np.array([[0.0], [0.5]], np.float32),
                    np.array([0, 1, 0, 1]),
                    mean_actions=False,
                    common_start=False,
                    keep=(),
                )
                first, second = np.array([0, 2, 1]), np.array([1, 3, 2])
                self.ledger.compare(Pairs(behaviour=behaviour, first=first, second=second, experts=experts))
            self.iteration += 1

    def checkpoint(self):
        return json.dumps([self.iteration, self.ledger.state_dict()])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("uninterrupted"))
    run.iterate(ITERATIONS)
    run.ledger.close()
    return read(run.ledger.preference_log.folder)


def test_every_comparison_is_kept(uninterrupted):
    assert uninterrupted.schema == SCHEMA
    assert len(uninterrupted) == ITERATIONS * 6
    assert uninterrupted["iteration"].to_pylist() == sorted([*range(ITERATIONS)] * 6)
    assert uninterrupted["question"].to_pylist() == sorted([*range(2 * ITERATIONS)] * 3)
    assert uninterrupted["first"].to_pylist()[:6] == [0, 2, 1, 4, 6, 5]  # trajectories of the iteration
    assert uninterrupted["second"].to_pylist()[:6] == [1, 3, 2, 5, 7, 6]
    assert set(uninterrupted["reason"].to_pylist()) == {"answered", "skipped", "equal", "mistaken"}
    simulated = FakeSimulator(steps=7).collect(
        None,
        np.array([[0.0], [0.5]], np.float32),
        np.array([0, 1, 0, 1]),
        iteration=2,
        first_trajectory=4,
        mean_actions=False,
        common_start=False,
        keep=(),
    )
    sixth = answers_of(questions(uninterrupted)[5])  # the second question of iteration 2
    assert sixth.first_sum.tolist() == simulated.returns[[0, 2, 1]].tolist()
    assert sixth.second_sum.tolist() == simulated.returns[[1, 3, 2]].tolist()


def test_answers_come_back_as_they_were_given(tmp_path):
    log = PreferenceLog(tmp_path)
    rewards = np.random.default_rng(0).normal(1, 1, size=(2, 100, 5))
    answers = TEACHER(rng=np.random.default_rng(0)).compare(*rewards, mean_return=5.0, episode_steps=5)
    rows = np.arange(100)
    log.append(
        answers,
        iteration=3,
        first=rows,
        second=rows,
        first_step=rows,
        second_step=0,
        clip_steps=5,
        episode_steps=5,
        mean_return=5.0,
        experts=1,
    )
    assert len(read(tmp_path)) == 0  # not on disk before a checkpoint asks for it
    log.state_dict()
    back = answers_of(read(tmp_path))
    np.testing.assert_equal(vars(back.preferences), vars(answers.preferences))
    for name in ("reason", "first_sum", "second_sum", "bits"):
        np.testing.assert_array_equal(getattr(back, name), getattr(answers, name))
    assert back.tau == answers.tau


def test_a_closed_log_is_one_file_that_any_reader_understands(tmp_path):
    run = Run(tmp_path)
    for _ in range(3):
        run.iterate()
        run.checkpoint()
    assert len(list(tmp_path.iterdir())) == 3
    run.ledger.close()
    (file,) = tmp_path.iterdir()
    assert pq.read_table(file).num_rows == 18
    run.ledger.close()  # again does no harm
    assert len(read(tmp_path)) == 18


@pytest.mark.parametrize("saved", range(ITERATIONS + 1))
@pytest.mark.parametrize("beyond", ["nothing", "unsaved", "flushed", "closed"])
def test_a_continued_run_logs_what_an_uninterrupted_one_does(tmp_path, uninterrupted, saved, beyond):
    run = Run(tmp_path)
    run.iterate(saved // 2)
    run.checkpoint()
    run.iterate(saved - saved // 2)
    state = run.checkpoint()
    if beyond != "nothing":
        run.iterate(2)
    if beyond == "flushed":
        run.checkpoint()  # on disk, but the machine stops before the checkpoint is
    if beyond == "closed":
        run.ledger.close()
    resumed = Run(tmp_path, state)
    resumed.iterate(ITERATIONS - saved)
    resumed.ledger.close()
    assert read(tmp_path).equals(uninterrupted)


def test_a_run_that_died_before_its_first_checkpoint_leaves_nothing_behind(tmp_path, uninterrupted):
    dead = Run(tmp_path)
    for _ in range(4):
        dead.iterate()
        dead.checkpoint()  # flushed, but the state itself is lost each time
    fresh = Run(tmp_path)
    fresh.iterate(3)
    fresh.checkpoint()
    assert read(tmp_path).equals(uninterrupted.slice(0, 18))
    fresh.iterate(ITERATIONS - 3)
    fresh.ledger.close()
    assert read(tmp_path).equals(uninterrupted)


class PowerCutError(Exception):
    """The machine stops."""


@pytest.mark.parametrize("stop_at", ["write_table", "fsync", "unlink"])
def test_a_machine_that_stops_while_writing_costs_nothing(tmp_path, uninterrupted, monkeypatch, stop_at):
    run = Run(tmp_path)
    for _ in range(3):
        run.iterate()
        state = run.checkpoint()

    def stop(*_args, **_kwargs):
        raise PowerCutError

    target = {"write_table": preference_log.pq, "fsync": preference_log.os, "unlink": preference_log.Path}
    with monkeypatch.context() as patch:
        patch.setattr(target[stop_at], stop_at, stop)
        with pytest.raises(PowerCutError):
            run.ledger.close()  # merging
    assert read(tmp_path).equals(uninterrupted.slice(0, 18))
    run.iterate()
    with monkeypatch.context() as patch:
        patch.setattr(preference_log.pq, "write_table", stop)
        with pytest.raises(PowerCutError):
            run.checkpoint()
    resumed = Run(tmp_path, state)
    resumed.iterate(ITERATIONS - 3)
    resumed.ledger.close()
    assert read(tmp_path).equals(uninterrupted)


def test_a_run_can_be_replayed_from_its_log_and_resumed_in_between(tmp_path, uninterrupted):
    original = Run(tmp_path / "original")
    original.iterate(ITERATIONS)
    original.ledger.close()
    log = str(tmp_path / "original")
    replayed = Run(tmp_path / "replayed", oracle=Replay(log=log, rng=np.random.default_rng(5)))
    replayed.iterate(2)
    state = replayed.checkpoint()
    resumed = Run(tmp_path / "replayed", state, oracle=Replay(log=log, rng=np.random.default_rng(6)))
    resumed.iterate(ITERATIONS - 2)
    resumed.ledger.close()
    assert read(tmp_path / "replayed").equals(uninterrupted)
    assert resumed.ledger.counts() == original.ledger.counts()


def test_a_checkpoint_without_its_log_is_refused(tmp_path):
    run = Run(tmp_path / "here")
    run.iterate()
    state = run.checkpoint()
    with pytest.raises(ValueError, match=r"speaks of 6 logged comparisons, but .*there holds 0"):
        Run(tmp_path / "there", state)


def test_the_log_is_compact(tmp_path):
    run = Run(tmp_path)
    run.iterate(600)
    run.ledger.close()
    (file,) = tmp_path.iterdir()
    assert file.stat().st_size / (600 * 6) < 40  # bytes per comparison, 16 of them the true sums


def test_a_run_can_do_without(tmp_path):
    run = Run(tmp_path)
    run.ledger.preference_log = None
    run.iterate()
    assert json.loads(run.checkpoint())[1]["preference_log"] is None
    run.ledger.close()
    assert list(tmp_path.iterdir()) == []
