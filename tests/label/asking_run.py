"""A run whose teacher is a person, on a task without physics, and people for it who answer as a question's name says.

`begin` starts processes that can be killed: the run, and the page's server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import oracles.human
from agents.ncrs import NCRS
from oracles.human import Human
from pbrl.label.__main__ import main as label
from pbrl.ledger import Ledger
from pbrl.policy import GaussianPolicy
from pbrl.run import loop
from pbrl.run.preference_log import PreferenceLog
from pbrl.run.questions import Answer, AnswerLog, RefusedError, now, read_question, read_round
from pbrl.search import Cosine
from pbrl.types import Oracle, Trajectories

STEPS, PAIRS = 10, 4
TARGET = np.array([0.8, -0.6])
SETTINGS: dict[str, Any] = {
    "text": {"default": "Which of the two does better at {task}?"},
    "confidence": [0.6, 0.7, 0.8, 0.9, 1.0],
    "answers_per_question": 1,
    "attention": 0.0,
    "seconds_per_question": None,
    "lease_seconds": 120.0,
    "undo_seconds": 0.0,
    "report_seconds": 60.0,
    "clips": {"width": 64, "height": 48},
}

# Stands in for pbrl.label.draw: clips without pictures.
DRAW = """
import json, os, pathlib, sys
folder = pathlib.Path(sys.argv[1]) / "questions"
def write(name, content):
    (folder / f"{name}.{os.getpid()}").write_text(content)
    (folder / f"{name}.{os.getpid()}").replace(folder / name)
for line in sys.stdin:
    order = json.loads(line)
    for clip in order["clips"]:
        write(f"{clip}.webp", "a clip")
    write(order["question"]["name"] + ".json", json.dumps({"format": 1, **order["question"]}))
"""


class TargetSimulator:
    """Observations are noise; the reward is the closeness of the action to a target."""

    task, obs_size, act_size, steps = "target", 3, 2, STEPS

    def collect(
        self, policy, parameters, assignment, *, iteration, first_trajectory, mean_actions, common_start, keep
    ) -> Trajectories:
        del mean_actions, common_start
        n = len(assignment)
        numbers = first_trajectory + np.arange(n)
        streams = [np.random.default_rng([iteration, number]) for number in numbers]
        observations = np.stack([each.standard_normal((STEPS + 1, 3), np.float32) for each in streams])
        noise = np.stack([each.standard_normal((STEPS, 2), np.float32) for each in streams])
        flat = observations[:, :-1].reshape(-1, 3)
        actions = policy.mean_actions(parameters, flat, np.repeat(assignment, STEPS)).reshape(n, STEPS, 2)
        actions = actions + np.exp(parameters[assignment, None, -2:]) * noise
        return Trajectories(
            policy=np.asarray(assignment),
            lengths=np.full(n, STEPS),
            diverged=np.zeros(n, bool),
            start=np.stack([np.full(n, iteration), numbers, numbers], axis=1),
            number=numbers,
            observations=observations if "observations" in keep else None,
            actions=actions if "actions" in keep else None,
            task_rewards=np.exp(-((actions.astype(np.float64) - TARGET) ** 2).sum(axis=2)),
        )


class AskingRun:
    """Work for `pbrl.run.loop`: NCRS on the target, with an oracle."""

    digest, ended = "asking", ""

    def __init__(self, folder: Path, oracle: Oracle, *, bits: int | None = None) -> None:
        self.folder = folder
        policy = GaussianPolicy(3, 2, hidden=[4], hidden_gain=1.0, output_gain=0.01, initial_log_std=-1.0)
        self.agent = NCRS(
            policy=policy,
            rng=np.random.default_rng(0),
            pairs=PAIRS,
            step=Cosine(maximum=0.5, minimum=0.1, decay=10),
            votes=None,
            feedback="score",
            direction="gaussian",
            collect="sampled",
            common_start=False,
        )
        self.ledger = Ledger(
            simulator=TargetSimulator(),
            oracle=oracle,
            trajectories_per_iteration=2 * PAIRS,
            pairs_per_iteration=PAIRS,
            bits_per_iteration=bits,
            preference_log=PreferenceLog(folder / "preferences"),
        )

    def iterate(self, iteration: int) -> dict[str, float]:
        metrics = self.agent.iterate(self.ledger.open_iteration(iteration))
        return {"iteration": iteration, **self.ledger.iteration_metrics(), **metrics, **self.ledger.counts()}

    def headline(self, metrics: Mapping[str, float]) -> str:
        return str(metrics["iteration"])

    def without_last_evaluation(self, row: dict[str, Any]) -> dict[str, Any]:
        return row

    def save(self, iteration: int) -> None:
        pass

    def find_problem(self, state: Mapping[str, Any]) -> str | None:
        return self.ledger.preference_log.find_problem(state["ledger"]["preference_log"])

    def state_dict(self) -> dict[str, Any]:
        return {"agent": self.agent.state_dict(), "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.agent.load_state_dict(state["agent"])
        self.ledger.load_state_dict(state["ledger"])


def human(folder: Path, iterations: int = 1, **changes: Any) -> Human:
    """The oracle, with its run's settings where it looks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    how = {**SETTINGS, **changes}
    settings = {"env": {"name": "target", "steps": STEPS}, "seed": 0, "iterations": iterations, "allow": []}
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings, "name": "ncrs", "oracle": how}))
    oracles.human.DRAW = (sys.executable, "-S", "-E", "-c", DRAW)
    return Human(**how, folder=folder)


