"""The benchmark measures what it says, in the form that it promises."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from pbrl.bench import collection as bench


def test_it_writes_the_promised_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny = [
        "tasks=[cheetah_run]",
        "agents_task=cheetah_run",
        "trajectories=4",
        "steps=5",
        "alternations=1",
        "peer_trajectories=1",
        "hidden=[8]",
    ]
    monkeypatch.setattr(sys, "argv", ["pbrl.bench", *tiny, "comparisons.pairs=10", "agents.ncrs.votes=2"])
    bench.main()
    with (tmp_path / "runs/bench/simulator.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["task", "what", "steps_per_second", "ratio_to_limit"]
    assert [row["what"] for row in rows][:2] == ["physics limit", "pbrl"]
    assert "dm_control loop" in {row["what"] for row in rows}
    assert float(rows[0]["ratio_to_limit"]) == 1.0
    assert all(float(row["steps_per_second"]) > 0 for row in rows)
    with (tmp_path / "runs/bench/agents.csv").open() as file:
        agents = list(csv.DictReader(file))
    assert [row["agent"] for row in agents] == ["ncrs", "zpg", "dpo", "ppo_rlhf"]
    assert all(float(row["ratio_to_collection"]) > 1 for row in agents)
    assert "10 comparisons of 1000-step clips take the teacher" in capsys.readouterr().out
