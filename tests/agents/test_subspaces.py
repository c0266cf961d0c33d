"""Subspaces: what each can reach, and that the linear one expresses linear maps of the observation and nothing else."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from agents import subspaces
from pbrl.normaliser import Normaliser
from pbrl.policy import GaussianPolicy, SquashedGaussianPolicy
from pbrl.types import Behaviour

OBS, ACT, HIDDEN = 5, 2, 32


def make(kind, *, penalty=1e-6, squashed=False, normalised=False):
    sizes = {"hidden": [HIDDEN, HIDDEN], "hidden_gain": 2**0.5, "output_gain": 0.01}
    if squashed:
        policy = SquashedGaussianPolicy(OBS, ACT, activation="relu", log_std_bounds=(-5.0, 2.0), **sizes)
    else:
        policy = GaussianPolicy(OBS, ACT, initial_log_std=-1.0, **sizes)
    policy.normaliser = Normaliser(OBS) if normalised else None
    theta = policy.initial(np.random.default_rng(0))
    return policy, theta, subspaces.subspace(kind, policy, theta, penalty=penalty)


def observed(observations, lengths=None):
    n, steps = observations.shape[:2]
    return Behaviour(
        policy=np.zeros(n, np.int64),
        lengths=np.full(n, steps - 1) if lengths is None else np.asarray(lengths),
        diverged=np.zeros(n, bool),
        start=np.zeros((n, 3), np.int64),
        number=np.arange(n),
        observations=observations.astype(np.float32),
    )


def image(L):
    """L as a matrix [d, k]."""
    return L.lift(np.eye(subspaces.size(L.shapes), dtype=np.float32)).T


def unexplained(policy, theta, change, x):
    """Share of the variance of the mean actions' change that no linear map of the observations x [n, OBS] explains."""
    change = policy.mean_actions(theta + change, x) - policy.mean_actions(theta, x)
    inputs = np.column_stack([x, np.ones(len(x))]).astype(np.float64)
    residual = change - inputs @ np.linalg.lstsq(inputs, change, rcond=None)[0]
    return (residual**2).sum() / ((change - change.mean(0)) ** 2).sum()


# What each reaches


def test_all_is_the_identity():
    policy, _, L = make("all")
    assert_array_equal(image(L), np.eye(policy.size))


@pytest.mark.parametrize("squashed", [False, True])
def test_last_is_the_identity_on_the_last_layer(squashed):
    policy, _, L = make("last", squashed=squashed)
    outputs = policy.sizes[-1]
    k, before = (HIDDEN + 1) * outputs, (OBS + 1) * HIDDEN + (HIDDEN + 1) * HIDDEN
    expected = np.zeros((policy.size, k))
    expected[before : before + k] = np.eye(k)
    assert_array_equal(image(L), expected)


@pytest.mark.parametrize("squashed", [False, True])
def test_linear_reaches_as_many_dimensions_as_linear_maps_have_all_in_the_last_layer(squashed):
    policy, _, L = make("linear", squashed=squashed)
    matrix, last = image(L), image(make("last", squashed=squashed)[2]).any(axis=1)
    assert matrix.shape == (policy.size, (OBS + 1) * policy.sizes[-1])
    assert np.linalg.matrix_rank(matrix) == matrix.shape[1]
    assert not matrix[~last].any()


@pytest.mark.parametrize("kind", ["all", "last", "linear"])
def test_lifting_is_linear_and_takes_batches(kind):
    _, _, L = make(kind)
    x, y = np.random.default_rng(1).standard_normal((2, subspaces.size(L.shapes)), np.float32)
    assert_allclose(L.lift(2 * x - y), 2 * L.lift(x) - L.lift(y), atol=1e-5)
    batch = L.lift(np.stack([[x, y]] * 3))
    assert batch.shape == (3, 2, len(L.lift(x)))
    assert_allclose(batch[1, 1], L.lift(y), atol=1e-6)
    assert batch.dtype == np.float32


# The linear subspace


def test_before_anything_was_seen_coordinates_are_a_linear_map_of_standard_normal_observations():
    policy, theta, L = make("linear")
    assert not L.fitted
    rng = np.random.default_rng(1)
    C, c = rng.standard_normal((OBS, ACT)), rng.standard_normal(ACT)
    x = rng.standard_normal((500, OBS)).astype(np.float32)
    change = L.lift(np.sqrt(OBS + 1) * np.concatenate([C.ravel(), c]).astype(np.float32))
    moved = policy.mean_actions(theta + change, x) - policy.mean_actions(theta, x)
    assert np.mean((moved - (x @ C + c)) ** 2) < 0.03 * np.mean((x @ C + c) ** 2)
    # The last layer as a whole can do more.
    anything = make("last")[2].lift(rng.standard_normal((HIDDEN + 1) * ACT).astype(np.float32))
    assert unexplained(policy, theta, change, x) < 0.03 < 0.04 < unexplained(policy, theta, anything, x)


