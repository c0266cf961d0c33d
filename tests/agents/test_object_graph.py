"""What agents receive and hold leads to no true reward, simulator or teacher: the object graph is walked.

Not by private means, such as a module's globals: the ledger cannot be got round by accident.
"""

import functools
import types
import weakref
from collections import deque
from collections.abc import Mapping

import numpy as np
import pytest
import torch

from pbrl.ledger import Budget, Ledger
from pbrl.simulation.simulator import Simulator
from pbrl.types import Answers, Behaviour, Pairs, Preferences, Question, Trajectories
from tests.agents.toy import AGENTS, Trial
from tests.toy_task import ToySimulator

OURS = ("pbrl", "agents", "oracles", "tests", "test_object_graph")
ENDS = (type, types.ModuleType, str, bytes, int, float, complex, np.generic, np.dtype, torch.dtype, type(None))


def neighbours(found):
    """What an object leads to, and by what name."""
    if isinstance(found, Mapping):
        yield from ((f"[{key!r}]", each) for key, value in found.items() for each in (key, value))
    elif isinstance(found, list | tuple | set | frozenset | deque):
        yield from ((f"[{place}]", each) for place, each in enumerate(found))
    elif isinstance(found, np.ndarray):
        yield ".base", found.base
        if found.dtype.hasobject:
            yield from ((f"[{place}]", each) for place, each in enumerate(found.ravel().tolist()))
    elif isinstance(found, torch.Tensor):
        yield ".grad", found.grad if found.is_leaf else None
    elif isinstance(found, functools.partial):
        yield from ((f".{name}", getattr(found, name)) for name in ("func", "args", "keywords"))
    elif isinstance(found, types.MethodType):
        yield from ((f".{name}", getattr(found, name)) for name in ("__self__", "__func__"))
    elif isinstance(found, types.FunctionType):
        yield from ((f".{name}", getattr(found, name)) for name in ("__defaults__", "__kwdefaults__", "__dict__"))
        yield from ((".__closure__", contents(cell)) for cell in found.__closure__ or ())
    elif isinstance(found, types.BuiltinMethodType):
        yield ".__self__", found.__self__
    elif isinstance(found, types.GeneratorType):
        yield ".gi_frame", dict(found.gi_frame.f_locals) if found.gi_frame else None
    elif isinstance(found, weakref.ref):
        yield "()", found()
    elif type(found).__module__.partition(".")[0] in OURS:  # properties and attributes of the class, too
        for name in dir(found):
            if not (name.startswith("__") and name.endswith("__")):
                yield f".{name}", attribute(found, name)
    slots = [name for each in type(found).__mro__ for name in np.atleast_1d(each.__dict__.get("__slots__", ()))]
    yield from ((f".{name}", attribute(found, name)) for name in slots if not name.startswith("__"))
    if hasattr(found, "__dict__"):
        yield ".__dict__", vars(found)


def attribute(found, name):
    try:
        return getattr(found, name)
    except Exception:  # a slot that is empty, a property that refuses
        return None


def contents(cell):
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def walk(root):
    """Everything that can be reached, and the shortest path to it."""
    seen, queue = {}, deque([("", root)])
    while queue:
        path, found = queue.popleft()
        if isinstance(found, ENDS) or id(found) in seen:
            continue
        seen[id(found)] = found  # kept, so that no other object gets its id
        yield path, found
        queue.extend((path + step, each) for step, each in neighbours(found))


def leaks(root, ledger):
    """The paths that lead to what only the ledger may hold."""
    forbidden = (Ledger, Simulator, ToySimulator, Trajectories, Question, Answers)
    rewards = [each.task_rewards for each in ledger.simulator.collected]
    assert rewards
    found = []
    for path, reached in walk(root):
        if isinstance(reached, forbidden) or reached is ledger.oracle or reached is ledger.simulator:
            found.append(f"{path or 'itself'} is a {type(reached).__name__}")
            continue
        array = reached.detach().numpy() if isinstance(reached, torch.Tensor) else reached
        if isinstance(array, np.ndarray) and any(np.may_share_memory(array, each) for each in rewards):
            found.append(f"{path or 'itself'} shares memory with true rewards")
    return found


def collect(budget, agent):
    arms = np.zeros(budget.trajectories_left, np.int64)
    how = {"mean_actions": False, "common_start": False, "keep": ("observations", "actions")}
    return budget.collect(agent.policy, agent.parameters[None], arms, **how)


@pytest.fixture
def trial():
    return Trial("random", "trajectories=8", "pairs=4", "normalise_observations=true")


# What agents receive and hold


