"""The reference results that ship: the code beside them still makes them."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from test_train import Command, record

from pbrl.reference.__main__ import read_settings
from pbrl.report.shipped import read_runs

RESULTS = Path(__file__).parents[2] / "results"
BEGINNING = 3  # iterations


@pytest.mark.slow
@pytest.mark.parametrize("agent", read_settings([])["agents"])
def test_a_run_begins_as_the_shipped_one(
    agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bit for bit, on a processor like the one that made them: on a znver5 `pes` differs by last bits."""
    shipped = {run.name: run for run in read_runs(RESULTS / "short.parquet")}["cheetah_run", agent, "irrational", 0]
    command = [*shlex.split(shipped.command)[3:], f"iterations={BEGINNING}", "folder=made"]
    code, _, err = Command(monkeypatch, capfd)(command, tmp_path)
    assert code == 0, err
    made = [row["return_mean"] for row in record(tmp_path / "made")]
    assert made == shipped.recorded.metrics["return_mean"][:BEGINNING].tolist()
