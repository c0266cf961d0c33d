"""Videos. Most tests put a stand-in for the drawing, so that they need no OpenGL."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image, ImageColor, ImageSequence
from safetensors.numpy import save_file

from pbrl import load
from pbrl.play import main, policy_after, policy_of, verdict
from pbrl.policy import GaussianPolicy
from pbrl.run import checkpoint
from pbrl.run.films import kept_policy
from pbrl.run.policy_file import save_policy
from pbrl.simulation import gl, tasks, video
from pbrl.simulation.simulator import Simulator
from pbrl.train import command
from pbrl.types import Answers, Preferences

ROOT = Path(__file__).parent.parent
STEPS = 40
TINY = [
    "env=cartpole_swingup",  # starts without compiling
    f"env.steps={STEPS}",
    "trajectories=8",
    "pairs=4",
    "agent.votes=4",
    "agent.policy.hidden=[8,8]",
    "evaluation.trajectories=2",
    "calibration.trajectories=4",
    "checkpoint_every=2",
    "threads=1",
    "wandb.mode=disabled",
]


def train(folder: Path, *arguments: str) -> Path:
    """A run in that folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pbrl.train", *TINY, f"folder={folder}", *arguments])
        command()
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six iterations, with checkpoints of the iterations 3 and 5."""
    return train(tmp_path_factory.mktemp("runs") / "seed_0", "iterations=6")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return shutil.copytree(finished, tmp_path / "seed_0")


class Studio:
    """Notes what is drawn and written above it."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.cameras: set[int] = set()
        self.lines: list[tuple[str, str]] = []


@pytest.fixture
def studio(monkeypatch: pytest.MonkeyPatch) -> Studio:
    """Draws grey pictures that get lighter; writes GIF."""
    notes, environment, caption = Studio(), tasks.load("cartpole_swingup"), video.caption

    def picture(physics: Any, camera: int, size: tuple[int, int]) -> Image.Image:
        notes.rewards.append(float(environment.task.get_reward(physics)))
        notes.cameras.add(camera)
        return Image.new("RGB", size, (len(notes.rewards) * 5 % 256,) * 3)

    def noted(image: Image.Image, lines: list[str], colour: str = video.PLAIN) -> Image.Image:
        notes.lines += [(line, colour) for line in lines]
        return caption(image, lines, colour)

    monkeypatch.setenv("MUJOCO_GL", "disable")
    monkeypatch.setattr(gl, "choose", lambda: "disable")
    monkeypatch.setattr(video, "picture", picture)
    monkeypatch.setattr(video, "caption", noted)
    monkeypatch.setattr(video, "encoder", lambda: None)
    return notes


def collected(run: Path, *, seed: int = 0, mean_actions: bool = True, rows: int = 1) -> Any:
    """What the run's last policy does."""
    simulator = Simulator("cartpole_swingup", seed=seed, steps=STEPS)
    policy = make_policy(simulator)
    _, parameters = policy_of(run, "last")
    return simulator.collect(policy, parameters[None], np.zeros(rows, np.int64), iteration=0, mean_actions=mean_actions)


def make_policy(simulator: Simulator) -> GaussianPolicy:
    gains = {"hidden_gain": 1.0, "output_gain": 1.0, "initial_log_std": 0.0}
    return GaussianPolicy(simulator.obs_size, simulator.act_size, hidden=[8, 8], **gains)


def change_teacher(run: Path, **traits: Any) -> None:
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    cfg["oracle"] |= traits
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))


