"""The benchmark's numbers, on a clock that tells what it is told to."""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from teachers import RATIONAL

from pbrl.bench import agents, collection, teachers
from pbrl.ledger import Ledger
from pbrl.types import Pairs, Question, Trajectories


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "perf_counter", clock)
    return clock


def work(clock: Clock, seconds: Iterable[float]) -> Callable[[], None]:
    """Takes these seconds, one after another, whenever it is done."""
    durations = iter(seconds)
    return lambda: clock.move(next(durations))


# Collection


def test_a_speed_is_steps_by_seconds(clock: Clock) -> None:
    assert collection.timed(3000, work(clock, [1.5])) == 2000.0


def test_contenders_take_turns_and_the_first_of_each_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str, speeds: Iterable[float]) -> collection.Contender:
        measured = iter(speeds)

        def run() -> float:
            order.append(name)
            return next(measured)

        return run

    running = {"one": contender("one", [1.0, 30.0, 10.0]), "other": contender("other", [2.0, 6.0, 5.0])}
    assert collection.take_turns(running, 2, "task") == {"one": [30.0, 10.0], "other": [6.0, 5.0]}
    assert order == ["one", "other"] * 3


def test_speeds_are_medians_and_ratios_are_taken_within_a_turn() -> None:
    """In the second turn the whole machine is ten times slower: the ratios do not notice."""
    speeds = {"physics limit": [1000.0, 100.0, 1100.0], "pbrl": [800.0, 80.0, 900.0], "peer": [100.0, 20.0, 88.0]}
    assert collection.rows_of("walker_walk", speeds) == [
        {"task": "walker_walk", "what": "physics limit", "steps_per_second": 1000, "ratio_to_limit": 1.0},
        {"task": "walker_walk", "what": "pbrl", "steps_per_second": 800, "ratio_to_limit": 0.8},
        {"task": "walker_walk", "what": "peer", "steps_per_second": 88, "ratio_to_limit": 0.1},
    ]
    assert collection.ratio(speeds["pbrl"], speeds["peer"]) == 8.0


# Agents


class TimedSimulator:
    """Takes three seconds for any collection, and collects nothing of interest."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def collect(self, policy: Any, parameters: Any, assignment: Any, **_: Any) -> Trajectories:
        del policy, parameters
        self.clock.move(3.0)
        count = len(assignment)
        return Trajectories(
            policy=assignment,
            lengths=np.ones(count, np.int64),
            diverged=np.zeros(count, bool),
            start=np.zeros((count, 3), np.int64),
            number=np.arange(count),
            task_rewards=np.ones((count, 1)),
        )


class TimedTeacher:
    """A rational teacher who takes half a second."""

    sees = "rewards"

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.teacher = RATIONAL(rng=np.random.default_rng(0))
        self.questions: list[Question] = []

    def compare(self, question: Question) -> Any:
        self.clock.move(0.5)
        self.questions.append(question)
        return self.teacher.compare(question)


class TimedAgent:
    """Collects twice and asks once, thinking for a second in between and for four at the end."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def iterate(self, budget: Any) -> dict[str, float]:
        policy = SimpleNamespace(normaliser=None)
        how: Any = {"mean_actions": False, "common_start": False, "keep": ()}
        for _ in range(2):
            numbers = budget.collect(policy, np.zeros((1, 1)), np.zeros(2, np.int64), **how).number
        self.clock.move(1.0)
        budget.compare(Pairs.whole(numbers[:1], numbers[1:]))
        self.clock.move(4.0)
        return {}


def test_an_iterations_time_is_divided_among_its_parts(clock: Clock) -> None:
    ledger = Ledger(
        simulator=TimedSimulator(clock),
        oracle=TimedTeacher(clock),  # type: ignore[arg-type]
        trajectories_per_iteration=4,
        pairs_per_iteration=1,
    )
    run = agents.iteration(TimedAgent(clock), ledger)  # type: ignore[arg-type]
    for number in range(2):
        assert run(number) == {"collect": 6.0, "ask": 0.5, "learn": 5.0, "whole": 11.5}


