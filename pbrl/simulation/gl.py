"""Which OpenGL can draw here? Found out by drawing, in a process of its own: a failing library may take it down.

Only pictures need OpenGL. dm_control and MuJoCo load the one that MUJOCO_GL names when they are first imported, so it
is chosen before.
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
    """Nothing can draw; the message says what to install."""


def candidates() -> list[str]:
    """What may be able to draw on this machine, in the order in which it is tried."""
    if sys.platform == "darwin":
        return ["glfw"]
    display = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    return ["glfw", "egl", "osmesa"] if display else ["egl", "osmesa"]


def obstacle(name: str) -> str | None:
    """Why this one cannot draw; None if it can."""
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
    """The first that can draw, or the one that MUJOCO_GL names."""
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
