"""A run's folder: whose it is, whether the run in it is finished, and who works there."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pbrl.run import checkpoint
from pbrl.run.files import write_atomically
from pbrl.run.settings import ConfigurationError, differences

log = logging.getLogger(__name__)


def is_finished(settings: Mapping[str, Any]) -> bool:
    """Whether this run is there already, to its last iteration. Asked before anything heavy is made."""
    if not settings["resume"] or not holds_this_run(settings):
        return False
    saved = checkpoint.load(Path(settings["folder"]) / "checkpoint")
    return saved is not None and saved[0] + 1 >= settings["iterations"]


def holds_this_run(settings: Mapping[str, Any]) -> bool:
    """Whether there is a run in the folder; another run than this one is refused."""
    folder = Path(settings["folder"])
    if not (folder / "config.yaml").exists():
        return False
    earlier = read_settings(folder)
    if changed := differences(settings, earlier):
        raise ConfigurationError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}): "
            "give this one another name=..., or start over with resume=false, which keeps the old one aside"
        )
    return True


def read_settings(folder: Path) -> dict[str, Any]:
    """A run's settings, as plain data."""
    path = folder / "config.yaml"
    try:
        settings = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path} holds no settings")
    return settings


def prepare(settings: Mapping[str, Any]) -> None:
    """Make the run's folder, or see that the run in it is this one."""
    folder = Path(settings["folder"])
    if not settings["resume"] and folder.exists():
        aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}~{n}")).exists())
        with lock(folder):
            folder.rename(aside)
        log.info("the run that was there is now %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    holds_this_run(settings)
    write_atomically(folder / "config.yaml", yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run's folder: a second process that wants to write there is turned away."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process is at work in {folder}") from None
        yield
