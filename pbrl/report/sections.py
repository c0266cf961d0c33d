"""The sections of a report as HTML. Their figures and tables are written to files at the same time."""

from __future__ import annotations

import math
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.report import chart, figures, page, tables
from pbrl.report.agreement import agreement
from pbrl.report.curves import AXES, Plot, draw, plot
from pbrl.report.files import Output, file_name
from pbrl.report.ledger import unequal_budgets, unequal_lengths
from pbrl.report.provenance import commands, compare_versions, disagreements
from pbrl.report.runs import RecordedRun
from pbrl.report.tables import RATIONAL, Bootstrap, agents_of, names, select, shared_tasks

FINAL = "Final return: mean over seeds of the last tenth of return_mean"
EVALUATED = "Evaluated return: mean over seeds of the last eval_return"
LARGEST_VIDEO = 4_000_000  # bytes, in the page
RETURNS_NOTE = "Bold: the highest mean of a task. ≈: the mean is within the interval of the highest."


def curves(runs: Sequence[RecordedRun], teacher: str, looks: figures.Looks, output: Output, smooth: int) -> str:
    """The paper's figure, against each kind of cost; evaluations; how often the teacher was wrong, and where."""
    drawn = {}

    def show(name: str, shown: Plot, caption: str, *, title: str, notes: Sequence[str] = ()) -> str:
        title = f"{title}, {teacher} teacher"
        html = output.figure(name, draw(shown, looks, title=title, notes=notes), caption)
        png = (output.folder / "figures" / f"{name}.png").read_bytes()
        return page.with_chart(html, chart.chart(shown, looks, png=png, name=name))

    counts = Counter((run.task, run.agent) for run in runs).values()
    seeds = " to ".join(dict.fromkeys((str(min(counts)), str(max(counts)))))
    smoothed = f" of the last {smooth} iterations" if smooth > 1 else ""
    spread = f"over {seeds} seeds; shaded, its 95 % interval (none for one seed)"
    for axis, label in AXES.items():
        asked = agents_of(runs)
        drawn_runs = asked if axis == "pairs_asked" else runs  # yardsticks ask nothing
        if not drawn_runs:
            continue
        notes = unequal_budgets(asked, axis)
        title = f"Return against {label}"
        caption = f"Mean of return_mean{smoothed} {spread}; dotted, where only some seeds have got that far."
        if axis == "seconds":
            caption += " Time depends on the machine, on threads and on what else ran there; evaluation is not counted."
        name = file_name("curves", axis, teacher)
        shown = plot(drawn_runs, axis, "return_mean", smooth)
        drawn["seconds" if axis == "seconds" else label] = show(name, shown, caption, title=title, notes=notes)
    if evaluated := [run for run in runs if not math.isnan(run.eval_return)]:
        caption = f"Mean of eval_return, of mean actions, {spread}."
        shown = plot(evaluated, "iteration", "eval_return", smooth)
        drawn["evaluation"] = show(file_name("evaluation", teacher), shown, caption, title="Evaluated return")
    if answered := [run for run in runs if np.isfinite(run.metrics.get("teacher_error_rate", np.nan)).any()]:
        caption = (
            f"Share{smoothed} of the answers that contradict the true order of the two clips, mean {spread}. "
            "Who compares trajectories that differ little gets more wrong answers."
        )
        shown = plot(answered, "iteration", "teacher_error_rate", smooth)
        title = "How often the teacher is wrong"
        drawn["teacher's errors"] = show(file_name("teacher", teacher), shown, caption, title=title)
    if (shown := agreement(runs)).curves:
        caption = (
            "Share of the answers that agree with the true order of the two clips, by how far apart their true returns "
            f"are, in bins that hold as many comparisons each; mean {spread}. From the runs' preference logs."
        )
        title = "Where the teacher is right"
        drawn["teacher's agreement"] = show(file_name("agreement", teacher), shown, caption, title=title)
    legend = chart.legend(looks, names(runs, "agent"))
    return f"<div>{legend}{page.tabs(file_name('curves', teacher), drawn)}</div>\n"  # the legend stays in view in it


def videos(runs: Sequence[RecordedRun]) -> str:
    """A film of each agent on each task: of the first run that has one."""
    films: dict[tuple[str, str], RecordedRun] = {}
    for run in runs:
        if run.video is not None and run.video.stat().st_size <= LARGEST_VIDEO:
            films.setdefault((run.task, run.agent), run)
    if not films:
        return ""
    shown = [(run.video, f"{task}: {agent}, seed {run.seed}") for (task, agent), run in films.items()]
    return "<h3>What was learnt</h3>\n" + page.films([(path, words) for path, words in shown if path is not None])


