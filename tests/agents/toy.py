"""Small agents, a budget that pays for anything, and behaviour to learn from."""

import functools
import os
import shlex
from functools import partial

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from pbrl.ledger import Ledger
from pbrl.policy import GaussianPolicy
from pbrl.run.settings import build, choices
from pbrl.run.training import build_agent, remembered
from pbrl.types import Behaviour, Clips, Pairs, Preferences
from tests.toy_task import ACT, OBS, STEPS, ToySimulator

TRAJECTORIES = 16
MOST = {"passes": 8, "gradient_steps": 10, "updates_per_step": 0.1, "updates_after_reset": 5, "batch_size": 32}
POLICY = partial(GaussianPolicy, hidden=[16, 16], hidden_gain=2**0.5, output_gain=0.01)


# In place of the agents of conf/agent, one of your own and the settings with which it is found: see docs/extending.md.
_given = shlex.split(os.environ.get("PBRL_AGENT", ""))
OWN = [each for each in _given if not each.startswith("agent=")]
AGENTS = [each.removeprefix("agent=") for each in _given if each not in OWN] or choices("agent")


# Agents of conf/agent


@functools.cache
def composed(*overrides):
    """The settings of a run that its objects are built from, with small networks."""
    with initialize_config_module("conf"):
        cfg = compose("train", overrides=["env=cheetah_run", *overrides, *OWN])
    names = ("agent", "oracle", "trajectories", "pairs", "bits", "remember", "allow", "normalise_observations")
    settings = {
        name: OmegaConf.to_container(cfg[name], resolve=True) if OmegaConf.is_config(cfg[name]) else cfg[name]
        for name in names
    }
    return {**settings, "agent": shrunk(settings["agent"])}


def shrunk(node):
    """The same settings, with 16 units in every hidden layer, and little work on the same data."""
    if not isinstance(node, dict):
        return node
    small = {key: [16, 16] if key.endswith("hidden") else shrunk(value) for key, value in node.items()}
    return small | {key: min(most, node[key]) for key, most in MOST.items() if node.get(key)}


def settings_of(name, *overrides, **changes):
    """The settings of a run with an agent of conf/agent, and changes to the agent's (a__b for b of a)."""
    settings = OmegaConf.create(composed(f"agent={name}", *overrides))
    for key, value in changes.items():
        OmegaConf.update(settings.agent, key.replace("__", "."), value)
    found = OmegaConf.to_container(settings)
    assert isinstance(found, dict)
    return found


