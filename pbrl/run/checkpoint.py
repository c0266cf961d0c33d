"""Checkpoints: all that a run needs to continue exactly, in files that cannot execute code.

    checkpoint/000040/               the previous one
    checkpoint/000050/               the state after iteration 50
        state.json                   numbers, text and structure, and a digest of the run's settings
        arrays.safetensors           arrays and tensors
        SHA256SUMS                   for `sha256sum --check`
    checkpoint/fixed/                arrays that do not change any more, such as those of a replay buffer, each file
        1f3a....safetensors          under its SHA-256; the checkpoints share them

A checkpoint gets its name when it is complete and on disk: an interrupted save leaves the earlier ones as they were.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

from pbrl.run.files import sync_folder, write_atomically
from pbrl.types import Fixed

FORMAT = 2  # 1: there were no shared files
STATE, ARRAYS, SUMS, FIXED = "state.json", "arrays.safetensors", "SHA256SUMS", "fixed"
DTYPES = {
    "bool",
    "float16",
    "float32",
    "float64",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}
NAME = re.compile(r"(\d{6,})(\.old|\.unfinished)?")
UNREADABLE = (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError)

logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; the message says what to do."""


def save(folder: Path, iteration: int, state: Mapping[str, Any], settings_digest: str | None = None) -> None:
    """Write the state after an iteration, as a whole or not at all, and keep one earlier checkpoint.

    A state consists of dicts with text or whole numbers as keys, lists, tuples, numbers, text, None, arrays and
    tensors. `load` returns all of it unchanged, except that every mapping becomes a dict, and every tensor is on the
    CPU and without its gradient. Checkpoints of later iterations are deleted: the run has been continued from an
    earlier one. `settings_digest` stands for the settings of the run; `load` refuses to continue with others.
    """
    if iteration < 0:
        raise ValueError(f"the iteration of a checkpoint must be at least 0, not {iteration}")
    target, arrays = folder / f"{iteration:06d}", _Arrays(folder / FIXED)
    files: dict[str, bytes] = {}
    try:
        content = {"format": FORMAT, "iteration": iteration, "state": _encode(state, "state", arrays)}
        content["fixed"] = arrays.fixed
        if settings_digest is not None:
            content["settings_digest"] = settings_digest
        files = {STATE: json.dumps(content, allow_nan=False).encode(), ARRAYS: safetensors.numpy.save(arrays)}
        files[SUMS] = _sums(files)
        _publish(files, target)
    except OSError as error:
        shutil.rmtree(_sibling(target, "unfinished"), ignore_errors=True)
        size = arrays.shared + sum(map(len, files.values()))
        raise CheckpointError(
            f"could not save iteration {iteration} in {folder.absolute()}: {error.strerror or error}. "
            f"A checkpoint needs a writable folder and {size / 1e6:.3f} MB in it. "
            "Earlier checkpoints are unchanged: once this is mended, the same command continues from the last of them."
        ) from error
    earlier = [path for number, path in _newest_first(folder) if number < iteration]
    kept = {target, next(filter(_is_sound, earlier), None)}
    for path in folder.iterdir():
        if NAME.fullmatch(path.name) and path not in kept:
            shutil.rmtree(path, ignore_errors=True)
    used = {name for path in kept if path is not None for name in _fixed_files((path / STATE).read_bytes())}
    for path in (folder / FIXED).glob("*"):
        if path.name not in used:
            with contextlib.suppress(OSError):  # it costs space, nothing else
                path.unlink()


