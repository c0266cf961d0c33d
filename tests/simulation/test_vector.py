"""The gymnasium environments: registered, checked by gymnasium, and dm_control's step by step."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from numpy.testing import assert_array_equal
from PIL import Image

import pbrl
from pbrl.simulation import gl, tasks, vector, video
from pbrl.simulation.vector import BatchedEnv
from pbrl.simulation.worlds import NativeWorlds, flatten

assert pbrl  # importing it registers the environments


@pytest.mark.parametrize("task", ["walker_walk", "quadruped_run", "pendulum_swingup"])
def test_gymnasiums_own_checker_is_content(task: str) -> None:
    with warnings.catch_warnings():  # of DM Control's own bounds; all else that the checker warns of is an error
        warnings.filterwarnings("ignore", message=r".*A Box observation space (min|max)imum value is -?infinity.*")
        warnings.filterwarnings("ignore", message=r".*we recommend using a symmetric and normalized space.*")
        check_env(gymnasium.make(f"pbrl/{task}-v0").unwrapped, skip_render_check=True)  # there may be no display


def test_every_task_is_registered() -> None:
    assert {f"pbrl/{name}-v0" for name in tasks.NAMES} <= set(gymnasium.registry)


def test_make_vec_gives_the_batched_environment() -> None:
    batch = gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)
    assert isinstance(batch.unwrapped, BatchedEnv)
    obs, info = batch.reset(seed=0)
    assert obs.shape == (64, 24)
    assert obs in batch.observation_space
    assert info == {}
    obs, rewards, terminated, truncated, info = batch.step(batch.action_space.sample())
    assert rewards.shape == terminated.shape == truncated.shape == (64,)
    batch.close()


@pytest.mark.parametrize("task", ["hopper_hop", "cartpole_swingup"])
def test_steps_are_dm_controls_across_episodes(task: str) -> None:
    """Episodes of 30 steps: truncated at the limit, begun anew by the next step, from the same stream."""
    batch = BatchedEnv(3, task, threads=2, max_episode_steps=30)
    references = [tasks.load(task) for _ in range(3)]
    for seed, reference in zip([4, 5, 6], references, strict=True):
        reference.task._random = np.random.RandomState(np.random.PCG64(seed))
    expected = [reference.reset() for reference in references]
    obs, _ = batch.reset(seed=[4, 5, 6])
    random = np.random.default_rng(0)
    for t in range(1, 70):
        assert_array_equal(obs, [flatten(step.observation) for step in expected])
        actions = random.uniform(-1, 1, batch.action_space.shape)
        obs, rewards, terminated, truncated, _ = batch.step(actions)
        assert not terminated.any()
        assert truncated.tolist() == [t % 31 == 30] * 3
        if t % 31 == 0:
            assert not rewards.any()
            expected = [reference.reset() for reference in references]
        else:
            expected = [reference.step(action) for reference, action in zip(references, actions, strict=True)]
            np.testing.assert_allclose(rewards, [step.reward for step in expected], rtol=0, atol=1e-9)


def test_seeds_and_threads() -> None:
    runs = []
    for threads, seed in [(1, 3), (2, 3), (3, 4)]:
        batch = BatchedEnv(5, "cheetah_run", threads=threads)
        obs, _ = batch.reset(seed=seed)
        again, _ = batch.reset()
        runs.append((obs, again, batch.step(np.full((5, 6), 0.5))[0]))
    for one, two in zip(runs[0], runs[1], strict=True):
        assert_array_equal(one, two)
    assert (runs[0][0] != runs[2][0]).any(axis=1).all()
    assert (runs[0][0] != runs[0][1]).any(axis=1).all()
    assert len(np.unique(runs[0][0], axis=0)) == 5


def test_diverged_physics_terminates_that_environment_alone() -> None:
    batch = BatchedEnv(4, "walker_walk", threads=2)
    batch.reset(seed=0)
    batch._worlds[1].physics[0].data.qfrc_applied[0] = 1e20  # type: ignore[attr-defined]
    actions = np.zeros((4, 6))
    _, rewards, terminated, truncated, info = batch.step(actions)
    assert terminated.tolist() == [False, False, True, False]
    assert not truncated.any()
    assert info["diverged"].tolist() == [False, False, True, False]
    assert (rewards > 0).tolist() == [True, True, False, True]
    _, _, terminated, _, info = batch.step(actions)  # begins anew
    assert not terminated.any()
    assert info == {}
    assert (batch.step(actions)[1] > 0).all()


def test_misuse_is_refused() -> None:
    batch = BatchedEnv(2, "cheetah_run", threads=1)
    with pytest.raises(gymnasium.error.ResetNeeded):
        batch.step(np.zeros((2, 6)))
    with pytest.raises(ValueError, match="one for each of 2 environments, not 3"):
        batch.reset(seed=[1, 2, 3])


@pytest.mark.parametrize("task", ["cheetah_run", "pendulum_swingup"])
def test_actions_are_checked_before_they_reach_compiled_code(task: str) -> None:
    batch = BatchedEnv(4, task, threads=2)
    batch.reset(seed=0)
    act = batch.single_action_space.shape[0]  # type: ignore[index]
    for shape in [(3, act), (4, 10 * act), (4, 1000), (5, act), (4 * act,), (4, act, 1), ()]:
        with pytest.raises(ValueError, match=rf"actions must have shape \(4, {act}\).*, not {re.escape(str(shape))}"):
            batch.step(np.zeros(shape))
    for dtype in (complex, object, bool, str):
        with pytest.raises(ValueError, match="actions must be real numbers, not"):
            batch.step(np.zeros((4, act), dtype))
    bad = np.zeros((4, act))
    bad[2, 0] = np.nan
    with pytest.raises(ValueError, match=r"the actions of environment \[2\] contain NaN or infinity"):
        batch.step(bad)
    expected = batch.step(np.full((4, act), 0.5, np.float32))[0]
    batch.reset(seed=0)
    assert_array_equal(batch.step(np.asfortranarray(np.full((4, act), 0.5)))[0], expected)


def test_arrays_are_checked_once_more_where_compiled_code_begins() -> None:
    worlds = NativeWorlds("cheetah_run", 3)
    worlds.reset([np.random.RandomState(0)] * 3)
    right: dict[str, Any] = {"actions": np.zeros((3, 6)), "obs": np.zeros((3, 17)), "rewards": np.zeros(3)}
    right |= {"ended": np.zeros(3, np.bool_), "diverged": np.zeros(3, np.bool_)}
    worlds.step(**right)
    for name, wrong in (
        ("actions", np.zeros((3, 1000))),
        ("actions", np.zeros((2, 6))),
        ("actions", np.zeros((3, 6), np.float32)),
        ("actions", np.zeros((6, 3)).T),
        ("obs", np.zeros((3, 16))),
        ("obs", np.zeros((17, 3)).T),
        ("obs", np.zeros((4, 17))),  # more than there are worlds
        ("rewards", np.zeros(2)),
        ("diverged", np.zeros(3, np.int64)),
    ):
        with pytest.raises(ValueError, match=r"must be (float64|bool) \(\d.*\), but is"):
            worlds.step(**{**right, name: wrong})
    with pytest.raises(ValueError, match=r"obs must be float64 \(3, 17\), but is float64 \(3, 18\)"):
        worlds.observe(np.zeros((3, 18)))


def test_environment_i_gets_seed_plus_i() -> None:
    batch = BatchedEnv(3, "walker_walk", threads=2)
    obs, _ = batch.reset(seed=7)
    assert_array_equal(obs, batch.reset(seed=[7, 8, 9])[0])
    assert_array_equal(obs, batch.reset(seed=np.int64(7))[0])  # type: ignore[arg-type]
    for i in range(3):
        single = gymnasium.make("pbrl/walker_walk-v0")
        assert_array_equal(single.reset(seed=7 + i)[0], obs[i])
    batch.reset(seed=7)
    second, _ = batch.reset()
    batch.reset(seed=7)
    assert_array_equal(batch.reset(seed=[7, None, 9])[0], [obs[0], second[1], obs[2]])  # None continues the stream


def test_an_error_in_a_thread_is_raised_and_the_other_threads_are_done() -> None:
    batch, expected = (BatchedEnv(4, "cheetah_run", threads=2) for _ in range(2))
    for each in (batch, expected):
        each.reset(seed=0)
    broken: Any = batch._worlds[1]
    step, broken.step = broken.step, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        batch.step(np.zeros((4, 6)))
    broken.step = step
    expected.step(np.zeros((4, 6)))
    assert_array_equal(batch.step(np.ones((4, 6)))[0][:2], expected.step(np.ones((4, 6)))[0][:2])


def test_threads_end_with_their_environment() -> None:
    def started(before: set[threading.Thread]) -> set[threading.Thread]:
        return {*threading.enumerate()} - before

    def end(threads: set[threading.Thread]) -> bool:
        for thread in threads:
            thread.join(timeout=30)
        return not any(thread.is_alive() for thread in threads)

    before = {*threading.enumerate()}
    batch = BatchedEnv(3, "cheetah_run", threads=3)
    threads = started(before)
    assert len(threads) == 2  # the caller is the third
    batch.close()
    with pytest.raises(gymnasium.error.ClosedEnvironmentError, match="closed"):
        batch.reset(seed=0)
    assert end(threads)
    batch = BatchedEnv(3, "cheetah_run", threads=3)
    batch.reset(seed=0)
    threads = started(before)
    del batch
    gc.collect()
    assert end(threads)


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for OpenGL, which need not be here: pictures whose grey is the environment's time."""

    def picture(physics: Any, camera: int, size: tuple[int, int]) -> Image.Image:
        assert camera == 0
        return Image.new("RGB", size, (round(100 * physics.time()) % 256,) * 3)

    monkeypatch.setattr(gl, "switch_on", lambda: None)
    monkeypatch.setattr(video, "picture", picture)


