"""Made-up runs: folders as `pbrl.train` leaves them, with known curves."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from pbrl.report.provenance import presets


def write_run(
    root: Path,
    returns: Sequence[float],
    *,
    agent: str = "ncrs",
    task: str = "walker_walk",
    oracle: str = "irrational",
    seed: int = 0,
    settings: dict[str, Any] | None = None,  # by dotted name
    experts: int = 1,
    errors: Sequence[float] | None = None,  # the teacher's, of each iteration
    drop: Sequence[str] = (),  # columns that the record lacks
) -> Path:
    """A run of one iteration for each return, evaluated at the last to be 10 better."""
    config = copy.deepcopy(presets()["train"])
    config |= {"agent": copy.deepcopy(presets()["agent"][agent]), "oracle": copy.deepcopy(presets()["oracle"][oracle])}
    config["choices"] = {"agent": agent, "env": task, "oracle": oracle}
    config |= {"env": {"name": task, "steps": None}, "seed": seed, "iterations": len(returns), "name": agent}
    for path, value in (settings or {}).items():
        node = config
        *parents, last = path.split(".")
        for parent in parents:
            node = node[parent]
        node[last] = value
    folder = root / task / config["name"] / oracle / f"seed_{seed}"
    folder.mkdir(parents=True)
    config["folder"] = str(folder)
    resolved = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    (folder / "config.yaml").write_text(yaml.dump(resolved, sort_keys=False))
    rows = []
    for i, value in enumerate(returns):
        row = {"iteration": i, "return_mean": value, "return_std": 1.0}
        if i == len(returns) - 1:
            row["eval_return"] = value + 10
        row |= {"trajectories": 64 * (i + 1), "env_steps": 64_000 * (i + 1), "pairs_asked": 32 * (i + 1)}
        row |= {"bits": 32 * experts * (i + 1), "seconds_collect": 2.0, "seconds_ask": 0.5, "seconds_learn": 0.5}
        if errors is not None:
            row["teacher_error_rate"] = errors[i]
        rows.append({name: value for name, value in row.items() if name not in drop})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
