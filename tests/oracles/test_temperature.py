"""Calibration: the teacher errs as often as it was asked to, where that is possible."""

from functools import partial

import numpy as np
import pytest
from scipy.stats import binom
from teachers import RATIONAL

from oracles import links
from oracles.oracle import Reason
from oracles.panel import Panel
from oracles.temperature import expected_error_rate, solve_temperature

SOLVING = partial(RATIONAL, tau={"error_rate": 0.2})


def teacher(**traits):
    return SOLVING(**traits, rng=np.random.default_rng(0))


def trajectories(count=64, steps=100, scale=1.0):
    rng = np.random.default_rng(4)
    skill = rng.normal(size=(count, 1))
    return scale * (2.0 + 0.1 * skill + rng.normal(size=(count, steps)))


def realised_errors(one, rewards):
    """Wrong labels and judged pairs, asking many times about all pairs of the trajectories."""
    seen = one.watch(rewards)
    i, j = np.tile(np.triu_indices(len(rewards), k=1), 50)
    answers = one.compare(seen[i], seen[j], mean_return=float(rewards.sum(axis=1).mean()), episode_steps=seen.steps)
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
        answers = each.compare(*np.zeros((2, 1, 100)), mean_return=0.0, episode_steps=100)
        assert answers.tau == tau


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
    assert one.calibrate(np.ones((8, 10))) == tau
    assert one.calibrate(np.ones((1, 10))) == tau


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
    settings = {"link": links.logistic, "eps_mistake": 0.0}
    tau = solve_temperature(gaps, 0.3, **settings)
    assert expected_error_rate(gaps, tau, **settings) == pytest.approx(0.3)
    larger = [expected_error_rate(gaps, tau * factor, **settings) for factor in np.geomspace(1.001, 1e3)]
    assert min(larger) > 0.3


def test_a_panels_members_are_calibrated():
    panel = Panel(teacher=SOLVING, members=3, vote="mean", rng=np.random.default_rng(0))
    assert panel.needs_calibration
    assert panel.calibrate(trajectories()) == teacher().calibrate(trajectories())


def test_uncalibrated_and_wrongly_calibrated_teachers_refuse():
    one = teacher()
    clips = np.zeros((1, 100))
    with pytest.raises(RuntimeError, match="calibrate the teacher before asking it"):
        one.compare(clips, clips, mean_return=0.0, episode_steps=100)
    one.calibrate(trajectories(steps=50))
    with pytest.raises(ValueError, match="calibrated on clips of 50 steps; these have 100"):
        one.compare(clips, clips, mean_return=0.0, episode_steps=100)
    with pytest.raises(RuntimeError, match=r"2.0 in bpref units: there is nothing to calibrate"):
        teacher(tau={"bpref": 2.0}).calibrate(clips)
    with pytest.raises(ValueError, match="sum to nan"):
        one.calibrate(np.full((4, 10), np.nan))
