"""A user's runs beside the reference runs that come with pbrl: on the same task, with the same teacher and budget.

Runs are cut to the same number of iterations. What cannot be compared is refused, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pbrl.report import figures, page, tables
from pbrl.report.curves import draw_curves
from pbrl.report.figures import REFERENCE
from pbrl.report.files import Output, file_name
from pbrl.report.ledger import unequal_budgets
from pbrl.report.provenance import leaves
from pbrl.report.runs import RecordedRun
from pbrl.report.sections import FINAL, RETURNS_NOTE
from pbrl.report.shipped import DamagedFileError, ShippedRun, files, read_runs
from pbrl.report.stats import Benchmark
from pbrl.report.tables import Bootstrap, names, scores, select, shown
from pbrl.run.settings import digest
from pbrl.types import Float64

RESULTS = Path(__file__).parents[2] / "results"
SAME = ("trajectories", "pairs", "bits", "normalise_observations", "env", "oracle")  # settings that must be the same


class NoResultsError(ValueError):
    """There are no reference results; the message says where they come from."""


def find_reference(folder: Path) -> tuple[list[ShippedRun], list[str]]:
    """The reference runs in a folder, each once, and which of the files there cannot be read."""
    found: dict[tuple[str, int], ShippedRun] = {}
    problems = []
    for path in files(folder):
        try:
            found |= {run.identity: run for run in read_runs(path)}
        except (DamagedFileError, OSError) as error:
            problems.append(f"Left out: {error}")
    if not found:
        raise NoResultsError(
            "; ".join([f"there are no reference results in {folder}", *problems])
            + ": a clone of pbrl's repository has them, an installed package has not; --results names another folder"
        )
    return list(found.values()), problems


def reference_section(
    runs: Sequence[RecordedRun], reference: Sequence[ShippedRun], bootstrap: Bootstrap, output: Output
) -> tuple[str, list[str], list[str]]:
    """Runs and reference side by side as HTML, sentences on where agents stand, and what was refused."""
    compared, refused = side_by_side(runs, tables.agents_of(each.recorded for each in reference))
    html, sentences = "", repeated(runs, reference)
    for (teacher, budget), group in compared.items():
        notes = unequal_budgets(group, "iteration")
        figure = draw_curves(
            group,
            "iteration",
            figures.styles(names(group, "agent")),
            title=f"Beside the reference, {teacher} teacher",
            notes=notes,
        )
        caption = f"Mean of return_mean over seeds; shaded, its 95 % interval. Budget: {budget}."
        html += output.figure(file_name("reference", teacher, budget), figure, caption)
        table = tables.returns(group, teacher, "final_return", f"{FINAL}, beside the reference", bootstrap)
        html += output.table(dataclasses.replace(table, name="reference"), file_name(teacher, budget), show=True)
        html += page.paragraph(RETURNS_NOTE, "small")
        sentences += [standing(group, agent, bootstrap) for agent in names(group, "agent") if not is_reference(agent)]
    html = "".join(page.paragraph(sentence) for sentence in sentences) + html
    return html or page.paragraph("No run can be compared with the reference."), sentences, refused


def side_by_side(
    runs: Sequence[RecordedRun], reference: Sequence[RecordedRun]
) -> tuple[dict[tuple[str, str], list[RecordedRun]], list[str]]:
    """By teacher and budget: the runs that can be compared beside the reference's, and sentences on the others."""
    groups: dict[tuple[str, str, str], list[RecordedRun]] = {}
    refused: dict[str, None] = {}
    for run in runs:
        if why := refusal(run, reference):
            refused[f"{run.agent} on {run.task} is not compared with the reference: {why}."] = None
        else:
            groups.setdefault((run.teacher, budget_of(run), run.task), []).append(run)
    compared: dict[tuple[str, str], list[RecordedRun]] = {}
    for (teacher, budget, _), ours in sorted(groups.items()):
        theirs = [each for each in reference if not differences(ours[0], each)]
        compared.setdefault((teacher, budget), []).extend(equally_long(ours, theirs))
    return compared, list(refused)


def refusal(run: RecordedRun, reference: Sequence[RecordedRun]) -> str:
    """Why a run cannot be compared with any reference run; empty if it can."""
    same_task = [each for each in reference if each.task == run.task]
    if not same_task:
        return f"it has no runs of this task, only of {', '.join(names(reference, 'task'))}"
    nearest = min((differences(run, each) for each in same_task), key=len)
    return ", ".join(f"{path} is {ours} here and {theirs} there" for path, (ours, theirs) in nearest.items())