@pytest.mark.usefixtures("drawing")
def test_pictures_of_one_environment_and_of_a_batch() -> None:
    one = gymnasium.make("pbrl/cartpole_swingup-v0", render_mode="rgb_array", width=64, height=48)
    one.reset(seed=0)
    first = one.render()
    one.step(one.action_space.sample())
    second = one.render()
    assert isinstance(first, np.ndarray)
    assert isinstance(second, np.ndarray)
    assert first.shape == (48, 64, 3)
    assert first.dtype == np.uint8
    assert (first != second).all()
    assert one.metadata["render_fps"] == 100
    one.close()
    batch = gymnasium.make_vec("pbrl/cartpole_swingup-v0", num_envs=3, render_mode="rgb_array", width=64, height=48)
    batch.reset(seed=0)
    pictures = batch.render()
    assert pictures is not None
    assert [picture.shape for picture in pictures] == [(48, 64, 3)] * 3
    batch.close()


@pytest.mark.usefixtures("drawing")
def test_gymnasium_records_videos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []

    class Clip:  # in place of moviepy, which writes the file
        def __init__(self, frames: list[Any], fps: int) -> None:
            written.append((len(frames), fps))

        def write_videofile(self, *_: Any, **__: Any) -> None:
            pass

    for name in ("moviepy", "moviepy.video", "moviepy.video.io", "moviepy.video.io.ImageSequenceClip"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(ImageSequenceClip=Clip))
    environment = gymnasium.make("pbrl/cartpole_swingup-v0", render_mode="rgb_array", max_episode_steps=6)
    recorder = gymnasium.wrappers.RecordVideo(environment, str(tmp_path / "videos"), disable_logger=True)
    recorder.reset(seed=0)
    over = False
    while not over:
        _, _, terminated, truncated, _ = recorder.step(recorder.action_space.sample())
        over = bool(terminated or truncated)
    recorder.close()
    assert written == [(7, 100)]


