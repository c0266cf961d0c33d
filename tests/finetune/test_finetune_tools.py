"""The programs beside `pbrl.finetune`: what they measure, in the form that they promise."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny_language

from pbrl.finetune import bench as finetune_bench
from pbrl.finetune import dimension as finetune_dimension


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    tiny_language.save(tmp_path / "model", "bert")
    tiny_language.write_data(tmp_path / "data.tsv")
    return [
        f"model.path={tmp_path / 'model'}", "model.layers=3", f"task.path={tmp_path / 'data.tsv'}",
        "task.validation=12", "batch_size=8", "threads=1",
    ]  # fmt: skip


def test_the_dimension_is_measured_once_and_kept(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ["seeds=2", "iterations=6", "evaluation.every=3"]

    def measure(dimensions: str) -> dict[str, object]:
        monkeypatch.setattr(sys, "argv", ["finetune_dimension", *settings, *fixed, f"dimensions={dimensions}"])
        finetune_dimension.main()
        (path,) = tmp_path.rglob("intrinsic_dimension.json")
        found: dict[str, object] = json.loads(path.read_text())
        return found

    first = measure("[4,16]")
    assert first["majority"] == pytest.approx(7 / 12)
    assert first["size"] == 32
    assert {d: len(runs) for d, runs in first["subspace"].items()} == {"4": 2, "16": 2}  # type: ignore[attr-defined]
    assert "d90 of the accuracy" in capsys.readouterr().out
    with monkeypatch.context() as patch:  # what is there is not measured again
        patch.setattr(finetune_dimension, "best_in_full", None)
        more = measure("[4,16,32]")
    assert more["full"] == first["full"]
    assert len(more["subspace"]["32"]) == 2  # type: ignore[index]
    with pytest.raises(SystemExit, match="d' = 99 is not possible for 32 parameters"):
        measure("[99]")


@pytest.mark.slow
def test_the_benchmark_compares_with_bare_inference(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["task.share=1.0", "alternations=2", "iterations=2", "methods=[mezo]"]
    monkeypatch.setattr(sys, "argv", ["finetune_bench", *settings, *small])
    finetune_bench.main()
    lines = [line.split("│") for line in capsys.readouterr().out.splitlines()]
    rows = {cells[1].strip(): [float(cell) for cell in cells[2:6]] for cells in lines if len(cells) == 7}
    assert set(rows) == {"inference", "mezo"}
    assert rows["inference"][1] == rows["inference"][3] == 1.0
    assert all(rate > 0 and ratio > 0 and memory > 50 for rate, ratio, memory, _ in rows.values())
