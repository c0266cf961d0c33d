"""`python -m pbrl`: what there is to run."""

from __future__ import annotations

import runpy
import sys

from rich.console import Console
from rich.table import Table

PROGRAMS = {
    "train": "train an agent from preferences; -m for a sweep",
    "label": "the page on which people compare clips, for runs with oracle=human",
    "report": "figures, tables and one HTML page of finished runs",
    "play": "a video of what a run has learnt; --pair: two trajectories and the teacher's answer",
    "audit": "what a teacher really does: rates, agreement, calibration",
    "reference": "the reference runs that are missing, and the pages made of them",
    "ridge": "the paper's synthetic experiment, and its peers",
    "finetune": "the paper's language-model experiment; also finetune.study, .dimension, .report, .bench",
    "bench": "how fast everything is, beside its limit",
    "doctor": "is all well on this machine, and what to do if not",
}


def main(arguments: list[str] | None = None) -> None:
    """Run a program by its name, or list them all."""
    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else ""
    if name.partition(".")[0] in PROGRAMS:
        sys.argv = [f"pbrl.{name}", *given[1:]]
        runpy.run_module(f"pbrl.{name}", run_name="__main__", alter_sys=True)
        return
    table = Table(show_header=False, box=None, padding=(0, 2))
    for program, does in PROGRAMS.items():
        table.add_row(f"python -m pbrl.{program}", does)
    Console().print(table)
    if name not in ("", "-h", "--help"):
        raise SystemExit(f"pbrl: there is no program {name!r}")


if __name__ == "__main__":
    main()