def make(name, *, seed=0, simulator=ToySimulator, trajectories=TRAJECTORIES, pairs=TRAJECTORIES // 2, **changes):
    """A small agent of conf/agent with these changes to its settings (a__b for b of a)."""
    settings = settings_of(name, **changes)
    return build_agent(settings, simulator, rng=np.random.default_rng(seed), trajectories=trajectories, pairs=pairs)


class Trial:
    """An agent, a teacher and a ledger on the toy task or a real one, as a run has them."""

    def __init__(self, agent, *overrides, seed=0, simulator=None, oracle=None, **changes):
        settings = settings_of(agent, *overrides, **changes)
        simulating, teaching, learning = np.random.SeedSequence(seed).spawn(3)
        self.simulator = simulator or ToySimulator(simulating)
        offered = {name: settings[name] for name in ("trajectories", "pairs")}
        self.agent = build_agent(settings, self.simulator, rng=np.random.default_rng(learning), **offered)
        self.ledger = Ledger(
            simulator=self.simulator,
            oracle=oracle or build(settings["oracle"], allow=settings["allow"], rng=np.random.default_rng(teaching)),
            trajectories_per_iteration=settings["trajectories"],
            pairs_per_iteration=settings["pairs"],
            bits_per_iteration=settings["bits"],
            remember=remembered(settings, self.agent),
            yardstick=settings["agent"].get("yardstick", False),
        )
        self.next = 0

    def run(self, iterations, wrap=lambda budget: budget):
        """Some iterations; the metrics of each. `wrap` is what the agent gets in place of a budget."""
        metrics = []
        for _ in range(iterations):
            learnt = self.agent.iterate(wrap(self.ledger.open_iteration(self.next)))
            metrics.append({**self.ledger.iteration_metrics(), **learnt})
            self.next += 1
        return metrics

    def evaluate(self, seed):
        """The mean return of the agent's policy, with mean actions."""
        rows = np.zeros(16, np.int64)
        collected = ToySimulator(seed).collect(
            self.agent.policy, self.agent.parameters[None], rows, iteration=0, mean_actions=True
        )
        return float(collected.returns.mean())


# A budget for agents that are tested alone


class StubBudget:
    """Pays for anything. Answers are those given, one after the other, or a function of the pairs.

    What was collected can be given, too; otherwise it has no observations and no actions, unless they are wanted.
    Trajectories are numbered from `first`, as if others had come before.
    """

    def __init__(self, *answers, collected=None, iteration=0, first=100, trajectories=TRAJECTORIES, pairs=8):
        self.iteration, self.first = iteration, first
        self.trajectories_left, self.pairs_left, self.bits_left = trajectories, pairs, 10**9
        self.answers, self.behaviour = list(answers), collected
        self.collections, self.asked, self.noted = [], [], {}

    def collect(self, policy, parameters, assignment, **how):
        assert len(assignment) <= self.trajectories_left
        self.trajectories_left -= len(assignment)
        first = self.first + sum(len(arms) for _, arms, _ in self.collections)
        self.collections.append((np.array(parameters), np.array(assignment), how))
        if self.behaviour is not None:
            return self.behaviour
        collected = behaviour(n=len(assignment), first=first, sizes=(policy.obs_size, policy.act_size))
        hidden = {name: None for name in ("observations", "actions") if name not in how["keep"]}
        return Behaviour(**{**vars(collected), **hidden, "policy": np.array(assignment)})

    def compare(self, pairs):
        assert len(pairs) <= self.pairs_left
        self.pairs_left -= len(pairs)
        self.asked.append(pairs)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return answer(pairs) if callable(answer) else answer

    def note(self, **numbers):
        self.noted |= numbers


# Behaviour, questions and answers


def behaviour(seed=0, *, n=TRAJECTORIES, lengths=None, first=100, sizes=(OBS, ACT), steps=STEPS):
    """N trajectories of random observations and actions, numbered from `first`."""
    rng = np.random.default_rng(seed)
    return Behaviour(
        policy=np.zeros(n, np.int64),
        lengths=np.full(n, steps) if lengths is None else np.asarray(lengths),
        diverged=np.zeros(n, bool),
        start=np.zeros((n, 3), np.int64),
        number=first + np.arange(n),
        observations=rng.standard_normal((n, steps + 1, sizes[0]), np.float32),
        actions=rng.standard_normal((n, steps, sizes[1]), np.float32),
    )


def pairs_of(collected):
    """The first half of the trajectories with the second half."""
    first, second = collected.number.reshape(2, -1)
    return Pairs.whole(first, second)


def clips_of(collected, steps, seed=0):
    """The same pairs, as clips that begin anywhere."""
    first, second = collected.number.reshape(2, -1)
    begin = np.random.default_rng(seed).integers(0, STEPS - steps + 1, (2, len(first)))
    one, other = (Clips(trajectory=each, step=step) for each, step in zip((first, second), begin, strict=True))
    return Pairs(first=one, second=other, steps=steps)


def shown(collected, clips, steps):
    """Row, first and last step of each clip, until its trajectory ended: one by one, as a reader would do it."""
    for number, begin in zip(clips.trajectory.tolist(), clips.step.tolist(), strict=True):
        row = collected.number.tolist().index(number)
        length = int(collected.lengths[row])
        yield row, min(begin, length), length if steps is None else min(begin + steps, length)


def preferences(probability, answered=None, label=None):
    q = np.asarray(probability, np.float64)
    return Preferences(
        probability=q,
        score=2 * q - 1,
        label=np.round(q) if label is None else np.asarray(label, np.float64),
        answered=np.ones(len(q), bool) if answered is None else np.asarray(answered),
    )


def after_the_end(collected, value):
    """The same trajectories with something else in the steps after their ends."""
    observations, actions = collected.observations.copy(), collected.actions.copy()
    for row, end in enumerate(collected.lengths):
        observations[row, end + 1 :], actions[row, end:] = value, value
    return Behaviour(**(vars(collected) | {"observations": observations, "actions": actions}))
