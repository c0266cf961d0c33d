"""What the end of a run shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pbrl.run.summary import draw_curve


@pytest.mark.parametrize("name", [r"$\x$", "$_$", "[/x]", "100 % {0}"])
def test_a_curve_is_drawn_whatever_its_run_is_called(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir(parents=True)
    metrics = {"iteration": np.arange(2.0), "return_mean": np.ones(2), "eval_return": np.array([np.nan, 1.0])}
    path = draw_curve(tmp_path / name, metrics)
    assert path.read_bytes().startswith(b"\x89PNG")