def run(
    folder: Path, oracle: Oracle, *, iterations: int, checkpoint_every: int = 1, bits: int | None = None
) -> AskingRun:
    """Let a run go on to its last iteration."""
    work = AskingRun(folder, oracle, bits=bits)
    loop.run(
        work,
        iterations=iterations,
        checkpoint_every=checkpoint_every,
        mirrors=lambda _: [],
        progress_bar=False,
    )
    work.ledger.close()
    return work


def what_came_of(folder: Path) -> list[dict[str, float]]:
    """The record of a run."""
    return [json.loads(line) for line in (folder / loop.RECORD).read_text().splitlines()]


# People


def opinion(question: str) -> tuple[str, int | None]:
    """What a simulated person says to a question: always the same."""
    number = int(question, 16)
    verdict = ("left", "right", "left", "right", "equal", "left", "right", "skip")[number % 8]
    return verdict, 1 + number // 8 % 5 if verdict in ("left", "right") else None


def answer_by_files(
    folder: Path,
    until: threading.Event,
    say: Callable[[Any], tuple[str, int | None]] = lambda question: opinion(question.name),
    name: str = "files",
) -> None:
    """A person without a page: answers as soon as a question can be shown, until told to stop."""
    log = AnswerLog(folder)
    while not until.is_set():
        asked = read_round(folder)
        log.refresh()
        for each in log.open(asked) if asked is not None else []:
            question = read_question(folder, each)
            if question is not None and name not in [answer.annotator for answer in log.valid().get(each, [])]:
                verdict, confidence = say(question)
                given = {"id": secrets.token_hex(16), "annotator": name, "seconds": 1.0, "at": now()}
                with contextlib.suppress(RefusedError):  # another was faster, and the run has gone on
                    log.answer(Answer(question=each, verdict=verdict, confidence=confidence, **given), asked)
        time.sleep(0.005)


class Person(threading.Thread):
    """Answers through the server as the page does: sends each answer until it is called saved."""

    def __init__(self, port: int, token: str, name: str = "ann") -> None:
        super().__init__(daemon=True)
        self.port, self.token, self.who = port, token, name
        self.saved: list[str] = []  # ids of answers that were called saved
        self.refused: list[str] = []
        self.enough = threading.Event()

    def post(self, path: str, body: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"Content-Type": "application/json", "Origin": f"http://127.0.0.1:{self.port}"}
        headers["Cookie"] = f"pbrl_label_{self.port}={self.token}"
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def run(self) -> None:
        while not self.enough.is_set():
            try:
                _, reply = self.post("/next", {"annotator": self.who})
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)
                continue
            for question in reply.get("questions", []):
                self.answer(question)
            time.sleep(0.005)

    def answer(self, question: Mapping[str, Any]) -> None:
        verdict, confidence = opinion(question["question"])
        body = {"id": secrets.token_hex(16), "run": question["run"], "question": question["question"]}
        body |= {"annotator": self.who, "verdict": verdict, "confidence": confidence, "seconds": 0.5}
        while not self.enough.is_set():
            try:
                status, reply = self.post("/answer", body)
            except (OSError, http.client.HTTPException):
                time.sleep(0.01)
                continue
            if status == 200:
                self.saved.append(reply["saved"])
                return
            if status < 500:
                self.refused.append(reply["error"])
                return
            time.sleep(0.01)


# Processes that can be killed

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["asking_run"])


def serve_page(folder: str, port: int) -> None:
    label([folder, "--port", str(port), "--no-browser"])


def run_alone(folder: str, iterations: int) -> None:
    try:
        run(Path(folder), human(Path(folder), iterations), iterations=iterations)
    except RefusedError as error:
        raise SystemExit(str(error)) from None


def begin(what: Callable[..., None], *arguments: Any) -> Any:
    """A function in a process of its own."""
    process = PROCESSES.Process(target=what, args=arguments, daemon=True)
    process.start()
    return process
