"""What the campaign counts, and how it calls the programs."""

from __future__ import annotations

import contextlib
import io
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

COLUMNS = ("lost iterations", "wrong states", "executions", "tracebacks")
EXAMPLES = 20  # of each kind that are shown


@dataclass
class Tally:
    """What happened in one part of the campaign."""

    part: str
    attempts: int = 0
    refused: int = 0  # answered with a sentence
    seconds: float = 0.0
    failures: dict[str, list[str]] = field(default_factory=lambda: {column: [] for column in COLUMNS})

    def fail(self, column: str, what: str) -> None:
        """Count a failure; `what` says how to see it again."""
        self.failures[column].append(what)
        if len(self.failures[column]) <= EXAMPLES:
            print(f"\n{self.part}: {column}: {what}", file=sys.stderr)

    @property
    def clean(self) -> bool:
        """Whether nothing failed."""
        return not any(self.failures.values())


@dataclass
class Outcome:
    """How a program ended: its exit code, all that it printed, and its traceback, if it had one."""

    code: int
    text: str
    traceback: str = ""


def call(program: Callable[[], object], arguments: Sequence[str]) -> Outcome:
    """Call a program in this process, as its command line would."""
    printed, code, trace = io.StringIO(), 0, ""
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), _argv(arguments):
        try:
            program()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            printed.write("" if isinstance(stop.code, int | None) else str(stop.code))
        except BaseException:
            code, trace = 1, traceback.format_exc()
    text = printed.getvalue()
    if "Traceback (most recent call last)" in text:
        trace = trace or text[text.index("Traceback") :]
    return Outcome(code, text, trace)


@contextlib.contextmanager
def _argv(arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = ["pbrl", *arguments]
    try:
        yield
    finally:
        sys.argv = before


class Clock:
    """The time that a part has."""

    def __init__(self, seconds: float) -> None:
        self.begin, self.seconds = time.monotonic(), seconds

    @property
    def over(self) -> bool:
        """Whether it is used up."""
        return time.monotonic() - self.begin > self.seconds


def last_lines(text: str, count: int = 3) -> str:
    """The end of a traceback, in one line."""
    return " | ".join(line.strip() for line in text.strip().splitlines()[-count:])[-400:]


def files(folder: Path) -> list[Path]:
    """All files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())