@pytest.mark.parametrize("normalised", [False, True])
def test_once_fitted_they_are_a_linear_map_of_what_is_observed(normalised):
    policy, theta, L = make("linear", normalised=normalised)
    rng, mean, std = np.random.default_rng(2), np.linspace(-1, 1, OBS), np.geomspace(0.1, 2, OBS)
    draw = lambda: mean + std * rng.standard_normal((40, 51, OBS))  # noqa: E731
    seen = observed(draw())
    L.fit(theta, seen)
    assert L.fitted
    x = draw().reshape(-1, OBS).astype(np.float32)
    inputs = x
    if normalised:  # as the run does after the iteration
        policy.normaliser.include(seen.observations.reshape(-1, OBS))
        inputs = policy.normaliser(x)
    C, c = rng.standard_normal((OBS, ACT)), rng.standard_normal(ACT)
    change = L.lift(np.sqrt(OBS + 1) * np.concatenate([C.ravel(), c]).astype(np.float32))
    moved = policy.mean_actions(theta + change, x) - policy.mean_actions(theta, x)
    assert np.mean((moved - (inputs @ C + c)) ** 2) < 0.03 * np.mean((inputs @ C + c) ** 2)


def test_the_regression_is_ridge_regression():
    _, theta, L = make("linear", penalty=0.1)
    x = np.random.default_rng(3).standard_normal((300, 1, OBS)).astype(np.float32)
    L.fit(theta, observed(x))
    W1, b1, W2, b2, _, _ = np.split(theta, np.cumsum([OBS * HIDDEN, HIDDEN, HIDDEN**2, HIDDEN, HIDDEN * ACT]))
    h = np.tanh(np.tanh(x[:, 0] @ W1.reshape(OBS, -1) + b1) @ W2.reshape(HIDDEN, -1) + b2).astype(np.float64)
    # As least squares, with a row of zeros and sqrt(penalty n) for each feature; the last column is the intercept.
    rows = np.block([[h, np.ones((300, 1))], [np.sqrt(0.1 * 300) * np.eye(HIDDEN), np.zeros((HIDDEN, 1))]])
    solution = np.linalg.lstsq(rows, np.concatenate([x[:, 0], np.zeros((HIDDEN, OBS))]), rcond=None)[0]
    assert_allclose(L.B, solution[:-1], atol=1e-4)
    assert_allclose(L.b[0], solution[-1], atol=1e-4)


def test_what_stands_after_an_episodes_end_is_not_observed():
    fits = []
    for rubbish in (0.0, 1e3):
        _, theta, L = make("linear", normalised=True)
        x = np.random.default_rng(4).standard_normal((10, 30, OBS))
        lengths = np.arange(10) + 5
        for row, end in enumerate(lengths):
            x[row, end + 1 :] = rubbish
        L.fit(theta, observed(x, lengths))
        fits.append(L.B)
    assert_array_equal(*fits)


def test_a_penalty_of_zero_is_refused():
    with pytest.raises(ValueError, match="penalty must be positive, not 0"):
        make("linear", penalty=0.0)


# Directions


@pytest.mark.parametrize("rank", [None, 1, 3])
def test_directions_have_uncorrelated_numbers_of_variance_one(rank):
    n, shapes = 40_000, [(4, 3), (1, 3)]
    x = subspaces.draw(np.random.default_rng(5), shapes, n, rank).astype(np.float64)
    assert x.shape == (n, 15)
    moments = x.T @ x / n
    error = np.sqrt((np.square(x[:, :, None] * x[:, None, :]).mean(0) - np.eye(15)) / n)
    assert (np.abs(moments - np.eye(15)) < 5 * error).all()


@given(rows=st.integers(1, 6), columns=st.integers(1, 6), rank=st.integers(1, 7))
def test_matrices_have_the_rank_that_was_asked_for(rows, columns, rank):
    matrices = subspaces.draw(np.random.default_rng(6), [(rows, columns)], 3, rank).reshape(3, rows, columns)
    for matrix in matrices.astype(np.float64):
        assert np.linalg.matrix_rank(matrix, tol=1e-4) == min(rows, columns, rank)


def test_matrices_that_a_rank_does_not_reduce_are_gaussian():
    x = subspaces.draw(np.random.default_rng(7), [(1, 3), (8, 2)], 2_000, 2)
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-3
    low = subspaces.draw(np.random.default_rng(7), [(8, 3)], 2_000, 1)
    assert stats.kstest(low.ravel(), "norm").pvalue < 1e-6
