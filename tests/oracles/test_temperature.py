"""`tau: {error_rate: x}`: the teacher errs as often as it was asked to, where that is possible."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import binom
from teachers import RATIONAL

from oracles import links
from oracles.panel import Panel
from oracles.temperature import expected_error_rate, solve_temperature
from pbrl.ledger import Ledger
from pbrl.types import Pairs, Question, Reason, Trajectories

SOLVING = partial(RATIONAL, tau={"error_rate": 0.2})
LOGISTIC = {"link": links.logistic, "eps_mistake": 0.0}
POLICY = SimpleNamespace(normaliser=None)  # all that the ledger asks of one


def teacher(**traits):
    return SOLVING(**traits, rng=np.random.default_rng(0))


def trajectories(count=64, steps=100, scale=1.0):
    rng = np.random.default_rng(4)
    skill = rng.normal(size=(count, 1))
    return scale * (2.0 + 0.1 * skill + rng.normal(size=(count, steps)))


def ask(one, first, second, **about):
    """About pairs [P, H] of clips; by default outside of any iteration, of episodes as long as they are."""
    iteration = about.pop("iteration", None)
    question = Question.about_rewards(first, second, **{"mean_return": 0.0, "episode_steps": first.shape[1], **about})
    return one.compare(replace(question, iteration=iteration))


def realised_errors(one, rewards):
    """Wrong labels and judged pairs, asking many times about all pairs of the trajectories."""
    i, j = np.tile(np.triu_indices(len(rewards), k=1), 50)
    steps = rewards.shape[1]
    about = {"mean_return": float(rewards.sum(axis=1).mean()), "steps": steps, "episode_steps": steps}
    answers = one.compare(Question(first=i, second=j, rewards=rewards, **about))
    judged = np.isin(answers.reason, [Reason.ANSWERED, Reason.MISTAKEN])
    truth = answers.second_sum > answers.first_sum
    return ((answers.preferences.label == 1) != truth)[judged].sum(), judged.sum()


@pytest.mark.parametrize("link", [links.logistic, links.probit, links.arctan])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize(
    ("error_rate", "traits"),
    [
        (0.01, {}),
        (0.2, {}),
        (0.49, {}),
        (0.2, {"eps_mistake": 0.1}),
        (0.4, {"gamma": 0.9, "eps_mistake": 0.1}),
        (0.3, {"eps_skip": 0.95, "eps_equal": 0.05}),
    ],
)
def test_the_wanted_share_of_answers_is_wrong(link, scale, error_rate, traits):
    one = teacher(link=link, tau={"error_rate": error_rate}, **traits)
    rewards = trajectories(scale=scale)
    one.calibrate(rewards)
    errors, judged = realised_errors(one, rewards)
    low, high = binom.interval(1 - 1e-6, judged, error_rate)
    assert low <= errors <= high


@pytest.mark.parametrize("link", [links.logistic, links.probit, links.arctan])
def test_one_gap_has_the_temperature_that_one_computes_by_hand(link):
    # Errs in 30 % at gap 2: sigma(-2 / tau) = 0.3; with mistakes 0.1 + 0.8 sigma(-2 / tau) = 0.3.
    inverse = {
        links.logistic: lambda q: np.log(q / (1 - q)),
        links.probit: lambda q: {0.3: -0.5244005127080407, 0.25: -0.6744897501960817}[q],
        links.arctan: lambda q: np.tan(np.pi * (q - 0.5)),
    }[link]
    rewards = np.array([[0.0, 1.0], [2.0, 1.0]])
    assert teacher(link=link, tau={"error_rate": 0.3}).calibrate(rewards) == pytest.approx(-2 / inverse(0.3))
    mistaken = teacher(link=link, tau={"error_rate": 0.3}, eps_mistake=0.1)
    assert mistaken.calibrate(rewards) == pytest.approx(-2 / inverse(0.25))


def test_the_temperature_used_is_reported_and_kept():
    one = teacher()
    assert one.needs_calibration
    tau = one.calibrate(trajectories())
    other = teacher()
    other.load_state_dict(one.state_dict())
    for each in (one, other):
        assert ask(each, np.zeros((1, 100)), np.zeros((1, 100))).tau == tau


def test_calibrating_does_not_move_the_stream_or_the_rounds():
    one = teacher()
    before = one.state_dict()
    one.calibrate(trajectories())
    after = one.state_dict()
    assert (after["rng"], after["rounds"]) == (before["rng"], before["rounds"])


def test_nothing_to_calibrate_on_keeps_the_temperature():
    one = teacher()
    assert one.calibrate(np.zeros((8, 10))) == 1.0
    tau = one.calibrate(trajectories())
    assert one.calibrate(np.ones((8, 100))) == tau
    assert one.calibrate(np.ones((1, 100))) == tau
    assert one.calibrate(np.ones((8, 10))) == pytest.approx(tau / 10)  # of clips a tenth as long


def test_a_teacher_too_blind_for_the_rate_is_as_good_as_it_can_be():
    # The better trajectory of each pair looks worse to a myopic teacher: always wrong, at best a coin.
    rewards = np.zeros((4, 1000))
    rewards[:, 0] = [10, 20, 30, 40]
    rewards[:, -1] = [4, 3, 2, 1]
    one = teacher(gamma=0.9, tau={"error_rate": 0.2})
    with pytest.warns(UserWarning, match=r"err in 0.500 of its answers, more than error_rate = 0.2"):
        one.calibrate(rewards)
    errors, judged = realised_errors(one, rewards)
    low, high = binom.interval(1 - 1e-6, judged, 0.5)
    assert low <= errors <= high


def test_the_largest_solution_is_taken_where_noise_helps():
    # Wrong about the closest pair: the rate starts at 1/3, dips, and rises to 1/2: it passes 0.3 twice.
    gaps = np.array([-0.01, 10.0, 10.0])
    tau = solve_temperature(gaps, 0.3, **LOGISTIC)
    assert expected_error_rate(gaps, tau, **LOGISTIC) == pytest.approx(0.3)
    larger = [expected_error_rate(gaps, tau * factor, **LOGISTIC) for factor in np.geomspace(1.001, 1e3)]
    assert min(larger) > 0.3


def test_a_panels_members_are_calibrated():
    panel = Panel(teacher=SOLVING, members=3, vote="mean", rng=np.random.default_rng(0))
    assert panel.needs_calibration
    assert panel.calibrate(trajectories()) == teacher().calibrate(trajectories())


def test_uncalibrated_and_wrongly_calibrated_teachers_refuse():
    one = teacher()
    clips = np.zeros((1, 100))
    with pytest.raises(RuntimeError, match="calibrate the teacher before asking it"):
        ask(one, clips, clips)
    one.calibrate(trajectories(steps=50))
    with pytest.raises(ValueError, match="calibrated on clips of 50 steps; these have 100"):
        ask(one, clips, clips)
    with pytest.raises(RuntimeError, match=r"2.0 in bpref units: there is nothing to calibrate"):
        teacher(tau={"bpref": 2.0}).calibrate(clips)
    with pytest.raises(ValueError, match="sum to nan"):
        one.calibrate(np.full((4, 10), np.nan))


# From iteration to iteration: solved for on the pairs that the agent asked about


def two_policies(pairs, *, apart, seed, steps=10):
    """Clips of two policies whose returns differ by `apart` on average and vary by 3: rewards [pairs, steps] each."""
    rng = np.random.default_rng(seed)
    first, second = rng.normal(0.0, 3.0, size=(2, pairs, 1)) / steps + np.zeros((1, steps))
    return first, second + apart / steps


def assert_errs_in(answers, error_rate):
    errors, decided = answers.wrong.sum(), answers.decided.sum()
    low, high = binom.interval(1 - 1e-6, decided, error_rate)
    assert low <= errors <= high, f"{errors} of {decided}"


@pytest.mark.parametrize(
    ("link", "apart"), [("logistic", 0.0), ("logistic", 10.0), ("logistic", 40.0), ("probit", 10.0), ("arctan", 40.0)]
)
def test_pairs_of_two_policies_are_answered_at_the_wanted_rate(link, apart):
    one = teacher(link=link)
    one.calibrate(np.concatenate(two_policies(32, apart=0.0, seed=0)))  # of one policy
    first = ask(one, *two_policies(100_000, apart=apart, seed=1), iteration=0)
    if apart == 40.0:  # farther apart than the calibration foresaw
        assert first.wrong.mean() < 0.1
    for iteration, seed in ((1, 2), (2, 3)):
        solved_on_many = ask(one, *two_policies(100_000, apart=apart, seed=seed), iteration=iteration)
        assert_errs_in(ask(one, *two_policies(5_000, apart=apart, seed=9), iteration=iteration), 0.2)
        assert solved_on_many.wrong.mean() == pytest.approx(0.2, abs=0.01)


def test_the_rate_is_met_with_mistakes_skips_and_ties():
    one = teacher(tau={"error_rate": 0.3}, eps_mistake=0.1, eps_skip=0.5, eps_equal=0.1)
    one.calibrate(trajectories())
    about = {"mean_return": 20.0, "episode_steps": 10}
    for iteration in range(2):
        answers = ask(one, *two_policies(100_000, apart=15.0, seed=iteration), iteration=iteration, **about)
    assert {*answers.reason} == {*Reason}
    few = ask(one, *two_policies(5_000, apart=15.0, seed=7), iteration=1, **about)
    assert_errs_in(few, 0.3)


def test_the_first_iteration_is_answered_with_the_calibrated_temperature():
    one = teacher()
    tau = one.calibrate(np.concatenate(two_policies(100, apart=0.0, seed=0)))
    for seed in (1, 2):  # two questions in it
        answers = ask(one, *two_policies(5_000, apart=0.0, seed=seed), iteration=0)
        assert answers.tau == tau
    exact = solve_temperature(np.abs(np.random.default_rng(5).normal(0, 3 * 2**0.5, 100_000)), 0.2, **LOGISTIC)
    assert tau == pytest.approx(exact, rel=0.2)  # 200 trajectories are a sample
    assert ask(one, *two_policies(10, apart=0.0, seed=3), iteration=1).tau == pytest.approx(exact, rel=0.05)


def test_the_last_iteration_is_solved_for_by_hand():
    one = teacher(tau={"error_rate": 0.3})
    one.calibrate(trajectories(steps=10))
    solved = {0: 2.0, 1: 4.0}  # gap of all pairs in the iteration
    for iteration, gap in solved.items():
        first = np.zeros((3, 10))
        second = first + np.array([1, -1, 1])[:, None] * gap / 10
        answers = ask(one, first, second, iteration=iteration)
        if iteration > 0:
            assert answers.tau == pytest.approx(2.0 / np.log(0.7 / 0.3))
    assert ask(one, first, second, iteration=2).tau == pytest.approx(4.0 / np.log(0.7 / 0.3))
    assert ask(one, first, second, iteration=2).tau == ask(one, first, second, iteration=2).tau  # within an iteration


def test_calibration_is_needed_until_there_are_pairs_to_solve_on():
    one = teacher()
    assert one.needs_calibration
    one.calibrate(trajectories(steps=10))
    assert one.needs_calibration
    tied = np.ones((4, 10))
    ask(one, tied, tied, iteration=0)
    assert one.needs_calibration  # ties teach nothing
    tau = one.calibrate(2 * trajectories(steps=10))
    assert ask(one, tied, tied + 0.2, iteration=1).tau == tau
    assert not one.needs_calibration
    solved = ask(one, tied, tied, iteration=2).tau
    assert solved == pytest.approx(2.0 / np.log(0.8 / 0.2))
    assert not one.needs_calibration
    assert ask(one, tied, tied, iteration=3).tau == solved  # nothing new to solve on


def test_questions_outside_of_an_iteration_leave_the_temperature():
    one = teacher()
    tau = one.calibrate(trajectories(steps=10))
    for seed in range(3):
        assert ask(one, *two_policies(10, apart=10.0, seed=seed)).tau == tau
    assert one.needs_calibration


def test_a_resumed_teacher_solves_for_the_same_temperature():
    through = teacher(eps_mistake=0.05)
    through.calibrate(trajectories(steps=10))
    for iteration in range(4):
        state = json.loads(json.dumps(through.state_dict()))
        resumed = SOLVING(eps_mistake=0.05, rng=np.random.default_rng(99))
        resumed.load_state_dict(state)
        assert resumed.needs_calibration == through.needs_calibration == (iteration == 0)
        for seed in (2 * iteration, 2 * iteration + 1):  # two questions in an iteration
            clips = two_policies(16, apart=5.0 * (iteration + 1), seed=seed)
            expected, actual = (ask(each, *clips, iteration=iteration) for each in (through, resumed))
            assert actual.tau == expected.tau
            np.testing.assert_equal(vars(actual.preferences), vars(expected.preferences))
        assert resumed.state_dict() == through.state_dict()


def test_a_resumed_teacher_meets_the_rate():
    before = teacher()
    before.calibrate(trajectories(steps=10))
    ask(before, *two_policies(100_000, apart=20.0, seed=1), iteration=6)
    after = SOLVING(rng=np.random.default_rng(1))
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert_errs_in(ask(after, *two_policies(5_000, apart=20.0, seed=2), iteration=7), 0.2)


def test_a_state_is_not_changed_by_what_comes_after_it():
    one = teacher()
    one.calibrate(trajectories(steps=10))
    ask(one, *two_policies(4, apart=1.0, seed=0), iteration=0)
    state = one.state_dict()
    kept = json.dumps(state)
    ask(one, *two_policies(4, apart=1.0, seed=1), iteration=0)
    assert json.dumps(state) == kept


def test_clips_shorter_than_the_calibration_are_cut_from_it():
    """Rewards of independent steps: the gaps of 25 steps are half those of 100."""
    rewards = np.random.default_rng(0).normal(size=(400, 100))
    one = teacher()
    whole = one.calibrate(rewards)
    rng = np.random.default_rng(1)
    short, long = (rng.normal(size=(2, 5_000, steps)) for steps in (25, 100))
    for clips, steps, tau in ((short, 25, whole / 2), (long, 100, whole)):
        answers = ask(one, *clips, episode_steps=100)
        assert answers.tau == pytest.approx(tau, rel=0.1), steps
        assert answers.wrong.mean() == pytest.approx(0.2, abs=0.03), steps


def test_gaps_of_several_clip_lengths_are_converted_in_proportion():
    one = teacher(tau={"error_rate": 0.3})
    one.calibrate(trajectories(steps=10))
    ten, five = np.zeros((2, 10)), np.zeros((2, 5))
    ask(one, ten, ten + 0.2, iteration=0)  # a gap of 2
    ask(one, five, five + 0.2, iteration=0, episode_steps=10)  # of 1 in half the steps
    tau = 2.0 / np.log(0.7 / 0.3)
    assert ask(one, ten, ten, iteration=1).tau == pytest.approx(tau)
    assert ask(one, five, five, iteration=1, episode_steps=10).tau == pytest.approx(tau / 2)


def test_a_panel_solves_on_its_questions_too():
    panel = Panel(teacher=SOLVING, members=3, vote="mean", rng=np.random.default_rng(0))
    panel.calibrate(trajectories(steps=10))
    first = np.zeros((2, 10))
    ask(panel, first, first + 0.2, iteration=0)
    assert not panel.needs_calibration
    assert ask(panel, first, first, iteration=1).tau == pytest.approx(2.0 / np.log(0.8 / 0.2))


def test_a_teacher_that_cannot_meet_the_rate_says_so_once():
    rewards = np.zeros((2, 1000))
    rewards[:, 0], rewards[:, -1] = [10, 20], [4, 3]
    one = teacher(gamma=0.9)
    with pytest.warns(UserWarning, match="more than error_rate = 0.2"):
        one.calibrate(rewards)
    for iteration in range(3):  # a warning would be an error
        ask(one, rewards[:1], rewards[1:], iteration=iteration)


def test_a_given_temperature_keeps_no_gaps():
    one = teacher(tau=1.0)
    ask(one, *two_policies(4, apart=1.0, seed=0), iteration=0)
    assert one.state_dict()["temperature"] is None
    assert one.temperature.gaps == []


class TwoPolicies:
    """A simulator: policy k has returns of about `parameters[k, 0]`."""

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, **_):
        del policy
        number = first_trajectory + np.arange(len(assignment))
        returns = parameters[assignment, 0] + 3.0 * np.random.default_rng(iteration).normal(size=len(assignment))
        return Trajectories(
            policy=assignment,
            lengths=np.full(len(assignment), 10),
            diverged=np.zeros(len(assignment), bool),
            start=np.zeros((len(assignment), 3), np.int64),
            number=number,
            task_rewards=np.repeat(returns[:, None] / 10, 10, axis=1),
        )


def test_through_the_ledger_two_arms_are_compared_at_the_wanted_rate():
    """Calibrated on the incumbent alone, the teacher erred in 0.03 of its answers about arms that lie apart."""
    oracle, size = teacher(), 20_000
    ledger = Ledger(
        simulator=TwoPolicies(), oracle=oracle, trajectories_per_iteration=size, pairs_per_iteration=size // 2
    )
    arms, assignment = np.array([[0.0], [20.0]], np.float32), np.arange(size) % 2
    calibrated = []
    for iteration in range(3):
        budget = ledger.open_iteration(iteration)
        calibrated.append(oracle.needs_calibration)
        ledger.calibrate(TwoPolicies(), POLICY, arms[0], trajectories=64, mean_actions=False)
        how = {"mean_actions": False, "common_start": False, "keep": ()}
        number = budget.collect(POLICY, arms, assignment, **how).number
        budget.compare(Pairs.whole(number[::2], number[1::2]))
        metrics = ledger.iteration_metrics()
        if iteration == 0:
            assert metrics["teacher_error_rate"] < 0.1
        else:
            assert metrics["teacher_error_rate"] == pytest.approx(0.2, abs=0.02)
        assert metrics["teacher_tau"] == oracle.temperature.solution[0]
    assert calibrated == [True, False, False]
