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
import torch
from hydra import compose, initialize_config_module
from teachers import RATIONAL

from pbrl.bench import agents, collection, figure, learning, program, teachers, turns
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
    assert turns.take_turns(running, 2, "task") == {"one": [30.0, 10.0], "other": [6.0, 5.0]}
    assert order == ["one", "other"] * 3


def test_speeds_are_medians_and_ratios_are_taken_within_a_turn() -> None:
    """In the second turn the whole machine is ten times slower: the ratios do not notice."""
    speeds = {"physics limit": [1000.0, 100.0, 1100.0], "pbrl": [800.0, 80.0, 900.0], "peer": [100.0, 20.0, 88.0]}
    assert collection.rows_of("walker_walk", speeds) == [
        {"task": "walker_walk", "what": "physics limit", "steps_per_second": 1000, "ratio_to_limit": 1.0},
        {"task": "walker_walk", "what": "pbrl", "steps_per_second": 800, "ratio_to_limit": 0.8},
        {"task": "walker_walk", "what": "peer", "steps_per_second": 88, "ratio_to_limit": 0.1},
    ]
    assert turns.ratio(speeds["pbrl"], speeds["peer"]) == 8.0


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
    for _ in range(2):
        assert run() == {"collect": 6.0, "ask": 0.5, "learn": 5.0, "whole": 11.5}


def test_an_agents_row_is_of_medians() -> None:
    seconds = [(2.0, 0.1, 2.0, 6.0), (20.0, 0.2, 10.0, 50.0), (4.0, 0.9, 1.0, 9.0)]
    measured = [dict(zip(("collect", "ask", "learn", "whole"), each, strict=True)) for each in seconds]
    assert agents.medians({"ncrs": measured}) == [
        {
            "agent": "ncrs",
            "seconds_collect": 4.0,
            "seconds_ask": 0.2,
            "seconds_learn": 2.0,
            "ratio_to_collection": 2.5,  # of 3, 2.5 and 2.25
        }
    ]


# Learning


def test_a_networks_weights_are_counted() -> None:
    assert learning.count_weights([3, 5, 2]) == 3 * 5 + 5 * 2


class TimedLearner:
    """Takes two seconds for whatever it learns from."""

    def __init__(self, clock: Clock) -> None:
        self.policy = SimpleNamespace(sizes=(3, 4, 2), obs_size=3, act_size=2)
        self.learn = self.fit = self.update = lambda *_: clock.move(2.0)
        self.remember = lambda *_: None
        self.reward_model = self.ppo = self


def test_a_learners_operations_are_those_of_its_mathematics(clock: Clock) -> None:
    """Six operations for each row and weight in a pass forward and back, two in a pass forward."""
    simulator = SimpleNamespace(steps=10, obs_size=3, act_size=2)
    experience = learning.random_experience(simulator, 8)  # type: ignore[arg-type]
    learner, weights = TimedLearner(clock), 3 * 4 + 4 * 2
    dpo = learning.dpo(learner, {"batch_pairs": 3, "gradient_steps": 5}, *experience)
    assert dpo() == pytest.approx((6 * 5 * 3 + 2 * 1) * 20 * weights / 2.0 / 1e9)  # 4 pairs of 2 x 10 rows
    settings = {"reward_model": {"members": 3, "hidden": [4], "batch_pairs": 32, "gradient_steps": 10}}
    model = learning.reward_model(learner, settings, *experience)
    assert model() == pytest.approx(6 * 3 * 10 * 4 * 20 * (5 * 4 + 4 * 1) / 2.0 / 1e9)
    ppo = learning.ppo(learner, {"ppo": {"critic_hidden": [4]}}, *experience)
    assert ppo() == pytest.approx((2 + 6) * 80 * (weights + 3 * 4 + 4 * 1) / 2.0 / 1e9)