def load(
    folder: Path,
    iteration: int | None = None,
    *,
    settings_digest: str | None = None,
    find_problem: Callable[[int, dict[str, Any]], str | None] | None = None,
) -> tuple[int, dict[str, Any]] | None:
    """The newest checkpoint that can be used, or that of an iteration: its iteration and its state.

    None if there is no checkpoint. A damaged checkpoint is skipped with a warning, and so is one for which
    `find_problem` (given the iteration and the state) returns a sentence: for example that the preference log lacks
    rows which the state counts. A checkpoint with another settings digest than the given one is refused.
    """
    problems, found = [], _newest_first(folder)
    if iteration is not None:
        there = ", ".join(str(number) for number in sorted({number for number, _ in found})) or "none"
        found = [(number, path) for number, path in found if number == iteration]
        if not found:
            raise CheckpointError(f"{folder.absolute()} has no iteration {iteration}; there is {there}")
    for number, path in found:
        try:
            state = _read(path, settings_digest)
        except UNREADABLE as error:
            problems.append(f"{path.absolute()} is damaged: {error}")
            continue
        if find_problem is not None and (problem := find_problem(number, state)):
            problems.append(f"{path.absolute()} cannot be used: {problem}")
            continue
        for each in problems:
            logger.warning("%s; continuing from iteration %d", each, number)
        return number, state
    if problems:
        raise CheckpointError(
            "no checkpoint can be used:\n  "
            + "\n  ".join(problems)
            + "\nRestore what is missing from a copy, or start over with `resume=false`, which keeps the old run aside."
        )
    return None


