"""Videos: pictures of a replayed trajectory with captions above them, written as mp4 or GIF."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import math
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from pbrl.types import Trajectories

FORMATS = (".mp4", ".gif")
RATE = 30.0  # frames per second, at most
TEXT = 20  # pixels, where the width allows
GROUND, PLAIN, PREFERRED = "#202020", "#f0f0f0", "#7ddc6f"


class VideoError(RuntimeError):
    """A video could not be written; the message says what to do."""


def encoder() -> str | None:
    """The path of ffmpeg, which mp4 needs: from the package imageio-ffmpeg, or the system's."""
    with contextlib.suppress(ImportError, RuntimeError):
        return str(importlib.import_module("imageio_ffmpeg").get_ffmpeg_exe())
    return shutil.which("ffmpeg")


def stride(timestep: float) -> int:
    """Control steps, of `timestep` seconds each, between two frames of a video in real time."""
    return max(1, math.ceil(1.0 / (timestep * RATE) - 1e-9))


def camera_number(names: Sequence[str], wanted: str | None) -> int:
    """The camera of that name or number; by default the task's first, if it has any."""
    if wanted is None:
        return 0 if names else -1
    if wanted in names:
        return names.index(wanted)
    if wanted.isdecimal() and int(wanted) < len(names):
        return int(wanted)
    raise ValueError(f"there is no camera {wanted}; there is {', '.join(names) or 'none'}")


def picture(physics: Any, camera: int, size: tuple[int, int]) -> Image.Image:
    """What a camera sees, width x height."""
    vars(physics).pop("_make_rendering_contexts", None)  # tasks.load replaced it, because simulating draws nothing
    screen = physics.model.vis.global_
    screen.offwidth, screen.offheight = max(size[0], screen.offwidth), max(size[1], screen.offheight)
    return Image.fromarray(physics.render(width=size[0], height=size[1], camera_id=camera))


def pictures(
    replay: Iterator[Any], *, steps: int, every: int, camera: int, size: tuple[int, int]
) -> Iterator[tuple[int, Image.Image]]:
    """Every `every`-th step of a replay, with its number. If the replay ends early, its last picture is repeated."""
    step = -1
    for moment in range(0, steps + 1, every):
        if passed := list(itertools.islice(replay, moment - step)):
            step += len(passed)
            image = picture(passed[-1], camera, size)
        yield step, image


_font = functools.cache(ImageFont.load_default)


def caption(image: Image.Image, lines: Sequence[str], colour: str = PLAIN) -> Image.Image:
    """The image below lines of text, as large as the width allows."""
    result = Image.new("RGB", (image.width, image.height + len(lines) * (TEXT + 6) + 4), GROUND)
    draw = ImageDraw.Draw(result)
    for number, text in enumerate(lines):
        size = TEXT
        while size > 1 and draw.textlength(text, _font(size)) > image.width - 16:
            size -= 1
        draw.text((8, 4 + number * (TEXT + 6)), text, colour, _font(size))
    result.paste(image, (0, result.height - image.height))
    return result


def beside(left: Image.Image, right: Image.Image) -> Image.Image:
    """Two images of one size, side by side."""
    result = Image.new("RGB", (left.width + 4 + right.width, left.height), GROUND)
    result.paste(left, (0, 0))
    result.paste(right, (left.width + 4, 0))
    return result


def frames(
    trajectories: Trajectories,
    views: Mapping[str, Iterator[tuple[int, Image.Image]]],
    *,
    timestep: float,
    heading: Sequence[str],
    preferred: int | None,
) -> Iterator[Image.Image]:
    """One view, or two side by side, each below its name and the true return so far; all below the heading."""
    so_far = np.pad(np.cumsum(trajectories.task_rewards, axis=1), ((0, 0), (1, 0)))  # [N, T + 1]
    for moment in zip(*views.values(), strict=True):
        panels = []
        for row, (name, (step, image)) in enumerate(zip(views, moment, strict=True)):
            text = f"{step * timestep:.2f} s   return {so_far[row, step]:.1f} of {trajectories.returns[row]:.1f}"
            colour = PREFERRED if row == preferred else PLAIN
            panels.append(caption(image, [f"{name}   {text}" if name else text], colour))
        yield caption(beside(*panels) if len(panels) == 2 else panels[0], heading)


def write(path: Path, frames: Iterable[Image.Image], *, seconds: float, title: str) -> None:
    """Write frames that last `seconds` each. The file appears under its name when it is complete."""
    temporary = path.with_name(f"{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        (_write_gif if path.suffix == ".gif" else _write_mp4)(temporary, iter(frames), seconds, title)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _write_gif(path: Path, frames: Iterator[Image.Image], seconds: float, title: str) -> None:
    pictures = list(frames)
    some = pictures[:: -(-len(pictures) // 8)]
    strip = Image.new("RGB", (pictures[0].width, len(some) * pictures[0].height))
    for number, each in enumerate(some):
        strip.paste(each, (0, number * each.height))
    palette = strip.quantize(124)  # one for all frames, so that what does not move takes no room
    ground, green = (np.array(ImageColor.getrgb(each)) for each in (GROUND, PREFERRED))
    shades = [ground + (green - ground) * part // 4 for part in (1, 2, 3, 4)]  # of a few letters: chosen by none
    palette.putpalette([*(palette.getpalette() or [])[:372], *np.concatenate(shades).tolist()])
    images = [each.quantize(palette=palette, dither=Image.Dither.NONE) for each in pictures]
    ends = np.round(100 * seconds * np.arange(len(images) + 1))  # a GIF's clock ticks in hundredths of a second
    durations = (10 * np.diff(ends)).astype(int).tolist()
    options = {"save_all": True, "append_images": images[1:], "duration": durations, "loop": 0, "comment": title}
    images[0].save(path, "GIF", **options)


def _write_mp4(path: Path, frames: Iterator[Image.Image], seconds: float, title: str) -> None:
    first = next(frames)
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{first.width}x{first.height}", "-r", f"{1.0 / seconds}"]
    even = ["-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2", "-pix_fmt", "yuv420p"]  # which every player can read
    about = ["-metadata", f"title={title}", "-movflags", "+faststart", "-f", "mp4"]
    command = [str(encoder()), "-loglevel", "error", "-y", *raw, "-i", "-", *even, *about, str(path)]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors)
        with contextlib.suppress(BrokenPipeError), process:  # its own message says more
            for frame in itertools.chain([first], frames):
                process.stdin.write(frame.tobytes())  # type: ignore[union-attr]  # it is a pipe
        if process.returncode != 0:
            errors.seek(0)
            reason = errors.read().decode(errors="replace").strip() or f"code {process.returncode}"
            raise VideoError(f"ffmpeg ({command[0]}) could not write the video: {reason}; --gif needs no ffmpeg")
