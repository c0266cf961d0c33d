"""SIGTERM and Ctrl-C: a run looks for them between iterations, saves and stops."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pbrl.run.terminal import say

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_received: list[int] = []


class Stopped(SystemExit):
    """The run has saved its state and stopped because of a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)  # the exit code, as shells have it
        self.number = number


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and Ctrl-C in the list that this gives; a second signal ends the process at once.

    Only the main thread of a process can catch signals: in others the list stays empty.
    """
    _received.clear()

    def handle(number: int, _: Any) -> None:
        if _received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        _received.append(number)
        say("finishing this iteration; repeat the signal to stop at once", file=sys.stderr)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield _received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def caught_signal() -> int:
    """The number of the signal that a run was asked to stop with, for those who wait within an iteration; 0 if none."""
    return _received[0] if _received else 0
