"""PES: updates by hand, what it estimates, what must not matter, and how the budget is spent."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

import agents.pes
from agents.pairing import by_index
from agents.pes import PES
from pbrl.policy import GaussianPolicy
from pbrl.run import checkpoint
from pbrl.search import Cosine
from pbrl.types import Pairs
from tests.agents.toy import StubBudget, Trial, preferences
from tests.toy_task import ToySimulator

SIGMA, STEP = 0.1, 0.02


def make(**changes):
    policy = GaussianPolicy(2, 1, hidden=[4], hidden_gain=1.0, output_gain=1.0, initial_log_std=0.0)
    given_settings = {
        "sigma": SIGMA,
        "step": lambda t: STEP,  # noqa: ARG005
        "rate": 0.0,
        "momentum": 0.0,
        "subspace": "all",
        "penalty": 1e-3,
        "rank": None,
        "votes": 1,
        "groups": 1,
        "feedback": "score",
        "collect": "mean",
        "normalise": False,
        **changes,
    }
    return PES(policy=policy, rng=np.random.default_rng(0), **given_settings)


def scores(values, answered=None, label=None):
    return preferences((np.array(values, float) + 1) / 2, answered, label)


def budget_of(*answers, pairs=3, trajectories=None, **how):
    return StubBudget(*answers, pairs=pairs, trajectories=2 * pairs if trajectories is None else trajectories, **how)


def directions_of(budget, collection=0):
    """eps_i [n, k] from the policies that were collected."""
    arms = budget.collections[collection][0].astype(np.float64)
    minus, plus = np.split(arms, 2)
    return (plus - minus) / (2 * SIGMA)


def rms(x):
    return np.sqrt(np.mean(np.square(x)))


class Judge:
    """Answers by a utility of the policies that acted: f(utility of the second - utility of the first)."""

    def __init__(self, utility, answer):
        self.utility, self.answer = utility, answer

    def budget(self, **how):
        budget = budget_of(self.compare, **how)
        self.stub = budget
        return budget

    def compare(self, pairs):
        acted = np.concatenate([arms[assignment] for arms, assignment, _ in self.stub.collections])
        utility = self.utility(acted.astype(np.float64))
        first, second = (utility[clips.trajectory - 100] for clips in (pairs.first, pairs.second))
        return scores(self.answer(second - first))


# The update


def test_the_update_by_hand():
    agent, budget = make(), budget_of(scores([1.0, -0.5, 0.2]))
    theta = agent.parameters.astype(np.float64)
    metrics = agent.iterate(budget)
    eps = directions_of(budget)
    g = (1.0 * eps[0] - 0.5 * eps[1] + 0.2 * eps[2]) / 3
    assert_allclose(agent.parameters, theta + STEP * g / rms(g), atol=1e-5)
    assert metrics["step"] == STEP
    assert metrics["gradient_norm"] == pytest.approx(np.linalg.norm(g), rel=1e-4)
    assert metrics["update_norm"] == pytest.approx(STEP * np.sqrt(agent.policy.size), rel=1e-4)


def test_both_policies_of_a_pair_are_equally_far_from_the_current_one():
    agent, budget = make(), budget_of(scores([1.0, 1.0, 1.0]))
    theta = agent.parameters
    agent.iterate(budget)
    minus, plus = np.split(budget.collections[0][0], 2)
    assert_allclose(minus + plus, np.stack([2 * theta] * 3), atol=1e-6)
    assert np.std(directions_of(budget)) == pytest.approx(1, abs=0.25)


def test_momentum_by_hand():
    agent, theta = make(momentum=0.75), None
    m = 0.0
    for n, values in enumerate([[1.0, 0.0, 0.0], [0.0, -1.0, 0.5]]):
        theta, budget = agent.parameters.astype(np.float64), budget_of(scores(values), iteration=n)
        agent.iterate(budget)
        m = 0.75 * m + 0.25 * np.array(values) @ directions_of(budget) / 3
        assert_allclose(agent.parameters, theta + STEP * m / rms(m), atol=1e-5)


def test_unanswered_pairs_do_not_count():
    agent, budget = make(), budget_of(scores([1.0, 0.9, 0.2], [True, False, True]))
    theta = agent.parameters.astype(np.float64)
    agent.iterate(budget)
    eps = directions_of(budget)
    g = (1.0 * eps[0] + 0.2 * eps[2]) / 2
    assert_allclose(agent.parameters, theta + STEP * g / rms(g), atol=1e-5)
    assert_allclose(agent.m, g, atol=1e-5)


@pytest.mark.parametrize("answer", [scores([1.0] * 3, [False] * 3), scores([0.0] * 3)])
def test_without_answers_it_stays_though_it_was_moving(answer):
    agent = make(momentum=0.5)
    for n in range(2):
        agent.iterate(budget_of(scores([1.0, 0.5, -1.0]), iteration=n))
    before, m = agent.parameters, agent.m
    agent.iterate(budget_of(answer, iteration=2))
    if not answer.answered.any():
        assert_array_equal(agent.parameters, before)
        assert_array_equal(agent.m, m)
    else:  # answers, but none of a side: the momentum is halved and still leads
        assert_allclose(agent.m, m / 2)
        assert (agent.parameters != before).all()


def test_equal_answers_from_the_beginning_lead_nowhere():
    agent = make()
    before = agent.parameters
    agent.iterate(budget_of(scores([0.0] * 3)))
    assert_array_equal(agent.parameters, before)


def test_hard_labels():
    agent, budget = make(feedback="label"), budget_of(scores([0.1, 0.1, 0.1], label=[1.0, 0.0, 0.5]))
    theta = agent.parameters.astype(np.float64)
    agent.iterate(budget)
    eps = directions_of(budget)
    g = (eps[0] - eps[1]) / 3
    assert_allclose(agent.parameters, theta + STEP * g / rms(g), atol=1e-5)


def test_the_step_follows_its_schedule():
    agent = make(step=Cosine(maximum=0.02, minimum=0.002, decay=100))
    assert agent.iterate(budget_of(scores([1.0] * 3), iteration=50))["step"] == pytest.approx(0.011)


def test_the_step_adapts_to_whether_answers_agree_with_the_momentum():
    agent = make(rate=0.1)
    agent.iterate(budget_of(scores([1.0, -1.0, 1.0])))
    assert agent.scale == 1.0  # there was no momentum to agree with
    for sign in (-1, -1, 1, 1, 1, 1):
        m, before = agent.m.astype(np.float64), agent.scale
        judge = Judge(lambda theta, m=m: theta @ m, lambda gap, sign=sign: sign * np.sign(gap) * [0.9, 0.1, 0.5])
        metrics = agent.iterate(judge.budget(iteration=1))
        g = agent.m.astype(np.float64)  # without momentum
        z = np.sqrt(3) * g @ m / (np.linalg.norm(m) * np.sqrt((0.81 + 0.01 + 0.25) / 3))
        assert z * sign > 0
        assert metrics["agreement"] == pytest.approx(z, rel=1e-4)
        assert agent.scale == pytest.approx(min(1, before * np.exp(0.1 * z)), rel=1e-5)
        assert metrics["step"] == pytest.approx(STEP * agent.scale)
    assert agent.scale == 1.0  # never longer than the schedule's


# What it estimates


@pytest.mark.parametrize("rank", [None, 1])
@pytest.mark.parametrize("votes", [1, 2])
def test_it_is_unbiased_on_a_linear_utility(rank, votes):
    """E g is 2 sigma c w for answers c times the gap, and sqrt(2 / pi) w / |w| for signs, of Gaussian directions."""
    agent = make(rank=rank, votes=votes)
    w = np.linspace(-1, 1, agent.policy.size)
    cases = {"proportional": (lambda gap: 0.1 * gap, 2 * SIGMA * 0.1 * w)}
    if rank is None:
        cases["sign"] = (np.sign, np.sqrt(2 / np.pi) * w / np.linalg.norm(w))
    for answer, expected in cases.values():
        judge, estimates = Judge(lambda theta: theta @ w, answer), []
        for n in range(600):
            agent.iterate(judge.budget(pairs=8, iteration=n))
            estimates.append(agent.m.astype(np.float64))
        error = np.std(estimates, axis=0, ddof=1) / np.sqrt(len(estimates))
        assert (np.abs(np.mean(estimates, axis=0) - expected) < 5 * error).all()
        assert np.linalg.norm(error) < 0.6 * np.linalg.norm(expected)  # else the line above would say nothing


def test_it_climbs():
    agent = make(momentum=0.5)
    target = agent.parameters.astype(np.float64) + 0.5
    judge = Judge(lambda theta: -np.square(theta - target).sum(-1), np.sign)
    distances = []
    for n in range(100):
        agent.iterate(judge.budget(pairs=8, iteration=n))
        distances.append(rms(agent.parameters - target))
    assert distances[-1] < 0.15


# What must not matter


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), swap=st.lists(st.booleans(), min_size=6, max_size=6))
def test_neither_the_order_of_the_pairs_nor_of_the_two_in_a_pair_matters(seed, swap):
    w = np.random.default_rng(0).standard_normal(make().policy.size)

    def parameters(pairing):
        agent, judge = make(), Judge(lambda theta: theta @ w, np.tanh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(agents.pes, "by_index", pairing)
            agent.iterate(judge.budget(pairs=6))
        return agent.parameters

    def shuffled(first, second, pairs):
        order, plain = np.random.default_rng(seed).permutation(pairs), by_index(first, second, pairs)
        one, other = (clips.trajectory[order] for clips in (plain.first, plain.second))
        return Pairs.whole(np.where(swap, other, one), np.where(swap, one, other))

    assert_allclose(parameters(shuffled), parameters(by_index), atol=1e-6)


def test_the_scale_of_the_scores_does_not_matter():
    one, other, rng, scales = make(rate=0.5), make(rate=0.5), np.random.default_rng(1), []
    for n in range(8):
        values = rng.uniform(-1, 1, 3)
        one.iterate(budget_of(scores(values), iteration=n))
        other.iterate(budget_of(scores(0.1 * values), iteration=n))
        scales.append(one.scale)
    assert_allclose(one.parameters, other.parameters, atol=1e-5)
    assert min(scales) < 0.9


def test_agreement_is_standard_normal_if_the_answers_ignore_the_momentum():
    agent, rng, agreement = make(subspace="last"), np.random.default_rng(1), []
    for n in range(400):
        metrics = agent.iterate(budget_of(scores(rng.uniform(-0.3, 0.3, 8)), pairs=8, iteration=n))
        agreement.append(metrics["agreement"])
    assert np.mean(agreement[1:]) == pytest.approx(0, abs=4 / 20)
    assert np.var(agreement[1:]) == pytest.approx(1, abs=4 * np.sqrt(2) / 20)


# The budget


def test_directions_are_collected_in_groups_of_common_starts():
    agent, budget = make(groups=2), budget_of(scores([1.0] * 5), pairs=5)
    agent.iterate(budget)
    assert [assignment.tolist() for _, assignment, _ in budget.collections] == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]
    assert all(how["common_start"] and how["mean_actions"] for _, _, how in budget.collections)
    (pairs,) = budget.asked
    assert_array_equal(pairs.first.trajectory, [100, 101, 102, 106, 107])
    assert_array_equal(pairs.second.trajectory, [103, 104, 105, 108, 109])


def test_without_groups_every_trajectory_starts_on_its_own():
    agent, budget = make(groups=None, collect="sampled"), budget_of(scores([1.0] * 3))
    agent.iterate(budget)
    ((_, _, how),) = budget.collections
    assert how == {"common_start": False, "mean_actions": False, "keep": ()}


def test_more_groups_than_directions_are_as_many():
    agent, budget = make(groups=10), budget_of(scores([1.0] * 3))
    agent.iterate(budget)
    assert len(budget.collections) == 3


def test_several_votes_on_a_direction():
    agent, budget = make(votes=2), budget_of(scores([1.0, 0.5, 0.0, -1.0, 0.3]), pairs=5)
    theta = agent.parameters.astype(np.float64)
    agent.iterate(budget)
    ((_, assignment, _),) = budget.collections
    assert_array_equal(assignment, [0, 0, 0, 1, 1, 2, 2, 2, 3, 3])  # two directions for five pairs
    eps = directions_of(budget)
    g = (1.5 * eps[0] - 0.7 * eps[1]) / 5
    assert_allclose(agent.parameters, theta + STEP * g / rms(g), atol=1e-5)


def test_more_pairs_than_the_trajectories_make_are_between_neighbours():
    agent, budget = make(), budget_of(scores([1.0, 0.0, 0.0, 1.0]), pairs=4, trajectories=5)
    theta = agent.parameters.astype(np.float64)
    agent.iterate(budget)
    eps = directions_of(budget)
    assert len(eps) == 2
    # Pairs: minus 0 with plus 0, minus 1 with plus 1, minus 0 with plus 1, minus 1 with plus 0.
    g = (eps[0] + (eps[1] + eps[0]) / 2) / 4
    assert_allclose(agent.parameters, theta + STEP * g / rms(g), atol=1e-5)


@pytest.mark.parametrize("subspace", ["all", "last", "linear"])
def test_only_the_linear_subspace_looks_at_observations_and_only_once(subspace):
    agent = make(subspace=subspace)
    kept = []
    for n in range(2):
        budget = budget_of(scores([1.0] * 3), iteration=n)
        agent.iterate(budget)
        kept.append(budget.collections[0][2]["keep"])
    assert kept == [("observations",) if subspace == "linear" else (), ()]


@pytest.mark.parametrize("subspace", ["last", "linear"])
def test_it_moves_within_the_subspace(subspace):
    agent = make(subspace=subspace)
    theta = agent.parameters
    for n in range(3):
        agent.iterate(budget_of(scores([1.0, -1.0, 0.5]), iteration=n))
    assert np.flatnonzero(agent.parameters - theta).tolist() == list(range(12, 17))  # four weights and a bias


def test_it_normalises_observations_if_it_is_told_to_or_the_run_does_already():
    assert make().policy.normaliser is None
    normalised = make(normalise=True).policy
    x = np.array([[3.0, -1.0], [1.0, 5.0]], np.float32)
    normalised.normaliser.include(x)
    assert_allclose(normalised.normaliser(x), [[1, -1], [-1, 1]], atol=1e-3)


# Resuming


@pytest.mark.parametrize("changes", [{"subspace": "linear", "rate": 0.1}, {"subspace": "last", "rank": 1, "votes": 2}])
def test_resumed_equals_uninterrupted(changes, tmp_path):
    small = ("trajectories=8", "pairs=4")
    whole, part = Trial("pes", *small, **changes), Trial("pes", *small, **changes)
    expected = whole.run(4)[2:]
    part.run(2)
    checkpoint.save(tmp_path, 1, {"agent": part.agent.state_dict(), "ledger": part.ledger.state_dict()})
    _, state = checkpoint.load(tmp_path)
    simulator = ToySimulator(np.random.SeedSequence(0).spawn(3)[0])
    resumed = Trial("pes", *small, seed=9, simulator=simulator, **changes)
    resumed.agent.load_state_dict(state["agent"])
    resumed.ledger.load_state_dict(state["ledger"])
    resumed.next = 2
    assert json.dumps(resumed.run(2)) == json.dumps(expected)
    assert_array_equal(resumed.agent.parameters, whole.agent.parameters)


# Settings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sigma": 0.0}, "sigma must be positive, not 0.0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1, not 1.0"),
        ({"rate": -0.1}, "rate must not be negative, not -0.1"),
        ({"votes": 0}, "votes must be at least 1, not 0"),
        ({"groups": 0}, "groups must be at least 1, not 0"),
        ({"rank": 0}, "rank must be at least 1, not 0"),
    ],
)
def test_a_wrong_setting_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        make(**changes)
