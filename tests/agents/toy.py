"""A task that is learnt in seconds: the reward is the closeness of the action to a target. And small agents for it."""

from functools import partial
from pathlib import Path

import numpy as np
from hydra.utils import instantiate
from omegaconf import OmegaConf

import conf
from oracles import links
from oracles.teacher import Teacher
from pbrl.ledger import Ledger
from pbrl.policy import GaussianPolicy
from pbrl.types import Behaviour, Pairs, Preferences, Trajectories

OBS, ACT, STEPS, TRAJECTORIES = 3, 2, 20, 16
TARGET = np.array([0.8, -0.6])
POLICY = partial(GaussianPolicy, hidden=[16, 16], hidden_gain=2**0.5, output_gain=0.01)


class ToySimulator:
    """Observations are noise; the reward is minus the squared distance of the action from the target."""

    obs_size, act_size = OBS, ACT

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, mean_actions, common_start, keep):
        del common_start, keep
        n = len(assignment)
        rng = np.random.default_rng([iteration, first_trajectory])
        observations = rng.standard_normal((n, STEPS + 1, OBS), np.float32)
        rows = np.repeat(assignment, STEPS)
        actions = policy.mean_actions(parameters, observations[:, :-1].reshape(-1, OBS), rows).reshape(n, STEPS, ACT)
        if not mean_actions:
            std = np.exp(parameters[:, -ACT:])[assignment]
            actions += std[:, None] * rng.standard_normal(actions.shape, np.float32)
        return Trajectories(
            policy=np.asarray(assignment),
            lengths=np.full(n, STEPS),
            diverged=np.zeros(n, bool),
            start=np.zeros((n, 3), np.int64),
            observations=observations,
            actions=actions,
            task_rewards=-((actions - TARGET) ** 2).sum(-1).astype(np.float64),
        )


def make(name, *, seed=0, simulator=ToySimulator, initial_log_std=0.0, **changes):
    """An agent of conf/agent with a small policy and these changes to its settings (a__b for b of a)."""
    settings = OmegaConf.load(Path(conf.__file__).parent / "agent" / f"{name}.yaml")
    for key, value in changes.items():
        OmegaConf.update(settings, key.replace("__", "."), value)
    policy = POLICY(simulator.obs_size, simulator.act_size, initial_log_std=initial_log_std)
    return instantiate(settings, policy=policy, rng=np.random.default_rng(seed), trajectories=TRAJECTORIES)


def toy_ledger(*, simulator=None):
    traits = {"gamma": 1.0, "eps_mistake": 0.0, "eps_skip": 0.0, "eps_equal": 0.0, "tie": "equal"}
    return Ledger(
        simulator=simulator or ToySimulator(),
        oracle=Teacher(link=links.logistic, tau=1.0, bpref_compat=False, rng=np.random.default_rng(1), **traits),
        trajectories_per_iteration=TRAJECTORIES,
        pairs_per_iteration=TRAJECTORIES // 2,
    )


def train(agent, ledger, iterations):
    """The runner's loop; the mean return and the metrics of each of the iterations."""
    returns, metrics = [], []
    for iteration in iterations:
        budget = ledger.open_iteration(iteration)
        while (pairs := agent.ask(budget)) is not None:
            metrics.append(agent.tell(pairs, ledger.compare(pairs)))
        returns.append(ledger.iteration_metrics()["return_mean"])
    return returns, metrics


def behaviour(seed=0, *, n=TRAJECTORIES, lengths=None):
    rng = np.random.default_rng(seed)
    return Behaviour(
        policy=np.zeros(n, np.int64),
        lengths=np.full(n, STEPS) if lengths is None else np.asarray(lengths),
        diverged=np.zeros(n, bool),
        start=np.zeros((n, 3), np.int64),
        observations=rng.standard_normal((n, STEPS + 1, OBS), np.float32),
        actions=rng.standard_normal((n, STEPS, ACT), np.float32),
    )


def pairs_of(collected):
    first, second = np.arange(len(collected)).reshape(2, -1)
    return Pairs(behaviour=collected, first=first, second=second)


def preferences(probability, answered=None):
    q = np.asarray(probability, np.float64)
    answered = np.ones(len(q), bool) if answered is None else np.asarray(answered)
    return Preferences(probability=q, score=2 * q - 1, label=np.round(q), answered=answered)


def after_the_end(collected, value):
    """The same trajectories with something else in the steps after their ends."""
    observations, actions = collected.observations.copy(), collected.actions.copy()
    for row, end in enumerate(collected.lengths):
        observations[row, end + 1 :], actions[row, end:] = value, value
    return Behaviour(**(vars(collected) | {"observations": observations, "actions": actions}))
