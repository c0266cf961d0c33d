"""What a terminal shows: progress bars, and messages that do not break them.

Messages are never wrapped or cut, so that paths and commands in them can be copied. Where the output is a file, a
progress bar is a line now and then.
"""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 30.0  # in a file
_LINE = "{desc}: {n_fmt} of {total_fmt}, {elapsed} so far, {remaining} left{postfix}"


class ProgressBar(tqdm):  # type: ignore[misc]
    """tqdm's bar on a terminal; elsewhere lines, the first after a while and the last at the end.

    name: what the lines begin with, where the bar's own description is not enough.
    """

    def __init__(self, *arguments: Any, name: str | None = None, **options: Any) -> None:
        self.in_lines = not sys.stderr.isatty()
        self.last_line = -1  # at what count it was written
        if self.in_lines:
            options |= {"mininterval": SECONDS_BETWEEN_LINES, "delay": SECONDS_BETWEEN_LINES, "miniters": 1}
            options |= {"bar_format": _LINE, "leave": True, "desc": name or options.get("desc")}
        super().__init__(*arguments, **options)
        if self.in_lines:
            self._instances.discard(self)  # a message would have tqdm show every bar again

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Show the bar as it is."""
        if not self.in_lines:
            return bool(super().display(msg, pos))
        print(str(self) if msg is None else msg, file=self.fp, flush=True)
        self.last_line = self.n
        return True

    def close(self) -> None:
        """End it; in a file, with a last line."""
        if not self.in_lines:
            super().close()
        elif not self.disable:
            if self.last_line != self.n:
                self.display()
            self.disable: bool = True


class Messages(logging.Handler):
    """Log messages on their own lines, above whatever bars there are."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it, with its level if it is a warning or worse."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        say(level + self.format(record))


def say(message: str, file: TextIO | None = None) -> None:
    """Write a line above whatever bars there are, to the standard output unless told otherwise."""
    tqdm.write(message, file=file or sys.stdout)
    (file or sys.stdout).flush()


def log_messages(level: int) -> None:
    """Send log messages to the terminal. By force: on its import, dm_control has set up logging for warnings alone."""
    logging.basicConfig(level=level, format="%(message)s", handlers=[Messages()], force=True)
