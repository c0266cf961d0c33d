"""A run's folder: whose it is, and who works there."""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from pbrl.run.files import unused_name, write_atomically
from pbrl.run.settings import ConfigurationError, differences, digest

log = logging.getLogger(__name__)

LARGEST_SETTINGS = 100_000  # bytes of a config.yaml; pbrl.train writes about 2,000
DEEPEST_SETTINGS = 50  # levels of nesting
YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the one in C is 7 times as fast


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes what occurs twice twice, rather than an alias of it."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


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
    """A run's settings, as plain data: nothing in them is imported, and none of them can take for ever to read."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise ConfigurationError(f"{path} is not a file")
    with path.open("rb") as file:
        content = file.read(LARGEST_SETTINGS + 1)
    try:
        _check_yaml(content)
        settings = link_names(yaml.load(content, YAML_LOADER))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigurationError(f"{path} is not a list of settings")
    return settings


def check_task_and_policy(settings: Mapping[str, Any]) -> None:
    """Refuse the settings of a run that do not say what its policy is, and in which task it acts."""
    for group, key, kind in (("env", "name", str), ("env", "steps", int | None), ("agent", "policy", dict)):
        node = settings.get(group)
        if not isinstance(node, dict) or not isinstance(node.get(key), kind):
            raise ConfigurationError(f"the run's config.yaml has no {group}.{key} that makes sense")
    if "_target_" not in settings["agent"]["policy"]:
        raise ConfigurationError("the run's config.yaml does not say what agent.policy is")


def _check_yaml(content: bytes) -> None:
    """Refuse what pbrl.train never writes and what takes for ever to read, before anything is built from it."""
    if len(content) > LARGEST_SETTINGS:
        raise ValueError(f"it has more than {LARGEST_SETTINGS} bytes")
    depth = 0
    for event in yaml.parse(content, YAML_LOADER):
        if getattr(event, "anchor", None) is not None:
            raise ValueError("it has anchors or aliases, which pbrl.train does not write")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST_SETTINGS:
            raise ValueError(f"it is nested more than {DEEPEST_SETTINGS} levels deep")


def link_names(node: Any) -> Any:
    """Settings with a teacher's link by its name, `logistic`; earlier versions recorded how to import it."""
    if isinstance(node, list):
        return [link_names(each) for each in node]
    if not isinstance(node, dict):
        return node
    if node.get("_target_") == "hydra.utils.get_object":
        package, _, name = str(node.get("path")).rpartition(".")
        if package == "oracles.links":
            return name
    return {key: link_names(each) for key, each in node.items()}


def prepare(settings: Mapping[str, Any]) -> None:
    """Make the run's folder, or see that the run in it is this one."""
    from pbrl.run import checkpoint, loop  # here, so that programs that only read settings start sooner

    folder = Path(settings["folder"])
    if not settings["resume"] and folder.exists():
        aside = unused_name(folder)
        with lock(folder):
            folder.rename(aside)
        log.info("the run that was there is now %s", aside)
    folder.mkdir(parents=True, exist_ok=True)
    if not holds_this_run(settings):  # its config.yaml may be lost: then a checkpoint of other settings is refused
        checkpoint.load(folder / loop.CHECKPOINT, settings_digest=digest(settings))
    write_atomically(folder / "config.yaml", yaml.dump(dict(settings), Dumper=_Dumper, sort_keys=False))


@contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the run's folder: a second process that wants to write there is turned away."""
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"another process is at work in {folder}") from None
        yield
