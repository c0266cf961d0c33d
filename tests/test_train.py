"""The runner, as a user meets it: commands in a folder."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from numba.core.event import install_recorder
from safetensors.numpy import load_file

from agents.ncrs import NCRS
from pbrl.run import checkpoint
from pbrl.run.films import Films
from pbrl.run.policy_file import KEPT, read_policy
from pbrl.run.record import read
from pbrl.run.training import TrainingRun
from pbrl.simulation import worlds
from pbrl.train import command, compose_settings, is_sweep

ROOT = Path(__file__).parent.parent
TINY = [
    "env=cheetah_run",
    "env.steps=5",
    "trajectories=8",
    "pairs=4",
    "agent.policy.hidden=[8,8]",
    "evaluation.every=3",
    "evaluation.trajectories=2",
    "checkpoint_every=2",
    "threads=1",
    "wandb.mode=disabled",
]
PLAIN = [*TINY, "env=pendulum_swingup"]  # starts without compiling


def start(arguments: list[str], folder: Path) -> subprocess.Popen[str]:
    """The command, in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "pbrl.train", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Command:
    """The command, in this process, which saves the time to start one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capfd = monkeypatch, capfd

    def __call__(self, arguments: list[str], folder: Path) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        self.monkeypatch.chdir(folder)
        self.monkeypatch.setattr(sys, "argv", ["pbrl.train", *arguments])
        self.capfd.readouterr()
        code: int | str | None = 0
        try:
            command()
        except SystemExit as stop:
            code = stop.code
        out, err = self.capfd.readouterr()
        if isinstance(code, str):  # Python prints it, and exits with 1
            code, err = 1, err + code
        return code or 0, out, err


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def record(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, but for the times."""
    rows = read(folder / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("seconds")} for row in rows]


def test_a_run_leaves_what_the_readme_promises(train: Command, tmp_path: Path) -> None:
    code, out, err = train([*TINY, "iterations=5"], tmp_path)
    assert code == 0, err
    folder = tmp_path / "runs/cheetah_run/ncrs/irrational/seed_0"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "versions.json", "metrics.jsonl", "curve.png", "policy.safetensors", "policy_best.safetensors",
        "policy_first.safetensors", "preferences", "checkpoint", ".lock"
    }  # fmt: skip
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}  # and nothing anywhere else
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    promised = {"iteration", "return_mean", "return_std", "trajectories", "env_steps", "pairs_asked", "pairs_answered"}
    for row in rows:
        assert promised | {"seconds_collect", "seconds_ask", "seconds_learn"} <= set(row)
        assert ("eval_return" in row) == (row["iteration"] in (0, 3, 4))
    assert rows[-1]["trajectories"] == 40
    assert rows[-1]["env_steps"] == 200
    assert rows[-1]["pairs_asked"] == 20
    assert load_file(folder / "policy.safetensors")["parameters"].dtype == np.float32
    assert yaml.safe_load((folder / "config.yaml").read_text())["choices"] == {
        "agent": "ncrs",
        "env": "cheetah_run",
        "oracle": "irrational",
    }
    assert "return, first and last tenth" in out
    # The same command leaves it alone; resume=false starts over and keeps it.
    before = (folder / "metrics.jsonl").stat().st_mtime_ns
    code, out, _ = train([*TINY, "iterations=5"], tmp_path)
    assert code == 0
    assert "nothing is left to do" in out
    assert (folder / "metrics.jsonl").stat().st_mtime_ns == before
    code, out, err = train([*TINY, "iterations=5", "resume=false"], tmp_path)
    assert code == 0, err
    assert "the run that was there is now" in " ".join(out.split())
    assert record(folder.with_name("seed_0~1")) == record(folder)


