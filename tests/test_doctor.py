"""The findings of pbrl.doctor, and its advice."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from pbrl import doctor
from pbrl.doctor import Finding
from pbrl.simulation import gl
from pbrl.simulation.simulator import Simulator


def statuses(findings: Any) -> list[tuple[str, str]]:
    return [(finding.status, finding.what) for finding in findings]


def distribution(folder: Path, name: str, version: str, about: str = "", top_level: str = "") -> None:
    """An installed package, as far as its metadata go."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{about}")
    (info / "top_level.txt").write_text(top_level)


def test_ranges_are_read_from_the_installed_metadata_or_from_the_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def not_installed(name: str) -> None:
            raise metadata.PackageNotFoundError(name)

        patch.setattr(metadata, "metadata", not_installed)
        python, required, extras = doctor.declared()
    assert python == ">=3.11"
    assert "<4" in {each.name: str(each.specifier) for each in required}["mujoco"]
    assert not {"pytest", "envpool"} & {each.name for each in required}
    assert "pytest" in {each.name for each in extras["test"]}
    assert "mujoco" not in {each.name for each in extras["test"]}

    lines = ["Requires-Python: >=3.9", "Requires-Dist: one<2", "Provides-Extra: more"]
    lines += ["Requires-Dist: two; extra == 'more'", "Requires-Dist: three; sys_platform == 'none' and extra == 'more'"]
    distribution(tmp_path, "pbrl", "9", "\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.declared() == (">=3.9", [Requirement("one<2")], {"more": [Requirement("two; extra == 'more'")]})


def test_packages_out_of_range_are_problems_with_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distribution(tmp_path, "mujoco", "4.0.1")
    monkeypatch.syspath_prepend(tmp_path)
    required = [Requirement("mujoco>=3.3,<4"), Requirement("nonesuch>=1"), Requirement("numpy>=2.0")]
    monkeypatch.setattr(doctor, "declared", lambda: (">=3.0", required, {"more": [Requirement("nonesuch>=1")]}))
    python, mujoco, nonesuch, fine = doctor.versions()
    assert (python.status, fine.status) == ("ok", "ok")
    assert mujoco == Finding(
        "problem", "packages", "mujoco is 4.0.1; pbrl needs <4,>=3.3", "pip install 'mujoco<4,>=3.3'"
    )
    assert nonesuch.found == "nonesuch is not installed; pbrl needs >=1"
    assert fine.found == f"numpy {metadata.version('numpy')}"
    (extra,) = doctor.extras()
    assert extra == Finding(
        "ok", "extra more", "nonesuch is not installed", "if you want it: pip install 'nonesuch>=1'"
    )
    monkeypatch.setattr(doctor, "declared", lambda: (">=4.0", [], {}))
    assert statuses(doctor.versions())[0] == ("problem", "python")


def test_other_packages_of_our_names_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert statuses(doctor.names()) == [("ok", "names")]
    distribution(tmp_path, "openai-agents", "1.0", top_level="agents\n")
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = doctor.names()
    assert finding.status == "warning"
    assert finding.found.startswith("openai-agents also has a package `agents`")
    assert finding.advice.startswith("pip uninstall openai-agents")


def test_a_folder_needs_permission_and_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for free, status in ((2e9, "ok"), (5e8, "warning"), (1e6, "problem")):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        (finding,) = doctor.folder()
        assert finding.status == status
        assert bool(finding.advice) == (status != "ok")
    assert not list(tmp_path.iterdir())

    def refuse(**_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    (finding,) = doctor.folder()
    assert finding.status == "problem"
    assert finding.found == f"{tmp_path} cannot be written: Permission denied"


def test_the_physics_is_compared_with_dm_controls(monkeypatch: pytest.MonkeyPatch) -> None:
    parity, speed = doctor.simulation()
    assert statuses([parity, speed]) == [("ok", "parity"), ("ok", "speed")]
    collect = Simulator.collect

    def slightly_off(self: Simulator, *arguments: Any, **how: Any) -> Any:
        trajectories = collect(self, *arguments, **how)
        if self.native:
            rewards = trajectories.task_rewards.copy()
            rewards[0, 5] += 1e-12
            return dataclasses.replace(trajectories, task_rewards=rewards)
        return trajectories

    monkeypatch.setattr(Simulator, "collect", slightly_off)
    parity = next(doctor.simulation())
    assert parity.status == "problem"
    assert "differ from dm_control's" in parity.found
    assert "constraints.txt" in parity.advice


def test_pictures_need_one_that_can_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(gl, "candidates", lambda: ["egl", "osmesa"])
    monkeypatch.setattr(gl, "obstacle", {"egl": "libEGL cannot be found", "osmesa": None}.get)
    assert next(doctor.pictures()) == Finding("ok", "OpenGL", "osmesa, not egl (libEGL cannot be found)")
    monkeypatch.setattr(gl, "obstacle", lambda _: "no")
    none = next(doctor.pictures())
    assert none.status == "warning"
    assert "libegl1" in none.advice
    assert "libosmesa6" in none.advice


def test_wandbs_login_is_seen_and_its_key_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    distribution(tmp_path, "wandb", "0.1")
    monkeypatch.syspath_prepend(tmp_path)
    keys = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(keys))

    def finding() -> Finding:
        (only,) = doctor.wandb()
        assert "secret" not in str(only)
        return only

    assert (finding().status, finding().found) == ("warning", "not logged in to api.wandb.ai: runs are kept offline")
    keys.write_text("machine api.wandb.ai login user password secret\n")
    assert finding() == Finding("ok", "wandb", "logged in to api.wandb.ai")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert finding().status == "warning"
    keys.write_text("not a netrc, secret\n")
    assert finding().status == "warning"
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    assert finding() == Finding("ok", "wandb", "logged in to wandb.example.org")
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert finding() == Finding("ok", "wandb", "WANDB_MODE is offline")


def test_a_check_that_fails_is_a_finding() -> None:
    def broken() -> Any:
        raise ImportError("no such library")
        yield

    (finding,) = doctor.examine(broken)
    assert (finding.status, finding.what, finding.found) == ("problem", "broken", "ImportError: no such library")


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("warning", 0), ("problem", 1)])
def test_only_problems_make_the_command_fail(
    status: Any, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda check: [Finding(status, check.__name__, "it [is] so", "do [this]")])
    with pytest.raises(SystemExit) as stop:
        doctor.main([])
    assert stop.value.code == code
    said = capsys.readouterr().out
    for text in ("it [is] so", "do [this]", "wandb", "cores", status):
        assert text in said


def test_cores_and_the_limits_of_a_container_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from pbrl import threads

    monkeypatch.setattr(threads, "cores", lambda: 8)
    monkeypatch.setattr("os.getloadavg", lambda: (9.5, 0.0, 0.0))
    monkeypatch.setattr(doctor, "quota", lambda: 2.0)
    fine, limited, busy = doctor.cores()
    assert fine.found.startswith("8 of ")
    assert "threads=2" in limited.advice
    assert busy.found == "busy: 9.5 processes want to run"
    monkeypatch.setattr("os.getloadavg", lambda: (1.0, 0.0, 0.0))
    monkeypatch.setattr(doctor, "quota", lambda: None)
    assert statuses(doctor.cores()) == [("ok", "cores")]
