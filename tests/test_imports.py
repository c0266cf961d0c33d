"""Imports go one way: core <- simulation <- run <- report; programs on top; agents and oracles beside them."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = {"types", "policy", "network", "normaliser", "seeds", "threads", "compilation", "search", "ledger"}
ROOMS = ["core", "simulation", "run", "report"]  # each may import those before it, and itself
PROGRAMS = {"train", "play", "audit", "doctor", "ridge", "finetune", "bench", "label", "reference", "__main__"}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("pbrl", "agents", "oracles")
    for path in sorted((ROOT / package).rglob("*.py"))
}


def room(module):
    """Where a module lives: core, simulation, run or report, a program, or a package beside pbrl."""
    package, _, rest = module.partition(".")
    name = rest.partition(".")[0]
    if package != "pbrl":
        return package
    if not name:
        return "pbrl"  # which offers what users import most, from any room
    if name in CORE:
        return "core"
    assert name in PROGRAMS or name in ROOMS, f"{module} has no room: give it one in tests/test_imports.py"
    return name


def imported(module, source):
    """What a module imports, wherever in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden(module, found):
    """Why a module may not import that; empty if it may."""
    here = room(module)
    if found.partition(".")[0] not in ("pbrl", "agents", "oracles") or found == "pbrl":
        return ""
    there = room(found)
    if there == here:
        return ""
    if there in PROGRAMS:
        return f"{found} is a program, and nobody imports those"
    if there in ("agents", "oracles"):
        return f"{there} are built from settings, and imported by nobody else"
    if here in ROOMS and ROOMS.index(there) > ROOMS.index(here):
        return f"{there} is above {here}"
    return ""


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_one_way(module):
    problems = {found: forbidden(module, found) for found in imports_of(module)}
    assert {found: why for found, why in problems.items() if why} == {}


@functools.cache
def imports_of(module):
    return [*imported(module, MODULES[module].read_text())]


def reached(module):
    """All modules of ours that importing one may load, itself included."""
    found, waiting = set(), [module]
    while waiting:
        here = waiting.pop()
        if here in MODULES and here not in found:
            found.add(here)
            for name in imports_of(here):
                waiting += [name, name.rpartition(".")[0]]  # a module, or something in it
    return found


def test_reports_the_ridge_and_fine_tuning_do_not_load_the_simulator():
    without = [module for module in MODULES if room(module) in ("report", "ridge", "finetune")]
    loaded = {module: [each for each in reached(module) if room(each) == "simulation"] for module in without}
    assert loaded == {module: [] for module in without}
    assert "pbrl.simulation.native" in reached("pbrl.train")  # by several detours


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("pbrl.ledger", "from pbrl.types import Pairs", True),
        ("pbrl.policy", "from pbrl.simulation import native", False),
        ("pbrl.policy", "from pbrl import simulation", False),
        ("pbrl.policy", "def f():\n    import pbrl.simulation.native", False),
        ("pbrl.search", "if TYPE_CHECKING:\n    from pbrl.run.settings import build", False),
        ("pbrl.simulation.worlds", "from pbrl.policy import Policy", True),
        ("pbrl.simulation.worlds", "from pbrl.run import files", False),
        ("pbrl.run.training", "from pbrl.simulation.simulator import Simulator", True),
        ("pbrl.run.training", "from pbrl.report.stats import estimate", False),
        ("pbrl.run.training", "from agents.ncrs import NCRS", False),
        ("pbrl.report.runs", "from pbrl.run.record import read", True),
        ("pbrl.report.runs", "import pbrl.train", False),
        ("pbrl.train", "from pbrl.report import page", True),
        ("pbrl.train", "from pbrl import play", False),
        ("pbrl.finetune.report", "from pbrl.ridge.report import panels", False),
        ("pbrl.finetune.report", "from pbrl.finetune.runs import find", True),
        ("pbrl.ridge.problem", "from oracles import links", False),
        ("agents.dpo", "from pbrl.ledger import Budget", True),
        ("agents.dpo", "from agents.pairing import at_random", True),
        ("agents.dpo", "import oracles.teacher", False),
        ("agents.dpo", "from pbrl.train import main", False),
        ("oracles.replay", "from pbrl.run.preference_log import read", True),
        ("oracles.replay", "from agents import dpo", False),
        ("oracles.replay", "import numpy, torch.nn", True),
    ],
)
def test_the_rule_itself(module, source, allowed):
    (why,) = {forbidden(module, found) for found in imported(module, source)}
    assert (why == "") == allowed