def check_that_killing_does_no_harm(train: Command, agent: str, kills: int, iterations: int, tmp_path: Path) -> None:
    arguments = [*PLAIN, f"agent={agent}", f"iterations={iterations}"]
    for way in ("whole", "killed"):
        (tmp_path / way).mkdir()
    code, _, err = train(arguments, tmp_path / "whole")
    assert code == 0, err
    run = f"runs/pendulum_swingup/{agent}/irrational/seed_0"
    moments = random.Random(agent)
    for _ in range(kills):
        rows = _rows(tmp_path / "killed" / run)
        process = start(arguments, tmp_path / "killed")
        while process.poll() is None and _rows(tmp_path / "killed" / run) <= rows:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.5))
        process.kill()
        process.communicate()
    code, _, err = train(arguments, tmp_path / "killed")
    assert code == 0, err
    assert record(tmp_path / "killed" / run) == record(tmp_path / "whole" / run)
    parameters = [load_file(tmp_path / way / run / "policy.safetensors")["parameters"] for way in ("whole", "killed")]
    np.testing.assert_array_equal(*parameters)


def test_killed_at_random_moments_the_record_is_the_uninterrupted_one(train: Command, tmp_path: Path) -> None:
    check_that_killing_does_no_harm(train, "ncrs", 1, 100, tmp_path)


@pytest.mark.slow
def test_killed_at_random_moments_an_agent_continues_with_its_replay_buffer(train: Command, tmp_path: Path) -> None:
    check_that_killing_does_no_harm(train, "pebble", 3, 12, tmp_path)


@pytest.mark.parametrize("agent", ["ncrs", pytest.param("ppo_rlhf", marks=pytest.mark.slow)])
def test_normalised_observations_continue_exactly(agent: str, train: Command, tmp_path: Path) -> None:
    arguments = [
        *PLAIN,
        "env=cartpole_balance",
        f"agent={agent}",
        "normalise_observations=true",
    ]
    run = f"runs/cartpole_balance/{agent}/irrational/seed_0"
    for way, stops in (("whole", [6]), ("parts", [3, 6]), ("plain", [6])):
        (tmp_path / way).mkdir()
        for stop in stops:
            plain = ["normalise_observations=false"] if way == "plain" else []
            code, _, err = train([*arguments, f"iterations={stop}", "evaluation.every=1", *plain], tmp_path / way)
            assert code == 0, err
    whole, parts, plain_run = (record(tmp_path / way / run) for way in ("whole", "parts", "plain"))
    assert whole == parts
    assert whole[0]["return_mean"] == plain_run[0]["return_mean"], "nothing has been seen before the first iteration"
    assert whole[1]["return_mean"] != plain_run[1]["return_mean"]
    for name in KEPT.values():
        policies = [(tmp_path / way / run / name).read_bytes() for way in ("whole", "parts")]
        assert policies[0] == policies[1], name
    best = max(whole, key=lambda row: row["eval_return"])
    assert read_policy(tmp_path / "whole" / run / KEPT["best"])[0] == best["iteration"]


def test_the_literal_reading_is_a_run_of_its_own(train: Command, tmp_path: Path) -> None:
    for preset, name, log_std in ((["experiment=literal"], "ncrs_literal", 0.0), ([], "ncrs", -1.2)):
        code, _, err = train([*PLAIN, "iterations=1", *preset], tmp_path)
        assert code == 0, err
        settings = yaml.safe_load(
            (tmp_path / f"runs/pendulum_swingup/{name}/irrational/seed_0/config.yaml").read_text()
        )
        assert settings["agent"]["policy"]["initial_log_std"] == log_std


def test_a_learnt_reward_is_compared_with_the_truth(train: Command, tmp_path: Path) -> None:
    """Where the reward is learnt from a teacher who is always right, it goes along with the true one."""
    easy = ["env=cartpole_balance", "env.steps=50", "oracle=rational", "trajectories=16", "pairs=32"]
    settings = [*PLAIN, *easy, "agent=ppo_rlhf", "iterations=5", "agent.reward_model.gradient_steps=30"]
    code, _, err = train(settings, tmp_path)
    assert code == 0, err
    rows = record(tmp_path / "runs/cartpole_balance/ppo_rlhf/rational/seed_0")
    assert rows[-1]["reward_correlation"] > 0.5


