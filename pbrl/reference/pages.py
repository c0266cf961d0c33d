"""The pages made of the reference runs: results/README.md with its figures, and tables in other pages.

In any page that conf/reference.yaml names, what stands between `<!-- results: short returns -->` and `<!-- end -->`
is replaced. Nothing in them is typed by hand.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pbrl.reference.protocol import PlannedRun
from pbrl.reference.runner import Results
from pbrl.report import figures, tables
from pbrl.report.curves import AXES, draw_curves
from pbrl.report.ledger import ledger, unequal_budgets
from pbrl.report.provenance import commands
from pbrl.report.runs import RecordedRun
from pbrl.report.sections import EVALUATED, FINAL, RETURNS_NOTE
from pbrl.report.shipped import ShippedRun
from pbrl.report.stats import Estimate
from pbrl.report.tables import RATIONAL, Bootstrap, Table, headline, names, select
from pbrl.run.files import write_atomically
from pbrl.run.settings import ConfigurationError

BLOCKS = (
    "progress",
    "figure",
    "returns",
    "claim",
    "evaluations",
    "yardstick",
    "statistics",
    "untried",
    "cost",
    "commands",
)
PAPER_AGENTS = ("ncrs", "zpg", "dpo", "ppo_rlhf")  # the agents of the paper's figure
MARKED = re.compile(r"(?P<begin><!-- results: (?P<name>[^>\n]*) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)
PICTURE = re.compile(r"\]\((?=[\w.-]+\.png\))")
INTRODUCTION = """# Reference results

Made by `python -m pbrl.reference write` from the files beside it: nothing is typed by hand.
`python -m pbrl.reference run` makes the runs that are missing and adds them; `python -m pbrl.report runs/ --reference`
draws your own runs beside these. The protocols are in [conf/reference.yaml](../conf/reference.yaml). What makes some
tasks harder than others is in [docs/starts.md](../docs/starts.md).

