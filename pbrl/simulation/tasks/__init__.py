"""The tasks: every one of DM Control's suite by name, `<domain>_<task>`, and tasks of your own by a function.

A domain of the suite with a file here runs in compiled loops. The file says which of the domain's tasks it covers
(`TASKS`) and whether dm_control writes into the model when an episode starts (`WRITES_MODEL`), reads dm_control's own
numbers (`constants`), and has observation and reward of one world as compiled functions (`observe`, `reward`). It may
have the same start of an episode as dm_control's, but faster (`initialize_episode`).
A task of your own runs in compiled loops if the module of its loading function has the same.
All other tasks run in dm_control's own environments.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

# Simulating needs no OpenGL: without this, dm_control looks for a display when it is imported.
_chosen = os.environ.get("MUJOCO_GL")
os.environ["MUJOCO_GL"] = _chosen or "disable"
try:
    from dm_control import suite
    from dm_control.rl.control import Environment, PhysicsError
    from dm_control.suite.base import Task as _SuiteTask
finally:
    if _chosen is None:
        del os.environ["MUJOCO_GL"]

__all__ = ["NAMES", "PhysicsError", "Task", "UnknownTaskError", "check_compiled", "find", "load", "native"]

NAMES = {f"{domain}_{task}": (domain, task) for domain, task in suite.ALL_TASKS}
_LOADING_SEED = 0  # LQR draws its springs when it is loaded; all threads and simulators must have the same


class UnknownTaskError(ValueError):
    """No task of the suite has that name."""


@dataclass(frozen=True)
class Task:
    """A task of your own: a name, and a function without arguments that returns a new dm_control `Environment`.

    Every call must make the same environment: each thread has one, and results must not depend on which.
    """

    name: str
    make: Callable[[], Any]


def find(name: str, make: Callable[[], Any] | None = None) -> str | Task:
    """What `Simulator` and `load` take: the suite's task of that name, or a task of your own if `make` is given."""
    if make is not None:
        return Task(name, make)
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, n=5, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(sorted(NAMES))}"
        raise UnknownTaskError(f"there is no task {name!r} in DM Control's suite; {hint}")
    return name


def load(task: str | Task) -> Any:
    """A new dm_control environment of the task."""
    absl = logging.getLogger("absl")  # MuJoCo's remarks on the suite's models do not concern the user
    level = absl.level
    absl.setLevel(logging.ERROR)
    try:
        if isinstance(task, Task):
            environment = task.make()
            _check(task, environment)
        else:
            find(task)
            environment = suite.load(*NAMES[task], task_kwargs={"random": _LOADING_SEED})
    finally:
        absl.setLevel(level)
    # quadruped_escape would make a renderer to upload its terrain to, in any thread; see pbrl.simulation.video.picture.
    environment.physics._make_rendering_contexts = lambda: None
    return environment


def native(task: str | Task) -> ModuleType | None:
    """The module with the task's compiled `observe` and `reward`, if there is one."""
    if isinstance(task, Task):
        make = task.make.func if isinstance(task.make, functools.partial) else task.make
        module = sys.modules.get(getattr(make, "__module__", None) or "")
        compiled = all(hasattr(getattr(module, name, None), "py_func") for name in ("observe", "reward"))
        return module if compiled and hasattr(module, "constants") else None
    domain, name = NAMES[task]
    if importlib.util.find_spec(f"pbrl.simulation.tasks.{domain}") is None:
        return None
    module = importlib.import_module(f"pbrl.simulation.tasks.{domain}")
    return module if name in module.TASKS else None


def check_compiled(environment: Any) -> None:
    """Refuse to run an environment in compiled loops that would ignore a part of it."""
    kind = type(environment.task)
    methods = ("before_step", "after_step", "get_termination")
    ignored = [name for name in methods if getattr(kind, name) is not getattr(_SuiteTask, name)]
    if ignored or len(environment.physics.data.ctrl) != environment.action_spec().shape[0]:
        raise ValueError(
            f"the compiled loops set one control per action and ignore {', '.join(methods)}, but {kind.__name__} has "
            f"its own {', '.join(ignored) or 'actions'}: remove its compiled `observe`, or use native=False"
        )


def _check(task: Task, environment: Any) -> None:
    """Refuse environments that cannot be reset from a random stream of ours."""
    if not isinstance(environment, Environment):
        raise TypeError(
            f"the task {task.name} must load a dm_control.rl.control.Environment, not a {type(environment).__name__}"
        )
    if not isinstance(environment.task, _SuiteTask):
        raise TypeError(
            f"the task {task.name} must be a dm_control.suite.base.Task, which draws from `self.random`, "
            f"not a {type(environment.task).__name__}"
        )
