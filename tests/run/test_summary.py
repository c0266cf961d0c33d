"""What the end of a run shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pbrl.run.summary import draw_curve, line


@pytest.mark.parametrize("name", [r"$\x$", "$_$", "[/x]", "100 % {0}"])
def test_a_curve_is_drawn_whatever_its_run_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    metrics = {"iteration": np.arange(2.0), "return_mean": np.ones(2), "eval_return": np.array([np.nan, 1.0])}
    path = draw_curve(tmp_path / name, metrics)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_iterations_that_collect_nothing_are_left_out(tmp_path: Path) -> None:
    nothing, evaluated = np.nan, np.array([1.0, np.nan, 3.0])
    metrics = {"iteration": np.arange(3.0), "return_mean": np.array([nothing, 5.0, nothing]), "eval_return": evaluated}
    assert "return 5.0 -> 5.0, evaluation 3.0 (best 3.0)" in line(metrics)
    assert "return nan -> nan, evaluation 3.0" in line({"iteration": np.arange(3.0), "eval_return": evaluated})
    assert draw_curve(tmp_path, {"iteration": np.arange(3.0), "eval_return": evaluated}).exists()
