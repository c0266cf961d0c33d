"""Commands, settings and versions of runs."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tests.synthetic_runs import write_run

from pbrl.report.provenance import (
    changes,
    commands,
    commit,
    compare_versions,
    disagreements,
    nearest,
    note_versions,
    presets,
)
from pbrl.report.runs import load


def settings(folder: Path, **how: Any) -> Any:
    return load(write_run(folder, [1.0], **how)).settings


def test_a_preset_is_recognised_with_what_was_changed() -> None:
    for name, preset in presets()["oracle"].items():
        assert nearest("oracle", preset) == (name, {})
    changed = presets()["agent"]["ncrs"] | {"votes": 16}
    assert nearest("agent", changed) == ("ncrs", {"agent.votes": 16})
    assert nearest("agent", {"_target_": "mine.Agent"}) == (None, {})


def test_changes_name_what_is_new_and_what_is_gone() -> None:
    found = changes({"a": {"b": 1, "new": 2}, "same": [1]}, {"a": {"b": 0, "old": 3}, "same": [1]})
    assert found == {"a.b": 1, "~a.old": None, "+a.new": 2}


def test_few_commands_make_many_runs(tmp_path: Path) -> None:
    every = [
        settings(tmp_path, agent=agent, task=task, seed=seed, settings={"iterations": 600})
        for agent in ("ncrs", "zpg")
        for task in ("walker_walk", "cheetah_run")
        for seed in (0, 1)
    ]
    assert commands(every) == [
        "python -m pbrl.train -m agent=ncrs,zpg env=walker_walk,cheetah_run oracle=irrational seed=0,1"
    ]
    every.append(settings(tmp_path, seed=7, settings={"iterations": 600, "agent.votes": 16, "name": "few"}))
    assert commands(every)[1:] == [
        "python -m pbrl.train agent=ncrs env=walker_walk oracle=irrational seed=7 agent.votes=16 name=few"
    ]


def test_a_command_makes_the_settings_it_came_from(tmp_path: Path) -> None:
    changed = {"oracle.tau": {"error_rate": 0.2}, "agent.policy.hidden": [8, 8], "agent.common_start": True}
    changed |= {"iterations": 7, "env.steps": 50, "evaluation.every": 3, "name": "mine"}
    original = settings(tmp_path, agent="ncrs_single", task="hopper_hop", seed=4, settings=changed)
    (command,) = commands([original])
    with initialize_config_module("conf"):
        made = OmegaConf.to_container(compose("train", shlex.split(command)[3:]))
    assert isinstance(made, dict)
    assert {**made, "folder": ""} == {**original, "folder": ""}


def test_disagreements_have_the_names_of_those_who_disagree(tmp_path: Path) -> None:
    one = settings(tmp_path, agent="ncrs")
    other = settings(tmp_path, agent="zpg", settings={"iterations": 5, "threads": 3, "seed": 8})
    found = disagreements([("ncrs", one), ("zpg", other)])
    assert found == {"iterations": {"1": ["ncrs"], "5": ["zpg"]}}  # neither threads nor seeds change what is learnt


def test_versions_are_noted_once_for_each_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_versions(tmp_path)
    note_versions(tmp_path)
    noted = json.loads((tmp_path / "versions.json").read_text())
    assert len(noted) == 1
    assert {"python", "numpy", "torch", "mujoco", "dm_control", "commit"} <= noted[0].keys()
    monkeypatch.setattr("pbrl.report.provenance.versions", lambda: {**noted[0], "numpy": "9.9"})
    note_versions(tmp_path)
    assert [entry["numpy"] for entry in json.loads((tmp_path / "versions.json").read_text())] == [
        noted[0]["numpy"],
        "9.9",
    ]
    (line,) = [line for line in compare_versions([tmp_path, tmp_path / "nothing"]) if line.startswith("numpy")]
    assert line == f"numpy 9.9; runs: {noted[0]['numpy']} (1), 9.9 (1), not noted (1)"


def test_a_damaged_note_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "versions.json").write_text("[{")
    note_versions(tmp_path)
    assert len(json.loads((tmp_path / "versions.json").read_text())) == 1


def test_the_commit_is_that_of_the_repository_itself(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init")
    (tmp_path / "file").touch()
    git("add", "file")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "file").write_text("changed")
    assert commit(tmp_path) == f"{clean}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None
