"""A training run: an agent, a teacher and a ledger between them, each with its own random stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pbrl import network
from pbrl.ledger import Ledger
from pbrl.normaliser import Normaliser
from pbrl.policy import Policy
from pbrl.run.loop import DivergedError
from pbrl.run.policy_file import KEPT, save_policy
from pbrl.run.preference_log import PreferenceLog
from pbrl.run.record import Row
from pbrl.run.settings import ConfigurationError, build, check_node, check_targets, digest, resolve
from pbrl.seeds import streams
from pbrl.simulation import tasks
from pbrl.simulation.simulator import Simulator
from pbrl.types import Agent, Float32, Oracle

LOG = "preferences"  # the folder of the preference log
EVALUATION = ("eval_return", "eval_return_std", "seconds_evaluate")  # in the row of an evaluated iteration


class TrainingRun:
    """All objects of a run, composed from its settings (see conf/train.yaml).

    They share nothing random: changing the teacher's noise does not move the physics.
    """

    ended = ""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.folder = Path(settings["folder"])
        self.seed: int = settings["seed"]
        self.digest = digest(settings)
        self.iterations: int = settings["iterations"]
        self.evaluation_settings: Mapping[str, Any] = settings["evaluation"]
        self.calibration_trajectories: int = settings["calibration"]["trajectories"]
        allow = settings["allow"]
        stream = streams(settings["seed"], "simulation", "teacher", "agent", "evaluation", "calibration")
        env = settings["env"]
        self.task = task_of(env, allow)
        where = {"task": self.task, "steps": env["steps"], "threads": settings["threads"]}
        self.simulator = Simulator(**where, seed=stream["simulation"])
        self.evaluation = Simulator(**where, seed=stream["evaluation"])
        self.calibration = Simulator(**where, seed=stream["calibration"])
        budget = {"trajectories": settings["trajectories"], "pairs": settings["pairs"]}
        rng = np.random.default_rng(stream["agent"])
        self.agent = build_agent(settings, self.simulator, rng=rng, iterations=self.iterations, **budget)
        self.policy = self.agent.policy
        self.first = self.policy.folded(self.agent.parameters).copy()
        # Evaluation, iteration and parameters of the highest so far; and without the evaluation of a last iteration, in
        # which a run that is extended equals one that was longer from the start.
        self.best: dict[str, Any] | None = None
        self.best_on_schedule: dict[str, Any] | None = None
        teaching = np.random.default_rng(stream["teacher"])
        oracle: Oracle = build(settings["oracle"], Oracle, allow=allow, rng=teaching, folder=self.folder)
        self.ledger = Ledger(
            simulator=self.simulator,
            oracle=oracle,
            trajectories_per_iteration=settings["trajectories"],
            pairs_per_iteration=settings["pairs"],
            bits_per_iteration=settings["bits"],
            remember=remembered(settings, self.agent),
            yardstick=settings["agent"].get("yardstick", False),
            preference_log=PreferenceLog(self.folder / LOG) if settings["preference_log"] else None,  # type: ignore[arg-type]
        )
        answers = settings["pairs"] * getattr(oracle, "members", 1) * getattr(self.agent, "experts", 1)
        if answers > self.ledger.bits_per_iteration:
            raise ConfigurationError(
                f"{answers // settings['pairs']} answers to each of {settings['pairs']} pairs cost more than the "
                f"{self.ledger.bits_per_iteration} that an iteration has: bits={answers} grants them"
            )

    def compile(self) -> None:
        """Compile what an iteration calls, by calling it once, so that no iteration's seconds count it."""
        simulator = Simulator(self.task, seed=0, threads=1, steps=1)
        for mean_actions in (False, True):
            simulator.collect(
                self.policy,
                self.agent.parameters[None],
                np.zeros(1, np.int64),
                iteration=0,
                mean_actions=mean_actions,
                keep=["observations", "actions"],
            )
        network.compile_activations()

    def iterate(self, iteration: int) -> dict[str, float]:
        """One iteration; its metrics."""
        agent, ledger, seconds = self.agent, self.ledger, {}
        self.best = self.best_on_schedule
        budget = ledger.open_iteration(iteration)
        begin = time.perf_counter()
        ledger.calibrate(
            self.calibration,
            agent.policy,
            agent.parameters,
            trajectories=self.calibration_trajectories,
            mean_actions=False,
        )
        seconds["calibrate"], begin = time.perf_counter() - begin, time.perf_counter()
        try:
            metrics = dict(agent.iterate(budget))
        except (ValueError, ArithmeticError) as error:
            if np.isfinite(agent.parameters).all():
                raise
            raise self.diverged(iteration) from error
        if not np.isfinite(agent.parameters).all():
            raise self.diverged(iteration)
        seconds |= ledger.seconds
        seconds["learn"] = time.perf_counter() - begin - sum(ledger.seconds.values())
        if self.policy.normaliser is not None and (seen := ledger.observations()) is not None:
            self.policy.normaliser.include(seen)
        on_schedule = iteration % self.evaluation_settings["every"] == 0
        if on_schedule or iteration == self.iterations - 1:
            begin = time.perf_counter()
            metrics |= self.evaluate(iteration, self.evaluation_settings["trajectories"])
            if self.best is None or metrics["eval_return"] > self.best["eval_return"]:
                parameters = self.policy.folded(agent.parameters).copy()
                self.best = {"eval_return": metrics["eval_return"], "iteration": iteration, "parameters": parameters}
            if on_schedule:
                self.best_on_schedule = self.best
            seconds["evaluate"] = time.perf_counter() - begin
        timed = {f"seconds_{part}": value for part, value in seconds.items()}
        return {"iteration": iteration, **ledger.iteration_metrics(), **metrics, **ledger.counts(), **timed}

    def diverged(self, iteration: int) -> DivergedError:
        """What to raise when the policy's parameters are no longer finite."""
        return DivergedError(
            f"{self.folder}: in iteration {iteration} the policy's parameters became infinite or not a number: "
            "the learner has diverged. Give it a smaller step or learning rate, under another name=...",
            iteration,
        )

    def evaluate(self, iteration: int, trajectories: int) -> dict[str, float]:
        """How the current policy does in truth, with mean actions; never charged."""
        collected = self.evaluation.collect(
            self.agent.policy,
            self.agent.parameters[None],
            np.zeros(trajectories, np.int64),
            iteration=iteration,
            mean_actions=True,
        )
        return {"eval_return": float(collected.returns.mean()), "eval_return_std": float(collected.returns.std())}

    def headline(self, metrics: Mapping[str, float]) -> str:
        """The return, where something was collected."""
        return f"return {metrics['return_mean']:.1f}" if "return_mean" in metrics else ""

    def save(self, iteration: int) -> None:
        """Leave the last policy, the first and the best so far for others to read."""
        self.save_policy(self.folder / KEPT["last"], iteration)
        self.save_policy(self.folder / KEPT["first"], -1, self.first)
        if self.best is not None:
            self.save_policy(self.folder / KEPT["best"], self.best["iteration"], self.best["parameters"])

    def save_policy(self, path: Path, iteration: int, parameters: Float32 | None = None) -> None:
        """Write a policy's parameters, None for the current ones, with its task and sizes."""
        if parameters is None:
            parameters = self.policy.folded(self.agent.parameters)
        save_policy(path, parameters, **self.about_policy(), iteration=str(iteration))

    def about_policy(self) -> dict[str, str]:
        """Task and sizes of the policy, for its file."""
        return {"task": self.simulator.task, "sizes": " ".join(str(size) for size in self.policy.sizes)}

    def without_last_evaluation(self, row: Row) -> Row:
        """The row of an iteration, had it not been the run's last one, which is always evaluated."""
        if int(row["iteration"] or 0) % self.evaluation_settings["every"] == 0:
            return row
        return {name: value for name, value in row.items() if name not in EVALUATION}

    def find_problem(self, state: Mapping[str, Any]) -> str | None:
        """Whether the preference log lacks rows that the state counts."""
        try:
            log, logged = self.ledger.preference_log, state["ledger"]["preference_log"]
            return None if log is None or logged is None else log.find_problem(logged)
        except (TypeError, LookupError) as error:
            return f"its state is not one of this run ({error!r})"

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        state: dict[str, Any] = {"agent": self.agent.state_dict(), "ledger": self.ledger.state_dict()}
        state["parameters"] = self.policy.folded(self.agent.parameters)  # for others to read
        state["policy"] = self.about_policy()
        state |= {"best": self.best, "best_on_schedule": self.best_on_schedule}
        if self.policy.normaliser is not None:
            state["normaliser"] = self.policy.normaliser.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.agent.load_state_dict(state["agent"])
        if np.shape(self.agent.parameters) != (self.policy.size,) or not np.isfinite(self.agent.parameters).all():
            raise ValueError(f"the policy's parameters are not {self.policy.size} numbers")
        self.ledger.load_state_dict(state["ledger"])
        self.best, self.best_on_schedule = state.get("best"), state.get("best_on_schedule")  # 0.1 kept none
        for best in (self.best, self.best_on_schedule):
            self._check_best(best)
        if self.policy.normaliser is not None:
            self.policy.normaliser.load_state_dict(state["normaliser"])

    def _check_best(self, best: Any) -> None:
        """Refuse what is not a policy that was the best one."""
        kinds = {"eval_return": float, "iteration": int, "parameters": np.ndarray}
        if best is not None and (
            {name: type(value) for name, value in best.items()} != kinds
            or best["parameters"].shape != (self.policy.size,)
        ):
            raise ValueError("the best policy is not one of this run")


