"""Sweeps whose runs are other processes, through each of the launchers, and a search. All of them are slow ones.

Ray is not among what the tests install, being large: `pip install -c constraints.txt -e '.[ray]'`. Slurm is Debian's:
`apt-get install slurmctld slurmd slurm-client munge`; its test wants to be root.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from test_sweeps import AGENTS, RUNS, TINY, settings
from test_train import ROOT, Command, record

from pbrl.simulation.simulator import cores


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def start(arguments: list[str], folder: Path, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own, as a launcher wants it."""
    token = folder / "ray_token"  # Ray would leave one in the home folder
    token.write_text(secrets.token_hex(32))
    return subprocess.Popen(
        [sys.executable, "-m", "pbrl.train", *arguments],
        cwd=folder,
        env={**os.environ, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "threads"),
    [
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], max(1, cores() // 2)),
        (["hydra/launcher=submitit_local"], 1),
        (["hydra/launcher=ray", "hydra.launcher.ray.init.num_cpus=2"], 1),
    ],
    ids=["joblib", "submitit_local", "ray"],
)
def test_every_launcher_gives_the_sequential_record(
    launcher: list[str], threads: int, train: Command, tmp_path: Path
) -> None:
    for way in ("sequential", "launched"):
        (tmp_path / way).mkdir()
    code, out, err = train(AGENTS, tmp_path / "sequential")
    assert code == 0, out + err
    process = start([*AGENTS, *launcher], tmp_path / "launched")
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "4 of 4 runs are finished" in out
    assert "Warning" not in out
    groups = set()
    for run in RUNS:
        rows = record(tmp_path / "launched" / run)
        assert len(rows) == 2
        assert rows == record(tmp_path / "sequential" / run)
        assert settings(tmp_path / "launched" / run)["threads"] == threads  # so that jobs do not fight for cores
        groups |= {settings(tmp_path / way / run)["wandb"]["group"] for way in ("sequential", "launched")}
    (group,) = groups  # one for the sweep, however it is launched
    assert re.fullmatch(r"agent-seed-[0-9a-f]{8}", group)
    assert (tmp_path / "launched/runs/sweeps" / group / "summary.txt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_sigterm_lets_the_runs_of_other_processes_save(launcher: str, tmp_path: Path) -> None:
    arguments = ["-m", "agent=random", "seed=0,1", *TINY, "iterations=100000", f"hydra/launcher={launcher}"]
    arguments += ["hydra.launcher.n_jobs=2"] if launcher == "joblib" else []
    process = start([*arguments, "checkpoint_every=100000"], tmp_path)
    runs = [tmp_path / f"runs/pendulum_swingup/random/irrational/seed_{seed}" for seed in (0, 1)]
    while process.poll() is None and not all((run / "metrics.jsonl").exists() for run in runs):
        time.sleep(0.1)
    process.terminate()
    out, _ = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, out
    assert "0 of 2 runs are finished; stopped by a signal" in out
    assert "stopped after" not in out  # the runs' own words would stand in the bars of this program
    for run in runs:
        (saved,) = (run / "checkpoint").iterdir()
        assert int(saved.name) + 1 == len(record(run))  # nothing was lost


def wait_for_rows(process: subprocess.Popen[str], run: Path, rows: int) -> None:
    while not ((run / "metrics.jsonl").exists() and len(record(run)) >= rows):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.slow
def test_the_others_are_finished_when_a_process_of_joblibs_is_killed(train: Command, tmp_path: Path) -> None:
    """Four jobs in two processes; the first one to be at work is killed, and takes the others down."""
    for way in ("sequential", "killed"):
        (tmp_path / way).mkdir()
    jobs = ["-m", "agent=random", "seed=0,1,2,3", *TINY, "iterations=300"]
    assert train(jobs, tmp_path / "sequential")[0] == 0
    process = start([*jobs, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], tmp_path / "killed")
    runs = [Path(f"runs/pendulum_swingup/random/irrational/seed_{seed}") for seed in range(4)]
    wait_for_rows(process, tmp_path / "killed" / runs[0], 5)
    (note,) = tmp_path.glob("killed/runs/sweeps/*/jobs/0.json")
    os.kill(json.loads(note.read_text())["process"], signal.SIGKILL)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert "the launcher failed: launching again the" in out
    assert "4 of 4 runs are finished" in out
    for run in runs:
        assert record(tmp_path / "killed" / run) == record(tmp_path / "sequential" / run)


DEADLY = """
import os, signal
from agents.random import Random

class Deadly(Random):
    def __init__(self, *, policy, rng, deadly: bool) -> None:
        super().__init__(policy=policy, rng=rng)
        self.deadly = deadly

    def iterate(self, budget):
        if self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().iterate(budget)
"""


@pytest.mark.slow
def test_a_job_that_is_killed_each_time_does_not_keep_the_others_from_ending(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    deadly = ["agent._target_=deadly.Deadly", "allow=[deadly]", "+agent.deadly=true,false"]
    jobs = ["-m", "agent=random", "seed=0,1", *TINY, *deadly, "iterations=20"]
    launcher = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    process = start([*jobs, *launcher], tmp_path, PYTHONPATH=f"{ROOT}:{tmp_path}")
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "2 of 4 runs are finished; the launcher failed" in out
    assert out.count("lost") >= 2
    for seed in (0, 1):
        run = tmp_path / f"runs/pendulum_swingup/random_deadly_False/irrational/seed_{seed}"
        assert len(record(run)) == 20


CLUSTER = """
import sys, time
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=1), cluster.add_node(num_cpus=1)]
print(cluster.address, flush=True)
for line in sys.stdin:
    if line == "lose a node\\n":
        cluster.remove_node(nodes.pop(0), allow_graceful=False)
        nodes.append(cluster.add_node(num_cpus=1))
        print("lost", flush=True)
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["worker", "node"])
def test_ray_starts_runs_again_that_lost_their_process_or_their_node(lost: str, train: Command, tmp_path: Path) -> None:
    for way in ("sequential", "ray"):
        (tmp_path / way).mkdir()
    jobs = ["-m", "agent=random", "seed=0,1", *TINY, "iterations=300"]
    assert train(jobs, tmp_path / "sequential")[0] == 0
    token = tmp_path / "ray_token"
    token.write_text(secrets.token_hex(32))
    environment = {**os.environ, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(ROOT), "RAY_worker_niceness": "0"}
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert cluster.stdin is not None
    assert cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        launcher = ["hydra/launcher=ray", f"hydra.launcher.ray.init.address='{address}'"]
        process = start([*jobs, *launcher], tmp_path / "ray", RAY_AUTH_TOKEN_PATH=str(token))
        runs = [Path(f"runs/pendulum_swingup/random/irrational/seed_{seed}") for seed in (0, 1)]
        for run in runs:
            wait_for_rows(process, tmp_path / "ray" / run, 5)
        if lost == "worker":
            (note,) = tmp_path.glob("ray/runs/sweeps/*/jobs/0.json")
            os.kill(json.loads(note.read_text())["process"], signal.SIGKILL)
        else:
            cluster.stdin.write("lose a node\n")
            cluster.stdin.flush()
            assert cluster.stdout.readline() == "lost\n"
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out
        assert "2 of 2 runs are finished" in out
        for run in runs:
            assert record(tmp_path / "ray" / run) == record(tmp_path / "sequential" / run)
    finally:
        cluster.stdin.close()
        cluster.wait(timeout=60)
        cluster.stdout.close()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm of this machine."""
    script, folder = str(Path(__file__).with_name("slurm.sh")), str(tmp_path / "slurm")
    subprocess.run([script, "start", folder], check=True)
    monkeypatch.setenv("SLURM_CONF", f"{folder}/slurm.conf")
    yield
    subprocess.run([script, "stop", folder], check=True)


@pytest.mark.slow
@pytest.mark.usefixtures("slurm")
def test_jobs_that_slurm_preempts_save_and_continue_when_it_runs_them_again(train: Command, tmp_path: Path) -> None:
    """They have no checkpoint but the one that they make when they are told."""
    for way in ("sequential", "slurm jobs"):
        (tmp_path / way).mkdir()
    jobs = ["-m", "agent=random", "seed=0,1", *TINY, "iterations=2000", "checkpoint_every=100000"]
    assert train(jobs, tmp_path / "sequential")[0] == 0
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=low", "hydra.launcher.cpus_per_task=1"]
    process = start([*jobs, *launcher, "hydra.launcher.mem_gb=1"], tmp_path / "slurm jobs")
    runs = [Path(f"runs/pendulum_swingup/random/irrational/seed_{seed}") for seed in (0, 1)]
    for run in runs:
        wait_for_rows(process, tmp_path / "slurm jobs" / run, 5)
    more_important = ["sbatch", "--partition=high", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1"]
    subprocess.run(more_important, check=True)
    out, _ = process.communicate(timeout=900)
    assert process.returncode == 0, out
    assert "2 of 2 runs are finished" in out
    printed = "".join(path.read_text() for path in tmp_path.glob("slurm jobs/runs/sweeps/*/submitit/*/*.out"))
    assert printed.count("DUE TO PREEMPTION") == 2
    assert printed.count("of 2000 iterations are there") == 2
    for run in runs:
        assert record(tmp_path / "slurm jobs" / run) == record(tmp_path / "sequential" / run)


@pytest.mark.slow
def test_a_search_finds_the_highest_evaluation_and_its_trials_do_not_collide(tmp_path: Path) -> None:
    search = ["experiment=tune", "hydra.sweeper.n_trials=3", "agent=ncrs_single", *TINY]
    process = start([*search, "agent.step.maximum=tag(log,interval(0.005,0.2))"], tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    runs = sorted(tmp_path.glob("runs/pendulum_swingup/*/irrational/seed_0"))
    assert len(runs) == 3
    evaluations = {record(run)[-1]["eval_return"]: settings(run)["agent"]["step"]["maximum"] for run in runs}
    (results,) = tmp_path.glob("runs/sweeps/*/optimization_results.yaml")
    best = yaml.safe_load(results.read_text())
    assert best["best_value"] == max(evaluations)
    steps = {settings(run)["agent"]["step"]["maximum"] for run in runs}
    assert len(steps) == 3
    assert best["best_params"]["agent.step.maximum"] in steps
    # The same search with one more trial finds the three on disk. One that fails is no end of it.
    more = [*search, "agent.step.maximum=tag(log,interval(0.005,0.2))", "hydra.sweeper.n_trials=4"]
    blocked = runs[0] / "checkpoint"
    blocked.rename(runs[0] / "aside")
    blocked.write_text("a file where a folder should be")
    process = start(more, tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 1, out
    assert "3 of 4 runs are finished" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  python")]
    assert shlex.split(line)[3:] == [*more, "--multirun"]  # which the preset stands for
    blocked.unlink()
    (runs[0] / "aside").rename(blocked)
    process = start(shlex.split(line)[3:], tmp_path)
    out, _ = process.communicate()
    assert process.returncode == 0, out
    assert out.count("nothing is left to do") >= 3
    assert "4 of 4 runs are finished" in out
    assert f"the best settings are in {results.relative_to(tmp_path)}" in out
