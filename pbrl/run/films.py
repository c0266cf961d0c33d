"""Videos while a run goes on: every so many iterations its incumbent, filmed by `pbrl.play`.

The run leaves the incumbent's parameters in `videos/` and goes on. `pbrl.play` films them in a process of its own, one
at a time, the newest first: nothing that it does, fails to do or waits for reaches the run, its randomness or its
results. Parameters go when their video is there. Those that have none stay: they are tried again when the run is
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

PLAY = ("nice", sys.executable, "-m", "pbrl.play")  # a core that training wants is training's
NO_MORE = 1  # an order; others are negative iterations, and the least is the next
GRACE_SECONDS = 5.0  # for a process to be gone

logger = logging.getLogger(__name__)


def kept_policy(run: Path, iteration: int) -> Path:
    """Where the parameters of an iteration wait to be filmed."""
    return run / "videos" / f"iteration_{iteration:06d}.safetensors"


class Films:
    """The videos of a run, as the run sees them."""

    def __init__(
        self,
        run: Path,
        *,
        every: int | None,  # iterations; None: there are no videos
        steps: int,  # control steps of a video
        width: int,  # pixels
        height: int,
        seconds: float,  # after which a video is given up
        finish_seconds: float,  # after which the end of a run does not wait
    ) -> None:
        self.run, self.seconds, self.finish_seconds = run, seconds, finish_seconds
        self._options = ["--steps", str(steps), "--size", f"{width}x{height}"]
        self._orders: queue.PriorityQueue[int] = queue.PriorityQueue()
        self._process: subprocess.Popen[str] | None = None
        self._given_up = False
        self._worker = threading.Thread(target=self._work, daemon=True)
        if every is not None:
            for iteration in self._without_video():
                self._orders.put(-iteration)
            self._worker.start()

    def film(self, iteration: int, save: Callable[[Path, int], None]) -> None:
        """Order a video of the incumbent, which `save` writes; one that is there already is not made again."""
        policy = kept_policy(self.run, iteration)
        if _has_video(policy):
            return
        try:
            policy.parent.mkdir(exist_ok=True)
            save(policy, iteration)
        except Exception as error:  # of the disk, or of safetensors about the disk
            logger.warning("no video of iteration %d (%s); the run goes on", iteration, error)
        else:
            self._orders.put(-iteration)

    def finish(self) -> None:
        """The run is over: wait until all videos are there, but no longer than `finish_seconds`."""
        self._orders.put(NO_MORE)
        if self._worker.is_alive():
            self._worker.join(self.finish_seconds)

    def stop(self) -> None:
        """Give up what is not done."""
        if not self._worker.is_alive():
            return
        self._given_up = True
        self._orders.put(NO_MORE)
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
        """The iterations whose parameters are kept; those that are not needed any more go."""
        kept = sorted(self.run.glob("videos/iteration_*.safetensors"))
        for policy in filter(_has_video, kept):
            policy.unlink()
        return [int(policy.stem.removeprefix("iteration_")) for policy in kept if policy.exists()]

    def _work(self) -> None:
        """Film what is ordered, up to the first failure: what is missing now will be missing the next time."""
        while (order := self._orders.get()) != NO_MORE and not self._given_up:
            failure = self._make(-order)
            if failure is not None:
                if not self._given_up:
                    logger.warning("no video of iteration %d, nor of others (%s); the run goes on", -order, failure)
                return
            kept_policy(self.run, -order).unlink(missing_ok=True)

    def _make(self, iteration: int) -> str | None:
        """Why there is no video of it; None if there is one."""
        output = kept_policy(self.run, iteration).with_suffix("").absolute()  # pbrl.play adds .mp4 or .gif
        what = [str(self.run), "--iteration", str(iteration), "--output", str(output)]
        home = str(Path(__file__).parents[2])  # the same pbrl as the run's
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
                start_new_session=True,  # Ctrl-C is for the run
            )
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
        """End the process, and those that it has started."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


def _has_video(policy: Path) -> bool:
    return any(policy.with_suffix(suffix).exists() for suffix in (".mp4", ".gif"))
