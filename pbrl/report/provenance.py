"""Where runs come from: the commands that make them, the settings in which they differ, the versions they ran with."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pbrl.run.settings import choices

Settings = Mapping[str, Any]
GROUPS = ("agent", "oracle")
# What a run may be told without learning anything else.
INCIDENTAL = ("folder", "resume", "checkpoint_every", "preference_log", "threads", "video", "wandb", "tensorboard")
PACKAGES = ("pbrl", "numpy", "scipy", "torch", "mujoco", "dm_control", "numba", "hydra-core", "matplotlib")


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Every preset of an agent and an oracle by name, and under "train" the settings beside them."""
    found: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    with initialize_config_module("conf"):
        for pair in zip_longest(*(choices(group) for group in GROUPS)):
            chosen = {group: name for group, name in zip(GROUPS, pair, strict=True) if name is not None}
            cfg = compose("train", overrides=[f"{group}={name}" for group, name in chosen.items()])
            for group, name in chosen.items():
                found[group][name] = OmegaConf.to_container(cfg[group])
    found["train"] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    return found


def changes(settings: Any, default: Any, path: str = "") -> dict[str, Any]:
    """The overrides that make a default what was set: `agent.votes: 16`; `+` before what is new, `~` what is gone."""
    if not isinstance(settings, Mapping) or not isinstance(default, Mapping):
        return {} if settings == default else {path: settings}
    found: dict[str, Any] = {}
    for key in {**default, **settings}:
        below = f"{path}.{key}".lstrip(".")
        if key not in settings:
            found[f"~{below}"] = None
        elif key not in default:
            found[f"+{below}"] = settings[key]
        else:
            found |= changes(settings[key], default[key], below)
    return found


def nearest(group: str, node: Settings) -> tuple[str | None, dict[str, Any]]:
    """The preset that a node was made from, as far as one can tell, and what was changed; None: from none of ours."""
    alike = {
        name: changes(node, preset, group)
        for name, preset in presets()[group].items()
        if preset["_target_"] == node["_target_"]
    }
    if not alike:
        return None, {}
    name = min(alike, key=lambda name: len(alike[name]))
    return name, alike[name]


def overrides(settings: Settings) -> dict[str, str]:
    """A run's command line, as far as it matters for what was learnt."""
    agent, agent_changes = nearest("agent", settings["agent"])
    oracle, oracle_changes = nearest("oracle", settings["oracle"])
    agent, oracle = agent or settings["name"], oracle or settings["oracle"]["_target_"]
    task = settings["env"]["name"]
    apart = ("agent", "oracle", "seed", *INCIDENTAL)
    rest = {key: value for key, value in settings.items() if key not in apart}
    default = {key: value for key, value in presets()["train"].items() if key not in apart}
    default |= {"name": agent, "env": {**default["env"], "name": task}}
    chosen = {"agent": agent, "env": task, "oracle": oracle, "seed": settings["seed"]}
    every = {**chosen, **agent_changes, **oracle_changes, **changes(rest, default)}
    return {key: in_words(value) for key, value in every.items()}


def commands(every_settings: Iterable[Settings]) -> list[str]:
    """The commands that repeat these runs, as few as will do."""
    lines = [overrides(settings) for settings in every_settings]
    for key in ("seed", "env", "agent", "oracle"):
        merged: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
        for line in lines:
            rest = tuple((name, "" if name == key else value) for name, value in line.items())
            merged.setdefault(rest, {})[line[key]] = None
        lines = [{**dict(rest), key: ",".join(values)} for rest, values in merged.items()]
    return [_command(line) for line in lines]


def _command(line: Mapping[str, str]) -> str:
    several = any("," in line[key] for key in ("seed", "env", "agent", "oracle"))
    arguments = [key if key.startswith("~") else f"{key}={value}" for key, value in line.items()]
    return shlex.join(["python", "-m", "pbrl.train", *(["-m"] if several else []), *arguments])


def in_words(value: Any) -> str:
    """A setting as one writes it on Hydra's command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_words(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_words(each) for each in value) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def leaves(settings: Any, path: str = "") -> dict[str, str]:
    """Every setting under its full name."""
    if not isinstance(settings, Mapping):
        return {path: in_words(settings)}
    return {k: v for key, below in settings.items() for k, v in leaves(below, f"{path}.{key}".lstrip(".")).items()}


def disagreements(named: Sequence[tuple[str, Settings]]) -> dict[str, dict[str, list[str]]]:
    """Settings of which runs have different values: for each the values, and the names of those who have them."""
    found: dict[str, dict[str, list[str]]] = {}
    for name, settings in named:
        for path, value in leaves(settings).items():
            if path.split(".")[0] in ("seed", "name", *INCIDENTAL) or path in ("env.name", "agent._target_"):
                continue
            names = found.setdefault(path, {}).setdefault(value, [])
            if name not in names:
                names.append(name)
    return {path: values for path, values in found.items() if len(values) > 1}


def note_versions(folder: Path) -> None:
    """Add the versions of now to a run's versions.json, unless they are the last that it was continued with."""
    noted = noted_versions(folder)
    if noted[-1:] != [now := versions()]:
        temporary = folder / "versions.json.new"
        temporary.write_text(json.dumps([*noted, now], indent=2) + "\n")
        temporary.replace(folder / "versions.json")


def noted_versions(folder: Path) -> list[dict[str, str]]:
    """What a run was made with, one entry for each time it changed; none if nobody noted it."""
    try:
        return list(json.loads((folder / "versions.json").read_text()))
    except (OSError, ValueError):
        return []


def compare_versions(folders: Sequence[Path]) -> list[str]:
    """Of each package: the version of the report, and those of the runs."""
    report = versions()
    noted = [noted_versions(folder) or [dict.fromkeys(report, "not noted")] for folder in folders]
    lines = []
    for package, version in report.items():
        count = Counter(each for run in noted for each in {entry.get(package, "not noted"): 0 for entry in run})
        lines.append(f"{package} {version}; runs: {', '.join(f'{each} ({many})' for each, many in count.items())}")
    return lines


def versions() -> dict[str, str]:
    """Of everything that numbers depend on, and the commit if pbrl runs from its repository."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": commit(Path(__file__).parents[2]) or "unknown"}


def commit(root: Path) -> str | None:
    """The commit of the repository at `root`, "-dirty" with changes to it; None if there is no repository or no git."""
    if not (root / ".git").exists():  # a repository around the environment that pbrl is installed in is not ours
        return None
    how = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(how, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
