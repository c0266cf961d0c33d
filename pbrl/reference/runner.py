"""Makes the reference runs that are missing, several at a time, each by `python -m pbrl.train` in a process of its own.

A finished run is added to its protocol's file at once. Whatever ends this program, the next start goes on: finished
runs are in the file or in their folders, half-finished ones continue from their checkpoints, and one that still runs,
because only this program was killed, is waited for. A run that fails does not stop the others.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from pbrl.reference.pace import hours, recorded
from pbrl.reference.protocol import PlannedRun
from pbrl.report.runs import NotARunError
from pbrl.report.shipped import DamagedFileError, ShippedRun, files, from_folder, read_runs, write_runs
from pbrl.run.checkpoint import CheckpointError
from pbrl.run.files import unused_name
from pbrl.run.finished import is_finished
from pbrl.run.folder import lock
from pbrl.run.priority import give_way
from pbrl.run.record import RecordError
from pbrl.run.settings import ConfigurationError, differences
from pbrl.run.signals import Stopped, catch_signals
from pbrl.run.terminal import say


class Results:
    """The files of finished reference runs: `<protocol>.parquet` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs: dict[str, dict[tuple[str, str, str, int], ShippedRun]] = {}
        for path in files(folder):
            self.runs[path.stem] = {run.name: run for run in self.read(path)}

    def read(self, path: Path) -> list[ShippedRun]:
        """The runs of a file; a damaged one is kept aside, and its runs are made again from their folders."""
        try:
            return read_runs(path)
        except DamagedFileError as error:
            aside = unused_name(path)
            path.rename(aside)
            print(f"{error}. It is kept as {aside}; runs whose folders are there are added again", file=sys.stderr)
            return []

    def find(self, run: PlannedRun) -> ShippedRun | None:
        """The run of this name in its protocol's file, with whatever settings."""
        return self.runs.get(run.protocol, {}).get(run.name)

    def twin(self, run: PlannedRun) -> ShippedRun | None:
        """A run of any protocol that learnt the same."""
        return next((each for each in self.every() if each.identity == run.identity), None)

    def every(self) -> Iterator[ShippedRun]:
        """All runs of all protocols."""
        return (each for runs in self.runs.values() for each in runs.values())

    def add(self, run: PlannedRun, shipped: ShippedRun) -> None:
        """Put a run into its protocol's file, in place of an earlier one of its name."""
        runs = self.runs.setdefault(run.protocol, {})
        runs[run.name] = shipped
        write_runs(self.folder / f"{run.protocol}.parquet", list(runs.values()))


@dataclass(frozen=True)
class Job:
    """A run that is being made."""

    run: PlannedRun
    process: subprocess.Popen[bytes] | None  # None: by a process that an earlier start of this program left behind

    def is_over(self) -> bool:
        """Whether its process has ended."""
        return not is_busy(self.run.folder) if self.process is None else self.process.poll() is not None


def make(
    runs: Sequence[PlannedRun],
    results: Results,
    *,
    workers: int,  # runs at a time
    niceness: int,
    changed: str,  # what to do with runs whose settings changed: "run" or "keep"
    poll_seconds: float,
) -> dict[Path, str]:
    """Make the runs that are missing, in their order; the folders of those that failed, and why.

    A signal stops it: every run that is being made finishes its iteration and saves.
    """
    waiting = [run for run in runs if is_missing(run, results, changed)]
    active: list[Job] = []
    failed: dict[Path, str] = {}
    stopped = 0
    with (
        catch_signals() as signals,
        tqdm(total=len(runs), initial=len(runs) - len(waiting), unit="run", disable=None) as bar,
    ):
        say(f"{len(waiting)} of {len(runs)} runs are missing")
        while waiting or active:
            if signals and not stopped:
                stopped, waiting = signals[0], []
                for job in active:
                    if job.process is not None:
                        job.process.terminate()  # it saves first
                active = [job for job in active if job.process is not None]
            while waiting and len(active) < workers and not signals:
                if (begun := begin(waiting.pop(0), results, niceness)) is not None:
                    active.append(begun)
                else:
                    bar.update()
            for job in [job for job in active if job.is_over()]:
                active.remove(job)
                if job.process is None:
                    waiting.insert(0, job.run)  # finished or not: see `begin`
                    continue
                why = collect(job.run, results)
                if why is not None and not stopped:
                    failed[job.run.folder] = why
                    say(f"{job.run.folder} failed: {why}")
                elif why is None:
                    say(f"{job.run.folder} is finished; {time_left(waiting, active, results, workers)}")
                bar.update()
            bar.set_postfix_str(time_left(waiting, active, results, workers))
            if active:
                time.sleep(poll_seconds)
    if stopped:
        print("stopped; the same command goes on")
        raise Stopped(stopped)
    return failed


