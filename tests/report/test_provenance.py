"""Commands, settings and versions of runs."""

from __future__ import annotations

import copy
import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from synthetic_runs import write_run

from pbrl.report import provenance
from pbrl.report.provenance import (
    changes,
    commands,
    compare_versions,
    disagreements,
    link_names,
    presets,
    teacher_name,
    upgrade,
)
from pbrl.report.runs import RecordedRun, load
from pbrl.run.versions import commit, note_versions

OLD_LINK = {"_target_": "hydra.utils.get_object", "path": "oracles.links.logistic"}


def settings(folder: Path, **how: Any) -> Any:
    return load(write_run(folder, [1.0], **how)).settings


def old_run(root: Path) -> Path:
    """A run as version 0.1 recorded it, with names and settings of then."""
    folder = root / "cheetah_run" / "ncrs" / "irrational" / "seed_0"
    folder.mkdir(parents=True)
    text = (Path(__file__).parent / "config_of_0.1.yaml").read_text()
    (folder / "config.yaml").write_text(text)
    charges = {"trajectories": 64, "env_steps": 12800, "pairs_asked": 32, "bits": 32}
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 0, "return_mean": 0.5, **charges}) + "\n")
    return folder


def test_a_run_of_an_earlier_version_is_named_by_its_folder(tmp_path: Path) -> None:
    run = load(old_run(tmp_path))
    assert run.settings["choices"] == {"agent": "ncrs", "oracle": "irrational", "env": "cheetah_run"}
    assert (run.agent, run.task, run.teacher) == ("ncrs", "cheetah_run", "irrational")
    assert commands([run.settings])[0].startswith(
        "python -m pbrl.train agent=ncrs env=cheetah_run oracle=irrational seed=0"
    )


def test_a_moved_run_of_an_earlier_version_is_named_by_the_folder_that_it_recorded(tmp_path: Path) -> None:
    text = (old := old_run(tmp_path)).joinpath("config.yaml").read_text()
    (old / "config.yaml").write_text(text.replace("folder: ", "folder: runs/cheetah_run/ncrs/irrational/seed_0 #"))
    assert load(old.rename(tmp_path / "copy")).teacher == "irrational"


def test_a_run_of_an_earlier_version_without_known_names_shows_its_settings(tmp_path: Path) -> None:
    run = load(old_run(tmp_path).rename(tmp_path / "somewhere"))
    assert run.agent == "ncrs"
    assert run.teacher.startswith("oracles.teacher.Teacher link=logistic tau=1.0 gamma=0.9 eps_mistake=0.1")
    assert commands([run.settings])[0].startswith("python -m pbrl.train agent=ncrs env=cheetah_run oracle=oracles.")


def test_runs_of_two_versions_do_not_differ_in_what_the_earlier_did_not_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = copy.deepcopy(presets())
    newer["train"] |= {"remember": 10, "allow": [], "bits": "${pairs}", "choices": "${hydra:runtime.choices}"}
    newer["oracle"]["irrational"] |= {"noise": {"new": 0.0}}
    monkeypatch.setattr(provenance, "presets", lambda: newer)
    old = load(old_run(tmp_path))
    assert old.teacher == "irrational"
    assert (old.settings["remember"], old.settings["allow"], old.settings["bits"]) == (10, [], 32)
    recorded = {**copy.deepcopy(dict(old.settings)), "oracle": newer["oracle"]["irrational"], "allow": []}
    recorded["choices"] = {"agent": "ncrs", "env": "cheetah_run", "oracle": "irrational"}
    new = RecordedRun(**{**old.__dict__, "settings": upgrade(recorded, tmp_path)})
    assert disagreements([("old", old.settings), ("new", new.settings)]) == {}
    assert len(commands([old.settings, new.settings])) == 1
    assert not {"remember", "allow", "bits", "choices", "noise"} & set(
        commands([old.settings])[0].replace("=", " ").split()
    )
    changed = upgrade({**recorded, "remember": 3}, tmp_path)
    assert disagreements([("old", old.settings), ("new", changed)]) == {"remember": {"10": ["old"], "3": ["new"]}}
    assert " remember=3 " in commands([changed])[0]


def test_defaults_follow_the_settings_that_they_refer_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = copy.deepcopy(presets())
    newer["agent"]["ncrs"]["votes"] = "${pairs}"
    monkeypatch.setattr(provenance, "presets", lambda: newer)
    same = settings(tmp_path / "a", settings={"pairs": 16, "agent.votes": 16})
    assert "agent.votes" not in commands([same])[0]
    other = settings(tmp_path / "b", settings={"pairs": 16, "agent.votes": 4})
    assert "agent.votes=4" in commands([other])[0]


