"""Draws the clips of a run's questions: `oracles.human` starts it, and tells it what to draw on its standard input.

An order is a line of JSON: a question, and for each of its two clips the actions that lead there. When both clips are
drawn, the question is written, too: then it can be shown. Nothing in a picture says how well it goes.

A clip is an animated WebP whose frames are whole pictures. The page takes it apart, and so shows any moment of two
clips in step; and it takes no other program to write one.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pbrl.run.files import write_atomically
from pbrl.run.folder import read_settings
from pbrl.run.questions import ShownQuestion, clip_path, write_question
from pbrl.seeds import streams
from pbrl.simulation import gl, video
from pbrl.types import Behaviour

if TYPE_CHECKING:  # it loads dm_control, which has to wait until MUJOCO_GL is chosen
    from pbrl.simulation.simulator import Simulator

WEBP = {"quality": 75, "method": 2, "kmin": 0, "kmax": 1}  # no frame builds on another
SKY = (96, 120, 144)  # red, green, blue


def draw(run: Path, orders: Iterator[str]) -> None:
    """Fill orders until there are no more."""
    settings = read_settings(run)  # written by the run that gives the orders
    os.environ["MUJOCO_GL"] = gl.choose()
    from pbrl.run.training import task_of
    from pbrl.simulation.simulator import Simulator

    env, seed = settings["env"], streams(settings["seed"], "simulation")["simulation"]
    simulator = Simulator(task_of(env, settings["allow"]), seed=seed, steps=env["steps"], threads=1)
    environment = plain_environment(simulator)
    for line in orders:
        order = json.loads(line)
        for clip, film in order["clips"].items():
            if not clip_path(run, clip).exists():
                frames, seconds = pictures(simulator, environment, film, size=tuple(order["size"]))
                write_atomically(clip_path(run, clip), animated_webp(frames, seconds))
        write_question(run, ShownQuestion(**order["question"]))


def plain_environment(simulator: Simulator) -> Any:
    """An environment that a processor draws five times as fast, into files of a quarter of the size.

    Without shadows, reflections, smooth edges and stars.
    """
    from mujoco import mjtTexture

    environment = simulator.environment()
    model = environment.physics.model
    model.light_castshadow[:] = False
    model.mat_reflectance[:] = 0.0
    model.vis.quality.offsamples = 0
    for texture in np.flatnonzero(model.tex_type == mjtTexture.mjTEXTURE_SKYBOX):
        begin, channels = model.tex_adr[texture], model.tex_nchannel[texture]
        size = model.tex_width[texture] * model.tex_height[texture] * channels
        model.tex_data[begin : begin + size].reshape(-1, channels)[:, :3] = SKY
    return environment


def pictures(
    simulator: Simulator, environment: Any, film: Mapping[str, Any], size: tuple[int, int]
) -> tuple[list[Image.Image], float]:
    """The pictures of a clip, and how many seconds each of them lasts."""
    actions = np.frombuffer(base64.b64decode(film["actions"]), "<f4").reshape(-1, film["act_size"])
    one = np.zeros(1, np.int64)
    behaviour = Behaviour(
        policy=one,
        lengths=one + len(actions),
        diverged=np.zeros(1, np.bool_),
        start=np.array([film["start"]]),
        number=one,
        actions=actions[None],
    )
    timestep = environment.control_timestep()
    every = video.stride(timestep)
    clip = itertools.islice(simulator.replay(behaviour, 0, environment), film["step"], None)
    camera = 0 if environment.physics.model.ncam else -1
    frames = video.pictures(clip, steps=film["steps"], every=every, camera=camera, size=size)
    return [image for _, image in frames], every * timestep


def animated_webp(frames: Sequence[Image.Image], seconds: float) -> bytes:
    """Frames that last `seconds` each."""
    file, duration = io.BytesIO(), round(1000 * seconds)
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, **WEBP)
    return file.getvalue()


def main() -> None:
    """Draw, and answer what goes wrong with a sentence."""
    try:
        draw(Path(sys.argv[1]), sys.stdin)
    except (gl.NoRendererError, ValueError, OSError) as error:
        raise SystemExit(f"pbrl.label.draw: {error}") from None


if __name__ == "__main__":
    main()