A run's command repeats it bit for bit on a processor of the same kind; on another the last bits of some sums differ,
and then runs part.
"""
UNTRIED = "The same over the tasks on which nothing was tried while the defaults of our own agents were chosen."
INTERPOLATED = "Between two evaluations a return is on the line through them. The yardstick's mean counts as known."
INTERVALS = "Intervals are 95 %, from a bootstrap stratified by task, widened for few seeds (docs/report.md)."


@dataclass(frozen=True)
class Yardstick:
    """What returns are divided by, in protocols that have runs of it."""

    names: Sequence[str]  # a table for each of them that has runs
    steps: Sequence[int]  # returns after so many steps


def write(
    runs: Sequence[PlannedRun],  # of all protocols
    results: Results,
    pages: Iterable[Path],
    bootstrap: Bootstrap,
    yardstick: Yardstick,
    tried_on: Sequence[str],  # tasks that defaults were tried on
) -> None:
    """Write results/README.md, its figures, and the tables of other pages."""
    blocks: dict[str, str] = {}
    text = INTRODUCTION
    for protocol in dict.fromkeys(run.protocol for run in runs):
        planned = [run for run in runs if run.protocol == protocol]
        shipped = list(results.runs.get(protocol, {}).values())
        made = {"progress": progress(planned, shipped)}
        if shipped:
            made |= findings(protocol, shipped, results.folder, bootstrap, yardstick, tried_on)
        text += f"\n## {protocol}\n\n" + "\n".join(made.values())
        blocks |= {f"{protocol} {name}": made.get(name, made["progress"]) for name in BLOCKS}
    write_atomically(results.folder / "README.md", text)
    for page in pages:
        if page.exists():
            write_atomically(page, replace_marked(page.read_text(), blocks, page, results.folder))


def replace_marked(text: str, blocks: Mapping[str, str], page: Path, folder: Path) -> str:
    """The text of a page with new blocks between its markers. `folder` is where figures are."""
    if text.count("<!-- results:") != len(MARKED.findall(text)):
        raise ConfigurationError(
            f"{page}: every <!-- results: NAME --> needs an <!-- end --> after it, on lines of their own"
        )
    to_folder = os.path.relpath(folder, page.parent)

    def replace(found: re.Match[str]) -> str:
        if (name := found["name"]) not in blocks:
            raise ConfigurationError(f"{page}: there are no results called {name!r}, only {', '.join(blocks)}")
        return found["begin"] + PICTURE.sub(f"]({to_folder}/", blocks[name]) + found["end"]

    return MARKED.sub(replace, text)


def findings(
    protocol: str,
    shipped: Sequence[ShippedRun],
    folder: Path,
    bootstrap: Bootstrap,
    yardstick: Yardstick,
    tried_on: Sequence[str],
) -> dict[str, str]:
    """All there is to say about the runs of a protocol, by name; its figure is written to the folder."""
    runs = [each.recorded for each in shipped]
    several = len(names(runs, "teacher")) > 1
    blocks = {"figure": (robustness_figure if several else curves_figure)(protocol, runs, folder, bootstrap)}
    blocks["returns"] = returns(runs, "final_return", FINAL, bootstrap) + f"\n{RETURNS_NOTE} {INTERVALS}\n"
    if "random" in names(runs, "agent"):
        blocks["returns"] += f"\n{against_random(runs, bootstrap)}\n"
    if not several and {*PAPER_AGENTS} <= {*names(runs, "agent")}:
        blocks["claim"] = f"{claim(runs, bootstrap)}\n"
    blocks["evaluations"] = returns(runs, "eval_return", EVALUATED, bootstrap)
    measured = [[each.recorded for each in shipped if each.name[1] == name] for name in yardstick.names]
    divided = [tables.at_steps(runs, known, yardstick.steps, bootstrap) for known in measured if known]
    if divided:
        blocks["yardstick"] = "\n".join(map(markdown, divided)) + f"\n{INTERPOLATED}\n"
    if not several and len(names(ranked := tables.agents_of(runs), "agent")) > 1:
        blocks["statistics"] = statistics(ranked, bootstrap)
        untried = [run for run in ranked if run.task not in tried_on]
        if 0 < len(untried) < len(ranked):
            blocks["untried"] = f"{UNTRIED}\n\n{statistics(untried, bootstrap)}"
    blocks["cost"] = f"{markdown(ledger(runs))}\n{markdown(minutes(shipped))}\n{hours(shipped)}\n"
    blocks["commands"] = (
        "\n".join(
            [
                "The commands that repeat these runs:\n",
                listing(commands(run.settings for run in runs)),
                versions(shipped),
            ]
        )
        + f" Each run's own command and versions are in `{protocol}.parquet`.\n"
    )
    return blocks


def progress(planned: Sequence[PlannedRun], shipped: Sequence[ShippedRun]) -> str:
    """What is there and what is missing, and what is not as the protocol has it now."""
    there = {each.name: each for each in shipped}
    done = sum(run.name in there for run in planned)
    if not shipped:
        return f"None of the {len(planned)} runs is there yet.\n"
    text = f"{done} of {len(planned)} runs are there.\n"
    if done < len(planned):
        agents = list(dict.fromkeys(run.name[1] for run in planned))
        table = Table("seeds", "Seeds that are there", ["task", "teacher", *agents], keys=2)
        for task, teacher in dict.fromkeys((run.name[0], run.name[2]) for run in planned):
            cells = []
            for agent in agents:
                wanted = [run.name in there for run in planned if run.name[:3] == (task, agent, teacher)]
                cells.append(f"{sum(wanted)} of {len(wanted)}" if wanted else "-")
            table.rows.append([task, teacher, *cells])
        text += f"\n{markdown(table)}"
    wanted_now = {run.name: run.identity for run in planned}
    for name, each in sorted(there.items()):
        if wanted_now.get(name) != each.identity:
            why = (
                "has other settings than the protocol has now" if name in wanted_now else "is no longer in the protocol"
            )
            text += f"\n**{', '.join(map(str, name))} {why}.**\n"
    return text


def returns(runs: Sequence[RecordedRun], quantity: str, title: str, bootstrap: Bootstrap) -> str:
    """Tasks by agents; with several teachers, tasks and teachers by agents."""
    made = {
        teacher: tables.returns(
            select(runs, teacher=teacher), teacher, quantity, f"{title}, {teacher} teacher", bootstrap
        )
        for teacher in names(runs, "teacher")
    }
    if len(made) == 1:
        return markdown(*made.values())
    whole = Table(quantity, title, ["task", "teacher", *names(runs, "agent")], keys=2)
    for teacher, table in made.items():
        for i, row in enumerate(table.rows):
            cells = {"teacher": teacher, **dict(zip(table.columns, row, strict=True))}
            best = [table.columns[column] for where, column in table.best if where == i]
            whole.best.update((len(whole.rows), whole.columns.index(agent)) for agent in best)
            whole.rows.append([cells.get(column, "-") for column in whole.columns])
    return markdown(whole)


def statistics(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> str:
    """Interquartile mean, optimality gap and probability of improvement over the shared tasks, with one teacher."""
    (teacher,) = names(runs, "teacher")
    aggregates = tables.aggregates(runs, teacher, bootstrap)
    if not aggregates.rows:
        return "No task has runs of all agents yet.\n"
    only = f"Over {', '.join(tables.shared_tasks(runs))}, which all agents have runs of.\n"
    parts = [markdown(aggregates), only, markdown(tables.improvement(runs, teacher, bootstrap))]
    return "\n".join([*parts, headline(aggregates, teacher)]) + "\n"


def against_random(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> str:
    """Which agents have not been shown to be better than `random`, where, and where one seed cannot tell.

    Where only the few seeds are to blame, with every one of the agent's above every one of random's, this is said.
    """
    not_above: dict[str, list[str]] = {}
    apart: dict[str, list[str]] = {}  # those of not_above whose every seed is above
    undecided: dict[str, list[str]] = {}
    pairs = sorted({(run.agent, run.task, run.teacher) for run in runs if run.agent != "random"})
    for agent, task, teacher in pairs:
        both = [select(runs, task=task, teacher=teacher, agent=name) for name in (agent, "random")]
        ours, theirs = (final(each, bootstrap) for each in both)
        where = f"{task}, {teacher}" if len(names(runs, "teacher")) > 1 else task
        if math.isnan(ours.low) or math.isnan(theirs.high):
            undecided.setdefault(agent, []).append(where)
        elif not ours.low > theirs.high:
            not_above.setdefault(agent, []).append(where)
            if min(run.final_return for run in both[0]) > max(run.final_return for run in both[1]):
                apart.setdefault(agent, []).append(where)

    def listed(found: Mapping[str, Sequence[str]]) -> str:
        return "; ".join(f"{agent} ({', '.join(places)})" for agent, places in found.items())

    if sum(map(len, undecided.values())) == len(pairs):
        return "With one seed each, no agent can be told from `random`."
    sentence = "Above `random`, interval above interval: every agent on every task"
    sentence += " with several seeds" if undecided else ""
    sentence += f", except {listed(not_above)}." if not_above else "."
    sentence += f" Among these exceptions, every seed is above every one of random's: {listed(apart)}." if apart else ""
    return f"{sentence} One seed, which decides nothing: {listed(undecided)}." if undecided else sentence


def claim(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> str:
    """What the runs say of the paper's claim that NCRS is competitive, against the baselines that it has itself."""
    theirs = [run for run in runs if run.agent in PAPER_AGENTS]
    places: dict[str, list[str]] = {}
    for task in tables.shared_tasks(theirs):
        found = {agent: final(select(theirs, task=task, agent=agent), bootstrap) for agent in PAPER_AGENTS}
        highest = max(found, key=lambda agent: float(found[agent].value))
        if math.isnan(found[highest].low):
            place = "cannot be placed, because the highest has one seed, on"
        elif highest == "ncrs":
            place = "is the highest on"
        elif found["ncrs"].value >= found[highest].low:
            place = "is within the interval of the highest on"
        else:
            place = "is below the interval of the highest on"
        places.setdefault(place, []).append(task if highest == "ncrs" else f"{task} ({highest})")
    says = "; ".join(f"{place} {', '.join(tasks)}" for place, tasks in places.items())
    return (
        'The paper finds that NCRS "achieves competitive performance against other baselines". '
        f"Here, among its four agents, the final return of NCRS {says or 'is not known yet on any task'}."
    )