def refused(*arguments: str) -> str:
    """What the command says when it exits with 1."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert isinstance(stop.value.code, str)  # which Python prints, and exits with 1
    return stop.value.code


# ------------------------------------------------------------------------------------------------ what is shown


@pytest.mark.parametrize(("arguments", "mean_actions"), [(["--seed=3"], True), (["--seed=3", "--sampled"], False)])
def test_the_video_shows_the_collected_trajectory_with_its_return(
    run: Path, studio: Studio, arguments: list[str], mean_actions: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    main([str(run), *arguments])
    trajectory = collected(run, seed=3, mean_actions=mean_actions)
    assert studio.rewards[1:] == trajectory.task_rewards[0, 3::4].tolist()  # 100 control steps per second, 25 frames
    so_far, whole = trajectory.task_rewards[0, :20].sum(), trajectory.returns[0]
    assert (f"0.20 s   return {so_far:.1f} of {whole:.1f}", video.PLAIN) in studio.lines
    how = "mean" if mean_actions else "sampled"
    assert (f"cartpole_swingup   ncrs, seed 0, iteration 5   {how} actions", video.PLAIN) in studio.lines
    assert f"true return {whole:.1f}\nwritten to {run / 'play.gif'}\n" in capsys.readouterr().out


def test_a_gif_plays_in_real_time(run: Path, studio: Studio) -> None:
    main([str(run), "--size", "96x64", "--camera", "lookatcart", "--output", str(run / "new" / "film")])
    with Image.open(run / "new" / "film.gif") as film:
        assert film.width == 96
        assert film.height > 64
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(film)]
    assert len(durations) == STEPS // 4 + 1
    assert set(durations) == {40}  # milliseconds
    assert studio.cameras == {1}
    assert [path.name for path in (run / "new").iterdir()] == ["film.gif"]


def test_a_pair_is_answered_by_the_runs_teacher(run: Path, studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    change_teacher(run, tau=0.0, gamma=1.0, eps_mistake=0.0)
    returns = collected(run, mean_actions=False, rows=2).returns
    assert returns[0] != returns[1]
    better = int(returns[1] > returns[0])
    main([str(run), "--pair"])
    words = f"the teacher prefers {'AB'[better]}   P(B better) = {better}.000"
    said = capsys.readouterr().out
    assert words in said
    assert f"true return {returns[0]:.1f} and {returns[1]:.1f}" in said
    assert (words, video.PLAIN) in studio.lines
    colours = {line[0]: colour for line, colour in studio.lines if " of " in line}
    assert colours == {"AB"[better]: video.PREFERRED, "AB"[1 - better]: video.PLAIN}
    assert len(studio.rewards) == 2 * (STEPS // 4 + 1)
    assert (run / "pair.gif").exists()
    assert not (run / "play.gif").exists()


def test_a_teacher_judges_what_is_shown_of_a_pair(
    run: Path, studio: Studio, capsys: pytest.CaptureFixture[str]
) -> None:
    change_teacher(run, tau=0.0, gamma=1.0, eps_mistake=0.0)
    whole = collected(run, mean_actions=False, rows=2).task_rewards
    steps = next(n for n in range(4, STEPS) if np.diff(whole[:, :n].sum(1))[0] * np.diff(whole.sum(1))[0] < 0)
    first, second = whole[:, :steps].sum(1)
    main([str(run), "--pair", "--steps", str(steps)])
    said = capsys.readouterr().out
    assert f"the teacher prefers {'AB'[int(second > first)]}" in said
    assert f"true return {first:.1f} and {second:.1f}" in said
    assert len(studio.rewards) == 2 * (steps // 4 + 1)


def test_a_gif_shows_in_colour_what_the_teacher_prefers(tmp_path: Path) -> None:
    sky = Image.fromarray(np.random.default_rng(0).integers(0, [30, 60, 120], (240, 320, 3)).astype(np.uint8))
    frame = video.caption(video.caption(sky, ["B   5.00 s"], video.PREFERRED), ["the teacher prefers B"])
    video.write(tmp_path / "pair.gif", [frame] * 3, seconds=0.04, title="")
    with Image.open(tmp_path / "pair.gif") as film:
        colours = {colour for _, colour in film.convert("RGB").getcolors(2**24)}
    assert ImageColor.getrgb(video.PREFERRED) in colours


def test_what_was_learnt_is_the_first_policy_beside_the_best(run: Path, studio: Studio) -> None:
    save_policy(run / "policy_best.safetensors", np.full_like(policy_of(run, "first")[1], 0.1), iteration="4")
    main([str(run), "--learning"])
    simulator = Simulator("cartpole_swingup", seed=0, steps=STEPS)
    both = np.stack([policy_of(run, which)[1] for which in ("first", "best")])
    trajectories = simulator.collect(
        make_policy(simulator), both, np.arange(2), iteration=0, mean_actions=True, common_start=True
    )
    assert studio.rewards[0] == studio.rewards[1]  # from one start
    assert studio.rewards[2::2] == trajectories.task_rewards[0, 3::4].tolist()
    assert studio.rewards[3::2] == trajectories.task_rewards[1, 3::4].tolist()
    assert trajectories.returns[0] != trajectories.returns[1]
    names = {line.split()[0] for line, _ in studio.lines if " of " in line}
    assert names == {"before", "after"}
    assert ("cartpole_swingup   ncrs, seed 0, iteration 4   mean actions", video.PLAIN) in studio.lines
    assert (run / "learning.gif").exists()


def test_the_first_policy_alone_and_runs_of_an_earlier_version(run: Path, studio: Studio) -> None:
    main([str(run), "--policy", "first", "--steps", "2"])
    assert any("before the first iteration" in line for line, _ in studio.lines)
    (run / "policy_best.safetensors").unlink()
    assert "has no policy_best.safetensors: an earlier version of pbrl" in refused(str(run), "--policy", "best")


def test_a_run_of_version_0_1_is_played(run: Path, studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings lack some, its teacher's link is an import, its policy has no header of ours."""
    settings = (Path(__file__).parent / "report/config_of_0.1.yaml").read_text()
    for name, value in (("cheetah_run", "cartpole_swingup"), ("steps: 200", f"steps: {STEPS}"), ("- 256", "- 8")):
        settings = settings.replace(name, value)
    (run / "config.yaml").write_text(settings)
    last, parameters = policy_of(run, "last")
    for path in run.glob("policy*"):
        path.unlink()
    save_file({"parameters": parameters}, run / "policy.safetensors", {"iteration": str(last), "task": "cartpole"})
    shutil.rmtree(run / "checkpoint")
    checkpoint.save(run / "checkpoint", 3, {"agent": {"parameters": parameters}, "ledger": {}})
    small = ["--steps", "4", "--size", "64x64"]
    main([str(run), *small])
    assert studio.rewards[1:] == [collected(run).task_rewards[0, 3]]
    main([str(run), "--pair", *small])
    assert "P(B better) = " in capsys.readouterr().out
    assert f"{run} are of an earlier version: leave out --iteration" in refused(str(run), "--iteration", "3")
    policy = load(run)
    simulator = Simulator("cartpole_swingup", seed=0)
    obs = np.ones(simulator.obs_size, np.float32)
    np.testing.assert_array_equal(policy.act(obs), make_policy(simulator).mean_actions(parameters, obs[None])[0])


