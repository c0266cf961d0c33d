"""Curves and budgets against known answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from synthetic_runs import write_run

from pbrl.report.curves import AXES, _tick, curve, draw_curves
from pbrl.report.figures import COLOURS, OWN_LOOKS, styles
from pbrl.report.ledger import unequal_budgets, unequal_lengths
from pbrl.report.runs import YARDSTICK, load


def test_a_curve_is_the_mean_over_seeds_with_its_95_percent_interval(tmp_path: Path) -> None:
    runs = [
        load(write_run(tmp_path, returns, seed=seed))
        for seed, returns in enumerate([[300.0, 400.0], [310.0, 420.0], [320.0, 500.0]])
    ]
    at, mean, low, high, complete = curve(runs, "iteration")
    np.testing.assert_array_equal(at, [0, 1])
    np.testing.assert_array_equal(mean, [310, 440])
    student = 4.302653  # the 97.5 % quantile with two degrees of freedom
    errors = np.array([10, np.sqrt(2800)]) / np.sqrt(3)
    np.testing.assert_allclose(high - mean, student * errors, rtol=1e-5)
    np.testing.assert_allclose(mean - low, student * errors, rtol=1e-5)
    assert complete.all()
    np.testing.assert_array_equal(curve(runs, "trajectories")[0], [64, 128])
    np.testing.assert_array_equal(curve(runs, "seconds")[0], [3, 6])


def test_where_only_some_seeds_have_got_the_curve_says_so(tmp_path: Path) -> None:
    whole = load(write_run(tmp_path, [0.0, 10.0, 20.0]))
    part = load(write_run(tmp_path, [2.0, 20.0], seed=1, settings={"iterations": 3}))
    at, mean, low, _, complete = curve([whole, part], "iteration")
    np.testing.assert_array_equal(at, [0, 1, 2])
    np.testing.assert_array_equal(mean, [1, 15, 20])
    np.testing.assert_array_equal(complete, [True, True, False])
    assert np.isnan(low[2])


def test_finished_runs_of_unequal_cost_are_compared_at_equal_cost(tmp_path: Path) -> None:
    slow = load(write_run(tmp_path, [0.0, 10.0, 20.0]))
    fast = load(write_run(tmp_path, [0.0, 10.0, 20.0], seed=1))
    fast = replace(fast, metrics={**fast.metrics, "seconds": np.array([2.0, 4.0, 6.0])})
    at, mean, _, _, complete = curve([slow, fast], "seconds")  # 3, 6, 9 seconds, and 2, 4, 6
    np.testing.assert_array_equal(at, [3, 6])
    np.testing.assert_array_equal(mean, [(0 + 5) / 2, (10 + 20) / 2])
    assert complete.all()


def test_one_seed_has_a_curve_without_a_band(tmp_path: Path) -> None:
    _, mean, low, high, _ = curve([load(write_run(tmp_path, [3.0, 4.0]))], "iteration")
    np.testing.assert_array_equal(mean, [3, 4])
    assert np.isnan([low, high]).all()


def test_an_interval_ends_where_returns_must(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [returns], seed=seed)) for seed, returns in enumerate([10.0, 990.0])]
    _, _, low, high, _ = curve(runs, "iteration")
    assert (low[0], high[0]) == (0.0, 1000.0)
    below = [load(write_run(tmp_path / "lqr", [returns], seed=seed)) for seed, returns in enumerate([-10.0, -900.0])]
    assert curve(below, "iteration").low[0] < -900


def test_smoothing_is_the_mean_of_the_last_iterations(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [1.0, 3.0, 8.0, 4.0]))]
    np.testing.assert_allclose(curve(runs, "iteration", smooth=3).mean, [1, 2, 4, 5])
    np.testing.assert_allclose(curve(runs, "iteration", smooth=100).mean, [1, 2, 4, 4])


def test_the_teachers_errors_have_a_curve(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [1.0, 2.0], seed=seed, errors=[0.1 + seed / 10, 0.3])) for seed in range(2)]
    np.testing.assert_allclose(curve(runs, "iteration", "teacher_error_rate").mean, [0.15, 0.3])


def test_evaluations_have_a_curve_of_their_own(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, returns, seed=seed)) for seed, returns in enumerate([[0.0, 10.0], [2.0, 20.0]])]
    at, mean, *_ = curve(runs, "iteration", "eval_return")  # only of the last iteration
    np.testing.assert_array_equal(at, [1])
    np.testing.assert_array_equal(mean, [25])


@pytest.mark.parametrize("axis", AXES)
def test_a_figure_has_a_panel_for_each_task_and_a_line_for_each_agent(tmp_path: Path, axis: str) -> None:
    tasks = ["walker_walk", "cheetah_run", "hopper_hop", "fish_swim"]
    folders = [write_run(tmp_path, [1.0, 2.0], task=task, agent=agent) for task in tasks for agent in ("ncrs", "zpg")]
    looks = styles(["ncrs", "zpg"])
    figure = draw_curves([load(folder) for folder in folders], axis, looks, title="", notes=["beware"])
    assert [panel.get_title() for panel in figure.axes] == sorted(tasks)
    for panel in figure.axes:
        assert [line.get_color() for line in panel.lines] == [looks["ncrs"]["color"], looks["zpg"]["color"]]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["ncrs", "zpg"]
    assert legend.get_title().get_text() == "beware"


@pytest.mark.parametrize("tasks", [1, 2, 5])
@pytest.mark.parametrize("notes", [[], ["Unequal budgets, bits per iteration: " + "an_agent 32, " * 30] * 4])
def test_words_are_inside_the_figure_and_beside_the_panels(tmp_path: Path, tasks: int, notes: list[str]) -> None:
    folders = [write_run(tmp_path, [1.0, 800.0], task=f"task_{i}", settings={"name": "n" * 90}) for i in range(tasks)]
    runs = [load(folder) for folder in folders]
    figure = draw_curves(runs, "seconds", styles(["n" * 90]), title="A title of many words " * 10, notes=notes)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    (legend,) = figure.legends
    texts = [panel.yaxis.label for panel in figure.axes] + [panel.xaxis.label for panel in figure.axes]
    for artist in [legend, figure._suptitle, *(text for text in texts if text.get_text())]:  # type: ignore[attr-defined]
        box = artist.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(panel.get_window_extent(renderer)) for panel in figure.axes)
        if artist is not legend:
            assert not box.overlaps(legend.get_window_extent(renderer))
    assert min(panel.bbox.height for panel in figure.axes) > 150  # however many words there are


@pytest.mark.parametrize("axis", [axis for axis in AXES if axis != "seconds"])
def test_what_is_counted_has_whole_numbers_on_its_axis(tmp_path: Path, axis: str) -> None:
    figure = draw_curves([load(write_run(tmp_path, [1.0, 2.0, 3.0]))], axis, styles(["ncrs"]), title="", notes=[])
    FigureCanvasAgg(figure).draw()
    ticks = [float(tick) for tick in figure.axes[0].get_xticks()]
    assert ticks == [round(tick) for tick in ticks]
    assert not [text for text in figure.axes[0].get_xticklabels() if "m" in text.get_text()]


def test_large_numbers_are_short_on_an_axis() -> None:
    assert [_tick(value) for value in (0, 0.5, 20, 1500, 2e6, 3.84e9)] == ["0", "0.5", "20", "1.5 k", "2 M", "3.84 G"]


def test_an_agent_has_the_same_colour_in_every_report() -> None:
    alone = {name: styles([name])[name] for name in ("ncrs", "zpg", "dpo", "ppo_rlhf", "random", "mine", "pebble")}
    assert styles(list(alone)) == alone


def test_the_suites_own_agents_look_different_and_the_same_in_every_report() -> None:
    agents = [*OWN_LOOKS]
    looks = styles(agents)
    assert len({tuple(look.values()) for look in looks.values()}) == len(agents)
    assert {name: styles(["another", name])[name] for name in agents} == looks
    with_yardsticks = [f"sac_true{YARDSTICK}", f"ppo_true{YARDSTICK}", "pebble", "ppo_rlhf"]  # of one figure
    assert len({looks[name]["color"] for name in with_yardsticks}) == 4


def test_every_agent_looks_different() -> None:
    agents = [f"agent {i}" for i in range(3 * len(COLOURS))]
    assert len({tuple(look.values()) for look in styles(agents).values()}) == len(agents)


def test_equal_budgets_need_no_note(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [1.0, 2.0], agent=agent)) for agent in ("ncrs", "zpg")]
    assert unequal_lengths(runs) == []
    for axis in AXES:
        assert unequal_budgets(runs, axis) == []


def test_unequal_budgets_are_named_at_the_same_place_of_an_axis(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [1.0, 2.0])), load(write_run(tmp_path, [1.0, 2.0], agent="zpg", experts=10))]
    runs.append(
        load(write_run(tmp_path, [1.0, 2.0], task="cheetah_run"))
    )  # where there is no other agent to compare with
    note = "Unequal budgets, bits per iteration: ncrs 32, zpg 320 (walker_walk)."
    assert unequal_budgets(runs, "iteration") == unequal_budgets(runs, "seconds") == [note]
    assert unequal_budgets(runs, "pairs_asked") == [
        "Unequal budgets, bits per comparison: ncrs 1, zpg 10 (walker_walk)."
    ]


def test_unequal_lengths_are_named_once(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path, [1.0, 2.0])), load(write_run(tmp_path, [1.0], agent="zpg"))]
    assert unequal_budgets(runs, "iteration") == []
    assert unequal_lengths(runs) == ["Unequal budgets, iterations: ncrs 2, zpg 1."]
