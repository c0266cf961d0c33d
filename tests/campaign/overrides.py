"""Command lines that nobody should write: each is answered with a sentence, or runs."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tally import Clock, Outcome, Tally, call, last_lines
from tqdm import tqdm

import pbrl.train
from pbrl.run.loop import RECORD
from pbrl.run.record import Record
from pbrl.run.settings import choices
from pbrl.run.training import TrainingRun

BASE = [
    "env=pendulum_swingup",
    "env.steps=3",
    "trajectories=4",
    "pairs=2",
    "agent.policy.hidden=[4]",
    "evaluation.trajectories=1",
    "calibration.trajectories=2",
    "threads=1",
    "iterations=1",
    "wandb.mode=disabled",
    "preference_log=false",
]
LONGEST = 5.0  # seconds of processor time, of which most attempts take a tenth
LARGEST = 2_000  # control steps of an attempt that is tried out
VALUES = [
    *("0", "1", "-1", "2", "3", "0.5", "-0.5", "1e300", "-1e-300", "1e-320", "nan", ".nan", "inf", "-inf", "1e999"),
    *("true", "false", "yes", "no", "on", "off", "null", "None", "~", "''", '""', "abc", "x", "0x10", "1_000", "1e3"),
    *("[]", "{}", "[1,2]", "[1,[2,[3]]]", "{a:1}", "{a:{b:1}}", "[null]", "[nan]", "{_target_:os.system}", "[-1]"),
    *(
        "${nope}",
        "${seed}",
        "${hydra:job.num}",
        "${oc.env:HOME}",
        "${oc.env:NOPE}",
        "${oc.decode:1}",
        "${.}",
        "$",
        "${",
    ),
    *("999999999999999999999999", "-999999999999999999999999", "10000000000", "a=b", "a,b", "a:b", "../x", "/", "."),
    *("\\", "'", '"', "(", ")", "[", "]", "{", "}", ",", "=", "@", "%s", "{0}", "\x00", "\x1b[31m", "\u202e", "🙂"),
    *("choice(1,2)", "range(3)", "interval(0,1)", "glob(*)", "sort(2,1)", "int(3)", "str(1)", "bool(1)", "json_str(1)"),
    *(
        "agents.ncrs.NCRS",
        "pbrl.train.main",
        "oracles.teacher.Teacher",
        "os.system",
        "builtins.exec",
        "pbrl",
        "agents.",
    ),
    *("???", "!!python/object:os.system", "a" * 300, " ", "\t", "1 2", "sampled", "mean", "logistic", "2020-01-01"),
]
GROUPS = ("agent", "env", "oracle", "experiment", "hydra/launcher", "hydra/sweeper", "hydra/job_logging", "policy")


def fuzz(attempts: int, seed: int, clock: Clock, folder: Path, _: object = None) -> Tally:
    """Compose so many command lines; each that can be run makes one iteration."""
    tally, draw = Tally("fuzzed overrides"), random.Random(seed)
    settings = {agent: paths(agent) for agent in choices("agent")}
    logging.disable(logging.CRITICAL)
    os.chdir(folder)
    for _turn in tqdm(range(attempts), desc=tally.part):
        if clock.over:
            break
        arguments = command_line(draw, settings)
        outcome = attempt(arguments)
        tally.attempts += 1
        tally.refused += outcome.code != 0
        if outcome.traceback:
            tally.fail("tracebacks", f"{arguments[len(BASE) :]!r}: {last_lines(outcome.traceback)}")
        elif outcome.code and not outcome.text.strip():
            tally.fail("tracebacks", f"{arguments[len(BASE) :]!r}: ended with {outcome.code} and without a word")
        if (folder / "runs").exists():
            shutil.rmtree(folder / "runs")
    logging.disable(logging.NOTSET)
    return tally


def attempt(arguments: list[str]) -> Outcome:
    """A command line, up to the end of its first iteration; one that takes long, as 10^10 updates do, is stopped."""
    signal.signal(signal.SIGPROF, lambda *_: sys.exit(0))
    signal.setitimer(signal.ITIMER_PROF, LONGEST)
    with patch.object(pbrl.train, "follow_and_film", iterate_once), patch.object(pbrl.train, "summary"):
        outcome = call(pbrl.train.command, arguments)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return outcome


def paths(agent: str) -> list[str]:
    """The full names of all settings of training with an agent."""
    with initialize_config_module("conf"):
        cfg = compose("train", overrides=[f"agent={agent}"], return_hydra_config=True)
    return [*_paths(OmegaConf.to_container(cfg)), "hydra.run.dir", "hydra.job.name", "hydra.mode", "hydra.verbose"]


def _paths(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, Mapping):
        return []
    below = {f"{path}.{key}".lstrip("."): value for key, value in node.items() if path or key != "hydra"}
    return [*below, *(each for name, value in below.items() for each in _paths(value, name))]


def command_line(draw: random.Random, settings: Mapping[str, list[str]]) -> list[str]:
    """Settings that make a small run, and one to three that nobody should write."""
    agent = draw.choice([*settings])
    return [*BASE, f"agent={agent}", *(override(draw, settings[agent]) for _ in range(draw.choice((1, 1, 2, 3))))]


def override(draw: random.Random, known: list[str]) -> str:
    """A known setting with any value, most often; or one with a typo, another operation, a choice, or nonsense."""
    path, value = draw.choice(known), draw.choice(VALUES)
    match draw.choices(range(7), (60, 10, 8, 8, 6, 4, 4))[0]:
        case 0:
            return f"{path}={value}"
        case 1:
            return f"{mutate(draw, path)}={value}"
        case 2:
            return draw.choice((f"+{path}={value}", f"++{path}={value}", f"~{path}", f"~{path}={value}"))
        case 3:
            group = draw.choice(GROUPS)
            return f"{group}={mutate(draw, draw.choice(choices(group) or ['x']))}"
        case 4:
            return f"{path}={mutate(draw, value)}"
        case 5:
            return mutate(draw, f"{path}={value}")
        case _:
            return "".join(draw.choice("abz019=+~@.,:/[]{}()'\"$ \\-_é") for _ in range(draw.randint(1, 12)))


def mutate(draw: random.Random, text: str) -> str:
    """The text with a letter left out, doubled, replaced or swapped."""
    if not text:
        return "x"
    at = draw.randrange(len(text))
    return draw.choice(
        (
            text[:at] + text[at + 1 :],
            text[:at] + text[at] + text[at:],
            text[:at] + draw.choice("abz019=.,_") + text[at + 1 :],
            text[:at] + text[at:][::-1],
        )
    )


def iterate_once(run: TrainingRun, settings: Mapping[str, Any], _: Path | None) -> None:
    """Instead of training: one iteration, if it is a small one."""
    most = max(
        settings["trajectories"], settings["evaluation"]["trajectories"], settings["calibration"]["trajectories"]
    )
    record = Record(run.folder / RECORD, after=-1)
    if most * run.simulator.steps <= LARGEST and settings["pairs"] <= LARGEST and run.policy.size < 10**6:
        record.write(run.iterate(0))
    record.close()
