"""Every agent of conf/agent learns the toy task, with the settings of its file."""

import functools

import numpy as np
import pytest
from scipy import stats

from pbrl.run.settings import choices
from tests.agents.toy import Trial

# Iterations and seeds until learning shows. Gradients cost more, and vary less.
EFFORT = {"ncrs": (50, 5), "zpg": (50, 5), "ncrs_single": (10, 4), "dpo": (4, 3), "ppo_rlhf": (5, 3), "random": (1, 8)}
EFFORT |= {"prefppo": (10, 3), "ppo_true": (5, 3), "pebble": (6, 3), "sac_true": (1, 3)}
TAKE_LONG = {"prefppo", "ppo_true", "pebble", "sac_true"}  # half a minute of CPU each
MORE = {  # where tests do less than the agent's file says
    "sac_true": {"sac__updates_per_step": 1.0, "sac__batch_size": 128},
    "pebble": {"sac__updates_per_step": 0.25, "sac__batch_size": 128, "reward_model__passes": 50},
}
AGENTS = [pytest.param(name, marks=pytest.mark.slow) if name in TAKE_LONG else name for name in choices("agent")]


@functools.cache
def final_returns(agent, oracle, iterations, seeds):
    """The return of the policy learnt, for each seed."""
    found = []
    for seed in range(seeds):
        trial = Trial(agent, f"oracle={oracle}", seed=seed, **MORE.get(agent, {}))
        trial.run(iterations)
        found.append(trial.evaluate(1000 + seed))
    return found


@pytest.mark.parametrize("agent", AGENTS)
def test_it_learns_the_toy_task(agent):
    """Every agent but the floor beats the floor: permutation test over seeds."""
    iterations, seeds = EFFORT.get(agent, (20, 4))
    # Algorithm 1 of the paper needs answers that are right with a fixed margin, however small the gap.
    oracle = "mistake" if agent == "ncrs_single" else "irrational"
    learnt = final_returns(agent, oracle, iterations, seeds)
    floor = final_returns("random", "irrational", 1, 8)
    result = stats.permutation_test(
        (learnt, floor), lambda x, y: np.mean(x) - np.mean(y), alternative="greater", rng=np.random.default_rng(0)
    )
    if agent == "random":  # the floor itself
        assert result.pvalue > 0.1, "the floor has risen"
    else:
        assert result.pvalue < 0.01, (learnt, floor)