def _publish(files: Mapping[str, bytes], target: Path) -> None:
    """Write to a folder of another name, and rename it when everything is on disk."""
    unfinished, old = _sibling(target, "unfinished"), _sibling(target, "old")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    for name, content in files.items():
        with (unfinished / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    sync_folder(unfinished)
    if target.exists():  # a folder cannot replace another in one step: `load` finds the old one, too
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    unfinished.rename(target)
    sync_folder(target.parent)
    sync_folder(target.parent.parent)


def _sibling(target: Path, suffix: str) -> Path:
    return target.with_name(f"{target.name}.{suffix}")


def _newest_first(folder: Path) -> list[tuple[int, Path]]:
    """The iteration and path of every finished checkpoint."""
    try:
        found = [(NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"cannot look for checkpoints in {folder.absolute()}: {error.strerror}") from error
    finished = [(int(match[1]), match[2] is None, path) for match, path in found if match and match[2] != ".unfinished"]
    return [(iteration, path) for iteration, _, path in sorted(finished, reverse=True)]


class _Arrays(dict[str, NDArray[Any]]):
    """The arrays of a state; those that do not change any more go to files that checkpoints share."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.fixed: list[str] = []  # SHA-256 of each shared file
        self.shared = 0  # bytes in them

    def share(self, arrays: dict[str, NDArray[Any]]) -> str:
        """The SHA-256 of a file that holds the arrays; it is written unless it is there."""
        content = safetensors.numpy.save(arrays)
        self.fixed.append(hashlib.sha256(content).hexdigest())
        self.shared += len(content)
        path = self.folder / _fixed_name(self.fixed[-1])
        if not path.exists() or path.read_bytes() != content:  # a damaged one is mended
            write_atomically(path, content)
        return self.fixed[-1]


def _fixed_name(digest: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    return f"{digest}.safetensors"


def _fixed_files(state: bytes) -> list[str]:
    """The names of the shared files of a checkpoint, from its state.json."""
    content = json.loads(state)
    return [_fixed_name(digest) for digest in content["fixed"]] if "fixed" in content else []


def _sums(files: Mapping[str, bytes]) -> bytes:
    shared = "".join(f"{Path(name).stem}  ../{FIXED}/{name}\n" for name in _fixed_files(files[STATE]))
    return _own_sums(files) + shared.encode()


def _own_sums(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in (STATE, ARRAYS)).encode()


def _sound_files(path: Path) -> dict[str, bytes]:
    """The contents of a checkpoint's files, if they match their hashes."""
    files = {name: (path / name).read_bytes() for name in (STATE, ARRAYS, SUMS)}
    expected = _own_sums(files)
    if not files[SUMS].startswith(expected) or files[SUMS] != _sums(files):
        altered = [line.split()[1].decode() for line in expected.splitlines(True) if line not in files[SUMS]]
        raise ValueError(f"{' and '.join(altered) or SUMS} was cut short or altered since it was written")
    for name in _fixed_files(files[STATE]):
        if hashlib.sha256((path.parent / FIXED / name).read_bytes()).hexdigest() != Path(name).stem:
            raise ValueError(f"{FIXED}/{name} was cut short or altered since it was written")
    return files


def _read(path: Path, settings_digest: str | None) -> dict[str, Any]:
    files = _sound_files(path)
    content = json.loads(files[STATE])
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"{path.absolute()} was written by a newer pbrl (format {content['format']}, this one reads {FORMAT}): "
            "upgrade pbrl, or start over with `resume=false`, which keeps the old run aside"
        )
    if settings_digest is not None and content.get("settings_digest", settings_digest) != settings_digest:
        raise CheckpointError(
            f"{path.absolute()} was saved by a run with other settings: give this run another name=..., "
            "or start over with `resume=false`, which keeps the old run aside"
        )
    if f"{content['iteration']:06d}" != path.name.removesuffix(".old"):
        raise ValueError(f"its name does not match its iteration, {content['iteration']}")
    arrays = _Arrays(path.parent / FIXED)
    arrays.update(safetensors.numpy.load(files[ARRAYS]))
    state: dict[str, Any] = _decode(content["state"], arrays)
    return state


def _is_sound(path: Path) -> bool:
    try:
        return bool(_sound_files(path))
    except UNREADABLE:
        return False


def _encode(value: Any, name: str, arrays: _Arrays) -> Any:
    """The value in terms of JSON, with its arrays put into `arrays`.

    A dict whose one key begins with `$` stands for what JSON lacks.
    """
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return {_kind(value, name): _put(value, name, arrays)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{name}/{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if isinstance(value, Fixed):
        own = _Arrays(arrays.folder)
        content = {key: _encode(item, key, own) for key, item in value.items()}
        return {"$fixed": [arrays.share(own), content]}
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{name} has the key {key!r}: a checkpoint's keys are text or whole numbers")
        pairs = [(key, _encode(item, f"{name}/{key}", arrays)) for key, item in value.items()]
        plain = all(type(key) is str and not key.startswith("$") for key in value)
        return dict(pairs) if plain else {"$dict": pairs}
    raise TypeError(
        f"{name} is a {type(value).__qualname__}: a checkpoint holds dicts, lists, tuples, numbers, text, None, "
        "arrays and tensors"
    )


def _kind(value: Any, name: str) -> str:
    if isinstance(value, np.generic):
        return "$scalar"
    if isinstance(value, torch.Tensor):
        return "$tensor"
    if type(value) is np.ndarray:
        return "$array"
    raise TypeError(f"{name} is a {type(value).__qualname__}: a checkpoint holds plain arrays")


def _put(value: Any, name: str, arrays: dict[str, NDArray[Any]]) -> str:
    dtype = str(value.dtype).removeprefix("torch.")  # numpy calls the other byte order >f4
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of {dtype}: a checkpoint holds {', '.join(sorted(DTYPES))}")
    while name in arrays:  # keys may contain slashes
        name += "'"
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    arrays[name] = np.asarray(array, order="C")
    return name


def _decode(value: Any, arrays: _Arrays) -> Any:
    """The inverse of `_encode`."""
    if isinstance(value, list):
        return [_decode(item, arrays) for item in value]
    match value:
        case {"$array": name}:
            return arrays[name].copy()
        case {"$tensor": name}:
            return torch.from_numpy(arrays[name].copy())
        case {"$scalar": name}:
            return arrays[name][()]
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_decode(items, arrays))
        case {"$dict": pairs}:
            return dict(_decode(pairs, arrays))
        case {"$fixed": [digest, items]}:
            own = _Arrays(arrays.folder)
            own.update(safetensors.numpy.load((arrays.folder / _fixed_name(digest)).read_bytes()))
            return _decode(items, own)
        case dict():
            return {key: _decode(item, arrays) for key, item in value.items()}
    return value
