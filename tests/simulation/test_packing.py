"""The compiled policies: the same actions as in NumPy, whichever rows they are computed with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pbrl.normaliser import Normaliser
from pbrl.policy import GaussianPolicy, Policy, SquashedGaussianPolicy
from pbrl.simulation import native
from pbrl.simulation.packing import mean_actions, pack
from pbrl.types import Float32

Sizes = tuple[int, int, tuple[int, ...]]
SIZES: list[Sizes] = [(17, 6, (256, 256)), (24, 6, (32,)), (67, 21, (40, 24, 8)), (1, 1, (3,)), (9, 8, (7, 5))]
KINDS = ["gaussian", "squashed_tanh", "squashed_relu"]


def make(kind: str, obs: int, act: int, hidden: tuple[int, ...]) -> Policy:
    gains = {"hidden_gain": 2**0.5, "output_gain": 1.0}
    if kind == "gaussian":
        return GaussianPolicy(obs, act, hidden=hidden, initial_log_std=-0.5, **gains)
    activation: Any = kind.removeprefix("squashed_")
    bounds = -0.5 * np.ones(act), np.arange(1.0, act + 1)
    return SquashedGaussianPolicy(
        obs, act, hidden=hidden, activation=activation, log_std_bounds=(-5, 2), action_bounds=bounds, **gains
    )


def some(policy: Policy, rng: np.random.Generator) -> Float32:
    return policy.initial(rng) + 0.1 * rng.standard_normal(policy.size).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("normalised", [False, True])
def test_compiled_mean_actions_equal_those_in_numpy(
    kind: str, sizes: Sizes, normalised: bool, rng: np.random.Generator
) -> None:
    policy = make(kind, *sizes)
    if normalised:
        policy.normaliser = Normaliser(policy.obs_size)
        policy.normaliser.include(rng.normal(1, 2, (50, policy.obs_size)).astype(np.float32))
    parameters, which = np.stack([some(policy, rng) for _ in range(3)]), rng.integers(0, 3, 13)
    obs = rng.standard_normal((13, policy.obs_size)).astype(np.float32)
    expected = policy.mean_actions(parameters, obs, which)
    np.testing.assert_allclose(mean_actions(policy, parameters, obs, which), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_noise_is_scaled_by_the_policys_std(kind: str, rng: np.random.Generator) -> None:
    policy = make(kind, 5, 3, (16, 16))
    parameters, noise = some(policy, rng), rng.standard_normal((13, 4, 3)).astype(np.float32)
    obs, actions = rng.standard_normal((13, 5)).astype(np.float32), np.empty((13, 3), np.float32)
    native.act(pack(policy, parameters), np.zeros(13, np.int64), obs, noise, 2, actions)
    expected, _ = policy.sample(torch.from_numpy(parameters), torch.from_numpy(obs), torch.from_numpy(noise[:, 2]))
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-5)


def test_a_squashed_action_stays_inside_its_bounds() -> None:
    policy = SquashedGaussianPolicy(
        1, 1, hidden=[2], activation="relu", hidden_gain=1.0, output_gain=1.0, log_std_bounds=(-5, 2)
    )
    parameters = np.zeros((2, policy.size), np.float32)
    parameters[:, -2] = -50, 50
    low, high = mean_actions(policy, parameters, np.zeros((2, 1), np.float32), np.array([0, 1]))[:, 0]
    assert -1 < low < -0.999999
    assert 0.999999 < high < 1


def test_tanh_is_tanh() -> None:
    x = np.linspace(-12, 12, 40_000, dtype=np.float32).reshape(4, -1)
    y = x.copy()
    native._tanh(y, *y.shape)
    assert np.abs(y - np.tanh(x.astype(np.float64))).max() < 4e-7
    assert np.abs(y).max() <= 1 + 1e-7


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 11), data=st.data())
def test_a_row_alone_equals_the_row_in_a_batch(kind: str, rows: int, data: st.DataObject) -> None:
    policy, rng = make(kind, 5, 3, (16, 16)), np.random.default_rng(rows)
    parameters = rng.standard_normal((3, policy.size)).astype(np.float32)
    which = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    obs = rng.standard_normal((rows, 5)).astype(np.float32)
    together = mean_actions(policy, parameters, obs, which)
    for i in range(rows):
        np.testing.assert_array_equal(mean_actions(policy, parameters[which[i]], obs[i : i + 1])[0], together[i])
