"""Samplers against brute force on small pools; how many questions a round has; what the pool remembers."""

import functools
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_module
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from agents import samplers
from agents.samplers import Questions, Round, Uniform
from pbrl.run.settings import ConfigurationError, build, choices
from pbrl.types import Preferences
from tests.agents.small_reward_model import differences_by_hand, random_pairs, reward_model
from tests.agents.toy import STEPS, Trial, behaviour, preferences

NAMES = choices("agent.sampler")
INFORMED = ["disagreement", "entropy", "coverage", "disagreement_coverage", "entropy_coverage"]
M, CLIP = 4, 5


@pytest.fixture(scope="module")
def pool_of_threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@functools.cache
def sampler(name):
    """The sampler that `agent.sampler=<name>` chooses on the command line."""
    with initialize_config_module("conf"):
        node = compose("train", overrides=["agent=prefppo", f"agent.sampler={name}"]).agent.sampler
    return build(OmegaConf.to_container(node))


def round_of(pool_of_threads, *, asked=6, seed=0, collected=None, questions=M, steps=CLIP):
    """A round about ten trajectories, after some pairs were asked about."""
    collected, model = behaviour(1, n=10) if collected is None else collected, reward_model(seed)
    if asked:
        model.remember(collected, random_pairs(collected, asked, steps=steps), preferences(np.ones(asked)))
    how = {"reward_model": model, "rng": np.random.default_rng(seed), "workers": pool_of_threads}
    return Round(pool=collected, M=questions, steps=steps, **how)


def as_rows(pairs):
    """Each pair as numbers that can be compared."""
    columns = (pairs.first.trajectory, pairs.first.step, pairs.second.trajectory, pairs.second.step)
    return [tuple(row) for row in np.stack(columns, axis=1).tolist()]


# Brute force: all by loops and torch's own layers


def candidates_of(pool_of_threads, seed):
    """The candidates that a sampler with ten for each question draws."""
    return round_of(pool_of_threads, seed=seed).draw(10 * M)


def probabilities(this, pairs):
    with torch.no_grad():
        D = [differences_by_hand(member, this.pool, pairs).double() for member in this.reward_model.members]
    return [[1 / (1 + math.exp(-float(value))) for value in each] for each in D]  # [members][P]


def disagreement(this, pairs):
    columns = list(zip(*probabilities(this, pairs), strict=True))
    means = [sum(column) / len(column) for column in columns]
    return [
        math.sqrt(sum((p - mean) ** 2 for p in column) / len(column))
        for column, mean in zip(columns, means, strict=True)
    ]


def entropy(this, pairs):
    columns = zip(*probabilities(this, pairs), strict=True)
    return [sum(-p * math.log(p) - (1 - p) * math.log(1 - p) for p in column) / 3 for column in columns]


def states(collected, pairs, pair):
    clips = [
        collected.observations[int(each.trajectory[pair] - 100), int(each.step[pair]) + t]
        for each in (pairs.first, pairs.second)
        for t in range(CLIP)
    ]
    return np.concatenate(clips).astype(float)


def best(values, rows, n):
    return sorted(rows, key=lambda row: -values[row])[:n]


def exhaustive_greedy(this, pairs, rows):
    """Always the row whose nearest neighbour, among all that were asked about or chosen, is farthest."""
    asked = random_pairs(this.pool, 6, steps=CLIP)
    centres = [states(this.pool, asked, pair) for pair in range(6)]
    found = []
    for _ in range(M):
        nearest = {row: min(math.dist(states(this.pool, pairs, row), centre) for centre in centres) for row in rows}
        found.append(max((row for row in rows if row not in found), key=lambda row: nearest[row]))
        centres.append(states(this.pool, pairs, found[-1]))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", INFORMED)
def test_the_choice_is_that_of_brute_force(name, seed, pool_of_threads):
    this, pairs = round_of(pool_of_threads, seed=seed), candidates_of(pool_of_threads, seed)
    everything, how = list(range(10 * M)), {"disagreement": disagreement, "entropy": entropy}
    first, _, second = name.partition("_")
    rows = everything if first == "coverage" else best(how[first](this, pairs), everything, 5 * M if second else M)
    expected = exhaustive_greedy(this, pairs, rows) if "coverage" in name else rows
    chosen = sampler(name).choose(this)
    assert as_rows(chosen) == [as_rows(pairs)[row] for row in expected]
    assert chosen.steps == CLIP


