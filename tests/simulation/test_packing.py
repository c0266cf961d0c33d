"""The compiled policies: the same actions as in NumPy, whichever rows they are computed with."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pbrl.normaliser import Normaliser
from pbrl.policy import GaussianPolicy, LowRank, Policy, SquashedGaussianPolicy
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


def low_rank_changes(policy: Policy, K: int, rank: int, rng: np.random.Generator) -> Float32:
    """Changes [K, size] whose weights have that rank, and whose biases and what follows them have any."""
    parts = []
    for inputs, outputs in pairwise(policy.sizes):
        U, V = rng.standard_normal((K, inputs, rank)), rng.standard_normal((K, rank, outputs))
        parts += [(U @ V).reshape(K, -1), rng.standard_normal((K, outputs))]
    rest = policy.size - sum(part.shape[1] for part in parts)
    return (0.1 * np.concatenate([*parts, rng.standard_normal((K, rest))], axis=1)).astype(np.float32)


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("normalised", [False, True])
def test_policies_of_low_rank_act_as_their_parameters_say(
    kind: str, sizes: Sizes, rank: int, normalised: bool, rng: np.random.Generator
) -> None:
    policy = make(kind, *sizes)
    if normalised:
        policy.normaliser = Normaliser(policy.obs_size)
        policy.normaliser.include(rng.normal(1, 2, (50, policy.obs_size)).astype(np.float32))
    base, change = some(policy, rng), low_rank_changes(policy, 5, rank, rng)
    obs, which = rng.standard_normal((13, policy.obs_size)).astype(np.float32), rng.integers(0, 5, 13)
    noise = rng.standard_normal((13, 1, policy.act_size)).astype(np.float32)
    actions = [np.empty((13, policy.act_size), np.float32) for _ in range(2)]
    policies = LowRank.around(policy, base, change, rank)
    np.testing.assert_allclose(np.asarray(policies), base + change, rtol=1e-5, atol=1e-5)
    for parameters, into in zip((base + change, policies), actions, strict=True):
        native.act(pack(policy, parameters), which, obs, noise, 0, into)
    np.testing.assert_allclose(*actions, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
@given(rows=st.integers(1, 11), data=st.data())
def test_a_row_of_low_rank_alone_equals_the_row_in_a_batch(kind: str, rows: int, data: st.DataObject) -> None:
    policy, rng = make(kind, 5, 3, (16, 20)), np.random.default_rng(rows)
    policies = LowRank.around(policy, some(policy, rng), low_rank_changes(policy, 3, 2, rng), 2)
    which = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    obs = rng.standard_normal((rows, 5)).astype(np.float32)
    together = mean_actions(policy, policies, obs, which)
    for i in range(rows):
        np.testing.assert_array_equal(mean_actions(policy, policies, obs[i : i + 1], which[i : i + 1])[0], together[i])


def test_layers_that_do_not_change_have_rank_0_and_narrow_ones_any(rng: np.random.Generator) -> None:
    policy = make("gaussian", 9, 2, (16, 16))
    change = np.zeros((4, policy.size), np.float32)
    change[:, -36:-4] = rng.standard_normal((4, 32))  # the last layer's weights
    policies = LowRank.around(policy, some(policy, rng), change, rank=2)
    assert [layer.U.shape[2] for layer in policies.layers] == [0, 0, 2]
    np.testing.assert_array_equal((policies.layers[2].U @ policies.layers[2].V).reshape(4, -1), change[:, -36:-4])


def test_changes_of_a_higher_rank_than_said_are_refused(rng: np.random.Generator) -> None:
    policy = make("gaussian", 5, 3, (16, 16))
    base, change = some(policy, rng), low_rank_changes(policy, 3, 2, rng)
    with pytest.raises(ValueError, match=r"layer 0 .* of which rank 1 leaves .* higher rank"):
        LowRank.around(policy, base, change, rank=1)


_HASH = """
import hashlib
import numpy as np
from pbrl.policy import GaussianPolicy, LowRank
from pbrl.simulation.packing import mean_actions
policy = GaussianPolicy(17, 6, hidden=[40, 24], hidden_gain=1.4, output_gain=1.0, initial_log_std=0.0)
rng = np.random.default_rng(0)
change = np.zeros((3, policy.size), np.float32)
change[:, :680] = (rng.standard_normal((3, 17, 1)) * rng.standard_normal((3, 1, 40))).reshape(3, -1)
base, obs = policy.initial(rng), rng.standard_normal((9, 17), np.float32)
found = [mean_actions(policy, each, obs, np.arange(9) // 2 % 3) for each in
         (base + change, LowRank.around(policy, base, change, 1))]
print(hashlib.sha256(b"".join(each.tobytes() for each in found)).hexdigest())
"""


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_processors_vectors(tmp_path: Path) -> None:
    hashes = []
    for processor in ({}, {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / str(len(hashes))), **processor}
        done = subprocess.run(
            [sys.executable, "-c", _HASH], env=environment, capture_output=True, text=True, check=True
        )
        hashes.append(done.stdout)
    assert hashes[0] == hashes[1]
