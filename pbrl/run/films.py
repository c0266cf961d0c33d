"""Videos of a run while it trains: every so many iterations `pbrl.play` films the current policy.

The run writes the policy's parameters to `videos/` and continues. `pbrl.play` films them in its own process, one at
a time, the newest first. A video that fails or hangs affects neither the run nor its random numbers nor its results.
Parameters are deleted when their video is complete. Those without a video stay: they are tried again when the run is
continued, and `python -m pbrl.play RUN --iteration N` finds them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from pbrl.run.priority import give_way

PLAY = (sys.executable, "-m", "pbrl.play")
NICENESS = 10  # training has priority
NO_MORE = 1  # ends the queue; its other items are negative iterations, the smallest (newest) comes first
GRACE_SECONDS = 5.0  # for a killed process to end

logger = logging.getLogger(__name__)


def kept_policy(run: Path, iteration: int) -> Path:
    """The file with the parameters of an iteration, until they are filmed."""
    return run / "videos" / f"iteration_{iteration:06d}.safetensors"


class Films:
    """Makes the videos of a run in the background."""

    def __init__(
        self,
        run: Path,
        *,
        every: int | None,  # iterations; None: no videos
        steps: int,  # control steps of a video
        width: int,  # pixels
        height: int,
        seconds: float,  # time limit of a video
        finish_seconds: float,  # how long `finish` waits
    ) -> None:
        self.run, self.seconds, self.finish_seconds = run, seconds, finish_seconds
        self._options = ["--steps", str(steps), "--size", f"{width}x{height}"]
        self._queue: queue.PriorityQueue[int] = queue.PriorityQueue()
        self._process: subprocess.Popen[str] | None = None
        self._abandoned = False
        self._worker = threading.Thread(target=self._work, daemon=True)
        if every is not None:
            for iteration in self._without_video():
                self._queue.put(-iteration)
            self._worker.start()

    def film(self, iteration: int, save: Callable[[Path, int], None]) -> None:
        """Queue a video of the policy, whose file `save` writes. A video that is there is not made again."""
        policy = kept_policy(self.run, iteration)
        if _has_video(policy):
            return
        try:
            policy.parent.mkdir(exist_ok=True)
            save(policy, iteration)
        except Exception as error:  # OSError, or what safetensors makes of it
            logger.warning("no video of iteration %d (%s); the run continues", iteration, error)
        else:
            self._queue.put(-iteration)

    def finish(self) -> None:
        """Wait until all videos are complete, but no longer than `finish_seconds`."""
        self._queue.put(NO_MORE)
        if self._worker.is_alive():
            self._worker.join(self.finish_seconds)

    def stop(self) -> None:
        """Abandon the videos that are not complete."""
        if not self._worker.is_alive():
            return
        self._abandoned = True
        self._queue.put(NO_MORE)
        self._kill()
        self._worker.join(GRACE_SECONDS)
        if left := self._without_video():
            logger.warning(
                "no time for a video of iteration %s: `python -m pbrl.play %s --iteration %d` makes it",
                ", ".join(map(str, left)),
                self.run,
                left[-1],
            )

    def _without_video(self) -> list[int]:
        """Iterations with parameters but no video. Deletes parameters that have a video."""
        kept = sorted(self.run.glob("videos/iteration_*.safetensors"))
        for policy in filter(_has_video, kept):
            policy.unlink()
        return [int(policy.stem.removeprefix("iteration_")) for policy in kept if policy.exists()]

    def _work(self) -> None:
        """Make the queued videos, up to the first failure: its cause would make the others fail, too."""
        while (item := self._queue.get()) != NO_MORE and not self._abandoned:
            failure = self._make(-item)
            if failure is not None:
                if not self._abandoned:
                    logger.warning("no video of iteration %d, nor of others (%s); the run continues", -item, failure)
                return
            kept_policy(self.run, -item).unlink(missing_ok=True)

    def _make(self, iteration: int) -> str | None:
        """Make the video of an iteration; why that failed, or None."""
        output = kept_policy(self.run, iteration).with_suffix("").absolute()  # pbrl.play adds .mp4 or .gif
        what = [str(self.run), "--iteration", str(iteration), "--output", str(output)]
        home = str(Path(__file__).parents[2])  # so that the process imports the same pbrl
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        try:
            self._process = process = subprocess.Popen(
                [*PLAY, *what, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": path},
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # Ctrl-C goes to the run alone
            )
            give_way(process.pid, NICENESS)
            complaint = process.communicate(timeout=self.seconds)[1]
        except OSError as error:
            return str(error)
        except subprocess.TimeoutExpired:
            self._kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=GRACE_SECONDS)
            return f"not done after {self.seconds:g} s"
        if process.returncode == 0:
            return None
        words = complaint.partition("pbrl.play: ")[2] or complaint.strip().rpartition("\n")[2]
        return " ".join(words.split()) or f"pbrl.play ended with code {process.returncode}"

    def _kill(self) -> None:
        """Kill the process and its children."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _has_video(policy: Path) -> bool:
    return any(policy.with_suffix(suffix).exists() for suffix in (".mp4", ".gif"))