def is_missing(run: PlannedRun, results: Results, changed: str) -> bool:
    """Whether a run is to be made; one that is there with other settings than it should have now is told of."""
    there = results.find(run)
    if there is None or there.identity == run.identity:
        return there is None
    what = differences(run.settings, there.recorded.settings)
    if there.identity[1] != run.identity[1]:
        what.append(f"iterations: {there.identity[1]}, not {run.identity[1]}")
    then = "it is made again" if changed == "run" else "it is kept"
    say(f"{', '.join(map(str, run.name))} of {run.protocol} has other settings ({'; '.join(what)}): {then}")
    return changed == "run"


def begin(run: PlannedRun, results: Results, niceness: int) -> Job | None:
    """Start or continue a run; None if it turns out to be finished."""
    if (twin := results.twin(run)) is not None:
        results.add(run, twin.renamed(run.settings["name"], run.command))
        return None
    if is_busy(run.folder):
        say(f"{run.folder} is being made by another process, which is waited for")
        return Job(run, None)
    resume = True
    try:
        if is_finished(run.settings) and collect(run, results) is None:
            return None
    except ConfigurationError:
        resume = False
        say(f"{run.folder} holds a run with other settings, which is kept aside")
    except CheckpointError:
        pass  # pbrl.train says what is wrong
    where = f"folder='{str(run.folder).replace(chr(39), chr(92) + chr(39))}'"  # quoted: a path may hold anything
    command = [sys.executable, "-m", "pbrl.train", *run.overrides, where, f"resume={str(resume).lower()}"]
    output = output_file(run)
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("wb") as file:  # in a session of its own: Ctrl-C reaches it once, through this program
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
    give_way(process.pid, niceness)
    return Job(run, process)


def collect(run: PlannedRun, results: Results) -> str | None:
    """Add a run to the results if it is finished; otherwise why it is not."""
    try:
        if not is_finished(run.settings):
            done, output = recorded(run), output_file(run)
            return f"{last_line(output)} ({done} of {run.settings['iterations']} iterations are there, see {output})"
        results.add(run, from_folder(run.folder, run.command))
    except (ConfigurationError, CheckpointError, NotARunError, RecordError, OSError) as error:
        return str(error)
    return None


def is_busy(folder: Path) -> bool:
    """Whether a process is at work in a run's folder."""
    if not folder.exists():
        return False
    try:
        with lock(folder):
            return False
    except ConfigurationError:
        return True


def output_file(run: PlannedRun) -> Path:
    """Where all that a run prints goes."""
    return run.folder.with_name(f"{run.folder.name}.txt")


def last_line(path: Path) -> str:
    """The last line of what a run printed that says something."""
    lines = path.read_text(errors="replace").replace("\r", "\n").split("\n") if path.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def time_left(waiting: Sequence[PlannedRun], active: Sequence[Job], results: Results, workers: int) -> str:
    """How long the rest takes, in words."""
    left = hours([*waiting, *(job.run for job in active)], results.every(), workers)
    return "how long the rest takes is not known yet" if left is None else f"about {left:.1f} hours are left"