def test_a_link_is_known_by_its_name_in_every_version() -> None:
    assert link_names({"teacher": {"link": OLD_LINK, "tau": 1.0}}) == {"teacher": {"link": "logistic", "tau": 1.0}}
    for other in ("mine.links.logistic", None, 3):
        node = {"link": {"_target_": "hydra.utils.get_object", "path": other}}
        assert link_names(node) == node


def test_a_teacher_is_named_by_its_preset_and_what_was_changed(tmp_path: Path) -> None:
    for name in presets()["oracle"]:
        assert teacher_name(settings(tmp_path, oracle=name)) == name
    changed = settings(tmp_path, seed=1, settings={"oracle.eps_mistake": 0.2})
    assert teacher_name(changed) == "irrational eps_mistake=0.2"
    old_link = settings(tmp_path, seed=2, oracle="stochastic", settings={"oracle.link": OLD_LINK})
    assert teacher_name(old_link) == "stochastic"
    other_link = settings(tmp_path, seed=3, settings={"oracle.link": {**OLD_LINK, "path": "oracles.links.probit"}})
    assert teacher_name(other_link) == "irrational link=probit"


def test_presets_of_the_users_own_show_all_their_settings(tmp_path: Path) -> None:
    mine = {"choices": {"agent": "mine", "oracle": "strict", "env": "my_task"}, "name": "mine", "iterations": 600}
    mine |= {"agent": {"_target_": "mine.Agent", "size": 3, "inner": {"a": 1}}}
    mine |= {"oracle": {"_target_": "mine.Oracle", "limit": 2}, "env": {"_target_": "mine.Task", "steps": 50}}
    run = load(write_run(tmp_path, [1.0], settings=mine))
    assert (run.agent, run.task, run.teacher) == ("mine", "my_task", "strict limit=2")
    assert commands([run.settings]) == [
        "python -m pbrl.train agent=mine env=my_task oracle=strict seed=0 agent.size=3 'agent.inner={a:1}' "
        "oracle.limit=2 env.steps=50"
    ]


def test_choices_that_are_no_names_are_ignored(tmp_path: Path) -> None:
    for seed, choices in enumerate([None, 3, [], {"agent": None, "oracle": ["x"], "env": 5}]):
        run = load(write_run(tmp_path, [1.0], seed=seed, settings={"choices": choices}))
        assert (run.agent, run.task, run.teacher) == ("ncrs", "walker_walk", "irrational")


def test_files_that_only_hold_what_presets_share_are_not_presets() -> None:
    for group in provenance.GROUPS:
        assert not [name for name in presets()[group] if name.startswith("_")]


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
    made["choices"] = original["choices"]  # known once Hydra runs
    assert {**link_names(made), "folder": ""} == {**original, "folder": ""}


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
    assert {"python", "processor", "numpy", "torch", "mujoco", "dm_control", "commit"} <= noted[0].keys()
    monkeypatch.setattr("pbrl.run.versions.versions", lambda: {**noted[0], "numpy": "9.9"})
    monkeypatch.setattr("pbrl.report.provenance.versions", lambda: {**noted[0], "numpy": "9.9"})
    note_versions(tmp_path)
    assert [entry["numpy"] for entry in json.loads((tmp_path / "versions.json").read_text())] == [
        noted[0]["numpy"],
        "9.9",
    ]
    (line,) = [line for line in compare_versions([tmp_path, tmp_path / "nothing"]) if line.startswith("numpy")]
    assert line == f"numpy 9.9; runs: {noted[0]['numpy']} (1), 9.9 (1), not noted (1)"


def test_going_on_with_another_kind_of_processor_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for processor in ("znver3", "znver3", "znver5"):
        monkeypatch.setattr("pbrl.run.versions.get_host_cpu_name", lambda processor=processor: processor)
        note_versions(tmp_path)
    noted = json.loads((tmp_path / "versions.json").read_text())
    assert [entry["processor"] for entry in noted] == ["znver3", "znver5"]


def test_damaged_notes_of_versions_are_replaced(tmp_path: Path) -> None:
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
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "short.parquet").touch()
    git("add", "file", "results")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "results" / "short.parquet").write_text("one more run")
    assert commit(tmp_path) == clean
    (tmp_path / "file").write_text("changed")
    assert commit(tmp_path) == f"{clean}-dirty"
    (tmp_path / "site-packages").mkdir()
    assert commit(tmp_path / "site-packages") is None
