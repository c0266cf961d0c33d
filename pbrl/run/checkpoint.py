"""Checkpoints: all that a run needs to continue exactly, in files that cannot execute code.

    checkpoint/000040/               the one before the last
    checkpoint/000050/               the state after iteration 50
        state.json                   numbers, text and structure
        arrays.safetensors           arrays and tensors
        SHA256SUMS                   as `sha256sum --check` reads it

A checkpoint appears under its name once it is complete and on disk, so whatever stops a save leaves the ones before it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError

FORMAT = 1
STATE, ARRAYS, SUMS = "state.json", "arrays.safetensors", "SHA256SUMS"
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


def save(folder: Path, iteration: int, state: Mapping[str, Any]) -> None:
    """Put the state after an iteration on disk, all or nothing, and keep one earlier checkpoint.

    A state is made of dicts with text or whole numbers as keys, lists, tuples, numbers, text, None, arrays and
    tensors. All of it comes back as it was, except that every mapping comes back as a dict, and every tensor on
    the CPU and without its gradient. Checkpoints of later iterations are those of an abandoned future: they go.
    """
    if iteration < 0:
        raise ValueError(f"the iteration of a checkpoint must be at least 0, not {iteration}")
    arrays: dict[str, NDArray[Any]] = {}
    content = {"format": FORMAT, "iteration": iteration, "state": _encode(state, "state", arrays)}
    files = {STATE: json.dumps(content, allow_nan=False).encode(), ARRAYS: safetensors.numpy.save(arrays)}
    files[SUMS] = _sums(files)
    target = folder / f"{iteration:06d}"
    try:
        _publish(files, target)
    except OSError as error:
        shutil.rmtree(_sibling(target, "unfinished"), ignore_errors=True)
        raise CheckpointError(
            f"could not save iteration {iteration} in {folder.absolute()}: {error.strerror or error}. "
            f"A checkpoint needs a folder that can be written and {sum(map(len, files.values())) / 1e6:.3f} MB in it. "
            "Earlier ones are as they were: put this right, and the same command continues from the last of them."
        ) from error
    earlier = [path for number, path in _newest_first(folder) if number < iteration]
    kept = {target, next(filter(_is_sound, earlier), None)}
    for path in folder.iterdir():
        if NAME.fullmatch(path.name) and path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def load(folder: Path, iteration: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """The newest sound checkpoint, or that of an iteration: its iteration and its state.

    None if nothing was ever saved here.
    """
    damaged, found = [], _newest_first(folder)
    if iteration is not None:
        there = ", ".join(str(number) for number in sorted({number for number, _ in found})) or "none"
        found = [(number, path) for number, path in found if number == iteration]
        if not found:
            raise CheckpointError(f"{folder.absolute()} has no iteration {iteration}; there is {there}")
    for number, path in found:
        try:
            state = _read(path)
        except UNREADABLE as error:
            damaged.append(f"{path.absolute()} is damaged: {error}")
            continue
        for problem in damaged:
            logger.warning("%s; continuing from iteration %d", problem, number)
        return number, state
    if damaged:
        raise CheckpointError(
            "no checkpoint can be read:\n  "
            + "\n  ".join(damaged)
            + "\nRestore one of them from a copy, or start over "
            "with `resume=false`, which keeps the old run aside."
        )
    return None


def _publish(files: Mapping[str, bytes], target: Path) -> None:
    """Write under another name, and rename when everything is on disk."""
    unfinished, old = _sibling(target, "unfinished"), _sibling(target, "old")
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)
    for name, content in files.items():
        with (unfinished / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(unfinished)
    if target.exists():  # folders cannot be swapped: `load` knows the old name too
        if old.exists():
            shutil.rmtree(old)
        target.rename(old)
    unfinished.rename(target)
    _sync_folder(target.parent)
    _sync_folder(target.parent.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _sums(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in (STATE, ARRAYS)).encode()


def _sound_files(path: Path) -> dict[str, bytes]:
    """The contents of a checkpoint, if they are what was written."""
    files = {name: (path / name).read_bytes() for name in (STATE, ARRAYS, SUMS)}
    expected = _sums(files)
    if files[SUMS] != expected:
        altered = [line.split()[1].decode() for line in expected.splitlines(True) if line not in files[SUMS]]
        raise ValueError(f"{' and '.join(altered) or SUMS} was cut short or altered since it was written")
    return files


def _read(path: Path) -> dict[str, Any]:
    files = _sound_files(path)
    content = json.loads(files[STATE])
    if content["format"] > FORMAT:
        raise CheckpointError(
            f"{path.absolute()} was written by a newer pbrl (format {content['format']}, this one reads {FORMAT}): "
            "upgrade pbrl, or start over with `resume=false`, which keeps the old run aside"
        )
    if f"{content['iteration']:06d}" != path.name.removesuffix(".old"):
        raise ValueError(f"its name is not that of its iteration, {content['iteration']}")
    state: dict[str, Any] = _decode(content["state"], safetensors.numpy.load(files[ARRAYS]))
    return state


def _is_sound(path: Path) -> bool:
    try:
        return bool(_sound_files(path))
    except UNREADABLE:
        return False


def _encode(value: Any, name: str, arrays: dict[str, NDArray[Any]]) -> Any:
    """The value for JSON, its arrays put into `arrays`. A dict with one key in `$` stands for what JSON lacks."""
    if isinstance(value, np.ndarray | np.generic | torch.Tensor):
        return {_kind(value, name): _put(value, name, arrays)}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{name}/{index}", arrays) for index, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
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
    dtype = str(value.dtype).removeprefix("torch.")  # numpy says >f4 of foreign bytes
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of {dtype}: a checkpoint holds {', '.join(sorted(DTYPES))}")
    while name in arrays:  # keys may contain slashes
        name += "'"
    array = value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value
    arrays[name] = np.asarray(array, order="C")
    return name


def _decode(value: Any, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """What `_encode` was given."""
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
        case dict():
            return {key: _decode(item, arrays) for key, item in value.items()}
    return value
