"""The one loop that every run goes through: iterate, record, save, until the last iteration or a signal.

What is done in an iteration is the work's own business (`pbrl.run.training`, `pbrl.finetune.tuning`). The same call
continues from the last checkpoint; the record of a continued run is the one it would have been uninterrupted.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

from pbrl.run import checkpoint, record
from pbrl.run.files import write_atomically
from pbrl.run.mirrors import MirrorProcess
from pbrl.run.record import Record, Row
from pbrl.run.settings import ConfigurationError
from pbrl.run.signals import Stopped, catch_signals
from pbrl.run.terminal import ProgressBar, say
from pbrl.run.versions import note_versions

log = logging.getLogger(__name__)

RECORD, CHECKPOINT, ERROR = "metrics.jsonl", "checkpoint", "error.txt"
FORMAT = 2  # of a state; 1: the ledger remembered no trajectories


class DivergedError(RuntimeError):
    """A learner's numbers have become useless: its run ends here, with the last good state kept.

    iteration: in which it happened, if the state before it is lost: that is made again from the last checkpoint. None
    if the state is still that before the iteration.
    """

    def __init__(self, message: str, iteration: int | None = None) -> None:
        super().__init__(message)
        self.iteration = iteration


class Work(Protocol):
    """What is done in a run."""

    folder: Path
    digest: str  # of the settings that make the run what it is: a checkpoint of others is refused
    ended: str  # why it is over before its last iteration, such as "diverged"; "" otherwise

    def iterate(self, iteration: int) -> Mapping[str, float]:
        """One iteration; its metrics, `iteration` among them."""

    def headline(self, metrics: Mapping[str, float]) -> str:
        """What the progress bar shows of an iteration."""

    def save(self, iteration: int) -> None:
        """Leave files for others to read, such as the policy, beside the checkpoint just saved."""

    def find_problem(self, state: Mapping[str, Any]) -> str | None:
        """Why a state cannot be continued from, such as files that are gone; None if it can."""

    def without_last_evaluation(self, row: Row) -> Row:
        """The row of an iteration, had it not been the run's last one."""

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


def run(
    work: Work,
    *,
    iterations: int,
    checkpoint_every: int,
    mirrors: Callable[[Path], Sequence[MirrorProcess]],
    progress_bar: bool,
    keep_bar: bool = True,
    asked_to_stop: Callable[[], int] = lambda: 0,
    after_iteration: Callable[[int], None] | None = None,
) -> None:
    """Continue from the last checkpoint, if there is one, to the last iteration.

    mirrors: starts the processes that follow the record at a path. keep_bar: leave the progress bar at the end.
    asked_to_stop: the number of a signal sent elsewhere, or 0.
    """
    start = load(work)
    if progress_bar or start:  # the folder stands above the bar, where no terminal is too narrow for it
        say(f"{work.folder}{f': {start} of {iterations} iterations are there' if start else ''}")
    note_versions(work.folder)
    path = work.folder / RECORD
    if 0 < start < iterations:
        record.shorten_row(path, start - 1, work.without_last_evaluation)  # it may have been the last one
    elif start:
        work.save(start - 1)  # the run may have been killed before it did
    rows = Record(path, after=start - 1)
    with ExitStack() as closing:
        closing.callback(rows.close)
        for mirror in mirrors(path):
            closing.callback(mirror.close)
        signals = closing.enter_context(catch_signals())
        bar = closing.enter_context(
            ProgressBar(
                total=iterations,
                initial=start,
                name=str(work.folder),
                unit="it",
                disable=not progress_bar,
                leave=keep_bar,
                dynamic_ncols=True,
            )
        )
        for iteration in range(start, iterations):
            try:
                metrics = work.iterate(iteration)
            except DivergedError as error:
                if error.iteration is not None:
                    raise
                log.warning("%s: %s", work.folder, error)
                work.ended = "diverged"
                save(work, rows, max(0, iteration - 1))
                break
            except (OSError, MemoryError, checkpoint.CheckpointError, record.RecordError, ConfigurationError):
                raise
            except Exception as error:
                if iteration != start or start == 0:
                    raise
                write_atomically(work.folder / ERROR, traceback.format_exc())
                raise checkpoint.CheckpointError(
                    f"iteration {iteration}, the first after the checkpoint, failed ({type(error).__name__}: {error}): "
                    f"either the code has changed, or the checkpoint was. The traceback is in {work.folder / ERROR}"
                ) from error
            rows.write(metrics)
            bar.set_postfix_str(work.headline(metrics), refresh=False)
            bar.update()
            # Asked once: a signal that comes later must not end an iteration that was not saved.
            signal = signals[0] if signals else asked_to_stop()
            over = bool(work.ended) or iteration == iterations - 1
            if over or signal or (iteration + 1) % checkpoint_every == 0:
                save(work, rows, iteration)
            if after_iteration is not None:
                after_iteration(iteration)
            if over:
                break
            if signal:
                bar.close()
                if progress_bar:  # else the program that launched this run says so, above its own bars
                    say(f"stopped after {iteration + 1} of {iterations} iterations; the same command goes on")
                raise Stopped(signal)


def save(work: Work, rows: Record, iteration: int) -> None:
    """Leave a checkpoint of the state after an iteration, which the record on disk has reached."""
    rows.sync()
    digests = [rows.digest.of(), rows.digest.of(work.without_last_evaluation)]  # the second, if the run is extended
    state = {"format": FORMAT, "record": digests, **work.state_dict()}
    checkpoint.save(work.folder / CHECKPOINT, iteration, state, work.digest)
    work.save(iteration)


def load(work: Work) -> int:
    """Give the work the state of the last checkpoint that can be used; the iteration to go on with."""

    def find_problem(iteration: int, state: Mapping[str, Any]) -> str | None:
        if state.get("format") != FORMAT:
            raise ConfigurationError(
                f"{work.folder} was begun by an earlier version of pbrl, and cannot be continued by this one: finish "
                "it there, or start over with resume=false, which keeps it aside. Report and play still read it"
            )
        digests = state.get("record", ())
        if not isinstance(digests, list | tuple):
            return "its fingerprints of the record are none"
        return record.find_problem(work.folder / RECORD, iteration, digests) or work.find_problem(state)

    saved = checkpoint.load(work.folder / CHECKPOINT, settings_digest=work.digest, find_problem=find_problem)
    if saved is None:
        return 0
    iteration, state = saved
    try:
        work.load_state_dict(state)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as error:
        if isinstance(error, checkpoint.CheckpointError):
            raise
        raise checkpoint.CheckpointError(
            f"{work.folder / CHECKPOINT} has a state of iteration {iteration} that is not one of this run "
            f"({type(error).__name__}: {error}): restore it from a copy, or start over with `resume=false`, "
            "which keeps the old run aside"
        ) from error
    return iteration + 1