def test_the_teacher_judges_what_is_shown(run: Path, studio: Studio, capsys: pytest.CaptureFixture[str]) -> None:
    change_teacher(run, tau=0.0, gamma=1.0, eps_mistake=0.0)
    seed, steps, better = next(  # a pair of which the beginning and the whole are not judged alike
        (seed, steps, int(so_far[1] > so_far[0]))
        for seed in range(50)
        for rewards in [collected(run, seed=seed, mean_actions=False, rows=2).task_rewards]
        for steps in range(4, STEPS, 4)
        for so_far in [rewards[:, :steps].sum(axis=1)]
        if np.diff(so_far) * np.diff(rewards.sum(axis=1)) < 0
    )
    main([str(run), "--pair", "--steps", str(steps), "--seed", str(seed)])
    assert f"the teacher prefers {'AB'[better]}   P(B better) = {better}.000" in capsys.readouterr().out
    assert len(studio.rewards) == 2 * (steps // 4 + 1)
    returns = collected(run, seed=seed, mean_actions=False, rows=2).task_rewards[:, :steps].sum(axis=1)
    assert any(f"return {returns[better]:.1f} of {returns[better]:.1f}" in line for line, _ in studio.lines)


def test_a_teacher_whose_temperature_is_solved_for_can_be_asked(
    run: Path, studio: Studio, capsys: pytest.CaptureFixture[str]
) -> None:
    change_teacher(run, tau={"error_rate": 0.3})
    main([str(run), "--pair", "--steps", "2"])
    assert "P(B better) = " in capsys.readouterr().out
    assert studio.rewards


def test_a_teacher_of_a_log_cannot_be_asked_anew(run: Path, studio: Studio) -> None:
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    cfg["oracle"] = {"_target_": "oracles.replay.Replay", "log": str(run / "preferences")}
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    said = refused(str(run), "--pair")
    assert "the run's teacher cannot be asked (question 0" in said
    assert "leave out --pair" in said
    assert not studio.rewards


def answers(*, label: float, answered: bool = True, sums: tuple[float, float] = (1.0, 2.0)) -> Answers:
    probability = np.array([0.25])
    return Answers(
        preferences=Preferences(
            probability=probability, score=2 * probability - 1, label=np.array([label]), answered=np.array([answered])
        ),
        reason=np.zeros(1, np.uint8),
        first_sum=np.array([sums[0]]),
        second_sum=np.array([sums[1]]),
        bits=np.ones(1, np.int64),
        tau=1.0,
    )


def test_answers_in_words() -> None:
    assert verdict(answers(label=1.0)) == ("the teacher prefers B   P(B better) = 0.250", 1)
    assert verdict(answers(label=0.0)) == ("the teacher prefers A, and is wrong   P(B better) = 0.250", 0)
    assert verdict(answers(label=0.5)) == ("the teacher calls them equal   P(B better) = 0.250", None)
    assert verdict(answers(label=0.5, answered=False)) == ("the teacher skips this pair: both are too poor", None)


# ------------------------------------------------------------------------------------------- which policy


def test_an_iteration_is_that_of_its_checkpoint(run: Path, tmp_path: Path) -> None:
    shorter = train(tmp_path / "shorter", "iterations=4")
    last, parameters = policy_of(run, "last")
    earlier, earlier_parameters = policy_after(run, 3)
    of_shorter, parameters_of_shorter = policy_of(shorter, "last")
    assert (last, earlier, of_shorter) == (5, 3, 3)
    np.testing.assert_array_equal(earlier_parameters, parameters_of_shorter)
    shutil.rmtree(run / "checkpoint")
    np.testing.assert_array_equal(policy_after(run, 5)[1], parameters)


def test_an_iteration_that_waits_for_its_video_is_found(run: Path) -> None:
    policy = make_policy(Simulator("cartpole_swingup", seed=0))
    (run / "videos").mkdir()
    parameters = {"parameters": np.arange(policy.size, dtype=np.float32)}
    save_file(parameters, kept_policy(run, 2), {"iteration": "2"})
    (run / "policy.safetensors").unlink()  # a run has none before its first checkpoint
    found, filmed = policy_after(run, 2)
    assert found == 2
    np.testing.assert_array_equal(filmed, parameters["parameters"])


def test_an_iteration_that_is_gone_is_refused_with_those_that_are_there(run: Path, studio: Studio) -> None:
    assert refused(str(run), "--iteration", "2").endswith("has no iteration 2; there is 3, 5")
    shutil.rmtree(run / "checkpoint")
    assert refused(str(run), "--iteration", "2").endswith("has no iteration 2; there is none")
    assert not studio.rewards


# ---------------------------------------------------------------------------------------------- what is wrong


def test_what_cannot_be_shown_is_refused_in_a_sentence(run: Path, studio: Studio) -> None:
    assert "did you mean" in refused(str(run.parent))
    assert str(run) in refused(str(run.parent))
    assert "name the folder that pbrl.train wrote to" in refused(str(run / "nowhere"))
    assert "there is no camera 2; there is fixed, lookatcart" in refused(str(run), "--camera", "2")
    assert "--steps must be between 1 and 40, the run's episode, not 41" in refused(str(run), "--steps", "41")
    assert "--steps must be between 1 and 40" in refused(str(run), "--steps", "0")
    assert "--output must end in .mp4 or .gif" in refused(str(run), "--output", "film.avi")
    assert "pip install imageio-ffmpeg" in refused(str(run), "--output", "film.mp4")
    (run / "policy.safetensors").write_bytes(b"1234")
    assert refused(str(run)).startswith("pbrl.play: ")
    (run / "policy.safetensors").unlink()
    assert "has no policy yet" in refused(str(run))
    assert not studio.rewards


def test_a_size_is_width_and_height(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(run), "--size", "large"])
    assert stop.value.code == 2
    assert "WIDTHxHEIGHT in pixels, such as 640x480, not 'large'" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the pieces


