"""Processes that give way to others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pbrl.run.priority import give_way

WAIT = [sys.executable, "-c", "input()"]


def test_a_process_gives_way_and_so_does_its_session() -> None:
    with subprocess.Popen(WAIT, stdin=subprocess.PIPE, start_new_session=True) as process:
        give_way(process.pid, 7)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 7
        autogroup = Path(f"/proc/{process.pid}/autogroup")
        assert not autogroup.exists() or autogroup.read_text().split()[1:] == ["nice", "7"]
        process.kill()
    assert os.getpriority(os.PRIO_PROCESS, 0) < 7  # ours is as it was


def test_one_that_has_ended_is_left_alone() -> None:
    process = subprocess.Popen(WAIT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    process.wait()
    give_way(process.pid, 7)
