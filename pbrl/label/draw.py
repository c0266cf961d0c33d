"""Draws the clips of a run's questions: `oracles.human` starts it, and tells it what to draw on its standard input.

An order is a line of JSON: a question, and for each of its two clips the actions that lead there. When both clips are
drawn, the question is written, too: then it can be shown. Nothing in a picture says how well it goes.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from pbrl.run.files import write_atomically
from pbrl.run.folder import read_settings
from pbrl.run.questions import FOLDER, ShownQuestion, clip_file, write_question
from pbrl.simulation import gl, video
from pbrl.types import Behaviour

if TYPE_CHECKING:  # it loads dm_control, which has to wait until MUJOCO_GL is chosen
    from pbrl.simulation.simulator import Simulator

WEBP = {"quality": 75, "method": 2, "kmin": 0, "kmax": 1}  # all frames are whole ones, which the page takes apart


def draw(run: Path, orders: Iterator[str]) -> None:
    """Fill orders until there are no more."""
    settings = read_settings(run)  # written by the run that gives the orders
    os.environ["MUJOCO_GL"] = gl.choose()
    from pbrl.run.training import task_of
    from pbrl.simulation.simulator import Simulator

    env, seed = settings["env"], np.random.SeedSequence(settings["seed"]).spawn(1)[0]
    simulator = Simulator(task_of(env, settings["allow"]), seed=seed, steps=env["steps"], threads=1)
    for line in orders:
        order = json.loads(line)
        for clip, film in order["clips"].items():
            if clip_file(run, clip) is None:
                write_clip(run / FOLDER / clip, simulator, film, size=tuple(order["size"]))
        write_question(run, ShownQuestion(**order["question"]))


def write_clip(path: Path, simulator: Simulator, film: Mapping[str, Any], size: tuple[int, int]) -> None:
    """Draw one clip, as mp4 where there is ffmpeg, otherwise as animated WebP."""
    frames, seconds = pictures(simulator, film, size)
    if video.encoder() is None:
        content = animated_webp(list(frames), seconds)
        write_atomically(path.with_suffix(".webp"), content)
        return
    with tempfile.TemporaryDirectory() as folder:
        video.write(Path(folder) / "clip.mp4", frames, seconds=seconds, title="")
        write_atomically(path.with_suffix(".mp4"), (Path(folder) / "clip.mp4").read_bytes())


def pictures(
    simulator: Simulator, film: Mapping[str, Any], size: tuple[int, int]
) -> tuple[Iterator[Image.Image], float]:
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
    timestep = simulator.environment().control_timestep()
    every = video.stride(timestep)
    replay = without_shadows(simulator.replay(behaviour, 0))
    clip = itertools.islice(replay, film["step"], None)
    frames = video.pictures(clip, steps=film["steps"], every=every, camera=0, size=size)
    return (image for _, image in frames), every * timestep


def without_shadows(replay: Iterator[Any]) -> Iterator[Any]:
    """The same physics, drawn five times as fast by a processor: no shadows, no reflections, no smooth edges."""
    physics = next(replay)
    physics.model.light_castshadow[:] = False
    physics.model.mat_reflectance[:] = 0.0
    physics.model.vis.quality.offsamples = 0
    try:
        yield physics
        yield from replay
    finally:
        physics.free()


def animated_webp(frames: Sequence[Image.Image], seconds: float) -> bytes:
    """Frames that last `seconds` each."""
    file, duration = io.BytesIO(), round(1000 * seconds)
    frames[0].save(file, "WEBP", save_all=True, append_images=frames[1:], duration=duration, loop=0, **WEBP)
    return file.getvalue()


def main() -> None:
    """Draw, and answer what goes wrong with a sentence."""
    try:
        draw(Path(sys.argv[1]), sys.stdin)
    except (gl.NoRendererError, video.VideoError, ValueError, OSError) as error:
        raise SystemExit(f"pbrl.label.draw: {error}") from None


if __name__ == "__main__":
    main()