def test_frames_are_in_real_time_at_no_more_than_thirty_per_second() -> None:
    timesteps = (0.01, 0.015, 0.02, 0.025, 0.03, 1 / 30, 0.04)
    assert [video.stride(timestep) for timestep in timesteps] == [4, 3, 2, 2, 2, 1, 1]


def test_an_early_end_stays_in_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video, "picture", lambda physics, camera, size: (physics, camera, size))
    how: dict[str, Any] = {"steps": 10, "every": 3, "camera": 1, "size": (64, 64)}
    shown = [(step, image[0]) for step, image in video.pictures(iter("abcde"), **how)]  # type: ignore[index]
    assert shown == [(0, "a"), (3, "d"), (4, "e"), (4, "e")]


def test_captions_fit_above_the_picture() -> None:
    image = Image.new("RGB", (200, 100), "blue")
    result = video.caption(image, ["a line that is far too long to fit at the usual size of the text", "short"])
    assert result.width == 200
    above = np.array(result)[: result.height - 100]
    assert (np.array(result)[result.height - 100 :] == [0, 0, 255]).all()
    assert (above[:, :6] == above[0, 0]).all()  # the margins are free
    assert (above[:, -6:] == above[0, 0]).all()
    assert (above != above[0, 0]).any()


FFMPEG = """#!{python}
import pathlib, sys
content = sys.stdin.buffer.read({limit})
if {limit} != -1:
    sys.exit("no room\\nfor this")
pathlib.Path(sys.argv[-1]).write_text(repr((len(content), sys.argv[1:])))
"""


