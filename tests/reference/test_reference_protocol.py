"""Which reference runs there are, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from tiny_reference import ROOT, part, settings

from pbrl.reference.__main__ import read_settings
from pbrl.reference.protocol import plan
from pbrl.run.settings import ConfigurationError, choices


def test_one_seed_of_everything_comes_before_the_next_seed(tmp_path: Path) -> None:
    first = part(agents=["random", "ncrs"], tasks=["pendulum_swingup", "cheetah_run"], seeds=[0, 1])
    runs = plan(settings(tmp_path, first, part(protocol="other", seeds=[7]), part(seeds=[2])))
    names = [(run.protocol, run.settings["seed"], run.name[0], run.name[1]) for run in runs]
    tiny = [("tiny", seed, task, agent) for seed in (0, 1) for task in first["tasks"] for agent in first["agents"]]
    assert names == [*tiny, ("other", 7, "pendulum_swingup", "random"), ("tiny", 2, "pendulum_swingup", "random")]
    assert runs[0].folder == tmp_path / "runs/tiny/pendulum_swingup/random/irrational/seed_0"
    assert len({run.identity for run in runs}) == len(runs)
    only = plan(settings(tmp_path, first, part(protocol="other", seeds=[7]), protocol="other"))
    assert [run.protocol for run in only] == ["other"]


def test_an_experiment_of_another_name_is_an_agent_of_its_own(tmp_path: Path) -> None:
    (run,) = plan(settings(tmp_path, part(agents=["zpg"], overrides=["experiment=zpg_experts"])))
    assert run.name == ("pendulum_swingup", "zpg_experts", "irrational", 0)
    assert run.settings["bits"] == 320
    assert "experiment=zpg_experts" in run.command


@pytest.mark.parametrize(
    ("changes", "more", "message"),
    [
        ({"agents": ["ncsr"]}, {}, "the protocol tiny has the agent 'ncsr', which is not there"),
        ({}, {"protocol": "shrot"}, "there is no protocol 'shrot', only tiny"),
        ({"seeds": [0, 0]}, {}, "two runs would share the folder .*seed_0"),
        ({"overrides": ["trajectories=1"]}, {}, "trajectories must be a whole number of at least 2"),
    ],
)
def test_what_cannot_be_planned_is_said(changes: dict, more: dict, message: str, tmp_path: Path) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigurationError, match=message):
        plan(settings(tmp_path, part(**changes), **more))


def test_all_names_in_our_protocols_are_there() -> None:
    ours = read_settings([])
    in_order = list(dict.fromkeys(each["protocol"] for each in ours["parts"]))
    reasons = ["no_myopia", "common_start", "true_reward", "graded_confidence"]
    assert in_order == ["short", "full", "teachers", *reasons, "everyone", "bpref", "new_agents"]
    for each in ours["parts"]:
        for key, group in (("agents", "agent"), ("tasks", "env"), ("teachers", "oracle")):
            assert {*each[key]} <= {*choices(group)}


def test_the_experiment_paper_short_is_the_protocol_short() -> None:
    ours = next(each for each in read_settings([])["parts"] if each["protocol"] == "short")
    experiment = yaml.safe_load((ROOT / "conf/experiment/paper_short.yaml").read_text())
    swept = experiment["hydra"]["sweeper"]["params"]
    assert swept["env"].split(",") == ours["tasks"]
    assert swept["agent"].split(",") == ours["agents"]
    assert list(map(int, swept["seed"].split(","))) == ours["seeds"]
    assert experiment["iterations"] == ours["iterations"]
    assert ours["teachers"] == ["irrational"]
