"""From runs to figures, tables and one HTML page.

    python -m pbrl.report runs/                 # to report/index.html
    python -m pbrl.report runs/ --agents ncrs,zpg --tasks walker_walk
    python -m pbrl.report runs/ --smooth 10     # means of ten iterations
    python -m pbrl.report runs/ --reference     # beside what pbrl has measured

A run's final return is the mean of the last tenth of its `return_mean`. Runs are told apart by task, agent (`name` in
their settings), teacher (the oracle's preset and what was changed of it) and seed. Unfinished runs count as far as
they are recorded, and are marked. A folder that cannot be used is named with the reason and left out.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from pbrl.report import page
from pbrl.report.chart import DIGEST, SCRIPT
from pbrl.report.figures import styles
from pbrl.report.files import Output
from pbrl.report.ledger import every_run, ledger
from pbrl.report.reference import RESULTS, NoResultsError, find_reference, reference_section
from pbrl.report.runs import find
from pbrl.report.sections import made_section, remarks, robustness_section, teacher_section
from pbrl.report.tables import Bootstrap, agents_of, aggregates, headline, names, select
from pbrl.report.text import printable
from pbrl.run.command_line import wrapped
from pbrl.run.files import write_atomically


def report(
    folders: Sequence[Path],
    output_folder: Path,
    bootstrap: Bootstrap,
    *,
    title: str = "pbrl report",
    threshold: float = 0.5,
    smooth: int = 1,
    results: Path | None = None,
    normalise: str = "",
    **selection: Sequence[str],
) -> None:
    """Find the runs and write everything about them; `agent` and `task` select runs by name, all if empty.

    results: the folder of the reference runs that they are put beside; None: they are not.
    normalise: the name of a yardstick whose runs returns are divided by, too; "": none.
    """
    runs, left_out = find(folders)
    if not runs:
        reasons = "".join(f"\n  {printable(str(folder))}: {reason}" for folder, reason in left_out.items())
        raise SystemExit(
            f"pbrl.report: no runs in {', '.join(map(str, folders))}; "
            f"a run is a folder with config.yaml and metrics.jsonl, which pbrl.train makes{reasons}"
        )
    yardstick = [run for run in runs if run.yardstick and run.settings["name"] == normalise]
    if normalise and not yardstick:
        there = sorted({str(run.settings["name"]) for run in runs if run.yardstick})
        raise SystemExit(
            f"pbrl.report: there are no runs of a yardstick {normalise!r} to normalise by, "
            f"only of {', '.join(there) or 'agents'}: python -m pbrl.train agent=sac_true makes them"
        )
    for kind, wanted in selection.items():
        found = names(runs, kind)
        for name in wanted:
            if name not in found:
                raise SystemExit(f"pbrl.report: there are no runs of the {kind} {name!r}, only of {', '.join(found)}")
    runs = [run for run in runs if all(getattr(run, kind) in wanted for kind, wanted in selection.items() if wanted)]
    if not runs:
        raise SystemExit("pbrl.report: no run has one of these agents and one of these tasks")
    reference, problems = find_reference(results) if results is not None else ([], [])
    output = Output(output_folder, Console(width=None if Console().is_terminal else 132))
    looks = styles(names(runs, "agent"))
    sections, headlines, summaries = {}, [], list[str]()
    for teacher in names(runs, "teacher"):
        output.say(f"\n{teacher} teacher", "bold")
        group = select(runs, teacher=teacher)
        with log_messages_in(problems):
            sections[f"Teacher: {teacher}"] = teacher_section(
                group, teacher, looks, bootstrap, output, threshold, smooth, yardstick
            )
        headlines.append(headline(table := aggregates(agents_of(group), teacher, bootstrap), teacher))
        if len(table.rows) > 1:
            summaries.append(page.table_html(replace(table, title=f"Over all tasks, {teacher} teacher")))
    if reference:
        sections["Beside the reference"], standings, refused = reference_section(
            agents_of(runs), reference, bootstrap, output
        )
        headlines += standings
        problems += refused
    sections["Robustness"] = robustness_section(agents_of(runs), bootstrap, output)
    sections["Ledger"] = output.table(ledger(runs), show=True)
    sections["How this was made"] = made_section(runs)
    output.table(every_run(runs))
    output.write_csv()
    warnings = remarks(runs, left_out) + problems
    summary = ", ".join(
        f"{len(found)} {kind}{'' if len(found) == 1 else 's'}"
        for kind in ("agent", "task", "teacher")
        if (found := names(runs, kind))
    )
    introduction = page.paragraph(f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {summary}.")
    introduction += "".join(page.paragraph(sentence) for sentence in headlines if sentence) + "".join(summaries)
    introduction += "".join(page.paragraph(warning, "warning") for warning in warnings)
    write_atomically(output_folder / "index.html", page.page(title, introduction, sections, SCRIPT, DIGEST))
    for sentence in filter(None, headlines):
        output.say(sentence, "bold")
    for warning in warnings:
        output.say(warning)
    output.say(f"The page is {output_folder / 'index.html'}; figures and tables are beside it.", "bold")


@contextmanager
def log_messages_in(found: list[str]) -> Iterator[None]:
    """Keep what is said about damaged files for the page, rather than print it: folders may have any names."""
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("pbrl")
    handler.emit = lambda record: found.append(f"{record.getMessage()}.")  # type: ignore[method-assign]
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        "python -m pbrl.report",
        description=wrapped(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, help="where to look for runs, at any depth")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder to write to (report)")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    parser.add_argument("--agents", default="", help="only these, by name: ncrs,zpg")
    parser.add_argument("--tasks", default="", help="only these: walker_walk,cheetah_run")
    parser.add_argument("--title", default="pbrl report", help="of the page (pbrl report)")
    parser.add_argument("--threshold", type=float, default=0.5, help="score whose first iteration is shown (0.5)")
    parser.add_argument("--smooth", type=int, default=1, help="iterations that curves are averaged over (1: none)")
    parser.add_argument("--reference", action="store_true", help="put them beside the results that come with pbrl")
    parser.add_argument("--normalise", default="", help="divide by a yardstick's return at as many steps: sac_true")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder of those results, if it is another")
    arguments = parser.parse_args()
    if arguments.resamples < 1:
        parser.error(f"--resamples must be at least 1, not {arguments.resamples}")
    if arguments.smooth < 1:
        parser.error(f"--smooth must be at least 1, not {arguments.smooth}")
    for folder in arguments.folders:
        if not folder.is_dir():
            raise SystemExit(f"pbrl.report: there is no folder {folder}")
    try:
        report(
            arguments.folders,
            arguments.output,
            Bootstrap(arguments.resamples, arguments.seed),
            title=arguments.title,
            threshold=arguments.threshold,
            smooth=arguments.smooth,
            results=arguments.results if arguments.reference else None,
            normalise=arguments.normalise,
            agent=[name for name in arguments.agents.split(",") if name],
            task=[name for name in arguments.tasks.split(",") if name],
        )
    except NoResultsError as error:
        raise SystemExit(f"pbrl.report: {error}") from None
    except OSError as error:
        raise SystemExit(f"pbrl.report: {error.strerror}: {error.filename}") from None


if __name__ == "__main__":
    main()
