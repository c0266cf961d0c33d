"""Files that are not what they were: noticed and repaired, or refused in a sentence; never believed, never executed."""

from __future__ import annotations

import json
import logging
import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from runs import LAST, Whole, command_of, difference, draw_quickly, is_sentence, same_state, saved_iteration
from tally import Clock, Tally, call, files, last_lines
from tqdm import tqdm

import pbrl.audit
import pbrl.report.__main__
import pbrl.train
from pbrl.run import checkpoint, summary


class Canary:
    """Unpickled, it leaves a file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("executed",))


NASTY = [
    b"",
    b"\x00" * 100,
    b"null",
    b"[]",
    b"{}",
    b'{"a": ' * 500,
    b"\xff\xfe\x00",
    b"nan",
    b"1e999",
    b"!!python/object/apply:os.mkdir [executed]",
    pickle.dumps(Canary()),
    b"a: &a [*a]",
]


def mutate(draw: random.Random, content: bytes) -> bytes:
    """The content with a bit flipped, cut, with a part zeroed, doubled, replaced or swapped, or something else."""
    if not content:
        return draw.choice(NASTY)
    at, length = draw.randrange(len(content)), draw.randint(1, 40)
    ways: list[Callable[[], bytes]] = [
        lambda: content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :],
        lambda: content[:at],
        lambda: content[:at] + bytes(length) + content[at + length :],
        lambda: content[:at] + content[at : at + length] + content[at:],
        lambda: content[:at] + draw.randbytes(length) + content[at + length :],
        lambda: content[at:] + content[:at],
        lambda: content[:at] + content[at + length :],
        lambda: content + draw.choice(NASTY),
        lambda: draw.choice(NASTY),
        lambda: _other_digit(draw, content),
    ]
    return draw.choice(ways)()


def _other_digit(draw: random.Random, content: bytes) -> bytes:
    digits = [at for at, byte in enumerate(content) if byte in b"0123456789"]
    if not digits:
        return content[::-1]
    at = draw.choice(digits)
    return content[:at] + draw.choice(b"0123456789").to_bytes() + content[at + 1 :]


def spoil(draw: random.Random, path: Path) -> None:
    """Mutate a file, or have something else in its place."""
    match draw.choices(range(4), (90, 4, 3, 3))[0]:
        case 0:
            path.write_bytes(mutate(draw, path.read_bytes()))
        case 1:
            path.unlink()
        case 2:
            path.unlink()
            path.mkdir()
        case 3:
            path.unlink()
            path.symlink_to(path.name)


def checkpoints(attempts: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """Mutated checkpoints: the other state, but no third one; a refusal if both have the file. Some are sealed again
    with right hashes: then the whole command runs, and must go on or refuse."""
    tally, draw = Tally("mutated checkpoints"), random.Random(seed)
    logging.disable(logging.CRITICAL)
    for turn in tqdm(range(attempts), desc=tally.part):
        if clock.over:
            break
        whole, place = wholes[turn % len(wholes)], folder / "place"
        shutil.copytree(whole.folder, place)
        os.chdir(place)
        saved = {number: checkpoint.load(Path("run/checkpoint"), number) for number in (LAST - 2, LAST)}
        path = draw.choice(files(Path("run/checkpoint")))
        tally.attempts += 1
        what = f"seed {seed}, turn {turn}, {whole.agent}, {path}"
        is_shared = path.parent.name == checkpoint.FIXED
        if turn % 8 == 0:
            _forge(draw, Path(f"run/checkpoint/{LAST:06d}"))
            outcome = call(pbrl.train.command, [*command_of(whole.agent), f"iterations={LAST + 2}"])
            tally.refused += outcome.code != 0
            if outcome.traceback or not is_sentence(outcome):
                tally.fail("tracebacks", f"{what}: {last_lines(outcome.traceback)}")
        else:
            spoil(draw, path)
            try:
                found = checkpoint.load(Path("run/checkpoint"))
            except checkpoint.CheckpointError:
                tally.refused += 1
                if not is_shared:
                    tally.fail("lost iterations", f"{what}: refused, although the other one is whole")
            except Exception as error:
                tally.fail("tracebacks", f"{what}: {error!r}")
            else:
                assert found is not None
                if not same_state(found, saved.get(found[0])):
                    tally.fail("wrong states", what)
        _look_for_canaries(tally, what, place)
        os.chdir(folder)
        shutil.rmtree(place)
    logging.disable(logging.NOTSET)
    return tally


def _forge(draw: random.Random, path: Path) -> None:
    """Change a value of the state, whatever it is, and seal the checkpoint again."""
    content = json.loads((path / "state.json").read_bytes())
    node: Any = content["state"]
    while True:
        key = draw.choice([*node] if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and draw.random() < 0.8:
            node = node[key]
            continue
        strange = [None, -1, 10**30, "x", [], {}, 0.5, {"$float": "nan"}, {"$array": "nope"}, {"$what": 1}, True]
        node[key] = draw.choice(strange)
        break
    (path / "state.json").write_text(json.dumps(content))
    sealed = {name: (path / name).read_bytes() for name in (checkpoint.STATE, checkpoint.ARRAYS)}
    (path / checkpoint.SUMS).write_bytes(checkpoint._sums(sealed))


def others(attempts: int, seed: int, clock: Clock, folder: Path, wholes: Sequence[Whole]) -> Tally:
    """All files of a finished run but its checkpoints: the same command repairs it or refuses it, and touches nothing
    that it cannot make again. Now and then audit and report are asked, too."""
    tally, draw = Tally("mutated other files"), random.Random(seed)
    logging.disable(logging.CRITICAL)
    for turn in tqdm(range(attempts), desc=tally.part):
        if clock.over:
            break
        whole, place = wholes[turn % len(wholes)], folder / "place"
        shutil.copytree(whole.folder, place)
        os.chdir(place)
        run = Path("run")
        path = draw.choice([each for each in files(run) if "checkpoint" not in each.parts])
        spoil(draw, path)
        tally.attempts += 1
        what = f"seed {seed}, turn {turn}, {whole.agent}, {path}"
        asked = [("audit", pbrl.audit.command, ["run=run"])] if turn % 10 == 1 else []
        asked += [("report", pbrl.report.__main__.main, ["run", "--resamples", "5"])] if turn % 50 == 1 else []
        for name, program, arguments in asked:
            outcome = call(program, arguments)
            if outcome.traceback or not is_sentence(outcome):
                tally.fail("tracebacks", f"{what}: {name}: {last_lines(outcome.traceback)}")
        with patch.object(summary, "draw_curve", draw_quickly):
            outcome = call(pbrl.train.command, command_of(whole.agent))
        tally.refused += outcome.code != 0
        if outcome.traceback or not is_sentence(outcome):
            tally.fail("tracebacks", f"{what}: {last_lines(outcome.traceback)}")
        elif outcome.code == 0 and (unlike := difference(run, whole)):
            tally.fail("wrong states", f"{what}: {unlike}")
        if saved_iteration(run) != LAST:
            tally.fail("lost iterations", f"{what}: the last saved one is {saved_iteration(run)}")
        _look_for_canaries(tally, what, place)
        os.chdir(folder)
        shutil.rmtree(place)
    logging.disable(logging.NOTSET)
    return tally


def _look_for_canaries(tally: Tally, what: str, place: Path) -> None:
    if any(place.rglob("executed")):
        tally.fail("executions", what)
