"""The pages made of the reference runs: every number of theirs is known by hand."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from synthetic_runs import write_run
from tiny_reference import part, settings

from pbrl.reference import pages
from pbrl.reference.__main__ import write
from pbrl.reference.pages import BLOCKS, minutes, replace_marked
from pbrl.reference.protocol import PlannedRun, plan
from pbrl.reference.runner import Results
from pbrl.report.runs import RecordedRun
from pbrl.report.shipped import from_folder
from pbrl.run.settings import ConfigurationError

TASKS = ["walker_walk", "cheetah_run"]
HEIGHTS = {"random": 10.0, "ncrs": 800.0, "zpg": 12.0}
PLAIN = {"overrides": [], "tasks": TASKS, "agents": list(HEIGHTS), "iterations": 10}


def add(results: Results, planned: PlannedRun, height: float, root: Path) -> None:
    """A made-up finished run that rises to a height, 3 seconds an iteration."""
    task, agent, oracle, seed = planned.name
    returns = np.linspace(0, height, planned.settings["iterations"]).tolist()
    made = write_run(root / planned.protocol, returns, agent=agent, task=task, oracle=oracle, seed=seed)
    results.add(planned, from_folder(made, planned.command))


def test_tables_figures_and_what_is_missing(tmp_path: Path) -> None:
    configured = settings(tmp_path, part(seeds=[0, 1, 2], **PLAIN), part(protocol="later", **PLAIN))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        _, agent, _, seed = planned.name
        if planned.protocol == "tiny" and (agent, seed) != ("zpg", 2):
            add(results, planned, HEIGHTS[agent] + 4 * (seed - 1), tmp_path / "made")
    readme = tmp_path / "README.md"
    readme.write_text(
        "a\n<!-- results: tiny returns -->\nold\n<!-- end -->\nb\n<!-- results: tiny figure -->\n<!-- end -->\n"
    )
    write(configured)

    page = (tmp_path / "results/README.md").read_text()
    assert "16 of 18 runs are there." in page
    assert "| walker_walk | irrational | 3 of 3 | 3 of 3 | 2 of 3 |" in page
    assert "None of the 6 runs is there yet." in page
    final = re.search(r"\| walker_walk \| \*\*800\.0 \[([\d.]+), ([\d.]+)\]\*\* \| 10\.0 \[", page)
    assert final is not None
    assert float(final[1]) < 800 < float(final[2])
    assert (
        "Above `random`, interval above interval: every agent on every task, except zpg (cheetah_run, walker_walk)."
        in page
    )
    assert "| irrational | ncrs | 6 | 10 | 640 (64) | 640,000 (64,000) | 320 (32) | 320 (32) |" in page
    assert "| walker_walk | 0.5 | 0.5 | 0.5 |" in page  # minutes: 10 iterations of 3 seconds
    assert "16 runs took 0.1 hours by the clock" in page
    assert (
        "    python -m pbrl.train -m agent=ncrs,random env=cheetah_run,walker_walk oracle=irrational seed=0,1,2" in page
    )
    assert (tmp_path / "results/tiny.png").read_bytes().startswith(b"\x89PNG")

    text = readme.read_text()
    assert text.startswith("a\n<!-- results: tiny returns -->\nFinal return: ")
    assert "\nold\n" not in text
    assert final[0] in text
    assert "](results/tiny.png)" in text
    assert "](tiny.png)" in page

    before = {path: path.read_bytes() for path in [readme, *(tmp_path / "results").iterdir()]}
    write(configured)
    assert before == {path: path.read_bytes() for path in before}  # the same runs, the same bytes


def test_minutes_are_those_of_the_fastest_run(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    for planned in plan(settings(tmp_path, part(seeds=[0, 1, 2], **PLAIN))):
        add(results, planned, 10, tmp_path / "made")
    for run in results.every():
        run.recorded.metrics["seconds"] *= 4 if run.recorded.seed == 1 else 20  # a busy machine
    assert minutes(list(results.every())).rows == [[task, "2.0", "2.0", "2.0"] for task in sorted(TASKS)]


def test_what_the_runs_say_of_the_papers_claim(tmp_path: Path) -> None:
    """Four tasks, one for each thing that can be said; `pes` is higher everywhere, but not the paper's."""
    heights = {  # of two seeds each
        "walker_walk": {"ncrs": (90, 92), "zpg": (20, 21), "dpo": (30, 31), "ppo_rlhf": (40, 41)},
        "cheetah_run": {"ncrs": (39, 40), "zpg": (20, 21), "dpo": (30, 31), "ppo_rlhf": (35, 50)},
        "hopper_stand": {"ncrs": (30, 31), "zpg": (90, 91), "dpo": (30, 31), "ppo_rlhf": (40, 41)},
        "walker_run": {"ncrs": (30, 31), "zpg": (10, 11), "dpo": (30, 31), "ppo_rlhf": (80,)},
    }
    agents = ["ncrs", "zpg", "dpo", "ppo_rlhf", "pes"]
    configured = settings(tmp_path, part(**{**PLAIN, "tasks": list(heights), "agents": agents, "seeds": [0, 1]}))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        task, agent, _, seed = planned.name
        several = heights[task].get(agent, (500, 501))
        if seed < len(several):
            add(results, planned, several[seed], tmp_path / "made")
    write(configured)
    assert (
        "among its four agents, the final return of NCRS is within the interval of the highest on cheetah_run "
        "(ppo_rlhf); is below the interval of the highest on hopper_stand (zpg); cannot be placed, because the highest "
        "has one seed, on walker_run (ppo_rlhf); is the highest on walker_walk."
    ) in (tmp_path / "results/README.md").read_text()


