"""A configuration is data: what it may name, and that nothing else is imported or called."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from pbrl.policy import GaussianPolicy
from pbrl.run.settings import ConfigurationError, build, check_name, check_node, instantiate

MKDIR = {"_target_": "os.mkdir", "path": "executed"}
TRAIN = {"_target_": "pbrl.train.train", "overrides": ["allow=[os,posix]", "oracle._target_=os.mkdir"]}
HOSTILE: list[Any] = [
    MKDIR,
    {"_target_": "sympy.sympify", "a": "__import__('os').mkdir('executed')"},
    {"_target_": "builtins.exec", "_args_": ["import os; os.mkdir('executed')"]},
    {"_target_": "hydra.utils.call", "_args_": [MKDIR]},
    {"_target_": "agents.ncrs.np.os.mkdir", "_args_": ["executed"]},  # by a way through a trusted module
    {"_target_": "pbrl.policy.np.os.mkdir", "_args_": ["executed"]},
    {"_target_": "pbrl.policy.network"},  # neither class nor function
    {"_target_": "pbrl.search.no_such_class"},
    {"_target_": "pbrl.ridge.__main__.main"},  # ours, and a function
    {"_target_": "pbrl.run.record.Record", "path": "executed", "after": -1},  # ours, and a class that writes
    TRAIN,
    {"_target_": "pbrl.run.settings.instantiate", "node": "x", "allow": ["os"]},
    {"_target_": "pbrl.${oc.decode:policy}.GaussianPolicy"},
    "${oc.decode:'{_target_: pbrl.train.train}'}",  # Hydra would make a node of it
    {"_target_": ["os.mkdir"], "_args_": ["executed"]},
    {"_target_": "..os.mkdir", "_args_": ["executed"]},
    {"_target_": "policy", "_args_": ["executed"]},
    {"_target_": None},
]


@pytest.mark.parametrize("payload", HOSTILE, ids=lambda payload: str(payload)[:60])
def test_nothing_is_called_but_classes_that_settings_may_name(
    payload: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nested = {"_target_": "pbrl.policy.GaussianPolicy", "hidden": [{"a": payload}]}
    for node in (nested, payload) if isinstance(payload, dict) else (nested,):
        for make in (instantiate, build):
            with pytest.raises(ConfigurationError, match=r"names|must be a value"):
                make(node, obs_size=3, act_size=2)
    assert not [*tmp_path.iterdir()]


def test_what_is_not_trusted_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "not_trusted.py").write_text("def call(): return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("not_trusted.call", "agents_of_mine.x", "pbrlx.y"):
        with pytest.raises(ConfigurationError, match=f"names '{name}', which is not of agents, oracles, pbrl"):
            instantiate({"_target_": name})
    assert "not_trusted" not in sys.modules
    assert instantiate({"_target_": "not_trusted.call"}, allow=["not_trusted"]) == 1  # by name it is


def test_what_a_configuration_may_name_is_made() -> None:
    gains = {"hidden_gain": 1.0, "output_gain": 1.0, "initial_log_std": 0.0}
    node = {"_target_": "pbrl.policy.GaussianPolicy", "hidden": ["${size}"], **gains}
    cfg = OmegaConf.create({"size": 4, "node": node})
    for make in (instantiate, build):
        policy = make(cfg.node, obs_size=3, act_size=2)
        assert isinstance(policy, GaussianPolicy)
        assert policy.sizes == (3, 4, 2)


OWN = """
from typing import Any

class Part:
    def __init__(self, width, *, depth: Any):
        self.width, self.depth = width, depth

class Agent:
    def __init__(self, policy, step, *parts, part, **others):
        self.policy, self.step, self.part, self.others = policy, step, part, others
"""


def test_classes_of_ones_own_need_neither_annotations_nor_an_entry_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_classes.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    part = {"_target_": "own_classes.Part", "width": "wide", "depth": {"a": None}}
    node = {"_target_": "own_classes.Agent", "step": [0.1, "x"], "part": part, "surplus": 3}
    check_node(node, "agent", allow=["own_classes"])
    agent = build(node, allow=["own_classes"], policy="a policy", rng="a generator")
    assert (agent.policy, agent.step) == ("a policy", [0.1, "x"])
    assert agent.others == {"surplus": 3, "rng": "a generator"}
    assert vars(agent.part) == {"width": "wide", "depth": {"a": None}}
    for path, wrong in (
        ("agent.step", {**node, "step": "???"}),
        ("agent.part.depth", {**node, "part": {**part, "depth": "???"}}),
    ):
        with pytest.raises(ConfigurationError, match=f"^{path} must be given"):
            check_node(wrong, "agent", allow=["own_classes"])
    with pytest.raises(ConfigurationError, match=r"^agent\.part\.surplus: unknown setting"):
        check_node({**node, "part": {**part, "surplus": 3}}, "agent", allow=["own_classes"])


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "..\\x", "\x1b[31m", "a\nb", "a\x00", "\u202eb", "\udcff", "x" * 201, 3, None, ["a"]]
)
def test_a_name_neither_leaves_its_folder_nor_spoils_a_terminal(name: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"env.name must be a name without slashes and control characters, not"
    ):
        check_name("env.name", name)
    for fine in ("ncrs", "two words", "[x]", "$a$", "é", "🙂", "..."):
        check_name("env.name", fine)
