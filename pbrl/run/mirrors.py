"""wandb and TensorBoard, each fed from the run's record by a process of its own, where they cannot harm the run.

The run starts the process and writes its record as always. A mirror that fails or hangs affects neither the run nor its
random numbers nor its results. The mirror knows that the run is over when its standard input ends; its messages come
back on its standard output and are logged. A mirror always begins with the first row, so it shows all rows of a
continued run, each once.

The process executes this file: it imports nothing of pbrl, and heavy packages only when it needs them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

AXES = ("trajectories", "pairs_asked", "env_steps")  # that wandb draws the return against, beside iterations
# wandb makes a section of panels of what stands before a slash, and has them in the order of their names: evaluations
# and returns come first. What a metric's name begins with says where it belongs; all others are the agent's own.
SECTIONS = {"eval_": "eval", "return_": "return", "teacher_": "teacher", "seconds_": "time"}
SECTION_OF = {"diverged": "return", "pairs_skipped": "teacher", "pairs_equal": "teacher"}
BUDGET = ("trajectories", "env_steps", "pairs_asked", "pairs_answered", "bits")
OWN = "update"
MODES: dict[str, tuple[Any, ...]] = {
    "auto": (None, "offline"),
    "online": ("online", "offline"),
    "offline": ("offline",),
    "disabled": (),
}
POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0  # for a mirror to say that it could not finish in time

Row = Mapping[str, Any]

logger = logging.getLogger(__name__)


def mirrors(record: Path, *, wandb: Mapping[str, Any], tensorboard: bool, **labels: Any) -> list[MirrorProcess]:
    """The mirrors of a record that the configuration asks for; labels: wandb's job_type, name and config."""
    found = [mirror_to_wandb(record, **wandb, **labels)]
    if tensorboard:
        found.append(mirror_to_tensorboard(record, finish_seconds=wandb["finish_seconds"]))
    return [mirror for mirror in found if mirror is not None]


def mirror_to_wandb(
    record: Path,
    *,
    mode: str,
    project: str,
    entity: str | None,
    group: str | None,
    job_type: str,
    name: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
    init_seconds: float,
    finish_seconds: float,
) -> MirrorProcess | None:
    """Mirror a record to the wandb run of its folder.

    `auto` is online if wandb is logged in, else offline. If going online fails for any reason, the rows go to an
    offline run that `wandb sync` uploads. None if `disabled`.
    """
    if mode not in MODES:
        raise ValueError(f"wandb's mode must be one of {', '.join(MODES)}, not {mode!r}")
    if mode == "disabled" or (mode == "auto" and os.environ.get("WANDB_MODE") == "disabled"):
        return None
    labels = {"project": project, "entity": entity, "group": group, "job_type": job_type, "name": name}
    about = {**labels, "tags": list(tags), "config": dict(config)}
    settings = {"mode": mode, "init_seconds": init_seconds, "about": about}
    return MirrorProcess("wandb", record, settings, finish_seconds)


def mirror_to_tensorboard(record: Path, *, finish_seconds: float) -> MirrorProcess:
    """Mirror a record to the folder `tensorboard` beside it."""
    return MirrorProcess("tensorboard", record, {}, finish_seconds)


class MirrorProcess:
    """The process of a mirror, as seen by the run. Open the record first: the process reads it."""

    def __init__(self, kind: str, record: Path, settings: Mapping[str, Any], finish_seconds: float) -> None:
        self.kind = kind
        self.finish_seconds = finish_seconds
        self._log = record.absolute().parent / kind / "mirror.log"
        self._process: subprocess.Popen[str] | None = None
        order = {"kind": kind, "record": str(record.absolute()), "finish_seconds": finish_seconds, "settings": settings}
        try:
            first_line = json.dumps(order, default=str) + "\n"
            self._log.parent.mkdir(exist_ok=True)
            with self._log.open("wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
                    encoding="utf-8",
                    errors="replace",
                    start_new_session=True,  # Ctrl-C goes to the run alone
                )
            self._listener = threading.Thread(target=self._listen, args=[self._process], daemon=True)
            self._listener.start()
            print(first_line, end="", file=self._process.stdin, flush=True)
        except (OSError, TypeError, ValueError) as error:
            logger.warning("%s could not be started (%s); the run continues, and its record is complete", kind, error)

    def close(self) -> None:
        """The run is over: wait until the mirror is complete, but no longer than `finish_seconds`."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):  # it may be gone
            self._process.stdin.close()  # type: ignore[union-attr]
        try:
            self._process.wait(self.finish_seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._listener.join(GRACE_SECONDS)

    def _listen(self, process: subprocess.Popen[str]) -> None:
        with process.stdout as messages:  # type: ignore[union-attr]
            for message in messages:
                level, _, text = message.strip().partition(" ")
                logger.log(logging.getLevelNamesMapping().get(level, logging.WARNING), "%s: %s", self.kind, text)
        if process.wait() != 0:
            logger.warning(
                "%s ended unexpectedly (code %d, see %s); the run continues, and its record is complete",
                self.kind,
                process.returncode,
                self._log,
            )


# The rest of this file runs in the mirror's process.


class Mirror(Protocol):
    """Shows the rows of a record somewhere else. Its arguments are the record's path and its settings."""

    def write(self, row: Row) -> None:
        """Show one more row."""

    def close(self) -> None:
        """Finish after the last row."""