def test_tasks_on_which_nothing_was_tried_have_statistics_of_their_own(tmp_path: Path) -> None:
    """`ncrs` is higher on cheetah_run, on which it was made, and lower on walker_walk."""
    heights = {"cheetah_run": {"ncrs": 900, "zpg": 100}, "walker_walk": {"ncrs": 100, "zpg": 300}}
    configured = settings(tmp_path, part(**{**PLAIN, "agents": ["ncrs", "zpg"], "seeds": [0, 1]}))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        add(results, planned, heights[planned.name[0]][planned.name[1]], tmp_path / "made")

    def found(tried_on: Sequence[str]) -> list[str]:
        write({**configured, "tried_on": tried_on})
        page = (tmp_path / "results/README.md").read_text()
        assert page.count(pages.UNTRIED) == page.count("interquartile mean |") - 1
        return re.findall(r"(\w+) has the highest interquartile mean over (\d) task", page)

    assert found(["cheetah_run"]) == [("ncrs", "2"), ("zpg", "1")]
    assert found([]) == found(TASKS) == [("ncrs", "2")]  # nothing to set apart


def test_a_yardstick_is_marked_divides_and_is_not_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: set[str] = set()

    def notes(runs: Sequence[RecordedRun], _: str) -> list[str]:
        noted.update(run.agent for run in runs)
        return []

    monkeypatch.setattr(pages, "unequal_budgets", notes)
    parts = part(seeds=[0, 1], **{**PLAIN, "agents": ["ncrs", "sac_true"]})
    configured = settings(tmp_path, parts, yardstick={"names": ["absent", "sac_true"], "steps": [640_000]})
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        add(results, planned, {"ncrs": 190.0, "sac_true": 390.0}[planned.name[1]], tmp_path / "made")
    assert all(Results(tmp_path / "results").find(planned) is not None for planned in plan(configured))
    write(configured)
    page = (tmp_path / "results/README.md").read_text()
    assert "8 of 8 runs are there." in page
    assert "| task | ncrs | sac_true (yardstick) |" in page
    # evaluated after the last iteration to be 10 better
    assert re.search(r"\| walker_walk \| ncrs \| 200\.0 \[.*?\] \| 0\.50 \[.*?\] \| 2 \|", page)
    assert re.search(r"\| walker_walk \| sac_true \(yardstick\) \| 400\.0 \[.*?\] \| 1\.00 \[.*?\] \| 2 \|", page)
    assert "| walker_walk | 0.5 | 0.5 |" in page  # minutes, of both
    assert "Return against environment steps" in page
    assert noted == {"ncrs"}  # a yardstick asks nothing, which is no unequal budget
    assert "interquartile mean" not in page  # of a single agent
    assert Results(tmp_path / "results").find(plan(configured)[-1]).recorded.agent == "sac_true (yardstick)"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("single", "sentence"),
    [
        ([], "every agent on every task, except zpg (cheetah_run, walker_walk)."),
        (
            ["ncrs"],
            "every agent on every task with several seeds, except zpg (cheetah_run, walker_walk). One seed, which "
            "decides nothing: ncrs (cheetah_run, walker_walk).",
        ),
        (["random"], "With one seed each, no agent can be told from `random`."),
    ],
)
def test_one_seed_is_not_told_from_random(single: list[str], sentence: str, tmp_path: Path) -> None:
    configured = settings(tmp_path, part(seeds=[0, 1, 2], **PLAIN))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        _, agent, _, seed = planned.name
        if agent not in single or seed == 0:
            add(results, planned, HEIGHTS[agent] + 4 * (seed - 1), tmp_path / "made")
    write(configured)
    assert sentence in (tmp_path / "results/README.md").read_text()