def task_of(env: Mapping[str, Any], allow: Sequence[str]) -> str | tasks.Task:
    """The task that the settings of an environment describe: of DM Control's suite by name, or by its `task` node."""
    node = env.get("task")
    if node is None:
        return tasks.find(env["name"])
    arguments = {key: value for key, value in node.items() if not key.startswith("_")}
    return tasks.find(env["name"], partial(resolve(node["_target_"], "env.task", allow=allow), **arguments))


def build_policy(node: Mapping[str, Any], simulator: Simulator, *, allow: Sequence[str]) -> Policy:
    """The policy that a node describes, of the sizes and bounds that the task has."""
    check_targets(node, "agent.policy", allow=allow)
    check_node(node, "agent.policy", allow=allow)
    sizes = {"obs_size": simulator.obs_size, "act_size": simulator.act_size}
    policy: Policy = build(node, Policy, allow=allow, **sizes, action_bounds=simulator.action_bounds)
    return policy


def build_agent(settings: Mapping[str, Any], simulator: Simulator, **offered: Any) -> Agent:
    """The agent of a run with its policy; `offered` is what its class may ask for beside its settings."""
    node, allow = settings["agent"], settings["allow"]
    policy = build_policy(node["policy"], simulator, allow=allow)
    if settings["normalise_observations"]:
        policy.normaliser = Normaliser(simulator.obs_size)
    agent: Agent = build(node, Agent, allow=allow, policy=policy, **offered)
    return agent


def remembered(settings: Mapping[str, Any], agent: Agent) -> int:
    """How many of the last trajectories may be asked about: those of two iterations, or the agent's pool if larger."""
    pool = getattr(agent, "pool", None) or 0
    if settings["remember"] is None:
        return max(2 * int(settings["trajectories"]), pool)
    if settings["remember"] < pool:
        raise ConfigurationError(
            f"the agent asks about its last {pool} trajectories, but remember={settings['remember']} keeps fewer: "
            f"remember=null keeps them all, agent.pool={settings['remember']} asks about those that are kept"
        )
    return int(settings["remember"])
