"""What the documents show is true: their examples run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pbrl.run.record import read

ROOT = Path(__file__).parent.parent
SMALL = ["iterations=3", "trajectories=8", "pairs=4", "threads=1", "wandb.mode=disabled", "evaluation.trajectories=2"]


def blocks(document: Path) -> list[tuple[str, str, str]]:
    """Language, content, and the text before it, of every fenced block."""
    parts = re.split(r"^```(\w*)\n(.*?)^```$", document.read_text(), flags=re.M | re.S)
    return [(parts[i + 1], parts[i + 2], parts[i]) for i in range(0, len(parts) - 1, 3)]


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT), str(folder)])
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def extension(tmp_path: Path) -> Path:
    """The files of docs/extending.md, each under the name that the text before it gives."""
    for language, content, before in blocks(ROOT / "docs/extending.md"):
        suffix = {"python": "py", "yaml": "yaml"}[language]
        name = re.findall(rf"`((?:mine|my_conf)/[\w/]+\.{suffix})`", before)[-1]
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "mine/__init__.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "search",
    [["--config-dir", "my_conf"], pytest.param(["hydra.searchpath=[file://my_conf]"], marks=pytest.mark.slow)],
)
def test_an_agent_an_oracle_and_a_task_of_ones_own(extension: Path, search: list[str]) -> None:
    own = [*search, "allow=[mine]", "agent=hill_climber", "oracle=tired", "env=spring_hold"]
    done = run(["pbrl.train", *own, *SMALL], extension)
    assert done.returncode == 0, done.stderr
    folder = extension / "runs/spring_hold/hill_climber/tired/seed_0"
    rows = read(folder / "metrics.jsonl")
    assert rows[-1]["env_steps"] == 3 * 8 * 100
    assert all("share" in row for row in rows)
    choices = yaml.safe_load((folder / "config.yaml").read_text())["choices"]
    assert choices == {"agent": "hill_climber", "env": "spring_hold", "oracle": "tired"}
    # A report reads such runs without importing anything of theirs.
    (extension / "mine/__init__.py").write_text("raise RuntimeError('imported')")
    done = run(["pbrl.report", "runs"], extension)
    assert done.returncode == 0, done.stderr
    assert "hill_climber" in done.stdout


@pytest.mark.slow
def test_an_agent_of_ones_own_is_held_to_the_contract(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/extending.md").read_text()
    (settings, tests) = re.findall(r'^    PBRL_AGENT="(.*)" python -m pytest (.*)$', page, flags=re.M)[0]
    monkeypatch.setenv("PBRL_AGENT", settings)
    paths = [str(ROOT / path) for path in tests.split()]
    done = run(["pytest", "-c", str(ROOT / "pyproject.toml"), "-n", "0", "-p", "no:cacheprovider", *paths], extension)
    assert done.returncode == 0, done.stdout
    assert "hill_climber" not in done.stdout  # what fails is named
    climber = extension / "mine/agent.py"
    climber.write_text(climber.read_text().replace("pairs = budget.pairs_left", "pairs = budget.pairs_left // 2"))
    done = run(["pytest", "-c", str(ROOT / "pyproject.toml"), "-n", "0", "-p", "no:cacheprovider", *paths], extension)
    assert "used_in_full[8-4-hill_climber]" in done.stdout


def test_nothing_of_ones_own_runs_unless_it_is_allowed(extension: Path) -> None:
    (extension / "mine/__init__.py").write_text("open('imported', 'w')")
    own = ["--config-dir", "my_conf", "agent=hill_climber", "env=pendulum_swingup"]
    done = run(["pbrl.train", *own, *SMALL], extension)
    assert done.returncode != 0
    assert "agent names 'mine.agent.HillClimber'" in done.stderr
    assert "add allow=[mine]" in done.stderr
    assert not (extension / "imported").exists()


def test_the_snippets_of_readme_simulator_and_tutorial_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, at_least in (("README.md", 2), ("docs/simulator.md", 2), ("docs/tutorial.md", 1)):
        snippets = [content for language, content, _ in blocks(ROOT / name) if language == "python"]
        assert len(snippets) >= at_least
        for snippet in snippets:
            exec(compile(snippet, name, "exec"), {"__name__": "__main__"})
        if name == "README.md":  # its run, under the name of the tutorial's, which is longer
            (agent,) = Path("runs/cheetah_run").iterdir()
            agent.rename(agent.with_name("ncrs"))


def test_every_snippet_is_run_by_some_test() -> None:
    """Here, in tests/oracles/test_documentation.py or in tests/ridge/test_ridge.py."""
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text()}
    assert pages == {"extending.md", "simulator.md", "teachers.md", "ridge.md", "tutorial.md"}
