"""The reference results that ship: the code beside them still makes them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from numpy._core._multiarray_umath import __cpu_features__ as instructions
from test_train import ROOT, record

from pbrl.reference.__main__ import read_settings
from pbrl.report.shipped import read_runs

BEGINNING = 3  # iterations
AVX512 = instructions["AVX512_SKX"]  # with which the shipped runs of `pes` were made


@pytest.mark.slow
@pytest.mark.parametrize("agent", read_settings([])["agents"])
def test_a_run_begins_as_the_shipped_one(agent: str, tmp_path: Path) -> None:
    """Bit for bit; but for `pes` on a processor without AVX-512, whose matrix products differ by last bits."""
    runs = {run.name: run for run in read_runs(ROOT / "results/short.parquet")}
    shipped = runs["cheetah_run", agent, "irrational", 0]
    command = [sys.executable, *shlex.split(shipped.command)[1:], f"iterations={BEGINNING}", "folder=made"]
    kernels = {"OPENBLAS_CORETYPE": "SkylakeX"} if AVX512 else {}  # it does not choose them on every such processor
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | kernels
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    made = [row["return_mean"] for row in record(tmp_path / "made")]
    expected = shipped.recorded.metrics["return_mean"][:BEGINNING].tolist()
    if AVX512 or agent != "pes":
        assert made == expected
    else:
        assert made == pytest.approx(expected, rel=0.02)
