"""Run folders made by somebody who wants their code to run, or a program to fall: every program that reads them."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml
from mutations import Canary, _look_for_canaries
from PIL import Image
from runs import Whole, command_of, is_sentence
from tally import Clock, Tally, call, last_lines
from tqdm import tqdm

import pbrl.audit
import pbrl.finetune.report
import pbrl.label.__main__
import pbrl.play
import pbrl.report.__main__
import pbrl.train
from pbrl.run.settings import ConfigurationError
from pbrl.simulation import gl, video
from pbrl.simulation.tasks import UnknownTaskError

MKDIR = {"_target_": "os.mkdir", "path": "executed"}
PAYLOADS: list[Any] = [
    MKDIR,
    {"_target_": "sympy.sympify", "a": "__import__('os').mkdir('executed')"},
    {"_target_": "builtins.exec", "_args_": ["import os; os.mkdir('executed')"]},
    {"_target_": "builtins.eval", "_args_": ["__import__('os').mkdir('executed')"]},
    {"_target_": "subprocess.run", "args": ["mkdir", "executed"]},
    {"_target_": "pbrl.simulation.gl.os.mkdir", "_args_": ["executed"]},
    {"_target_": "agents.ncrs.np.os.mkdir", "_args_": ["executed"]},
    {"_target_": "pbrl.run.files.write_atomically", "path": "executed", "content": "x"},
    {"_target_": "agents.samplers.Uniform"},  # it may be named, but is neither agent, policy nor teacher
    {"_target_": "pbrl.run.record.Record", "path": "executed", "after": -1},
    {
        "_target_": "pbrl.train.train",
        "overrides": ["allow=[os,posix]", "~oracle", "+oracle={_target_:os.mkdir,path:executed}"],
    },
    "${oc.decode:'{_target_: pbrl.train.train, overrides: [folder=executed]}'}",
    {"_target_": "hydra.utils.get_object", "path": "os.mkdir"},
    {"_target_": "hydra.utils.call", "_args_": [MKDIR]},
    {"_target_": "functools.partial", "_args_": [MKDIR]},
    {"_target_": ["os.mkdir"], "_args_": ["executed"]},
    {"_target_": "..os.mkdir", "_args_": ["executed"]},
    {"_target_": "os.mkdir", "_partial_": True, "path": "executed"},
    {"a": {"b": [{"c": MKDIR}]}},
    [MKDIR],
    "${oc.create:${oc.env:HOME}}",
    "$(mkdir executed)",
    "[/x]\x1b[31m",
    None,
    [],
    {},
    -1,
    1e308,
    "x" * 5000,
]
FILES: dict[str, bytes] = {
    "config.yaml": b"!!python/object/apply:os.mkdir [executed]",
    "policy.safetensors": pickle.dumps(Canary()),
    "metrics.jsonl": pickle.dumps(Canary()),
    "preferences/000000000000.parquet": pickle.dumps(Canary()),
    "versions.json": pickle.dumps(Canary()),
    "checkpoint/000011/state.json": pickle.dumps(Canary()),
    "checkpoint/000011/arrays.safetensors": pickle.dumps(Canary()),
}


def folders(attempts: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """Every payload at every place of config.yaml, and a pickle in place of every file; programs take turns. There is
    nothing to draw: of the same number of attempts, the next seed makes the next."""
    tally = Tally("hostile run folders")
    logging.disable(logging.CRITICAL)
    every = list(_hostile(wholes[0]))
    for turn in tqdm(range(attempts), desc=tally.part):
        if clock.over:
            break
        what, make = every[(seed * attempts + turn) * 7919 % len(every)]
        place = folder / "place"
        shutil.copytree(wholes[0].folder, place)
        os.chdir(place)
        make(Path("run"))
        name, program, arguments = (programs := list(_programs(wholes[0])))[turn % len(programs)]
        with (
            patch.object(gl, "choose", lambda: "disable"),
            patch.object(video, "picture", lambda _, __, size: Image.new("RGB", size)),
        ):
            outcome = call(program, arguments)
        tally.attempts += 1
        tally.refused += outcome.code != 0
        if outcome.traceback or not is_sentence(outcome):
            tally.fail("tracebacks", f"{name}, {what}: {last_lines(outcome.traceback)}")
        _look_for_canaries(tally, f"{name}, {what}", place)
        os.chdir(folder)
        shutil.rmtree(place)
    logging.disable(logging.NOTSET)
    return tally


def _programs(whole: Whole) -> Iterator[tuple[str, Callable[[], object], list[str]]]:
    small = ["--steps", "2", "--size", "64x64", "--gif"]
    yield "play", pbrl.play.main, ["run", *small]
    yield "play --pair", pbrl.play.main, ["run", "--pair", *small]
    yield "play --learning", pbrl.play.main, ["run", "--learning", *small]
    yield "load", load, []
    yield "label --export", pbrl.label.__main__.main, [".", "--export", "answers.csv"]
    yield "audit", pbrl.audit.command, ["run=run"]
    yield "report", pbrl.report.__main__.main, ["run", "--resamples", "5"]
    yield "finetune.report", pbrl.finetune.report.main, ["."]
    yield "train", pbrl.train.command, command_of(whole.agent)
    yield "train, longer", pbrl.train.command, [*command_of(whole.agent), "iterations=13"]


def load() -> None:
    """The policy of a run, in a notebook: what is raised is a sentence, of a kind that says so."""
    try:
        pbrl.load("run").act(np.zeros(3))
    except (ConfigurationError, UnknownTaskError) as error:
        raise SystemExit(f"pbrl.load: {error}") from None


def _hostile(whole: Whole) -> Iterator[tuple[str, Callable[[Path], object]]]:
    settings = yaml.safe_load((whole.folder / "run/config.yaml").read_text())
    for path in _places(settings):
        for number, payload in enumerate(PAYLOADS):
            changed = _with(settings, path, payload)
            yield f"payload {number} at {'.'.join(path)}", _writer("config.yaml", yaml.safe_dump(changed).encode())
    for name, content in FILES.items():
        yield f"a pickle as {name}", _writer(name, content)


def _writer(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda run: (run / name).write_bytes(content)


def _places(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield (*path, key)
            yield from _places(value, (*path, key))


def _with(settings: dict[str, Any], path: Sequence[str], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(settings)
    node = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return changed
