"""Importing pbrl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code as a user would, standing in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(ROOT)!r})\n{code}"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["agents", "oracles", "conf"])
def test_another_package_of_the_same_name_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").touch()
    result = python("import pbrl", tmp_path)
    assert result.returncode != 0
    assert f"pbrl comes with a package `{name}`, but `import {name}` finds {tmp_path / name}" in result.stderr


def test_a_folder_of_the_same_name_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    result = python("import pbrl, gymnasium; print(len(gymnasium.registry) > 51)", tmp_path)
    assert result.stdout == "True\n", result.stderr


def test_importing_needs_no_display_and_says_nothing(tmp_path: Path) -> None:
    result = python("import os; os.environ.pop('MUJOCO_GL', None); import pbrl.simulation.simulator", tmp_path)
    assert result.returncode == 0
    assert result.stdout == result.stderr == ""
    assert not list(tmp_path.iterdir())
