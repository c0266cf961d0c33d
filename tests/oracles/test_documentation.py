"""What docs/teachers.md says: its code runs, its table is that of the presets, its commands are understood."""

import re
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_module
from scipy.stats import binom
from teachers import PRESETS, preset

PAGE = (Path(__file__).parents[2] / "docs" / "teachers.md").read_text()


def test_the_snippets_run():
    """One after another, as a reader would type them."""
    snippets = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    assert len(snippets) == 3
    names = {}
    exec(snippets[0], names)
    assert names["answers"].preferences.probability.shape == (32,)
    assert names["answers"].preferences.answered.all()
    exec(snippets[1], names)
    assert len(names["answers"]) == 64 * 63 // 2
    np.testing.assert_array_equal(names["answers"].first_sum, names["trajectories"].sum(axis=1)[names["i"]])
    exec(snippets[2], names)
    assert names["tau"] == names["teacher"].temperature.solution[0]
    low, high = binom.interval(1 - 1e-6, 2016, 0.2)
    assert low <= 2016 * names["error_rate"] <= high


def rows():
    """The table of presets: traits by name."""
    columns = ("tau", "gamma", "eps_mistake", "eps_skip", "eps_equal")
    for line in PAGE.splitlines():
        if match := re.fullmatch(r"\| (`.*?) \| ([\d.]+) \| (.*) \|.*\|", line):
            numbers = [float(cell) for cell in match[0].split("|")[2:7]]
            for name in re.findall(r"`(\w+)`", match[1]):
                yield name, dict(zip(columns, numbers, strict=True))


@pytest.mark.parametrize(("name", "traits"), [*rows()])
def test_the_table_is_that_of_the_presets(name, traits):
    settings = preset(name)
    settings = settings.get("teacher", settings)
    assert {trait: settings[trait] for trait in traits} == traits


def test_no_preset_is_missing():
    assert {name for name, _ in rows()} | {"replay"} == {*PRESETS}


def test_the_settings_named_exist():
    """Every `oracle.x=y` can be composed, and every command."""
    overrides = {*re.findall(r"`(oracle\.\w+=[\w.]+)`", PAGE)}
    assert overrides == {"oracle.eps_mistake=0.2", "oracle.link=probit"}
    with initialize_config_module("conf"):
        composed = compose("train", ["oracle=stochastic", *sorted(overrides), "bits=320"])
        assert (composed.oracle.eps_mistake, composed.oracle.link) == (0.2, "probit")
        assert composed.calibration.trajectories > 0
        for arguments in re.findall(r"^    python -m pbrl.audit (.*)$", PAGE, flags=re.MULTILINE):
            compose("audit", arguments.split())


def test_the_files_named_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", PAGE):
        assert (Path(__file__).parents[2] / "docs" / target).exists(), target
