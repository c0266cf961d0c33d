"""The versions that a run was made with: `versions.json` in its folder, one entry for each time they changed.

The processor is among them: NumPy and its linear algebra choose instructions by it, and so the last bits of a result.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

from llvmlite.binding import get_host_cpu_name

from pbrl.run.files import write_atomically

FILE = "versions.json"
PACKAGES = ("pbrl", "numpy", "scipy", "torch", "mujoco", "dm_control", "numba", "hydra-core", "matplotlib")


def versions() -> dict[str, str]:
    """What numbers depend on: versions, the kind of processor, and the commit if pbrl runs from its repository."""
    found = {"python": platform.python_version(), "processor": get_host_cpu_name()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"commit": commit(Path(__file__).parents[2]) or "unknown"}


def note_versions(folder: Path) -> None:
    """Add the present versions to a run's versions.json, unless its last entry has the same."""
    noted = noted_versions(folder)
    if noted[-1:] != [present := versions()]:
        write_atomically(folder / FILE, json.dumps([*noted, present], indent=2) + "\n")


def noted_versions(folder: Path) -> list[dict[str, str]]:
    """The entries of a run's versions.json; empty if there is no such file or it is damaged."""
    try:
        entries = json.loads((folder / FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    if not isinstance(entries, list):
        return []
    return [
        {package: version for package, version in entry.items() if isinstance(version, str)}
        for entry in entries
        if isinstance(entry, dict)
    ]


def commit(root: Path) -> str | None:
    """The commit of the repository at `root`, with "-dirty" if files were changed; None without repository or git.

    Changes in results/ and in pages do not count: the run that was just added there changes no number of the next.
    """
    if not (root / ".git").exists():  # a repository around the environment that pbrl is installed in is not ours
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        excluded = (":(exclude)results", ":(exclude)*.md")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *excluded)
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
