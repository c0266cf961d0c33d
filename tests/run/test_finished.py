"""The end of a run: it is repeated until it is whole; and a run that is extended has no other end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_train import PLAIN, Command, record

import pbrl.train
from pbrl.run import preference_log, summary
from pbrl.run.preference_log import PreferenceLog
from pbrl.run.training import TrainingRun


class Killed(BaseException):
    """Nothing after this is done."""


RUN = Path("runs/pendulum_swingup/ncrs/irrational/seed_0")
ARGUMENTS = [*PLAIN, "iterations=5"]  # checkpoints are of the iterations 3 and 4


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("sys.argv", ["pbrl.train", *ARGUMENTS])
        pbrl.train.command()
    return folder


def check_that_it_ends_whole(train: Command, folder: Path, whole: Path) -> None:
    code, out, err = train(ARGUMENTS, folder)
    assert code == 0, err
    assert "nothing is left to do" not in out
    run, other = folder / RUN, whole / RUN
    assert {path.name for path in run.iterdir()} == {path.name for path in other.iterdir()}
    assert record(run) == record(other)
    assert (run / "policy.safetensors").read_bytes() == (other / "policy.safetensors").read_bytes()
    assert [path.name for path in (run / "preferences").iterdir()] == ["000000000000.parquet"]
    assert preference_log.read(run / "preferences") == preference_log.read(other / "preferences")
    assert "nothing is left to do" in train(ARGUMENTS, folder)[1]


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def keep_rows(path: Path, rows: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:rows]))


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "policy.safetensors").unlink(),
        lambda run: (run / "policy.safetensors").write_bytes(b"x"),
        lambda run: flip(run / "policy.safetensors", -1),
        lambda run: flip(run / "policy.safetensors", 30),  # in its header
        lambda run: (run / "curve.png").unlink(),
        lambda run: keep_rows(run / "metrics.jsonl", 4),
        lambda run: flip(run / "metrics.jsonl", -3),
        lambda run: shutil.rmtree(run / "checkpoint/000004"),
    ],
    ids=[
        "no policy",
        "no longer a policy",
        "another policy",
        "another header",
        "no curve",
        "cut record",
        "other record",
        "state",
    ],
)
def test_what_is_missing_of_a_finished_run_is_made_again(
    damage: Callable[[Path], None], train: Command, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    damage(tmp_path / RUN)
    check_that_it_ends_whole(train, tmp_path, whole)


@pytest.mark.parametrize(
    ("owner", "name"),
    [(TrainingRun, "save"), (PreferenceLog, "close"), (summary, "draw_curve")],
    ids=["policy", "log", "curve"],
)
def test_killed_after_its_last_checkpoint_a_run_is_finished_by_the_same_command(
    owner: object, name: str, train: Command, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at each step of the end."""
    usual = getattr(owner, name)

    def killed(*arguments: object, **more: object) -> None:
        if name != "save" or arguments[1] == 4:
            raise Killed
        usual(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, killed)
        with pytest.raises(Killed):
            train(ARGUMENTS, tmp_path)
    assert (tmp_path / RUN / "checkpoint/000004").exists()
    check_that_it_ends_whole(train, tmp_path, whole)


@pytest.mark.parametrize("name", ["metrics.jsonl", "preferences/000000000000.parquet"])
@pytest.mark.parametrize("how", ["gone", "altered"])
def test_what_no_checkpoint_can_go_on_from_is_said(
    name: str, how: str, train: Command, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    (tmp_path / RUN / name).unlink() if how == "gone" else flip(tmp_path / RUN / name, 100)
    code, out, err = train(ARGUMENTS, tmp_path)
    assert code == 1
    assert "no checkpoint can be used" in err
    assert "Traceback" not in out + err
    assert "nothing is left to do" not in out
    assert {path.name for path in (tmp_path / RUN / "checkpoint").iterdir()} == {"000003", "000004"}


def test_without_its_settings_a_run_is_continued_by_no_others(train: Command, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole / "runs", tmp_path / "runs")
    (tmp_path / RUN / "config.yaml").unlink()
    code, out, err = train([*ARGUMENTS, "agent.votes=1"], tmp_path)
    assert code == 1
    assert "was saved by a run with other settings" in err
    assert "Traceback" not in out + err
    check_that_it_ends_whole(train, tmp_path, whole)


def test_a_run_that_is_extended_equals_one_that_was_longer_from_the_start(
    train: Command, whole: Path, tmp_path: Path
) -> None:
    """Also if it is killed between the change of its record and its next checkpoint."""
    shutil.copytree(whole / "runs", tmp_path / "extended/runs")
    assert "eval_return" in record(tmp_path / "extended" / RUN)[4]
    (tmp_path / "long").mkdir()
    longer = [*ARGUMENTS, "iterations=8"]
    assert train(longer, tmp_path / "long")[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingRun, "iterate", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train(longer, tmp_path / "extended")
    assert train(longer, tmp_path / "extended")[0] == 0
    rows = record(tmp_path / "extended" / RUN)
    assert [row["iteration"] for row in rows if "eval_return" in row] == [0, 3, 6, 7]
    assert rows == record(tmp_path / "long" / RUN)
    policies = [tmp_path / way / RUN / "policy.safetensors" for way in ("extended", "long")]
    assert policies[0].read_bytes() == policies[1].read_bytes()
    logs = [preference_log.read(tmp_path / way / RUN / "preferences") for way in ("extended", "long")]
    assert logs[0] == logs[1]
    assert np.isfinite(logs[0]["first_sum"].to_numpy()).all()
