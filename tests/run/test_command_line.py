"""--help of the programs, and mistakes on their command lines."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pbrl import train
from pbrl.__main__ import PROGRAMS as PROGRAMS_LISTED
from pbrl.__main__ import main
from pbrl.run.command_line import help_text
from pbrl.run.settings import config_folders, suggest

PROGRAMS = {
    "pbrl.train": (["agent", "env", "oracle", "experiment"], "trajectories: 64 # per iteration, for every agent"),
    "pbrl.audit": (["oracle", "env", "policy"], "bins: 10 # of each curve"),
    "pbrl.bench": (["oracle"], "alternations: 5 # turns of each contender; the table has the medians"),
    "pbrl.ridge": ([], "dimension: 500 # d"),
    "pbrl.finetune": (["task", "model", "method", "study"], "evaluation: # on the validation set"),
    "pbrl.finetune.dimension": (["task", "model"], "seeds: 5 # runs for each d'"),
    "pbrl.finetune.bench": (["task", "model"], "iterations: 10 # per turn"),
    "pbrl.finetune.study": (["task"], "smoothing: 8 # evaluations whose mean"),
}


def said(program: str, arguments: list[str], capfd: pytest.CaptureFixture[str]) -> tuple[int | str | None, str]:
    """How the program ends, and what it prints."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [program, *arguments])
        for name in (program, f"{program}.__main__"):  # other tests may have imported it
            patch.delitem(sys.modules, name, raising=False)
        with pytest.raises(SystemExit) as stop:
            runpy.run_module(program, run_name="__main__")
    return stop.value.code, capfd.readouterr().out


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_has_examples_own_groups_and_what_settings_mean(
    program: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    groups, comment = PROGRAMS[program]
    code, out = said(program, ["--help"], capfd)
    assert code == 0
    about = out.partition("Chosen by name")[0].partition("Set by name")[0]
    assert f"    python -m {program}" in about  # an example
    assert max(map(len, about.splitlines())) <= 80
    assert comment in out
    chosen = out.partition("Chosen by name")[2].partition("Set by name")[0]
    for group in ("agent", "env", "oracle", "experiment", "task", "model", "method", "study", "policy", "hydra"):
        assert (f"\n  {group}" in chosen) == (group in groups), group
    assert "hydra" not in out.partition("Set by name")[2].replace("${hydra:", "")
    assert "\n    _target_" not in out


def test_help_shows_the_settings_of_what_is_chosen() -> None:
    about = {"program": "pbrl.train", "config": "train", "groups": ("agent", "oracle"), "about": "It trains."}
    text = help_text(["agent=dpo", "--help"], **about)  # type: ignore[arg-type]
    assert text.startswith("It trains.")
    assert "agent (now dpo): dpo, ncrs" in text
    agent = text.partition("agent.NAME=VALUE, of agent=dpo")[2].partition("oracle.NAME=VALUE")[0]
    assert "hidden_gain: 1.4142135623730951 # of the orthogonal weights: sqrt(2)" in agent  # shared: conf/policy
    assert "learning_rate:" in agent
    teacher = text.partition("oracle.NAME=VALUE, of oracle=irrational")[2]
    assert "eps_mistake: 0.0 # share of answers given the wrong way round" in teacher
    assert teacher.index("eps_mistake: 0.0") < teacher.index("eps_mistake: 0.1")


@pytest.mark.parametrize(
    ("program", "arguments", "sentence"),
    [
        ("pbrl.audit", ["oracle=irational"], "there is no oracle 'irational'; did you mean irrational"),
        ("pbrl.audit", ["orcale.tau=1"], "orcale.tau: unknown setting"),
        ("pbrl.audit", ["oracle=replay"], "oracle.log must be given: oracle.log=..."),
        ("pbrl.audit", ["run=/nowhere"], "/nowhere/preferences holds no comparisons"),
        ("pbrl.bench", ["tasks=[foo]"], "there is no task 'foo' in DM Control's suite"),
        ("pbrl.ridge", ["experiment.sed=1"], "experiment.sed: unknown setting; did you mean experiment.seed?"),
        ("pbrl.finetune", ["method=foo"], "there is no method 'foo'; there are mezo"),
        ("pbrl.finetune", ["iteratons=3"], "iteratons: unknown setting; did you mean iterations?"),
    ],
)
def test_mistakes_are_answered_with_a_sentence(
    program: str, arguments: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out = said(program, arguments, capfd)
    assert isinstance(code, str), "which Python prints, and exits with 1"
    assert sentence in code
    assert "Error executing job" not in out + capfd.readouterr().err


@pytest.mark.parametrize(
    "program", ["pbrl.play", "pbrl.report", "pbrl.label", "pbrl.reference", "pbrl.doctor", "pbrl.finetune.report"]
)
def test_programs_without_settings_have_examples_too(
    program: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out = said(program, ["--help"], capfd)
    assert code == 0
    assert f"    python -m {program} " in out
    assert max(map(len, out.splitlines())) <= 80


def test_help_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    how = {"program": "pbrl.train", "config": "train", "groups": ("agent", "oracle"), "about": train.__doc__ or ""}
    lines = help_text(["agent=zpg"], **how).splitlines()  # type: ignore[arg-type]
    assert max(map(len, lines)) <= 80
    at = next(i for i, line in enumerate(lines) if line.startswith("  bits: null # answers per iteration"))
    assert lines[at + 1].startswith("      # ")  # what a setting means goes on as a comment
    how = {"program": "pbrl.finetune.study", "config": "finetune_study", "groups": (), "about": ""}
    assert "        weights: norm, steepest: null}" in help_text([], **how).splitlines()  # and a long value as it is


def test_a_command_without_arguments_is_fine() -> None:
    suggest([], ["agent"])
    assert config_folders([]) == []
    assert config_folders(["--config-dir", "mine", "seed=1", "-cd=yours"]) == [Path("mine"), Path("yours")]


def test_programs_are_listed_on_a_line_each(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main([])
    listed = capfd.readouterr().out.partition("`")[0].strip().splitlines()
    assert [line.split()[2].removeprefix("pbrl.") for line in listed] == [*PROGRAMS_LISTED]


def test_help_may_be_read_in_part() -> None:
    """As by `python -m pbrl.ridge --help | head`, here with a reader that is gone from the start."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pbrl.ridge", "--help"]
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, "")
