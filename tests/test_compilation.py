"""Numba's cache on disk: a damaged file is noticed, and costs one compilation."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

SOURCE = """
import numba
from pbrl.compilation import with_sound_cache

@with_sound_cache
@numba.njit(cache=True)
def double(x):
    return 2 * x
"""


def load(path: Path) -> Any:
    """The module, as a new process would have it."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("size", [0, 20])
def test_a_truncated_file_is_compiled_again(
    suffix: str, size: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "doubling.py"
    path.write_text(SOURCE)
    assert load(path).double(2) == 4
    (file,) = tmp_path.rglob(f"*.{suffix}")
    whole = file.read_bytes()
    file.write_bytes(whole[:size])
    assert load(path).double(2) == 4
    assert "the compiled code of double on disk is damaged" in caplog.text
    assert len(file.read_bytes()) > size
    caplog.clear()
    again = load(path)
    assert again.double(2) == 4
    assert sum(again.double.stats.cache_hits.values()) == 1
    assert not caplog.records
