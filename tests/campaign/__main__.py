"""The campaign: everything that may happen to a run, many times over, and what came of it.

    python tests/campaign                                      # all of it: some hours on two cores
    python tests/campaign kills overrides --scale 0.1 --seed 1 # two parts, a tenth of each, of other draws
    python tests/campaign --results all.jsonl                  # add it to a file, and show all that is in it
    python tests/campaign --scale 0 --results all.jsonl --write docs/reliability.md  # put the table into the page

Every part is drawn from --seed, and ends when --minutes are over: the table says how many attempts were made. The
program exits with 1 if anything was lost, wrong, executed, or answered with a traceback.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MUJOCO_GL": "disable"}  # so that it can fork

import hostile
import interruptions
import mutations
import overrides
import page
import runs
from tally import COLUMNS, Clock, Tally

PARTS = {  # attempts
    "kills": 300,
    "signals": 90,
    "disks": 60,
    "checkpoints": 2000,
    "files": 2000,
    "folders": 1500,
    "overrides": 10_000,
    "page": 5000,
}
WITHOUT_RUNS = ("overrides", "page")  # which need no uninterrupted run to compare with
BEGIN, END = "<!-- campaign -->", "<!-- end of campaign -->"


PROGRAMS = {
    "kills": interruptions.kill,
    "signals": interruptions.ask_to_stop,
    "disks": interruptions.starve,
    "checkpoints": mutations.checkpoints,
    "files": mutations.others,
    "folders": hostile.folders,
    "overrides": overrides.fuzz,
    "page": page.hostile_requests,
}


def table(tallies: Sequence[Tally]) -> str:
    """What came of it, in Markdown."""
    lines = [f"| what | attempts | refused in a sentence | {' | '.join(COLUMNS)} | minutes |"]
    lines.append("|---|" + "--:|" * (3 + len(COLUMNS)))
    for part in dict.fromkeys(each.part for each in tallies):
        group = [each for each in tallies if each.part == part]
        attempts, refused = (sum(getattr(each, name) for each in group) for name in ("attempts", "refused"))
        counts = " | ".join(str(sum(len(each.failures[column]) for each in group)) for column in COLUMNS)
        minutes = sum(each.seconds for each in group) / 60
        lines.append(f"| {part} | {attempts:,} | {f'{refused:,}' if refused else ''} | {counts} | {minutes:.0f} |")
    return "\n".join(lines)


def main() -> None:
    """Read the command line, and run the parts that it names."""
    parser = argparse.ArgumentParser(prog="python tests/campaign", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all of them by default")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (0)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the attempts (1)")
    parser.add_argument("--minutes", type=float, default=120.0, help="for each part at most (120)")
    parser.add_argument("--results", type=Path, help="a file to add to, and to make the table of")
    parser.add_argument("--write", type=Path, help="the page that has the table")
    options = parser.parse_args()
    if unknown := {*options.parts} - {*PARTS}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}")
    page, results = (path and path.absolute() for path in (options.write, options.results))
    tallies = []
    with tempfile.TemporaryDirectory(prefix="campaign") as name, runs.models_compiled_once():
        folder = Path(name)
        parts = (options.parts or [*PARTS]) if options.scale else []
        agents = runs.AGENTS if {*parts} - {*WITHOUT_RUNS} else ()
        wholes = [runs.make_whole(agent, folder / "whole" / agent) for agent in agents]
        for part in parts:
            (folder / part).mkdir()
            begin, clock = time.monotonic(), Clock(60 * options.minutes)
            attempts = max(1, int(options.scale * PARTS[part]))
            tallies.append(PROGRAMS[part](attempts, options.seed, clock, folder / part, wholes))
            tallies[-1].seconds = time.monotonic() - begin
            os.chdir("/")
            if results is not None:
                with results.open("a") as file:
                    file.write(json.dumps(asdict(tallies[-1])) + "\n")
    if results is not None:
        tallies = [Tally(**json.loads(line)) for line in results.read_text().splitlines()]
    print(table(tallies))
    if page is not None:
        text = re.sub(f"{BEGIN}.*{END}", f"{BEGIN}\n{table(tallies)}\n{END}", page.read_text(), flags=re.DOTALL)
        page.write_text(text)
    sys.exit(0 if all(tally.clean for tally in tallies) else 1)


if __name__ == "__main__":
    main()