@pytest.mark.parametrize("name", [*INFORMED, "uniform"])
def test_the_first_round_is_uniform(name, pool_of_threads):
    chosen = sampler(name).choose(round_of(pool_of_threads, asked=0))
    assert as_rows(chosen) == as_rows(Uniform().choose(round_of(pool_of_threads, asked=0)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("questions", [1, 7])
def test_as_many_questions_as_are_wanted(name, questions, pool_of_threads):
    chosen = sampler(name).choose(round_of(pool_of_threads, questions=questions))
    assert len(chosen) == questions


@pytest.mark.parametrize("name", NAMES)
def test_whole_trajectories(name, pool_of_threads):
    chosen = sampler(name).choose(round_of(pool_of_threads, steps=None))
    assert chosen.steps is None
    assert len(chosen) == M


@pytest.mark.parametrize("steps", [None, 3])
def test_disjoint_pairs_have_no_trajectory_twice(steps, pool_of_threads):
    chosen = sampler("disjoint").choose(round_of(pool_of_threads, steps=steps))
    assert chosen.steps == steps
    assert len({*chosen.first.trajectory.tolist(), *chosen.second.trajectory.tolist()}) == 2 * M
    begins = {*chosen.first.step.tolist(), *chosen.second.step.tolist()}
    assert begins == {0} if steps is None else len(begins) > 1


# Candidates


@given(st.integers(2, 6), st.integers(1, STEPS), st.integers(0, 10**6))
def test_candidates_are_clips_of_two_trajectories_within_their_episodes(n, steps, seed):
    lengths = np.random.default_rng(seed).integers(0, STEPS + 1, size=n)
    collected = behaviour(n=n, lengths=lengths)
    how = {"reward_model": None, "rng": np.random.default_rng(seed), "workers": None}
    pairs = Round(pool=collected, M=1, steps=steps, **how).draw(50)
    assert (pairs.first.trajectory != pairs.second.trajectory).all()
    for clips in (pairs.first, pairs.second):
        latest = np.maximum(0, lengths[collected.rows(clips.trajectory)] - steps)
        assert (clips.step <= latest).all()


def test_every_pair_of_trajectories_and_every_beginning_is_drawn_equally_often(pool_of_threads):
    pairs = round_of(pool_of_threads, collected=behaviour(n=4), asked=0).draw(12_000)
    starts = np.bincount(np.r_[pairs.first.step, pairs.second.step])
    assert len(starts) == STEPS - CLIP + 1  # the last possible one among them
    assert abs(starts / 1500 - 1).max() < 0.12  # standard deviation 37
    rows = as_rows(pairs)
    counts = np.bincount([4 * (row[0] - 100) + row[2] - 100 for row in rows], minlength=16).reshape(4, 4)
    assert np.diag(counts).sum() == 0
    assert abs(counts[~np.eye(4, dtype=bool)] / 1000 - 1).max() < 0.15  # standard deviation 30


def test_settings_that_make_no_sense_fail_by_name():
    for make in (samplers.Disagreement, samplers.Entropy, samplers.Coverage):
        with pytest.raises(ValueError, match="candidates must be at least 1, not 0"):
            make(candidates=0)
    for make in (samplers.DisagreementCoverage, samplers.EntropyCoverage):
        with pytest.raises(ValueError, match="shortlist must be between 1 and candidates, which is 3, not 4"):
            make(candidates=3, shortlist=4)


# Rounds of questions


class Teacher:
    """A budget that answers: the second is better."""

    def __init__(self, iteration=0, pairs=32):
        self.iteration, self.pairs_left, self.asked = iteration, pairs, []

    def compare(self, pairs):
        self.asked.append(pairs)
        ones = np.ones(len(pairs))
        return Preferences(probability=ones, score=ones, label=ones, answered=np.ones(len(pairs), bool))


def questions(**changes):
    settings = {
        "sampler": Uniform(),
        "clip_steps": CLIP,
        "pool": 10,
        "questions": None,
        "questions_in_all": None,
        "schedule": "constant",
        "iterations": 10,
        "rng": np.random.default_rng(0),
    }
    return Questions(**(settings | changes))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [30, 30, 30]),
        ("falling", [30, 15, 3]),  # 30 (10 - t) / 10
        ("rising", [27, 50, 150]),  # 30 * 10 / (11 - t)
    ],
)
def test_the_schedule_by_hand(schedule, expected):
    found = [questions(schedule=schedule, questions=30).number(Teacher(t, pairs=1000)) for t in (0, 5, 9)]
    assert found == expected