def test_agents_take_turns_and_the_first_of_each_does_not_count() -> None:
    order: list[tuple[str, int]] = []

    def run(name: str) -> Callable[[int], agents.Turn]:
        def turn(number: int) -> agents.Turn:
            order.append((name, number))
            return {"whole": float(number)}

        return turn

    turns = agents.take_turns({"one": run("one"), "other": run("other")}, 2)
    assert turns == {"one": [{"whole": 1.0}, {"whole": 2.0}], "other": [{"whole": 1.0}, {"whole": 2.0}]}
    assert order == [(name, number) for number in range(3) for name in ("one", "other")]


def test_an_agents_row_is_of_medians() -> None:
    seconds = [(2.0, 0.1, 2.0, 6.0), (20.0, 0.2, 10.0, 50.0), (4.0, 0.9, 1.0, 9.0)]
    turns = [dict(zip(("collect", "ask", "learn", "whole"), each, strict=True)) for each in seconds]
    assert agents.medians({"ncrs": turns}) == [
        {
            "agent": "ncrs",
            "seconds_collect": 4.0,
            "seconds_ask": 0.2,
            "seconds_learn": 2.0,
            "ratio_to_collection": 2.5,  # of 3, 2.5 and 2.25
        }
    ]


# Teachers


def test_a_teachers_time_is_the_median_of_its_repeats(clock: Clock) -> None:
    oracle = TimedTeacher(clock)
    durations = iter([7.0, 1.0, 2.0])
    compare = oracle.compare
    oracle.compare = lambda question: (clock.move(next(durations)), compare(question))[1]  # type: ignore[method-assign]
    rng = np.random.default_rng(0)
    reading, comparing = teachers.seconds(oracle, pairs=5, steps=8, repeats=3, rng=rng)  # type: ignore[arg-type]
    assert (reading, comparing) == (0.0, 2.5)  # the clock stands still while rewards are summed
    assert [(len(each), each.steps) for each in oracle.questions] == [(5, 8)] * 3
    asked = oracle.questions[0]
    assert len({*asked.first, *asked.second}) == 10  # no clip twice


# The program


def test_the_papers_four_agents_are_measured() -> None:
    with initialize_config_module("conf"):
        assert [*compose("bench").agents] == ["ncrs", "zpg", "dpo", "ppo_rlhf"]


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_program_writes_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a clock that moves by a second whenever it is read: every piece of work takes one second."""
    monkeypatch.chdir(tmp_path)
    ticks = iter(range(10**9))
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    size = ["trajectories=4", "steps=5", "alternations=2", "peer_trajectories=1", "hidden=[8]", "threads=2"]
    only = ["tasks=[cheetah_run]", "agents_task=cheetah_run", "~agents.ppo_rlhf"]
    monkeypatch.setattr(sys, "argv", ["pbrl.bench", *size, *only, "comparisons.pairs=10"])
    collection.main()
    rows = rows_of(tmp_path / "runs/bench/simulator.csv")
    assert [*rows[0]] == ["task", "what", "steps_per_second", "ratio_to_limit"]
    ours = {row["what"]: (row["steps_per_second"], row["ratio_to_limit"]) for row in rows}
    expected = {
        "physics limit": ("20", "1.0"),
        "pbrl": ("20", "1.0"),
        "pbrl, 1 thread": ("10", "0.5"),
        "pbrl, one policy": ("20", "1.0"),
        "pbrl, half the trajectories": ("10", "0.5"),
        "pbrl.simulation.vector, random actions": ("20", "1.0"),
        "dm_control loop": ("5", "0.25"),
    }
    assert {what: ours[what] for what in expected} == expected
    # Read six times in an iteration: around it, around the collection and around the question.
    assert rows_of(tmp_path / "runs/bench/agents.csv") == [
        {
            "task": "cheetah_run",
            "agent": agent,
            "seconds_collect": "1.0",
            "seconds_ask": "1.0",
            "seconds_learn": "3.0",
            "ratio_to_collection": "5.0",
        }
        for agent in ("ncrs", "zpg", "dpo")
    ]
    out = " ".join(capsys.readouterr().out.split())
    assert "10 comparisons of 1000-step clips take the teacher 1.000 s, 1.000 s of it to read the rewards" in out
