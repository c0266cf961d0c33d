"""Clips: what they show is what happened."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from oracles.human import films_of
from pbrl.label.draw import animated_webp
from pbrl.run.questions import ShownQuestion, clip_path, digest, read_question
from pbrl.seeds import streams
from pbrl.simulation.simulator import Simulator
from pbrl.types import Film


def frames(content: bytes) -> list[Image.Image]:
    with Image.open(io.BytesIO(content)) as clip:
        found = []
        for number in range(clip.n_frames):
            clip.seek(number)
            found.append(clip.convert("RGB"))
        return found


def test_a_clip_is_a_file_that_browsers_know() -> None:
    pictures = [Image.new("RGB", (32, 24), (40 * number, 0, 0)) for number in range(5)]
    content = animated_webp(pictures, 0.04)
    assert content[:4] + content[8:12] == b"RIFFWEBP"
    assert content.count(b"ANMF") == 5
    shades = [each.getpixel((16, 12))[0] for each in frames(content)]
    np.testing.assert_allclose(shades, [0, 40, 80, 120, 160], atol=12)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["cheetah_run", "reacher_easy"])
def test_a_clip_shows_its_part_of_the_trajectory(tmp_path: Path, task: str, make_policy: Any) -> None:
    """The second clip is a part of the first. The program is run twice: it draws nothing again."""
    simulator = Simulator(task, seed=streams(0, "simulation")["simulation"], steps=40)
    policy = make_policy(simulator)
    parameters = policy.initial(np.random.default_rng(0))[None]
    collected = simulator.collect(policy, parameters, np.zeros(1, np.int64), iteration=3, keep=["actions"])
    behaviour = collected.without_rewards(np.array([7]), ["actions"])
    films = [films_of(Film(trajectories=behaviour, step=np.array([at])), steps)[0] for at, steps in ((0, 40), (20, 20))]
    settings = {"env": {"name": task, "steps": 40}, "seed": 0, "allow": []}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    clips = [digest("whole"), digest("part")]
    question = ShownQuestion(
        name=digest("question"), iteration=3, first=7, second=7, first_step=0, second_step=20, steps=20, swapped=False,
        repeats=None, left=clips[0], right=clips[1],
    )  # fmt: skip
    order = {"question": vars(question), "clips": dict(zip(clips, films, strict=True)), "size": [64, 48]}
    times = []
    for _ in range(2):
        command = [sys.executable, "-m", "pbrl.label.draw", str(tmp_path)]
        subprocess.run(command, input=json.dumps(order) + "\n", text=True, check=True)
        times.append([clip_path(tmp_path, clip).stat().st_mtime_ns for clip in clips])
    assert times[0] == times[1]
    assert read_question(tmp_path, question.name) == question
    whole, part = (frames(clip_path(tmp_path, clip).read_bytes()) for clip in clips)
    assert whole[0].size == (64, 48)
    assert len(whole) == 2 * len(part) - 1
    assert [each.tobytes() for each in part] == [each.tobytes() for each in whole[len(part) - 1 :]]
    assert whole[0].tobytes() != whole[-1].tobytes()
