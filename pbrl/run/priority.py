"""Processes beside a program that give way to others."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def give_way(pid: int, niceness: int) -> None:
    """Lower the priority of a process that has just begun, in a session of its own.

    Linux may divide the cores between sessions first, and only within a session by niceness. So the session, which is
    an autogroup there, gets the niceness, too.
    """
    with suppress(OSError):  # it has ended
        os.setpriority(os.PRIO_PROCESS, pid, niceness)
    with suppress(OSError):  # there are no autogroups
        Path(f"/proc/{pid}/autogroup").write_text(str(niceness))
