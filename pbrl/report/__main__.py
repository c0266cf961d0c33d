"""From runs to figures, tables and one HTML page.

    python -m pbrl.report runs/ [more folders]

A run's final return is the mean of the last tenth of its `return_mean`. Runs are told apart by task, agent (`name` in
their settings), teacher (the oracle's settings) and seed. Unfinished ones count as far as they are, and are marked.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pbrl.report import page
from pbrl.report.figures import styles
from pbrl.report.files import Output
from pbrl.report.ledger import every_run, ledger
from pbrl.report.runs import find
from pbrl.report.sections import made_section, remarks, robustness_section, teacher_section
from pbrl.report.tables import Bootstrap, names, select
from pbrl.report.text import printable
from pbrl.run.files import write_atomically


def report(folders: Sequence[Path], output_folder: Path, bootstrap: Bootstrap) -> None:
    """Find the runs, say all about them, and write it."""
    runs, left_out = find(folders)
    if not runs:
        reasons = "".join(f"\n  {printable(str(folder))}: {reason}" for folder, reason in left_out.items())
        raise SystemExit(
            f"pbrl.report: no runs in {', '.join(map(str, folders))}; "
            f"a run is a folder with config.yaml and metrics.jsonl, which pbrl.train makes{reasons}"
        )
    output = Output(output_folder, Console(width=None if Console().is_terminal else 132))
    looks = styles(names(runs, "agent"))
    sections = {}
    for teacher in names(runs, "teacher"):
        output.say(f"\n{teacher} teacher", "bold")
        sections[f"Teacher: {teacher}"] = teacher_section(
            select(runs, teacher=teacher), teacher, looks, bootstrap, output
        )
    sections["Robustness"] = robustness_section(runs, bootstrap, output)
    sections["Ledger"] = output.table(ledger(runs), show=True)
    sections["How this was made"] = made_section(runs)
    output.table(every_run(runs))
    output.write_csv()
    warnings = remarks(runs, left_out)
    summary = ", ".join(
        f"{len(found)} {kind}{'' if len(found) == 1 else 's'}"
        for kind in ("agent", "task", "teacher")
        if (found := names(runs, kind))
    )
    introduction = page.paragraph(f"{len(runs)} run{'' if len(runs) == 1 else 's'}: {summary}.")
    introduction += "".join(page.paragraph(warning, "warning") for warning in warnings)
    write_atomically(output_folder / "index.html", page.page("pbrl report", introduction, sections))
    for warning in warnings:
        output.say(warning)
    output.say(f"The page is {output_folder / 'index.html'}; figures and tables are beside it.", "bold")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m pbrl.report", description="Figures, tables and a page about runs.")
    parser.add_argument("folders", nargs="+", type=Path, help="where to look for runs, at any depth")
    parser.add_argument("--output", type=Path, default=Path("report"), help="folder to write to (report)")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap (2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (0)")
    arguments = parser.parse_args()
    if arguments.resamples < 1:
        parser.error(f"--resamples must be at least 1, not {arguments.resamples}")
    for folder in arguments.folders:
        if not folder.is_dir():
            raise SystemExit(f"pbrl.report: there is no folder {folder}")
    try:
        report(arguments.folders, arguments.output, Bootstrap(arguments.resamples, arguments.seed))
    except OSError as error:
        raise SystemExit(f"pbrl.report: {error.strerror}: {error.filename}") from None


if __name__ == "__main__":
    main()
