"""Small runs to be killed, starved and spoilt, and whether they are what they would have been."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from dm_control.mujoco.wrapper import core
from tally import Outcome, call

import pbrl.train
from pbrl.run import checkpoint, preference_log, record, summary
from pbrl.simulation import tasks

AGENTS = ("ncrs", "zpg", "dpo", "ppo_rlhf", "pes")
TINY = [
    "env=pendulum_swingup",
    "env.steps=4",
    "trajectories=4",
    "pairs=2",
    "agent.policy.hidden=[4]",
    "evaluation={every:5,trajectories:1}",
    "calibration.trajectories=2",
    "checkpoint_every=2",
    "iterations=12",
    "threads=1",
    "wandb.mode=disabled",
]
LAST = 11  # iteration


def command_of(agent: str) -> list[str]:
    """The arguments of a small run of an agent."""
    small = ["agent.reward_model.hidden=[4]", "agent.ppo.critic_hidden=[4]"] if agent == "ppo_rlhf" else []
    return [f"agent={agent}", *TINY, *small, "folder=run"]


@dataclass
class Whole:
    """What an uninterrupted run leaves, and how long it takes."""

    agent: str
    folder: Path
    seconds: float
    rows: list[dict[str, Any]]
    policy: bytes
    log: dict[str, list[Any]]


def child(arguments: Sequence[str], folder: Path, before: Callable[[], object] | None = None) -> int:
    """Start pbrl.train in a process of its own, in a folder; it has all imports already. `said` is what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.chdir(folder)
        logging.disable(logging.NOTSET)
        if before is not None:
            before()
        with patch.object(summary, "draw_curve", draw_quickly):
            outcome = call(pbrl.train.command, arguments)
        code = outcome.code
        (folder.parent / f"{folder.name}.said").write_text(outcome.traceback or outcome.text)
        code = 71 if outcome.traceback else code
    finally:
        os._exit(code % 256)


def wait(process: int) -> int:
    """The exit code of a child; negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def said(folder: Path) -> str:
    """What the last child in a folder printed."""
    path = folder.parent / f"{folder.name}.said"
    return path.read_text() if path.exists() else ""


def make_whole(agent: str, folder: Path) -> Whole:
    """An uninterrupted run: once here, so that children find all loaded and compiled, and once in a child."""
    here = folder / "here"
    here.mkdir(parents=True)
    os.chdir(here)
    with patch.object(summary, "draw_curve", draw_quickly):
        outcome = call(pbrl.train.command, command_of(agent))
    begin = time.monotonic()
    if outcome.code != 0 or wait(child(command_of(agent), folder / "there")) != 0:
        raise RuntimeError(f"{agent} does not even run uninterrupted: {outcome.text}{said(folder / 'there')}")
    whole = Whole(agent, folder / "there", time.monotonic() - begin, *leftovers(folder / "there/run"))
    if unlike := difference(here / "run", whole):
        raise RuntimeError(f"{agent} is not the same twice: {unlike}")
    return whole


def draw_quickly(run: Path, _: object) -> Path:
    """Instead of a learning curve, which takes most of the time of a small run."""
    (run / summary.CURVE).write_bytes(b"a picture")
    return run / summary.CURVE


def leftovers(run: Path) -> tuple[list[dict[str, Any]], bytes, dict[str, list[Any]]]:
    """The record without its times, the policy's bytes, and the preference log."""
    rows = record.read(run / "metrics.jsonl")
    timeless = [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]
    return timeless, (run / "policy.safetensors").read_bytes(), preference_log.read(run / "preferences").to_pydict()


def difference(run: Path, whole: Whole) -> str:
    """How a finished run differs from the uninterrupted one; empty if it does not."""
    try:
        found = leftovers(run)
    except Exception as error:
        return f"cannot be read: {error!r}"
    expected = (whole.rows, whole.policy, whole.log)
    return ", ".join(
        name for name, one, other in zip(("record", "policy", "log"), found, expected, strict=True) if one != other
    )


def saved_iteration(run: Path) -> int:
    """The newest iteration that could be continued from; -1 if there is none."""
    try:
        saved = checkpoint.load(run / "checkpoint")
    except checkpoint.CheckpointError:
        return -1
    return -1 if saved is None else saved[0]


def same_state(one: Any, other: Any) -> bool:
    """Whether two states are equal, also in type and shape."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return [*one] == [*other] and all(same_state(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same_state, one, other))
    if hasattr(one, "dtype"):
        a, b = np.asarray(one), np.asarray(other)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return bool(one == other) or (one != one and other != other)


def is_sentence(outcome: Outcome) -> bool:
    """Whether a program that refused said why."""
    return outcome.code == 0 or bool(outcome.text.strip())


@contextlib.contextmanager
def models_compiled_once() -> Iterator[None]:
    """MuJoCo's models from copies: to compile them from XML takes most of the time of a small attempt."""
    compiled, usual = {}, core._get_model_ptr_from_xml

    def copied(*arguments: Any, **more: Any) -> Any:
        key = repr((arguments, more))
        if key not in compiled:
            compiled[key] = usual(*arguments, **more)
        return copy.copy(compiled[key])

    with patch.object(core, "_get_model_ptr_from_xml", copied):
        tasks.load("pendulum_swingup")  # before processes are forked
        yield