def test_without_render_mode_there_is_no_picture_and_without_a_display_no_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = BatchedEnv(1, "cartpole_swingup")
    assert plain.render() is None
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(gymnasium.error.Error, match="there is no display here"):
        gymnasium.make("pbrl/cartpole_swingup-v0", render_mode="human")


def test_where_there_is_a_display_a_window_follows_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[float] = []

    class Window:
        def __init__(self, physics: Any) -> None:
            self.physics, self.over = physics, threading.Event()
            threading.Thread(target=self.live, daemon=True).start()

        def live(self) -> None:
            self.over.wait()
            time.sleep(0.2)  # as a window takes some time to close
            shown.append(-1.0)

        def sync(self) -> None:
            shown.append(self.physics.time())

        def close(self) -> None:
            self.over.set()

    monkeypatch.setattr(vector, "window", Window)
    one = gymnasium.make("pbrl/cartpole_swingup-v0", render_mode="human")
    one.reset(seed=0)
    one.step(one.action_space.sample())
    one.close()
    assert shown == pytest.approx([0.0, 0.01, -1.0])  # closed means that the window is gone


@pytest.mark.slow
def test_real_pictures_where_something_can_draw() -> None:
    one = gymnasium.make("pbrl/walker_walk-v0", render_mode="rgb_array", width=96, height=72)
    one.reset(seed=0)
    picture = one.render()
    assert isinstance(picture, np.ndarray)
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) > 20
    (physics,) = one.unwrapped._batch.physics()  # type: ignore[attr-defined]
    assert physics._contexts is not None
    one.close()
    assert physics._contexts is None
