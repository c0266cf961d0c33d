"""Observation normalisation: the moments, the folding, and learning with it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from pbrl.normaliser import Normaliser
from pbrl.policy import GaussianPolicy
from tests.agents.toy import POLICY, StubBudget, behaviour, make, preferences


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_moments_in_parts_are_those_of_the_whole(parts: list[int], seed: int) -> None:
    rng, normaliser = np.random.default_rng(seed), Normaliser(3)
    everything = [(rng.normal(5, 2, (n, 3)) * [1, 100, 0]).astype(np.float32) for n in parts]
    for part in everything:
        normaliser.include(part)
    seen = np.concatenate(everything).astype(np.float64)
    if len(seen):
        assert_allclose(normaliser.mean, seen.mean(axis=0), rtol=1e-12, atol=1e-12)
        expected = seen.std(axis=0)
        assert_allclose(normaliser.std, np.where(expected > 1e-6, expected, 1.0), rtol=1e-6)
    assert normaliser.std[2] == 1.0, "an observation that never changes is left as it is"


def normalised(policy: GaussianPolicy) -> GaussianPolicy:
    policy.normaliser = Normaliser(policy.obs_size)
    policy.normaliser.include(np.random.default_rng(3).normal(2, [1, 4, 0.1], (50, 3)).astype(np.float32))
    return policy


def test_policies_in_numpy_and_torch_see_normalised_observations(rng: np.random.Generator) -> None:
    plain = POLICY(3, 2, initial_log_std=0.0)
    policy = normalised(POLICY(3, 2, initial_log_std=0.0))
    parameters = rng.standard_normal((2, plain.size)).astype(np.float32)
    obs = rng.normal(2, 3, (20, 3)).astype(np.float32)
    which = np.arange(20) % 2
    assert policy.normaliser is not None
    expected = plain.mean_actions(parameters, policy.normaliser(obs), which)
    assert_allclose(policy.mean_actions(parameters, obs, which), expected, rtol=1e-3, atol=1e-4)
    assert_allclose(plain.mean_actions(policy.folded(parameters), obs, which), expected, rtol=1e-3, atol=1e-4)
    one = torch.from_numpy(parameters[0])
    assert_allclose(policy.mean(one, torch.from_numpy(obs[::2])), expected[::2], rtol=1e-3, atol=1e-4)


def test_ppo_on_normalised_observations_is_ppo_on_those_observations() -> None:
    """Its networks see the same numbers, so it learns the same."""
    one, other = (make("ppo_rlhf", reward_model__learning_rate=1e-12) for _ in range(2))
    normalised(one.policy)
    seen = behaviour()
    ready = type(seen)(**(vars(seen) | {"observations": one.policy.normaliser(seen.observations)}))
    rewards = np.random.default_rng(0).standard_normal(seen.actions.shape[:2], np.float32)
    from pbrl.threads import workers

    with workers() as pool:
        one.ppo.update(seen, rewards, pool)
        other.ppo.update(ready, rewards, pool)
    assert_allclose(one.parameters, other.parameters, atol=1e-6)
    assert one.iterate(StubBudget(preferences(np.full(8, 0.9)), collected=seen))