@pytest.fixture
def ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Make a stand-in that notes how it is called, or gives up after so many bytes."""

    def make(limit: int = -1) -> None:
        path = tmp_path / "ffmpeg"
        path.write_text(FFMPEG.format(python=sys.executable, limit=limit))
        path.chmod(0o755)
        monkeypatch.setattr(video, "encoder", lambda: str(path))

    return make


def grey(count: int) -> Iterator[Image.Image]:
    return (Image.new("RGB", (65, 40)) for _ in range(count))


def test_mp4_gets_every_frame_and_its_title(tmp_path: Path, ffmpeg: Callable[..., None]) -> None:
    ffmpeg()
    video.write(tmp_path / "film.mp4", grey(7), seconds=0.05, title="what it is")
    size, arguments = eval((tmp_path / "film.mp4").read_text())
    assert size == 7 * 65 * 40 * 3
    assert {"65x40", "20.0", "title=what it is", "yuv420p"} <= set(arguments)


def test_an_encoder_that_gives_up_is_quoted_and_leaves_nothing(tmp_path: Path, ffmpeg: Callable[..., None]) -> None:
    ffmpeg(limit=10)
    with pytest.raises(video.VideoError, match="no room\nfor this; --gif needs no ffmpeg"):
        video.write(tmp_path / "film.mp4", grey(1000), seconds=0.05, title="")
    assert [path.name for path in tmp_path.iterdir()] == ["ffmpeg"]


# ------------------------------------------------------------------------------------------------------ OpenGL


def test_what_can_draw_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    tried: list[str] = []
    monkeypatch.setattr(gl, "obstacle", lambda name: tried.append(name) or (None if name == "osmesa" else "no"))
    assert gl.choose() == "osmesa"
    assert tried == ["egl", "osmesa"]
    monkeypatch.setenv("DISPLAY", ":0")
    assert gl.candidates() == ["glfw", "egl", "osmesa"]
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(gl.NoRendererError, match="egl: no\nWhat to do: unset MUJOCO_GL=egl, or apt-get install"):
        gl.choose()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gl.candidates() == ["glfw"]


def play(run: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, as a user without a display runs it."""
    unset = ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY", "PYOPENGL_PLATFORM")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "pbrl.play", str(run), *arguments],
        env={**kept, "PYTHONPATH": os.pathsep.join([str(ROOT), kept.get("PYTHONPATH", "")]), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def mujoco_can_draw() -> bool:
    """Whether MuJoCo's own bindings find OpenGL without a display, without any code of ours."""
    code = "import mujoco; mujoco.GLContext(8, 8).make_current()"
    tries = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "MUJOCO_GL": name}, capture_output=True)
        for name in ("egl", "osmesa")
    ]
    return any(tried.returncode == 0 for tried in tries)


