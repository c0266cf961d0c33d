"""SIGTERM and Ctrl-C as something to ask about between iterations, rather than to die of."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Stopped(SystemExit):
    """A run that saved and ended because it was asked to, by a signal of that number."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


@contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Note SIGTERM and Ctrl-C instead of dying of them; a second one is obeyed at once."""
    received: list[int] = []

    def note(number: int, _: Any) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(number)
        print("\nfinishing this iteration; once more to stop at once", file=sys.stderr)

    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
