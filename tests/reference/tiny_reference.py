"""Protocols whose runs take moments, and the command that makes them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from pbrl.reference.__main__ import read_settings

ROOT = Path(__file__).parents[2]
TINY = ("env.steps=5", "trajectories=8", "pairs=4", "agent.policy.hidden=[8,8]", "evaluation={every:2,trajectories:2}")


def part(**changes: Any) -> dict[str, Any]:
    """A part of a protocol: one run of the agent `random`, unless something is changed."""
    chosen = {"protocol": "tiny", "agents": ["random"], "tasks": ["pendulum_swingup"], "teachers": ["irrational"]}
    return {**chosen, "seeds": [0], "iterations": 2, "overrides": [*TINY], **changes}


def settings(folder: Path, *parts: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """conf/reference.yaml with these parts, and everything below a folder."""
    places = {"folder": str(folder / "runs"), "results": str(folder / "results"), "pages": [str(folder / "README.md")]}
    return {**read_settings(["poll_seconds=0.01"]), "parts": list(parts), **places, **changes}


def start(folder: Path, *parts: dict[str, Any]) -> subprocess.Popen[str]:
    """`python -m pbrl.reference run` in a folder, with these parts, in a process of its own."""
    arguments = ["run", f"parts={in_hydra(list(parts))}", "poll_seconds=0.1", "folder=runs"]
    return subprocess.Popen(
        [sys.executable, "-m", "pbrl.reference", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def in_hydra(value: Any) -> str:
    """A value as it is written on Hydra's command line."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{in_hydra(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(in_hydra, value)) + "]"
    return f'"{value}"' if isinstance(value, str) and "=" in value else str(value)