class Wandb:
    """A wandb run. Its identifier is kept in the run's folder, to continue the same wandb run."""

    def __init__(self, record: Path, mode: str, init_seconds: float, about: dict[str, Any]) -> None:
        folder = record.parent / "wandb"
        os.environ["WANDB_SILENT"] = "true"
        os.environ["WANDB_CACHE_DIR"] = str(folder / "cache")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would use the network even when offline
        try:
            import wandb
        except ImportError as error:
            raise RuntimeError(f"{error}; `pip install wandb`, or turn it off with its mode `disabled`") from error

        file = folder / "run_id"
        run_id = (file.read_text() if file.exists() else "") or secrets.token_hex(4)
        file.write_text(run_id)
        about |= {"id": run_id, "resume": "allow", "dir": str(record.parent)}
        settings = wandb.Settings(silent=True, console="off", init_timeout=init_seconds)
        for attempt in MODES[mode]:
            try:
                self.run = wandb.init(mode=attempt, settings=settings, **about)
                break
            except Exception as error:
                if attempt == "offline":
                    raise
                expected = mode == "auto" and "No API key" in str(error)  # nobody has logged in
                say("INFO" if expected else "WARNING", f"not online ({error}), so offline")
                wandb.teardown()
        self.folder = Path(self.run.dir).parent
        if self.run.offline:
            say("INFO", f"upload with `wandb sync {self.folder}`")
        else:
            say("INFO", f"{self.run.url}")
        self.first = self.run.step  # wandb has the rows before this already
        self.step: int | None = None  # of the last row that was sent
        self.make_video, self.videos, self.shown = wandb.Video, record.parent / "videos", set[Path]()
        self.run.define_metric("iteration", hidden=True)
        self.run.define_metric("*", step_metric="iteration")
        self.run.define_metric("budget/*", step_metric="iteration", hidden=True)  # straight lines: axes, not panels
        for axis in AXES:  # wandb draws a metric against one axis only: the return has a name for each
            self.run.define_metric(f"return/against_{axis}", step_metric=f"budget/{axis}")

    def write(self, row: Row) -> None:
        """Log the metrics that are numbers, with the iteration as step."""
        if row["iteration"] >= self.first:
            self.step = row["iteration"]
            returns = {f"return_against_{axis}": row.get("return_mean") for axis in AXES if axis in row}
            numbers = {in_section(name): value for name, value in {**row, **returns}.items() if value is not None}
            self.run.log(numbers, step=self.step)
            self._show_videos()

    def _show_videos(self) -> None:
        """Log videos that are new, each under its own name, at the last row's step: wandb's steps only increase."""
        for path in sorted({*self.videos.glob("*.mp4"), *self.videos.glob("*.gif")} - self.shown):
            self.shown.add(path)
            self.run.log({f"videos/{path.stem}": self.make_video(str(path))}, step=self.step)

    def close(self) -> None:
        """Finish. An offline run has every row, so earlier offline runs of the same run are deleted."""
        if self.step is not None:
            self._show_videos()
        offline, own = self.run.offline, self.folder.name
        self.run.finish()
        if offline:
            for earlier in self.folder.parent.glob(f"*run-*-{own.rpartition('-')[2]}"):
                if earlier.name != own:
                    shutil.rmtree(earlier, ignore_errors=True)


def in_section(name: str) -> str:
    """A metric's name with its section: `seconds_learn` as `time/learn`."""
    if name == "iteration":
        return name
    if name in BUDGET:
        return f"budget/{name}"
    if name in SECTION_OF:
        return f"{SECTION_OF[name]}/{name}"
    for beginning, section in SECTIONS.items():
        if name.startswith(beginning):
            return f"{section}/{name.removeprefix(beginning)}"
    return f"{OWN}/{name}"


class TensorBoard:
    """Scalars against the iteration."""

    def __init__(self, record: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RuntimeError(f"{error}; `pip install tensorboard`, or turn it off") from error

        folder = record.parent / "tensorboard"
        for earlier in folder.glob("events.out.tfevents.*"):
            earlier.unlink()
        self.writer = SummaryWriter(str(folder))

    def write(self, row: Row) -> None:
        """Add the metrics that are numbers."""
        for name, value in row.items():
            if value is not None and name != "iteration":
                self.writer.add_scalar(in_section(name), value, row["iteration"])

    def close(self) -> None:
        """Write everything to disk."""
        self.writer.close()


def say(level: str, text: str) -> None:
    """Send a message to the run's log, if the run is still there."""
    with contextlib.suppress(BrokenPipeError):
        os.write(messages, f"{level} {' '.join(text.split())}\n".encode())


def follow(record: Path, over: threading.Event) -> Iterator[dict[str, Any]]:
    """The rows of a record, those that are there and those to come, until the run is over."""
    with record.open("rb") as file:
        half, more = b"", True
        while more:
            more = not over.wait(POLL_SECONDS)
            *lines, half = (half + file.read()).split(b"\n")
            yield from map(json.loads, lines)


def main() -> None:
    """Mirror the record that the first line of the standard input names."""
    order = json.loads(sys.stdin.readline())
    record = Path(order["record"])
    over = threading.Event()

    def wait_for_end() -> None:
        os.read(sys.stdin.fileno(), 1)  # returns when the run closes the pipe
        over.set()
        time.sleep(order["finish_seconds"])
        state = f"not done {order['finish_seconds']} s after the run; what it has is in {record.parent / order['kind']}"
        say("WARNING", f"{state}; the run's record is complete")
        os._exit(0)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        kind = {"wandb": Wandb, "tensorboard": TensorBoard}[order["kind"]]
        mirror: Mirror = kind(record, **order["settings"])
        for row in follow(record, over):
            mirror.write(row)
        mirror.close()
    except Exception as error:
        traceback.print_exc()  # into the mirror's log
        say("WARNING", f"stopped ({type(error).__name__}: {error}); the run continues, and its record is complete")


if __name__ == "__main__":
    messages = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what packages print goes to the log
    main()