def statistics(
    runs: Sequence[RecordedRun], teacher: str, looks: figures.Looks, bootstrap: Bootstrap, output: Output
) -> str:
    """Aggregates, profiles and probabilities of improvement over tasks."""
    tasks = shared_tasks(runs)
    if not tasks:
        output.say(nothing := "No task has runs of all agents: there are no statistics over tasks.")
        return page.paragraph(nothing, "warning")
    budgets = unequal_lengths(runs) + unequal_budgets(runs, "iteration")
    notes = list(budgets)
    if apart := [task for task in names(runs, "task") if task not in tasks]:
        notes.append(f"Over {', '.join(tasks)} only: some agent has no run of {', '.join(apart)}.")

    def words(title: str) -> dict[str, Any]:
        return {"notes": notes, "title": f"{title}, {teacher} teacher"}

    html = "".join(page.paragraph(note, "warning") for note in notes if note not in budgets)  # which come first
    html += page.paragraph(
        "Scores are final returns divided by the task's maximum (1000, or env.steps). Intervals are 95 %, from a boot"
        f"strap stratified by task ({bootstrap.resamples} resamples, seed {bootstrap.seed}), widened for few seeds.",
        "small",
    )
    table = tables.aggregates(runs, teacher, bootstrap)
    html += output.table(table, teacher, show=True)
    for note in notes:
        output.say(note)
    html += output.figure(
        file_name("aggregates", teacher),
        figures.aggregates(table, looks, **words("Scores over all tasks")),
        "Interquartile mean: of the middle half of all runs. Optimality gap: how far runs stay below the maximum.",
    )
    html += output.figure(
        file_name("profiles", teacher),
        figures.profiles(runs, looks, bootstrap, **words("Performance profiles")),
        "Performance profiles: the share of runs that score more than τ, shaded pointwise.",
    )
    table = tables.improvement(runs, teacher, bootstrap)
    html += output.table(table, teacher)
    if table.rows:
        html += output.figure(
            file_name("improvement", teacher),
            figures.improvement(table, looks, **words("Probability of improvement")),
            "How probably a run of the first agent beats a run of the second on a random task. Where no runs overlap, "
            "nothing varies: an interval without width then says only that these few runs do not overlap.",
        )
    return html


def teacher_section(
    runs: Sequence[RecordedRun],
    teacher: str,
    looks: figures.Looks,
    bootstrap: Bootstrap,
    output: Output,
    threshold: float,
    smooth: int,
    yardstick: Sequence[RecordedRun] = (),
) -> str:
    """Everything about the runs with one teacher; `yardstick`: the runs to normalise by, if any."""
    asked = agents_of(runs)
    budgets = unequal_lengths(asked) + unequal_budgets(asked, "iteration")
    html = "".join(page.paragraph(note, "warning") for note in budgets)
    html += curves(runs, teacher, looks, output, smooth)
    html += videos(runs)
    html += output.table(tables.returns(runs, teacher, "final_return", FINAL, bootstrap), teacher, show=True)
    html += output.table(tables.returns(runs, teacher, "eval_return", EVALUATED, bootstrap), teacher)
    html += page.paragraph(RETURNS_NOTE, "small")
    if yardstick:
        html += output.table(tables.normalised(runs, teacher, yardstick, bootstrap), teacher, show=True)
    if any(not run.finished for run in runs):
        html += page.paragraph("*: with unfinished runs, as far as they are recorded.", "small")
    html += output.table(tables.speed(runs, teacher, threshold, bootstrap), teacher)
    html += statistics(agents_of(runs), teacher, looks, bootstrap, output)
    html += "<h3>The commands behind these runs</h3>\n" + page.listing(commands(run.settings for run in runs))
    if differing := disagreements([(run.agent, run.settings) for run in runs]):
        html += "<h3>Settings in which they differ</h3>\n" + page.listing(
            [
                f"{setting}: " + "; ".join(f"{value} ({', '.join(agents)})" for value, agents in values.items())
                for setting, values in differing.items()
            ]
        )
    return html


def robustness_section(runs: Sequence[RecordedRun], bootstrap: Bootstrap, output: Output) -> str:
    """How much agents lose with other teachers than the rational one."""
    if RATIONAL not in names(runs, "teacher") or len(names(runs, "teacher")) < 2:
        return page.paragraph("This needs runs with the rational teacher and with another one: oracle=rational,...")
    table = tables.robustness(runs, bootstrap)
    caption = (
        "An agent's mean score over tasks, divided by its mean score with the rational teacher, on the tasks and "
        "seeds that it has runs of with both. Intervals are of seeds: both runs of a seed begin alike."
    )
    return output.figure("robustness", figures.robustness(table), caption) + output.table(table, show=True)


def made_section(runs: Sequence[RecordedRun]) -> str:
    """How to repeat the report and its runs, and with which versions they were made."""
    html = page.listing([shlex.join(["python", "-m", "pbrl.report", *sys.argv[1:]])])
    html += page.paragraph("The commands that repeat all runs:")
    html += page.listing(commands(run.settings for run in runs))
    html += page.paragraph("Versions of this report, and those of the runs with the number of runs:")
    return html + page.listing(compare_versions([run.folder for run in runs]))


def remarks(runs: Sequence[RecordedRun], left_out: Mapping[Path, str]) -> list[str]:
    """Warnings that come first: unfinished runs, folders left out, runs of one name with different settings."""
    found = [
        f"Unfinished, used as far as it is recorded: {run.folder} "
        f"({run.iterations} of {run.settings['iterations']} iterations)."
        for run in runs
        if not run.finished
    ]
    found += [f"Left out: {folder}: {reason}" for folder, reason in left_out.items()]
    mixed: dict[tuple[str, str], str] = {}
    for agent, task, teacher in sorted({(run.agent, run.task, run.teacher) for run in runs}):
        group = select(runs, agent=agent, task=task, teacher=teacher)
        for setting, values in disagreements([(str(run.folder), run.settings) for run in group]).items():
            each = "; ".join(f"{value} in {folders[0]}" for value, folders in values.items())
            mixed.setdefault((agent, setting), f"{setting} ({each})")
    found += [f"Runs called {agent} differ in {what}: give them different names." for (agent, _), what in mixed.items()]
    return found