def differences(one: RecordedRun, other: RecordedRun) -> dict[str, tuple[str, str]]:
    """The settings of task, teacher and budget in which two runs differ, with both values."""
    ours, theirs = must_match(one.settings), must_match(other.settings)
    both = {path: (ours.get(path, "null"), theirs.get(path, "null")) for path in {**ours, **theirs}}
    return {path: values for path, values in both.items() if values[0] != values[1]}


def must_match(settings: Mapping[str, Any]) -> dict[str, str]:
    """Task, teacher and budget of a run, setting by setting."""
    every = {key: settings.get(key) for key in SAME}
    every["bits"] = settings.get("bits") or settings.get("pairs")  # null: as many as pairs
    return leaves(every)


def budget_of(run: RecordedRun) -> str:
    """The budget of a run in words."""
    every = must_match(run.settings)
    return ", ".join(f"{key} {value}" for key, value in every.items() if key in SAME or key == "env.steps")


def equally_long(ours: Sequence[RecordedRun], theirs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """All runs cut to one length; of reference runs of several lengths, the shortest that are long enough."""
    shortest = min(run.iterations for run in ours)
    lengths = sorted({run.iterations for run in theirs})
    length = next((each for each in lengths if each >= shortest), lengths[-1])
    theirs = [dataclasses.replace(run, agent=run.agent + REFERENCE) for run in theirs if run.iterations == length]
    every = [cut(run, min(shortest, length)) for run in [*ours, *theirs]]
    return [run for run in every if np.isfinite(run.metrics["return_mean"]).any()]


def cut(run: RecordedRun, iterations: int) -> RecordedRun:
    """The first iterations of a run."""
    keep = run.metrics["iteration"] < iterations
    metrics = {name: values[keep] for name, values in run.metrics.items()}
    return dataclasses.replace(run, metrics=metrics, settings={**run.settings, "iterations": iterations})


def is_reference(agent: str) -> bool:
    """Whether this is the name of an agent of the reference."""
    return agent.endswith(REFERENCE)


def standing(group: Sequence[RecordedRun], agent: str, bootstrap: Bootstrap) -> str:
    """One sentence on where an agent stands among those of the reference, on the tasks that it shares with them."""
    ours = select(group, agent=agent)
    tasks = names(ours, "task")
    lengths = sorted({run.iterations for run in ours})
    places: dict[str, list[str]] = {"above": [], "below": [], "not told apart from": []}
    for other in filter(is_reference, names(group, "agent")):
        theirs = select(group, agent=other)
        if all(task in names(theirs, "task") for task in tasks):
            gap = bootstrap(mean_gap, scores(ours, tasks), scores(theirs, tasks))
            place = "above" if gap.low > 0 else "below" if gap.high < 0 else "not told apart from"
            places[place].append(other.removesuffix(REFERENCE))
    score = shown(bootstrap(mean_score, scores(ours, tasks)))
    where = "; ".join(f"{place} {', '.join(others)}" for place, others in places.items() if others)
    after = " to ".join(dict.fromkeys((str(lengths[0]), str(lengths[-1]))))
    return (
        f"{agent} beside the reference, {ours[0].teacher} teacher, after {after} iterations of {', '.join(tasks)}: "
        f"mean score {score}; {where or 'no agent of the reference has runs of all these tasks'}."
    )


def mean_score(benchmark: Benchmark) -> Float64:
    """The mean over tasks of the mean over runs."""
    return np.asarray(np.mean([task.mean(axis=-1) for task in benchmark], axis=0))


def mean_gap(first: Benchmark, second: Benchmark) -> Float64:
    """By how much the mean score of the first is higher."""
    return mean_score(first) - mean_score(second)


def repeated(runs: Sequence[RecordedRun], reference: Sequence[ShippedRun]) -> list[str]:
    """Of runs with the settings and the seed of a reference run: whether their returns are the same, bit for bit."""
    by_digest = {run.identity[0]: run.recorded for run in reference}
    equal: dict[str, int] = {}
    different = []
    for run in runs:
        if (other := by_digest.get(digest(run.settings))) is None:
            continue
        both = min(len(each.metrics["return_mean"]) for each in (run, other))
        ours, theirs = (each.metrics["return_mean"][:both] for each in (run, other))
        unlike = np.flatnonzero(~np.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True))
        if len(unlike):
            first = int(run.metrics["iteration"][unlike[0]])
            different.append(
                f"{run.folder} has the settings of a reference run, but other returns from iteration {first} on: "
                "other versions of pbrl or of what it uses?"
            )
        else:
            equal[run.agent] = equal.get(run.agent, 0) + 1
    same = [
        f"{count} {'run' if count == 1 else 'runs'} of {agent}: bit for bit the reference."
        for agent, count in equal.items()
    ]
    return same + different
