"""`python -m pbrl`: what there is to run."""

from __future__ import annotations

import runpy
import sys

from rich.console import Console
from rich.table import Table

PROGRAMS = {  # each fits on a line of 80 characters
    "train": "train an agent from preferences; -m: a sweep",
    "label": "the page on which people compare clips",
    "report": "figures, tables and one HTML page of runs",
    "play": "a video of what a run has learnt",
    "audit": "what a teacher really does: rates, agreement",
    "reference": "the reference results, and the runs behind them",
    "ridge": "the paper's synthetic experiment, and its peers",
    "finetune": "its language-model experiment",
    "bench": "how fast everything is, beside its limit",
    "doctor": "is all well on this machine, and what if not",
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
    print("\n`pbrl train ...` is the same; --help shows examples and settings.")
    if name not in ("", "-h", "--help"):
        raise SystemExit(f"pbrl: there is no program {name!r}")


if __name__ == "__main__":
    main()