def test_the_command_draws_the_task_wherever_mujoco_can_draw(run: Path) -> None:
    result = play(run, "--gif", "--steps", "8", "--size", "96x72")
    assert "Traceback" not in result.stderr
    assert (result.returncode == 0) == mujoco_can_draw(), result.stderr
    if result.returncode == 0:
        with Image.open(run / "play.gif") as film:
            first, *_, last = [np.array(frame.convert("RGB"), int) for frame in ImageSequence.Iterator(film)]
        assert len(np.unique(first[-72:].reshape(-1, 3), axis=0)) > 20  # a scene with light and shade
        assert (first[-72:] != last[-72:]).any()


def test_where_nothing_can_draw_the_message_names_the_packages(run: Path) -> None:
    result = play(run, PYOPENGL_PLATFORM="nothing")  # neither EGL nor OSMesa is loaded
    assert result.returncode == 1
    assert result.stderr.startswith("pbrl.play: nothing here can draw a picture:\n  egl: ")
    for package in ("libegl1", "libgl1", "libosmesa6", "conda-forge"):
        assert package in result.stderr
    assert "Traceback" not in result.stderr
    assert not (run / "play.gif").exists()


@pytest.mark.parametrize("node", ["env", "agent", "name", "oracle"])
@pytest.mark.parametrize("value", [None, [], {}, "x", -1])
def test_settings_of_any_shape_are_refused_or_shown(run: Path, studio: Studio, node: str, value: Any) -> None:
    """A run folder may be anybody's."""
    del studio
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    cfg[node] = value
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    if node in ("env", "agent"):
        assert "the run's config.yaml has no" in refused(str(run))
    else:
        main([str(run), "--steps", "2", "--size", "64x64"])


@pytest.mark.parametrize("value", [{"a": 1}, [1], "x", None])
def test_a_teacher_of_any_settings_is_refused_in_a_sentence(run: Path, studio: Studio, value: Any) -> None:
    del studio
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    cfg["oracle"]["eps_skip"] = value
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    said = refused(str(run), "--pair", "--steps", "2", "--size", "64x64")
    assert "the run's teacher cannot be asked (oracle.eps_skip must be a number, not" in said


def test_a_policy_or_teacher_that_is_something_else_is_refused_in_a_sentence(run: Path, studio: Studio) -> None:
    """Of a class that a configuration may name."""
    del studio
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    cfg["oracle"] = {"_target_": "agents.samplers.Uniform"}
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    assert "(a setting names agents.samplers.Uniform, which makes no Oracle)" in refused(str(run), "--pair")
    cfg["agent"]["policy"] = {"_target_": "agents.samplers.Uniform"}
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    assert "a setting names agents.samplers.Uniform, which makes no Policy" in refused(str(run))


@pytest.mark.parametrize(
    "place", [("agent", "policy", "hidden_gain"), ("agent", "policy"), ("env", "task"), ("oracle",)]
)
@pytest.mark.parametrize("target", ["os.mkdir", "sympy.sympify", "pbrl.train.train"])
def test_somebody_elses_run_executes_nothing(
    run: Path, studio: Studio, place: tuple[str, ...], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del studio
    monkeypatch.chdir(run)
    cfg = yaml.safe_load((run / "config.yaml").read_text())
    node = functools.reduce(lambda found, key: found[key], place[:-1], cfg)
    node[place[-1]] = {"_target_": target, "_args_": ["__import__('os').mkdir('executed')"]}
    (run / "config.yaml").write_text(yaml.safe_dump(cfg))
    assert f"names '{target}', which is not of agents, oracles, pbrl" in refused(str(run), "--pair", "--steps", "2")
    assert not (run / "executed").exists()