def test_checkpoints_of_an_earlier_version_are_refused_in_a_sentence(train: Command, tmp_path: Path) -> None:
    assert train([*TINY, "iterations=2"], tmp_path)[0] == 0
    folder = tmp_path / "runs/cheetah_run/ncrs/irrational/seed_0"
    saved = checkpoint.load(folder / "checkpoint")
    assert saved is not None
    state = {name: value for name, value in saved[1].items() if name != "format"}
    shutil.rmtree(folder / "checkpoint")
    checkpoint.save(folder / "checkpoint", saved[0], state)
    code, out, err = train([*TINY, "iterations=4"], tmp_path)
    assert code != 0
    assert "was begun by an earlier version of pbrl" in err
    assert "Traceback" not in out + err


def test_nothing_is_compiled_on_the_clock(tmp_path: Path) -> None:
    """A run compiles before its first iteration, whose seconds are then those of any other."""
    run = TrainingRun(compose_settings([*TINY, "agent=dpo", f"folder={tmp_path}"]))
    worlds._observe_and_reward.cache_clear()  # another test may have compiled it
    with install_recorder("numba:compiler_lock") as before:
        run.compile()
    with install_recorder("numba:compiler_lock") as during:
        run.iterate(0)
    assert before.buffer
    assert not during.buffer, during.buffer


def test_an_experiment_that_is_a_sweep_needs_no_m() -> None:
    assert is_sweep(["experiment=paper"])
    assert not is_sweep(["experiment=quick", "agent=ncrs"])


@pytest.mark.slow
@pytest.mark.parametrize("agent", ["ncrs", "zpg", "dpo", "ppo_rlhf"])
def test_killed_twenty_times(train: Command, agent: str, tmp_path: Path) -> None:
    check_that_killing_does_no_harm(train, agent, 20, 300, tmp_path)