def final(runs: Sequence[RecordedRun], bootstrap: Bootstrap) -> Estimate:
    """The mean final return of some runs; nan without any."""
    if not runs:
        return Estimate(*(np.array(math.nan) for _ in range(3)))
    return bootstrap(tables.mean, [np.array([run.final_return for run in runs])])


def curves_figure(protocol: str, runs: Sequence[RecordedRun], folder: Path, _: Bootstrap) -> str:
    """The paper's figure; beside a yardstick, against environment steps."""
    (teacher,) = names(runs, "teacher")
    axis = "env_steps" if any(run.yardstick for run in runs) else "iteration"
    title = f"Return against {'iterations' if axis == 'iteration' else AXES[axis]}, {teacher} teacher"
    looks = figures.styles(names(runs, "agent"))
    drawn = draw_curves(runs, axis, looks, title=title, notes=unequal_budgets(tables.agents_of(runs), axis))
    write_atomically(folder / f"{protocol}.png", figures.render(drawn, protocol).png)
    return f"![{title}]({protocol}.png)\n\nMean over seeds of return_mean; shaded, its 95 % interval.\n"


def robustness_figure(protocol: str, runs: Sequence[RecordedRun], folder: Path, bootstrap: Bootstrap) -> str:
    """The matrix agent by teacher, drawn and as a table."""
    if RATIONAL not in names(runs, "teacher"):
        return "There is no run with the rational teacher yet, with which the others are compared.\n"
    table = tables.robustness(runs, bootstrap)
    write_atomically(folder / f"{protocol}.png", figures.render(figures.robustness(table), protocol).png)
    return f"![{table.title}]({protocol}.png)\n\n{markdown(table)}"


