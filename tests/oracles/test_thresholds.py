"""What the thresholds of skip and equal scale with: the mean return of the last trajectories that were paid for."""

from types import SimpleNamespace

import numpy as np
import pytest
from teachers import RATIONAL

from pbrl.ledger import Ledger
from pbrl.types import Pairs, Trajectories

POLICY = SimpleNamespace(normaliser=None)  # all that the ledger asks of one
HOW = {"mean_actions": False, "common_start": False, "keep": ()}


class ExactReturns:
    """A simulator: the return of a trajectory is `parameters[k, 0]`, earned at the first of two steps."""

    def collect(self, policy, parameters, assignment, *, iteration, first_trajectory, **_):
        del policy, iteration
        count = len(assignment)
        return Trajectories(
            policy=assignment,
            lengths=np.full(count, 2),
            diverged=np.zeros(count, bool),
            start=np.zeros((count, 3), np.int64),
            number=first_trajectory + np.arange(count),
            task_rewards=parameters[assignment, :1].astype(np.float64) * [1.0, 0.0],
        )


def collect(budget, *returns):
    """Trajectories with these returns: their numbers."""
    parameters = np.array(returns, np.float32)[:, None]
    return budget.collect(POLICY, parameters, np.arange(len(returns)), **HOW).number


def answered(budget, number):
    """Whether the teacher answers about this trajectory, or skips it."""
    return bool(budget.compare(Pairs.whole(number, number)).answered[0])


@pytest.fixture
def ledger():
    """Of a teacher that skips below half of R; an iteration has 4 trajectories."""
    teacher = RATIONAL(eps_skip=0.5, rng=np.random.default_rng(0))
    return Ledger(simulator=ExactReturns(), oracle=teacher, trajectories_per_iteration=4, pairs_per_iteration=8)


def test_they_scale_with_the_last_trajectories_as_many_as_an_iteration_has(ledger):
    budget = ledger.open_iteration(0)
    numbers = collect(budget, 10.0, 6.0)  # R = 8
    assert answered(budget, numbers[1:])  # 6 > 4
    numbers = collect(budget, 20.0, 4.0)  # R = 10
    assert not answered(budget, numbers[1:])  # 4 < 5
    budget = ledger.open_iteration(1)
    one = collect(budget, 8.0)  # R = (6 + 20 + 4 + 8) / 4 = 9.5
    assert answered(budget, one)  # 8 > 4.75
    other = collect(budget, 96.0)  # R = (20 + 4 + 8 + 96) / 4 = 32
    assert not answered(budget, one)  # 8 < 16
    assert answered(budget, other)
    three = collect(budget, 3.0, 1.0)  # R = (8 + 96 + 3 + 1) / 4 = 27: those of this iteration alone
    assert not answered(budget, three[:1])
    assert ledger._question(Pairs.whole(one, other)).mean_return == 27.0


def test_questions_before_the_first_collection_of_an_iteration_use_the_iteration_before(ledger):
    numbers = collect(ledger.open_iteration(0), 10.0, 10.0, 4.0, 4.0)  # R = 7
    budget = ledger.open_iteration(1)
    assert answered(budget, numbers[2:3])  # 4 > 3.5


def test_the_window_survives_a_resume(ledger):
    numbers = collect(ledger.open_iteration(0), 10.0, 10.0, 4.0, 4.0)
    teacher = RATIONAL(eps_skip=0.5, rng=np.random.default_rng(0))
    resumed = Ledger(simulator=ExactReturns(), oracle=teacher, trajectories_per_iteration=4, pairs_per_iteration=8)
    resumed.load_state_dict(ledger.state_dict())
    budget = resumed.open_iteration(1)
    collect(budget, 0.0)  # R = (10 + 4 + 4 + 0) / 4 = 4.5
    assert answered(budget, numbers[2:3])
    collect(budget, 30.0)  # R = 9.5
    assert not answered(budget, numbers[2:3])


def test_equal_scales_with_the_same(ledger):
    ledger.oracle.eps_skip, ledger.oracle.eps_equal = 0.0, 0.5
    budget = ledger.open_iteration(0)
    numbers = collect(budget, 10.0, 6.0)  # R = 8: 10 and 6 are 4 apart
    pair = Pairs.whole(numbers[:1], numbers[1:])
    assert budget.compare(pair).label[0] == 0.0
    collect(budget, 10.0, 10.0)  # R = 9
    assert budget.compare(pair).label[0] == 0.5