def test_seeds_that_are_all_above_random_are_told_from_those_that_are_not(tmp_path: Path) -> None:
    """Intervals of three seeds are wide: those of both agents hold random's, but only one has a seed as low."""
    heights = {"random": (10, 12, 14), "ncrs": (14.1, 40, 90), "zpg": (13.9, 40, 90)}
    configured = settings(tmp_path, part(seeds=[0, 1, 2], **{**PLAIN, "tasks": ["cheetah_run"]}))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        _, agent, _, seed = planned.name
        add(results, planned, heights[agent][seed], tmp_path / "made")
    write(configured)
    assert (
        "every agent on every task, except ncrs (cheetah_run); zpg (cheetah_run). Among these exceptions, every seed "
        "is above every one of random's: ncrs (cheetah_run).\n"
    ) in (tmp_path / "results/README.md").read_text()


def test_several_teachers_are_a_matrix(tmp_path: Path) -> None:
    teachers = ["rational", "skip"]
    how = {**PLAIN, "tasks": ["cheetah_run"], "agents": ["ncrs", "zpg"], "teachers": teachers, "seeds": [0, 1]}
    configured = settings(tmp_path, part(**how))
    results = Results(tmp_path / "results")
    for planned in plan(configured):
        height = {("ncrs", "rational"): 400, ("ncrs", "skip"): 100, ("zpg", "skip"): 300}.get(planned.name[1:3])
        if height is not None:  # zpg has no run with the rational teacher
            add(results, planned, height, tmp_path / "made")
    write(configured)
    page = (tmp_path / "results/README.md").read_text()
    assert "| agent | rational | skip |" in page
    assert "| ncrs | 1 | 0.25 [0.25, 0.25] |" in page
    final = page.partition("last tenth of return_mean:")[2].partition("\n\nBold")[0]
    assert "| task | teacher | ncrs | zpg |" in final
    assert re.search(r"\| cheetah_run \| rational \| 400\.0 \[.*?\] \| - \|", final)
    assert re.search(r"\| cheetah_run \| skip \| 100\.0 \[.*?\] \| \*\*300\.0 \[.*?\]\*\* \|", final)
    assert "interquartile mean" not in page  # over tasks: a teacher is none


def test_runs_that_are_not_as_the_protocol_has_them_now_are_told_of(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    for planned in plan(settings(tmp_path, part(seeds=[0, 1], **{**PLAIN, "agents": ["ncrs"]}))):
        add(results, planned, 100.0, tmp_path / "made")
    now = {**PLAIN, "agents": ["ncrs"], "overrides": ["agent.direction=sphere"], "tasks": ["walker_walk"]}
    write(settings(tmp_path, part(**now)))
    page = (tmp_path / "results/README.md").read_text()
    assert "**walker_walk, ncrs, irrational, 0 has other settings than the protocol has now.**" in page
    assert "**cheetah_run, ncrs, irrational, 1 is no longer in the protocol.**" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- results: tiny -->\n<!-- end -->\n",
            "there are no results called 'tiny', only tiny progress, tiny figure",
        ),
        ("<!-- results: tiny progress -->\nno end\n", "every <!-- results: NAME --> needs an <!-- end --> after it"),
        ("<!-- results: tiny progress --> <!-- end -->\n", "on lines of their own"),
    ],
)
def test_markers_that_make_no_sense_are_refused(text: str, message: str) -> None:
    blocks = {f"tiny {name}": "" for name in BLOCKS}
    with pytest.raises(ConfigurationError, match=message):
        replace_marked(text, blocks, Path("README.md"), Path("results"))