def test_no_more_than_the_budget_and_no_more_than_in_all(pool_of_threads):
    asking, model = questions(questions_in_all=50), reward_model()
    asking.look_at(behaviour(n=10))
    rounds = [Teacher() for _ in range(3)]
    for budget in rounds[:2]:
        asking.ask(budget, model, pool_of_threads)
    assert asking.ask(rounds[2], model, pool_of_threads) is None
    assert [sum(map(len, budget.asked)) for budget in rounds] == [32, 18, 0]
    assert model.pairs == 50


def test_the_pool_is_the_last_trajectories_of_whatever_collection(pool_of_threads):
    asking = questions(pool=7)
    for first in (100, 104, 108):
        asking.look_at(behaviour(first, n=4, first=first))
    assert asking.pool.number.tolist() == [105, 106, 107, 108, 109, 110, 111]
    np.testing.assert_array_equal(asking.pool.observations[0], behaviour(104, n=4, first=104).observations[1])
    budget = Teacher(pairs=500)
    asking.ask(budget, reward_model(), pool_of_threads)
    assert {*budget.asked[0].first.trajectory.tolist()} == {*range(105, 112)}


def test_without_a_pool_only_the_last_collection_is_asked_about():
    asking = questions(pool=None)
    for first in (100, 104):
        asking.look_at(behaviour(n=4, first=first))
    assert asking.pool.number.tolist() == [104, 105, 106, 107]


def test_clips_are_no_longer_than_trajectories(pool_of_threads):
    asking, budget = questions(clip_steps=50), Teacher()
    asking.look_at(behaviour(n=10))
    asking.ask(budget, reward_model(), pool_of_threads)
    assert budget.asked[0].steps == STEPS


def test_saved_and_loaded_it_asks_the_same(pool_of_threads):
    one, two = questions(questions_in_all=40, pool=7), questions(questions_in_all=40, pool=7)
    one.look_at(behaviour(n=10))
    one.ask(Teacher(), reward_model(), pool_of_threads)
    two.load_state_dict(one.state_dict())
    two.rng.bit_generator.state = one.rng.bit_generator.state
    asked = []
    for each in (one, two):
        budget = Teacher()
        each.look_at(behaviour(n=2, first=110))
        each.ask(budget, reward_model(), pool_of_threads)
        asked.append(as_rows(budget.asked[0]))
    assert asked[0] == asked[1]
    assert len(asked[0]) == 8


@pytest.mark.parametrize("setting", ["clip_steps", "pool", "questions", "questions_in_all"])
def test_numbers_that_make_no_sense_fail_by_name(setting):
    with pytest.raises(ValueError, match=f"{setting} must be at least"):
        questions(**{setting: 0})
    with pytest.raises(ValueError, match="schedule=rising needs the number of iterations"):
        questions(schedule="rising", iterations=None)


# Settings of a run


@pytest.mark.parametrize("name", NAMES)
def test_every_sampler_is_chosen_by_name(name):
    assert type(sampler(name)).__name__.lower() == name.replace("_", "")


def test_a_run_remembers_as_many_trajectories_as_the_agent_asks_about_or_says_that_it_does_not():
    assert Trial("prefppo", "trajectories=8").ledger.remember == 100
    assert Trial("prefppo", "trajectories=64").ledger.remember == 128
    assert Trial("ppo_rlhf", "trajectories=8").ledger.remember == 16
    with pytest.raises(ConfigurationError, match="asks about its last 100 trajectories, but remember=40 keeps fewer"):
        Trial("prefppo", "trajectories=8", "remember=40")


def test_trajectories_of_earlier_iterations_are_asked_about():
    trial = Trial("prefppo", "trajectories=4", "pairs=30", "agent.pool=8", "agent.sampler=uniform")
    asked, compare = [], trial.ledger._compare
    trial.ledger._compare = lambda budget, pairs: asked.append(pairs) or compare(budget, pairs)
    trial.run(3)
    assert {*asked[2].first.trajectory.tolist(), *asked[2].second.trajectory.tolist()} == {*range(4, 12)}