def _rows(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_signal_after_the_moment_to_save_waits_for_the_next(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*PLAIN, "checkpoint_every=1000", "iterations=6", "video.every=1"]

    def late(_: Films, iteration: int, __: Any) -> None:  # after the iteration was or was not saved
        if iteration == 2:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Films, "film", late)
        code, out, _ = train(arguments, tmp_path)
    assert code == 128 + signal.SIGTERM
    assert "stopped after 4 of 6 iterations; the same command goes on" in out
    code, out, err = train([*arguments, "video.every=null"], tmp_path)
    assert code == 0, err
    assert "4 of 6 iterations are there" in out


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_finishes_the_iteration_and_saves(number: signal.Signals, tmp_path: Path) -> None:
    arguments = [*PLAIN, "checkpoint_every=1000", "iterations=5000"]
    process = start(arguments, tmp_path)
    folder = tmp_path / "runs/pendulum_swingup/ncrs/irrational/seed_0"
    while _rows(folder) < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    rows = _rows(folder)
    assert f"stopped after {rows} of 5000 iterations; the same command goes on" in out
    assert "finishing this iteration" in err
    process = start(arguments, tmp_path)
    while _rows(folder) < rows + 2 and process.poll() is None:
        time.sleep(0.05)
    process.kill()
    out, err = process.communicate()
    assert f"{rows} of 5000 iterations are there" in out, err
    assert [row["iteration"] for row in record(folder)] == list(range(len(record(folder))))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["agent=ncsr"], "there is no agent 'ncsr'; did you mean ncrs"),
        (["env=walker_wlak"], "there is no env 'walker_wlak'; did you mean walker_walk"),
        (["oracle=irational"], "there is no oracle 'irational'; did you mean irrational"),
        (["iterations=0"], "iterations must be a whole number of at least 1, not 0"),
        (["trajectories=-64"], "trajectories must be a whole number of at least 2, not -64"),
        (["remember=32"], "remember must be a whole number of at least 64, not 32"),
        (["agent.votes=99"], "votes must be between 1 and 32, the pairs of an iteration, not 99"),
        (
            ["agent=zpg", "agent.experts=10"],
            "10 answers to each of 32 pairs cost more than the 32",
        ),
        (["oracle=panel"], "bits=320 grants them"),
        (["resume=maybe"], "resume must be true or false, not 'maybe'"),
        (["tensorboard=maybe"], "tensorboard must be true or false, not 'maybe'"),
        (["preference_log=maybe"], "preference_log must be true or false, not 'maybe'"),
        (["wandb.finish_seconds=abc"], "wandb.finish_seconds must be a number of seconds, not 'abc'"),
        (["+foo=1"], "foo: unknown setting"),
        (["name=../../evil"], "name must be a name without slashes and control characters, not '../../evil'"),
        (["folder=null"], "folder must be the path of a folder, not None"),
        (["agent._target_=os.system"], "agent names 'os.system', which is not of agents, oracles, pbrl"),
        (["agent._target_=agents.ncrs.np.float64"], "which is of numpy"),
        (["agent._target_=pbrl.train.train"], "agent names 'pbrl.train.train', which is not of agents, oracles, pbrl"),
        (["agent._target_=agents.ncrs.Ncrs"], "which cannot be imported"),
        (["agent.votes=many"], "agent.votes must be a whole number or null, not 'many'"),
        (["agent.collect=some"], "agent.collect must be sampled or mean, not 'some'"),
        (["agent.step.maximum=-1"], "0 < minimum <= maximum"),
        (["agent=prefppo", "~agent.ppo.gae_lambda"], "missing 1 required keyword-only argument: 'gae_lambda'"),
        (["agent=ppo_true", "agent.ppo._partial_=3"], "agent.ppo._partial_ must be true or false, not 3"),
        (["agent=pebble", "~agent.sac._target_"], "agent.sac must be a node with a _target_, not"),
        (["+agent.step._partial_=true"], "agent.step must be a node with a _target_, not"),
        (["+agent._partial_=true"], "a setting names agents.ncrs.NCRS, which makes no Agent"),
        (["~oracle", "+oracle={_target_:oracles.uniform_margin.UniformMargin,p:0.2}"], "which makes no Oracle"),
        (["+agent._args_=[1]"], "agent._args_: unknown setting"),
        (["+agent.momentum=0.9"], "agent.momentum: unknown setting"),
        (["oracle=replay"], "oracle.log must be given: oracle.log=..."),
        (["agent.vots=3"], "agent.vots: unknown setting; did you mean agent.votes?"),
        (["evaluation.evry=3"], "evaluation.evry: unknown setting; did you mean evaluation.every?"),
        (["iterations=${nope}"], "nope"),
        (["agent"], "agent"),
        (["wandb=x"], "wandb is a group of settings, such as wandb.x=..., not 'x'"),
        (["oracle.eps_mistake=1.5"], "eps_mistake must be in [0, 1], not 1.5"),
        (["oracle.tau=-1"], "tau"),
        (["oracle.tau=[1,2]"], "oracle.tau must be a number or a group with a number in each place, not [1, 2]"),
        (["oracle.tau={bpref:x}"], "a group with a number in each place, not {'bpref': 'x'}"),
        (["agent.policy.hidden=[4,[4]]"], "agent.policy.hidden must be a list with a whole number in each place"),
        (["env.steps=2000"], "steps must be between 1 and 1000"),
        (["wandb.mode=maybe"], "wandb.mode must be auto, online, offline or disabled, not 'maybe'"),
        (["video.every=0"], "video.every must be a whole number of at least 1, not 0"),
        (["video.width=9"], "video.width must be a whole number of at least 64, not 9"),
        (["threads=0"], "threads must be a whole number of at least 1, not 0"),
        (["threads=10000000000"], "threads must be at most 10000, not 10000000000"),
        (["~pairs"], "pairs is missing"),
        (["~video.every"], "video.every is missing"),
        (["~agent.policy"], "agent.policy is missing"),
        (["+video.evry=3"], "video.evry: unknown setting; did you mean video.every?"),
        (["env.steps=abc"], "env.steps must be a whole number of at least 1, not 'abc'"),
        (["env.name=3"], "env.name must be a name"),
        (["env=-1e-300"], "must be a string"),
        (["allow=1_000"], "allow must be a list of packages, such as [mine], not 1000"),
        (["wandb.tags=x"], "wandb.tags must be a list of words, such as [a,b], not 'x'"),
        (["wandb.project=[]"], "wandb.project must be a word, not []"),
        (
            ["agent.step.maximum=-99999999999999999999"],
            "agent.step.maximum must be a number, not -99999999999999999999",
        ),
        (["agent.step.maximum=nan"], "agent.step.maximum must be a number, not nan"),
        (["seed=99999999999999999999"], "seed must be a whole number of at least 0"),
        (["agent.policy.hidden=[1000000000,1000000000]"], "more memory than there is"),
    ],
)
def test_nonsense_fails_at_the_start_with_a_sentence(
    arguments: list[str], sentence: str, train: Command, tmp_path: Path
) -> None:
    code, out, err = train(arguments, tmp_path)
    assert code != 0
    assert sentence in err
    assert "Traceback" not in out + err
    assert not list(tmp_path.iterdir())  # and leaves nothing behind


