"""The tasks: every one of DM Control's suite by name, `<domain>_<task>`.

A domain with a file here is natively batched. The file says which of the domain's tasks it covers (`TASKS`) and
whether dm_control writes into the model when an episode starts (`WRITES_MODEL`), reads dm_control's own numbers
(`constants`), and has observation and reward of one world as compiled functions (`observe`, `reward`).
All other tasks run through dm_control's own environments.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import logging
import os
from types import ModuleType
from typing import Any

# Simulating needs no OpenGL: without this, dm_control looks for a display when it is imported.
_chosen = os.environ.get("MUJOCO_GL")
os.environ["MUJOCO_GL"] = _chosen or "disable"
try:
    from dm_control import suite
    from dm_control.rl.control import PhysicsError
finally:
    if _chosen is None:
        del os.environ["MUJOCO_GL"]

__all__ = ["NAMES", "PhysicsError", "UnknownTaskError", "load", "native"]

NAMES = {f"{domain}_{task}": (domain, task) for domain, task in suite.ALL_TASKS}


class UnknownTaskError(ValueError):
    """No task of the suite has that name."""


def load(name: str) -> Any:
    """A new dm_control environment of the task."""
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=5, cutoff=0.5) or sorted(NAMES)
        raise UnknownTaskError(f"there is no task {name!r} in DM Control's suite; did you mean {', '.join(near)}?")
    absl = logging.getLogger("absl")  # MuJoCo's remarks on the suite's models are not the user's business
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        environment = suite.load(*NAMES[name])
    finally:
        absl.setLevel(level)
    # quadruped_escape would make a renderer to upload its terrain to, in whichever thread; see pbrl.simulation.video.picture.
    environment.physics._make_rendering_contexts = lambda: None
    return environment


def native(name: str) -> ModuleType | None:
    """The file that makes the task fast, if there is one."""
    domain, task = NAMES[name]
    if importlib.util.find_spec(f"pbrl.simulation.tasks.{domain}") is None:
        return None
    module = importlib.import_module(f"pbrl.simulation.tasks.{domain}")
    return module if task in module.TASKS else None
