"""The reference runs: which there are, in order of priority, and what `pbrl.train` makes of their settings."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import DictConfig

from pbrl.report.provenance import teacher_name
from pbrl.run.settings import ConfigurationError, check, choices, digest, plain_settings

GROUPS = {"agents": "agent", "tasks": "env", "teachers": "oracle"}
ALWAYS = ("threads=1", "wandb.mode=disabled")  # of every reference run


@dataclass(frozen=True)
class PlannedRun:
    """A run of a protocol, made or not."""

    protocol: str
    overrides: Sequence[str]  # that pbrl.train takes, without the folder
    settings: Mapping[str, Any]  # that pbrl.train makes of them

    @property
    def folder(self) -> Path:
        """Where it is made."""
        return Path(self.settings["folder"])

    @functools.cached_property
    def name(self) -> tuple[str, str, str, int]:
        """What it is called in the results: task, agent, teacher, seed."""
        settings = self.settings
        return settings["env"]["name"], settings["name"], teacher_name(settings), settings["seed"]

    @functools.cached_property
    def identity(self) -> tuple[str, int]:
        """The same for two runs that learn the same."""
        return digest(self.settings), self.settings["iterations"]

    @property
    def command(self) -> str:
        """What makes it again, in a folder of the user's."""
        return shlex.join(["python", "-m", "pbrl.train", *self.overrides])


def plan(settings: Mapping[str, Any]) -> list[PlannedRun]:
    """All runs of the chosen protocols, in order of priority, from the settings of conf/reference.yaml."""
    parts = settings["parts"]
    protocols = list(dict.fromkeys(part["protocol"] for part in parts))
    chosen = settings["protocol"]
    if chosen is not None and chosen not in protocols:
        raise ConfigurationError(f"there is no protocol {chosen!r}, only {', '.join(protocols)}")
    runs = [run for part in parts if chosen in (None, part["protocol"]) for run in part_runs(part, settings["folder"])]
    folders: dict[Path, PlannedRun] = {}
    for run in runs:
        if (other := folders.setdefault(run.folder, run)) is not run:
            raise ConfigurationError(f"two runs would share the folder {run.folder}: {other.command}; {run.command}")
    return runs


def part_runs(part: Mapping[str, Any], folder: str) -> Iterator[PlannedRun]:
    """The runs of one part of conf/reference.yaml: seed by seed, task by task."""
    for key, group in GROUPS.items():
        for name in part[key]:
            if name not in choices(group):
                raise ConfigurationError(
                    f"the protocol {part['protocol']} has the {group} {name!r}, which is not there"
                )
    for seed, task, teacher, agent in product(part["seeds"], part["tasks"], part["teachers"], part["agents"]):
        chosen = (f"agent={agent}", f"env={task}", f"oracle={teacher}")
        others = (f"iterations={part['iterations']}", *part.get("overrides", ()), *ALWAYS)
        settings = train_settings((*chosen, *others), seed, f"{folder}/{part['protocol']}")
        yield PlannedRun(part["protocol"], (*chosen, f"seed={seed}", *others), settings)


def train_settings(overrides: Sequence[str], seed: int, root: str) -> dict[str, Any]:
    """The settings that `pbrl.train` would have with these overrides and this seed, and a folder below `root`."""
    settings = plain_settings(composed(tuple(overrides)))
    folder = f"{root}/{settings['env']['name']}/{settings['name']}/{settings['choices']['oracle']}/seed_{seed}"
    settings |= {"seed": seed, "folder": folder}
    check(settings)
    return settings


@functools.cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    """Hydra's configuration of `pbrl.train`. Composing takes a fifth of a second: once for all seeds."""
    with initialize_config_module("conf"):
        return compose("train", overrides=list(overrides), return_hydra_config=True)