def test_nothing_that_an_agent_receives_leads_to_the_truth(trial):
    ledger, agent = trial.ledger, trial.agent
    budget = ledger.open_iteration(0)
    behaviour = collect(budget, agent)
    preferences = budget.compare(Pairs.whole(behaviour.number[:4], behaviour.number[4:]))
    budget.note(reward=np.arange(8.0))
    received = {
        "budget": budget,
        "a method of the budget": budget.compare,
        "behaviour": behaviour,
        "preferences": preferences,
        "policy": agent.policy,
        "generator": np.random.default_rng(0),
    }
    assert [type(each) for each in (budget, behaviour, preferences)] == [Budget, Behaviour, Preferences]
    assert {name: leaks(each, ledger) for name, each in received.items()} == {name: [] for name in received}


@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_that_an_agent_holds_leads_to_the_truth(agent):
    trial = Trial(agent, "trajectories=8", "pairs=4")
    trial.run(2)
    assert leaks(trial.agent, trial.ledger) == []
    assert leaks(trial.agent.state_dict(), trial.ledger) == []


# The walk finds what leaks


class Slots:
    __slots__ = ("secret",)


class Holder:
    def __init__(self, secret):
        self.secret = secret

    def method(self):
        """Leads to its object."""


class Hidden:
    """Has the secret in a property only."""

    kept = None

    @property
    def view(self):
        return type(self).kept


def slots(secret):
    found = Slots()
    found.secret = secret
    return found


def property_of_a_class(secret):
    return type("Leaking", (Hidden,), {"kept": None, "view": property(lambda _: secret)})()


def in_an_array(secret):
    found = np.empty(1, object)
    found[0] = secret
    return found


def generator(secret):
    yield 0
    yield secret


def started(secret):
    found = generator(secret)
    next(found)
    return found


WAYS = {
    "itself": lambda secret: secret,
    "attribute": Holder,
    "slot": slots,
    "class attribute": lambda secret: type("Leaking", (Hidden,), {"kept": secret})(),
    "property": property_of_a_class,
    "list": lambda secret: [[secret]],
    "tuple": lambda secret: (0, secret),
    "deque": lambda secret: deque([secret]),
    "dict": lambda secret: {"a": {"b": secret}},
    "set of functions": lambda secret: {lambda: secret},
    "closure": lambda secret: lambda: secret,
    "nested closure": lambda secret: Holder(lambda: (lambda: secret)()),
    "default argument": lambda secret: lambda it=secret: it,
    "bound method": lambda secret: Holder(secret).method,
    "built-in method": lambda secret: [secret].append,
    "partial": lambda secret: functools.partial(print, secret),
    "keyword of a partial": lambda secret: functools.partial(print, end=secret),
    "array of objects": in_an_array,
    "generator": started,
}


def leaking_budget(hide, secret):
    """A budget with one more attribute."""

    class Leaking(Budget):
        __slots__ = ("extra",)

    budget = Leaking(0)
    budget.extra = hide(secret)
    return budget


@pytest.mark.parametrize("way", WAYS)
def test_the_walk_finds_what_a_budget_leaks(trial, way):
    ledger = trial.ledger
    collect(ledger.open_iteration(0), trial.agent)
    trajectories = ledger.simulator.collected[0]
    secrets = {
        "ledger": ledger,
        "simulator": ledger.simulator,
        "oracle": ledger.oracle,
        "trajectories": trajectories,
        "rewards": trajectories.task_rewards[2:, 1::2],  # a view
    }
    found = {name for name, secret in secrets.items() if leaks(leaking_budget(WAYS[way], secret), ledger)}
    assert found == {*secrets}
    assert leaks(leaking_budget(WAYS[way], np.zeros(3)), ledger) == []


def test_the_walk_finds_views_tensors_and_weak_references(trial):
    ledger = trial.ledger
    behaviour = collect(ledger.open_iteration(0), trial.agent)
    rewards = ledger.simulator.collected[0].task_rewards
    wide = np.lib.stride_tricks.as_strided(rewards, shape=(1,))
    for leak in (torch.from_numpy(rewards)[0], wide, weakref.ref(ledger), ledger.state_dict, ledger._timed):
        assert leaks(Holder(leak), ledger)
    taken = rewards[:0]  # shows nothing, but its base does
    assert any(".base" in path for path in leaks(Holder(taken), ledger))
    assert leaks(Holder(rewards.copy()), ledger) == []
    assert leaks(behaviour, ledger) == []


def test_the_walk_ends_where_objects_lead_to_each_other():
    one, other = Holder(None), Holder(None)
    one.secret, other.secret = other, one
    assert len([path for path, reached in walk(one) if isinstance(reached, Holder)]) == 2
