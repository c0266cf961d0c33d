"""What a terminal and a file are shown."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from pbrl.run.terminal import ProgressBar, log_messages, say

LONG = "runs/" + "a_very_long_name/" * 12 + "seed_0"  # of more columns than a terminal has


class Screen(io.StringIO):
    """Notes what is written to it; a terminal or a file."""

    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


@pytest.mark.parametrize(("total", "left", "expected"), [(600, "09:30", 20), (610, "09:40", 21)])  # the last line once
def test_in_a_file_a_bar_is_a_line_now_and_then(
    total: int, left: str, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    file = Screen(is_terminal=False)
    monkeypatch.setattr(sys, "stderr", file)
    with ProgressBar(total=total, name="runs/seed_0", unit="it") as bar:
        bar._time = lambda: clock[0]  # type: ignore[method-assign]
        bar.start_t = bar.last_print_t = 0.0
        for _ in range(total):
            clock[0] += 1.0
            bar.set_postfix_str("return 1.5", refresh=False)
            bar.update()
            say("a message", file=file)
    lines = [line for line in file.getvalue().splitlines() if line != "a message"]  # which adds no line of the bar's
    assert len(lines) == expected
    assert lines[0] == f"runs/seed_0: 30 of {total}, 00:30 so far, {left} left, return 1.5"
    assert lines[-1].startswith(f"runs/seed_0: {total} of {total}")
    assert "\r" not in file.getvalue()


def test_a_bar_that_is_off_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_terminal in (True, False):
        monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal=is_terminal))
        with ProgressBar(total=3, disable=True) as bar:
            bar.update(3)
        assert screen.getvalue() == ""


def test_messages_stand_above_the_bar_whole_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(is_terminal=True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(sys, "stdout", screen)
    handlers, level = logging.root.handlers[:], logging.root.level
    try:
        log_messages(logging.INFO)
        with ProgressBar(total=3, ncols=60) as bar:
            bar.update()
            logging.getLogger("pbrl").warning("see %s", LONG)
            logging.getLogger("pbrl").info("upload with `wandb sync %s`", LONG)
            say("and so on")
            bar.update()
    finally:
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    rows = [row.rpartition("\r")[2] for row in screen.getvalue().splitlines()]  # what stays on the screen
    assert f"warning: see {LONG}" in rows
    assert f"upload with `wandb sync {LONG}`" in rows
    assert "and so on" in rows