def test_the_learners_limit_is_a_product_in_every_thread(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[int] = []
    monkeypatch.setattr(torch, "mm", lambda x, _, out: (products.append(len(x)), clock.move(0.5), out)[2])
    threads = torch.get_num_threads()
    speed = learning.matrix_product(rows=20, width=4)()
    assert products == [20] * learning._PRODUCTS * threads
    assert speed == pytest.approx(2 * 20 * 4 * 4 * len(products) / (0.5 * len(products)) / 1e9)


def test_a_learners_row_is_of_medians_and_ratios_within_a_turn() -> None:
    speeds = {"matrix product": [100.0, 10.0, 110.0], "DPO": [60.0, 7.0, 55.0]}
    assert learning.rows_of("walker_walk", speeds) == [
        {"task": "walker_walk", "what": "matrix product", "gflop_per_second": 100.0, "ratio_to_limit": 1.0},
        {"task": "walker_walk", "what": "DPO", "gflop_per_second": 55.0, "ratio_to_limit": 0.6},
    ]


# The figure


def test_the_figures_hours_are_those_of_all_its_iterations() -> None:
    iterations = [
        {"agent": "dpo", "task": "a", "seconds_collect": 9.0, "seconds_ask": 0.5, "seconds_learn": 1.5},
        {"agent": "dpo", "task": "b", "seconds_collect": 9.0, "seconds_ask": 1.0, "seconds_learn": 3.0},
        {"agent": "ncrs", "task": "a", "seconds_collect": 9.0, "seconds_ask": 0.0, "seconds_learn": 0.0},
    ]
    learning_seconds = figure.learning(iterations)
    assert learning_seconds == {"dpo": 3.0, "ncrs": 0.0}
    # two tasks, five seeds of 600 iterations
    assert figure.hours({"a": 1.0, "b": 2.0}, learning_seconds, seeds=5, iterations=600) == {
        "dpo": 3000 * (4.0 + 5.0) / 3600,
        "ncrs": 3000 * (1.0 + 2.0) / 3600,
        "all": 3000 * 12.0 / 3600,
    }


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
    size += ["figure.tasks=[cheetah_run]", "figure.seeds=1", "figure.iterations=3600", "figure.steps=5"]
    size += ["sac.updates=3", "sac.agent.sac.critic_hidden=[8]"]
    only = ["tasks=[cheetah_run]", "agents_tasks=[cheetah_run]", "~agents.ppo_rlhf"]
    monkeypatch.setattr(sys, "argv", ["pbrl.bench", *size, *only, "comparisons.pairs=10"])
    program.main()
    rows = rows_of(tmp_path / "runs/bench/simulator.csv")
    assert [*rows[0]] == ["task", "what", "steps_per_second", "ratio_to_limit"]
    ours = {row["what"]: (row["steps_per_second"], row["ratio_to_limit"]) for row in rows}
    expected = {
        "physics limit": ("20", "1.0"),
        "physics limit, no timers": ("20", "1.0"),
        "pbrl": ("20", "1.0"),
        "pbrl, 1 thread": ("10", "0.5"),
        "pbrl, one policy": ("20", "1.0"),
        "pbrl, 4 policies, different everywhere": ("20", "1.0"),
        "pbrl, 4 policies, different by rank 1": ("20", "1.0"),
        "pbrl, half the trajectories": ("10", "0.5"),
        "pbrl.simulation.vector": ("20", "1.0"),
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
    rows = rows_of(tmp_path / "runs/bench/learning.csv")
    assert [(row["task"], row["what"]) for row in rows] == [("cheetah_run", what) for what in ("matrix product", "DPO")]
    # An iteration takes a second to collect and four to ask and learn: five hours for 3600 of them.
    hours = {row["agent"]: row["hours"] for row in rows_of(tmp_path / "runs/bench/figure.csv")}
    assert hours == {"ncrs": "5.0", "zpg": "5.0", "dpo": "5.0", "all": "15.0"}
    assert [(row["what"], row["updates_per_second"]) for row in rows_of(tmp_path / "runs/bench/sac.csv")] == [
        (f"{who}, {threads}", "3.0") for threads in ("1 thread", "2 threads") for who in ("pbrl", "Stable-Baselines3")
    ]
    out = " ".join(capsys.readouterr().out.split())
    assert "cheetah_run: 4 policies, different everywhere, take 1.00 times as long as one" in out
    assert "take 15.0 hours on this machine, without evaluations (ncrs 5.0, zpg 5.0, dpo 5.0)" in out
    assert "10 comparisons of 1000-step clips take the teacher 1.000 s, 1.000 s of it to read the rewards" in out
