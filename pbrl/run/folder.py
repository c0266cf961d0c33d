"""A run's folder: whose it is, whether the run in it is finished, and who is at work there."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from pbrl.run import checkpoint
from pbrl.run.settings import ConfigurationError, differences

log = logging.getLogger(__name__)


def is_finished(cfg: DictConfig) -> bool:
    """Whether this run is there already, to its last iteration. Asked before anything heavy is made."""
    if not cfg.resume or not see_that_it_is_this_run(cfg):
        return False
    saved = checkpoint.load(Path(cfg.folder) / "checkpoint")
    return saved is not None and saved[0] + 1 >= cfg.iterations


def see_that_it_is_this_run(cfg: DictConfig) -> bool:
    """Whether there is a run in the folder; another run than this one is refused."""
    folder = Path(cfg.folder)
    if not (folder / "config.yaml").exists():
        return False
    earlier = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    if changed := differences(OmegaConf.to_container(cfg, resolve=True), earlier):
        raise ConfigurationError(
            f"{folder} holds a run with other settings ({'; '.join(changed)}): "
            "give this one another name=..., or start over with resume=false, which keeps the old one aside"
        )
    return True


def prepare(cfg: DictConfig) -> None:
    """Make the run's folder, or see that the run in it is this one."""
    folder = Path(cfg.folder)
    if not cfg.resume and folder.exists():
        aside = next(path for n in range(1, 10_000) if not (path := folder.with_name(f"{folder.name}~{n}")).exists())
        with alone_in(folder):
            folder.rename(aside)
        log.info("the run that was there is now %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    see_that_it_is_this_run(cfg)
    temporary = folder / "config.yaml.new"
    temporary.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    temporary.replace(folder / "config.yaml")


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the run's folder: a second process that means to write there is turned away."""
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process is at work in {folder}") from None
        yield
