"""Runs that are killed, asked to stop, or find the disk full: no iteration that was saved is lost, and the same command
ends with the record, the policy and the log of an uninterrupted run."""

from __future__ import annotations

import itertools
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from runs import Whole, child, command_of, difference, said, saved_iteration, wait
from tally import Clock, Tally, last_lines
from tqdm import tqdm

from pbrl.run.record import read

TRACEBACK, OK = 71, 0


def kill(kills: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """SIGKILL at moments drawn uniformly over a run's whole life, from its start to its end."""
    return _interrupt(Tally("kill -9"), [signal.SIGKILL], kills, random.Random(seed), clock, folder, wholes)


def ask_to_stop(signals: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """SIGTERM and SIGINT: besides, an iteration that was recorded is an iteration that was saved."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    return _interrupt(Tally("SIGTERM and SIGINT"), numbers, signals, random.Random(seed), clock, folder, wholes)


def _interrupt(
    tally: Tally,
    numbers: Sequence[signal.Signals],
    count: int,
    draw: random.Random,
    clock: Clock,
    folder: Path,
    wholes: Sequence[Whole],
) -> Tally:
    bar = tqdm(total=count, desc=tally.part)
    for turn in itertools.count():
        if tally.attempts >= count or clock.over:
            break
        whole = wholes[turn % len(wholes)]
        place = folder / str(turn)
        run, saved, code = place / "run", -1, -1
        while code != OK:
            begin, process = time.monotonic(), child(command_of(whole.agent), place)
            moment = draw.uniform(0, 1.2 * whole.seconds) if tally.attempts < count else 1e9
            code = _wait_until(process, begin + moment)
            number = draw.choice(numbers)
            if code is None:
                os.kill(process, number)
                code = wait(process)
                tally.attempts += 1
                bar.update()
            what = f"{whole.agent}, turn {turn}, attempt {tally.attempts}"
            if code == TRACEBACK:
                tally.fail("tracebacks", f"{what}: {last_lines(said(place))}")
                break
            if code > 0 and code not in (128 + signal.SIGTERM, 128 + signal.SIGINT):
                tally.fail("lost iterations", f"{what}: it does not go on: {said(place)[-300:]}")
                break
            now = saved_iteration(run)
            if now < saved:
                tally.fail("lost iterations", f"{what}: iteration {saved} was saved, now it is {now}")
            if code in (128 + signal.SIGTERM, 128 + signal.SIGINT) and (run / "metrics.jsonl").exists():
                rows = len(read(run / "metrics.jsonl"))
                if rows > now + 1 and "stopped after" in said(place):
                    tally.fail("lost iterations", f"{what}: {rows} were recorded, {now + 1} saved")
            saved = now
        if code == OK and (unlike := difference(run, whole)):
            tally.fail("wrong states", f"{whole.agent}, turn {turn}: {unlike}")
        shutil.rmtree(place, ignore_errors=True)
    bar.close()
    return tally


def _wait_until(process: int, moment: float) -> int | None:
    """The exit code, or None if the process still runs at that moment."""
    while time.monotonic() < moment:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    return None


def starve(attempts: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """Quotas (no file may grow beyond a size), and full disks where this program may mount one."""
    tally, draw = Tally("full disks and quotas"), random.Random(seed)
    can_mount = os.geteuid() == 0 and shutil.which("mount") is not None
    for turn in tqdm(range(attempts), desc=tally.part):
        if clock.over:
            break
        whole, place = wholes[turn % len(wholes)], folder / str(turn)
        place.mkdir(parents=True)
        size = sum(path.stat().st_size for path in whole.folder.rglob("*") if path.is_file())
        mounted = can_mount and turn % 2 == 0 and _mount(place, draw.randrange(4096, 2 * size))
        limit = draw.randrange(100, 20_000)
        code = wait(child(command_of(whole.agent), place, None if mounted else lambda: _limit(limit)))  # noqa: B023
        tally.attempts += 1
        tally.refused += code != OK
        what = f"{whole.agent}, turn {turn}, {'a full disk' if mounted else f'files of at most {limit} bytes'}"
        if code == TRACEBACK:
            tally.fail("tracebacks", f"{what}: {last_lines(said(place))}")
        saved = saved_iteration(place / "run")
        if mounted:
            subprocess.run(["mount", "-o", "remount,size=100m", str(place)], check=True)
        code = wait(child(command_of(whole.agent), place))
        if code == TRACEBACK:
            tally.fail("tracebacks", f"{what}, then room: {last_lines(said(place))}")
        elif code != OK or (f"{saved + 1} of" not in said(place) and 0 <= saved < len(whole.rows) - 1):
            tally.fail("lost iterations", f"{what}, then room: {said(place)[-300:]}")
        elif unlike := difference(place / "run", whole):
            tally.fail("wrong states", f"{what}: {unlike}")
        if mounted:
            subprocess.run(["umount", str(place)], check=True)
        shutil.rmtree(place, ignore_errors=True)
    return tally


def _mount(place: Path, size: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _limit(size: int) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
