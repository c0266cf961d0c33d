"""Find an OpenGL library that can draw here, by drawing in a process of its own: a broken library may crash it.

Only pictures need OpenGL. dm_control and MuJoCo load the library that MUJOCO_GL names when they are first imported, so
it must be chosen before, or switched on later (`switch_on`).
"""

from __future__ import annotations

import ctypes.util
import os
import signal
import subprocess
import sys

LIBRARIES = {"egl": ("EGL", "GL"), "osmesa": ("OSMesa",), "glfw": ("GL",)}
PACKAGES = (
    "apt-get install libegl1 libgl1 (a graphics card, or Mesa in software), or libosmesa6 (software alone); "
    "with conda: conda install -c conda-forge libegl libgl, or 'mesalib<25.1'"
)
_DRAWING = """
from dm_control import mujoco
physics = mujoco.Physics.from_xml_string(
    "<mujoco><worldbody><light pos='0 0 9'/><geom size='1'/></worldbody></mujoco>"
)
assert physics.render(32, 32).any(), "it draws nothing but black"
"""
_SECONDS = 60.0  # a driver may hang


class NoRendererError(RuntimeError):
    """No OpenGL library can draw; the message says what to install."""


def candidates() -> list[str]:
    """The values of MUJOCO_GL to try on this machine, in order."""
    if sys.platform == "darwin":
        return ["glfw"]
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return ["glfw", "egl", "osmesa"] if display else ["egl", "osmesa"]


def obstacle(name: str) -> str | None:
    """Why this value of MUJOCO_GL cannot draw; None if it can."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-c", _DRAWING],
            env={**os.environ, "MUJOCO_GL": name},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it did not draw within {_SECONDS:.0f} s"
    if process.returncode == 0:
        return None
    missing = [library for library in LIBRARIES.get(name, ()) if ctypes.util.find_library(library) is None]
    if missing:
        return f"{' and '.join(f'lib{library}' for library in missing)} cannot be found"
    if process.returncode < 0:
        return f"it died of {signal.Signals(-process.returncode).name}"
    return (process.stderr.strip().splitlines() or ["it failed without a word"])[-1]


def choose() -> str:
    """The value of MUJOCO_GL if it is set, otherwise the first that can draw."""
    named = os.environ.get("MUJOCO_GL")
    obstacles = {}
    for name in [named] if named else candidates():
        reason = obstacle(name)
        if reason is None:
            return name
        obstacles[name] = reason
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in obstacles.items())
    unset = f"unset MUJOCO_GL={named}, or " if named else ""
    raise NoRendererError(f"nothing here can draw a picture:{reasons}\nWhat to do: {unset}{PACKAGES}")


def switch_on() -> None:
    """Let dm_control draw in this process, which imported it without OpenGL: MUJOCO_GL was not set then."""
    from dm_control import _render

    importers = {"glfw": _render._import_glfw, "egl": _render._import_egl, "osmesa": _render._import_osmesa}
    if _render.BACKEND not in importers:
        name = choose()
        _render.Renderer, _render.BACKEND = importers[name](), name