def minutes(shipped: Sequence[ShippedRun]) -> Table:
    """How long a run takes, without what the machine did beside it: tasks by agents."""
    runs = [each.recorded for each in shipped]
    agents = names(runs, "agent")
    table = Table("minutes", "Minutes of one core, without evaluation, of the fastest run", ["task", *agents])
    for task in names(runs, "task"):
        cells = []
        for agent in agents:
            alike = [each for each in shipped if (each.recorded.task, each.recorded.agent) == (task, agent)]
            taken = [each.seconds_per_iteration * each.recorded.iterations / 60 for each in alike]
            cells.append(f"{min(taken):,.1f}" if taken else "-")
        table.rows.append([task, *cells])
    return table


def hours(shipped: Sequence[ShippedRun]) -> str:
    """How long it took in all."""
    took = f"{len(shipped)} run{'' if len(shipped) == 1 else 's'} took {sum(each.hours for each in shipped):,.1f} hours"
    return f"{took} by the clock, one core each, on a machine that did other things."


def versions(shipped: Sequence[ShippedRun]) -> str:
    """The versions that the runs were made with, and the runs that were continued with others than they began with."""
    every: dict[str, dict[str, None]] = {}
    for each in shipped:
        for noted in each.versions:
            for package, version in noted.items():
                every.setdefault(package, {})[version] = None
    text = "Made with " + "; ".join(f"{package} {', '.join(found)}" for package, found in every.items()) + "."
    mixed = ["/".join(map(str, each.name)) for each in shipped if len(each.versions) > 1]
    return f"{text} Continued with other versions than they began with: {', '.join(mixed)}." if mixed else text


def markdown(table: Table) -> str:
    """A table with its title, for a page."""

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    rows = [
        [f"**{cell}**" if (i, j) in table.best else cell for j, cell in enumerate(row)]
        for i, row in enumerate(table.rows)
    ]
    rule = ["---"] * table.keys + ["--:"] * (len(table.columns) - table.keys)
    return f"{table.title}:\n\n" + "\n".join(map(line, [table.columns, rule, *rows])) + "\n"


def listing(lines: Sequence[str]) -> str:
    """Lines to copy, such as commands."""
    return "\n".join(f"    {each}" for each in lines) + "\n"
