"""What a run was made with."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

PACKAGES = ("pbrl", "numpy", "scipy", "torch", "mujoco", "dm_control", "numba", "hydra-core", "matplotlib")


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