def test_other_settings_do_not_continue_a_run(train: Command, tmp_path: Path) -> None:
    assert train([*TINY, "iterations=2"], tmp_path)[0] == 0
    code, _, err = train([*TINY, "iterations=3", "agent.votes=2"], tmp_path)
    assert code != 0
    assert "holds a run with other settings (agent.votes: None, not 2)" in err
    code, _, err = train([*TINY, "iterations=3", "agent.votes=2", "name=fewer"], tmp_path)
    assert code == 0, err
    assert (tmp_path / "runs/cheetah_run/fewer/irrational/seed_0/metrics.jsonl").exists()
    assert train([*TINY, "iterations=3", "threads=2"], tmp_path)[0] == 0  # what changes nothing may change


def test_a_damaged_checkpoint_falls_back_and_a_hopeless_one_says_what_to_do(train: Command, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    for folder in (whole, damaged):
        folder.mkdir()
    assert train([*TINY, "iterations=8"], whole)[0] == 0
    assert train([*TINY, "iterations=6"], damaged)[0] == 0
    run = "runs/cheetah_run/ncrs/irrational/seed_0"
    newest = max((damaged / run / "checkpoint").iterdir())
    (newest / "arrays.safetensors").write_bytes((newest / "arrays.safetensors").read_bytes()[:-100])
    code, _, err = train([*TINY, "iterations=8"], damaged)
    assert code == 0, err
    assert record(damaged / run) == record(whole / run)
    for path in (damaged / run / "checkpoint").iterdir():
        (path / "state.json").write_text("{")
    code, out, err = train([*TINY, "iterations=9"], damaged)
    assert code != 0
    assert "resume=false" in err
    assert "Traceback" not in out + err
    assert record(damaged / run) == record(whole / run)  # nothing was touched


def test_two_processes_do_not_share_a_folder(train: Command, tmp_path: Path) -> None:
    process = start([*PLAIN, "iterations=5000"], tmp_path)
    folder = tmp_path / "runs/pendulum_swingup/ncrs/irrational/seed_0"
    while _rows(folder) < 1 and process.poll() is None:
        time.sleep(0.05)
    code, _, err = train([*PLAIN, "iterations=5000"], tmp_path)
    process.kill()
    process.communicate()
    assert code != 0
    assert "another process is at work in runs/pendulum_swingup/ncrs/irrational/seed_0" in err


def test_a_folder_that_cannot_be_written(train: Command, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    code, out, err = train([*TINY, "iterations=1"], tmp_path)
    assert code != 0
    assert "runs" in err
    assert "Traceback" not in out + err


def test_a_calibrated_teacher_records_its_temperature(train: Command, tmp_path: Path) -> None:
    code, _, err = train(
        [*TINY, "iterations=3", "env.steps=50", "oracle=stochastic", "oracle.tau={error_rate: 0.3}"], tmp_path
    )
    assert code == 0, err
    taus = [row["teacher_tau"] for row in record(tmp_path / "runs/cheetah_run/ncrs/stochastic/seed_0")]
    assert len(set(taus)) == 3
    assert min(taus) > 0


def test_streams_are_apart(train: Command, tmp_path: Path) -> None:
    """Another teacher does not move the physics: the first iteration's trajectories are the same."""
    for oracle in ("rational", "irrational"):
        assert train([*TINY, "iterations=1", f"oracle={oracle}"], tmp_path)[0] == 0
    first, second = (
        record(tmp_path / f"runs/cheetah_run/ncrs/{name}/seed_0")[0] for name in ("rational", "irrational")
    )
    assert first["return_mean"] == second["return_mean"]


def test_a_learner_that_diverges_ends_its_run_with_a_sentence_and_keeps_its_last_good_state(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It diverges in iteration 3; checkpoints are made every two iterations, of which 1 is the last."""
    arguments, folder = [*PLAIN, "iterations=6"], tmp_path / "runs/pendulum_swingup/ncrs/irrational/seed_0"
    usual = NCRS.iterate

    def diverge(agent: NCRS, budget: Any) -> Any:
        metrics = usual(agent, budget)
        if budget.iteration == 3:
            agent.parameters = np.full_like(agent.parameters, np.nan)
        return metrics

    with monkeypatch.context() as patch:
        patch.setattr(NCRS, "iterate", diverge)
        for _ in range(2):  # the same command says the same
            code, out, err = train(arguments, tmp_path)
            assert code == 1
            assert "in iteration 3 the policy's parameters became infinite or not a number" in err
            assert "the state before it is saved" in err
            assert "Traceback" not in out + err
            assert [row["iteration"] for row in record(folder)] == [0, 1, 2]
            assert max((folder / "checkpoint").iterdir()).name == "000002"
    (tmp_path / "whole").mkdir()
    assert train(arguments, tmp_path / "whole")[0] == 0
    assert train(arguments, tmp_path)[0] == 0  # with a learner that does not
    assert record(folder) == record(tmp_path / "whole" / folder.relative_to(tmp_path))


@pytest.mark.parametrize(
    "forged",
    [
        {"record": 3.0},
        {"ledger": None},
        {"agent": None},
        *(
            pytest.param(forged, marks=pytest.mark.slow)
            for forged in (
                {"ledger": {"counts": {"x": 0.5}}},
                {"best": 3},
                {"best": {"parameters": []}},
                {"best_on_schedule": {"iteration": "1"}},
            )
        ),
        {"agent": {"rng": {"state": {"state": 10**60}}}},
    ],
    ids=str,
)
def test_a_forged_state_is_refused_in_a_sentence(forged: dict[str, Any], train: Command, tmp_path: Path) -> None:
    """With all hashes right."""
    arguments, folder = [*PLAIN, "iterations=3"], tmp_path / "runs/pendulum_swingup/ncrs/irrational/seed_0"
    assert train(arguments, tmp_path)[0] == 0
    saved = checkpoint.load(folder / "checkpoint")
    settings = json.loads((folder / "checkpoint/000002/state.json").read_text())["settings_digest"]
    assert saved is not None
    shutil.rmtree(folder / "checkpoint")

    def changed(one: Any, other: Any) -> Any:
        return (
            {**one, **{key: changed(one.get(key), other[key]) for key in other}} if isinstance(other, dict) else other
        )

    checkpoint.save(folder / "checkpoint", 2, changed(saved[1], forged), settings)
    code, out, err = train([*arguments, "iterations=4"], tmp_path)
    assert code == 1
    assert "not one of this run" in err or "are none" in err
    assert "Traceback" not in out + err


def test_an_iteration_that_fails_after_a_checkpoint_leaves_its_traceback_in_a_file(
    train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, folder = [*PLAIN, "iterations=3"], tmp_path / "runs/pendulum_swingup/ncrs/irrational/seed_0"
    assert train(arguments, tmp_path)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(NCRS, "iterate", lambda *_: 1 / 0)
        code, out, err = train([*arguments, "iterations=4"], tmp_path)
    assert code == 1
    assert "iteration 3, the first after the checkpoint, failed (ZeroDivisionError" in err
    assert "Traceback" not in out + err
    assert "ZeroDivisionError" in (folder / "error.txt").read_text()


def test_ctrl_c_at_any_time_has_no_traceback(train: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pbrl.train.check", interrupt)
    code, _, err = train([*PLAIN, "iterations=3"], tmp_path)
    assert code == 130
    assert "stopped; the same command goes on" in err
