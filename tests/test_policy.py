"""One flat vector, one network: compiled, in torch and by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pbrl.policy import GaussianPolicy
from pbrl.simulation import native
from pbrl.types import Float32


def make(obs: int = 17, act: int = 6, hidden: tuple[int, ...] = (256, 256), log_std: float = 0.0) -> GaussianPolicy:
    return GaussianPolicy(obs, act, hidden=hidden, hidden_gain=2**0.5, output_gain=0.01, initial_log_std=log_std)


def by_hand(policy: GaussianPolicy, parameters: Float32, obs: Float32) -> np.ndarray:
    """The network in double precision, straight from the layout in the docstring."""
    x, rest = obs.astype(np.float64), parameters.astype(np.float64)
    for layer, (n, m) in enumerate(zip(policy.sizes[:-1], policy.sizes[1:], strict=True)):
        weights, bias, rest = rest[: n * m].reshape(n, m), rest[n * m : n * m + m], rest[n * m + m :]
        x = x @ weights + bias
        if layer < len(policy.sizes) - 2:
            x = np.tanh(x)
    assert len(rest) == policy.act_size
    return x


def test_the_papers_architecture_and_initialisation(rng: np.random.Generator) -> None:
    policy = make(log_std=-1.0)
    parameters = policy.initial(rng)
    assert parameters.dtype == np.float32
    assert parameters.shape == (policy.size,) == (17 * 256 + 256 + 256 * 256 + 256 + 256 * 6 + 6 + 6,)
    first = parameters[: 17 * 256].reshape(17, 256)
    np.testing.assert_allclose(first @ first.T, 2 * np.eye(17), atol=1e-5)  # orthogonal rows, gain sqrt(2)
    assert not parameters[17 * 256 : 18 * 256].any()  # zero bias
    second = parameters[18 * 256 : 18 * 256 + 256**2].reshape(256, 256)
    np.testing.assert_allclose(second.T @ second, 2 * np.eye(256), atol=1e-5)
    last = parameters[-12 - 256 * 6 : -12].reshape(256, 6)
    np.testing.assert_allclose(last.T @ last, 1e-4 * np.eye(6), atol=1e-9)
    np.testing.assert_array_equal(parameters[-6:], np.float32(-1.0))


def test_orthogonal_matrices_are_drawn_uniformly() -> None:
    """Signs included: the mean of the draws is zero, which QR without its sign correction misses."""
    policy = make(4, 1, (4,))
    draws = np.stack([policy.initial(np.random.default_rng(seed))[:16] for seed in range(2000)])
    assert np.abs(draws.mean(axis=0)).max() < 5 * np.sqrt(2) * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize(
    "sizes", [(17, 6, (256, 256)), (24, 6, (32,)), (67, 21, (40, 24, 8)), (1, 1, (3,)), (9, 8, (7, 5))]
)
def test_compiled_torch_and_hand_computed_means_agree(
    sizes: tuple[int, int, tuple[int, ...]], rng: np.random.Generator
) -> None:
    policy = make(*sizes)
    parameters = policy.initial(rng) + 0.1 * rng.standard_normal(policy.size).astype(np.float32)
    obs = rng.standard_normal((13, policy.obs_size)).astype(np.float32)
    expected = by_hand(policy, parameters, obs)
    np.testing.assert_allclose(policy.mean_actions(parameters, obs), expected, rtol=1e-4, atol=1e-4)
    mean = policy.mean(torch.from_numpy(parameters).double(), torch.from_numpy(obs).double())
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_tanh_is_tanh() -> None:
    x = np.linspace(-12, 12, 40_000, dtype=np.float32).reshape(4, -1)
    y = x.copy()
    native._tanh(y, y.shape[1])
    assert np.abs(y - np.tanh(x.astype(np.float64))).max() < 4e-7
    assert np.abs(y).max() <= 1 + 1e-7


@given(rows=st.integers(1, 11), data=st.data())
def test_a_row_alone_equals_the_row_in_a_batch(rows: int, data: st.DataObject) -> None:
    policy, rng = make(5, 3, (16, 16)), np.random.default_rng(rows)
    parameters = rng.standard_normal((3, policy.size)).astype(np.float32)
    which = np.array(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    obs = rng.standard_normal((rows, 5)).astype(np.float32)
    together = policy.mean_actions(parameters, obs, which)
    for i in range(rows):
        np.testing.assert_array_equal(policy.mean_actions(parameters[which[i]], obs[i : i + 1])[0], together[i])


def test_log_probability_is_the_gaussians(rng: np.random.Generator) -> None:
    policy = make(5, 3, (8,), log_std=0.3)
    parameters = torch.from_numpy(policy.initial(rng) + rng.standard_normal(policy.size).astype(np.float32)).double()
    obs, actions = torch.randn(4, 7, 5, dtype=torch.double), torch.randn(4, 7, 3, dtype=torch.double)
    normal = torch.distributions.Normal(policy.mean(parameters, obs), parameters[-3:].exp())
    torch.testing.assert_close(
        policy.log_probability(parameters, obs, actions), normal.log_prob(actions).sum(-1), rtol=1e-10, atol=1e-10
    )


def test_torch_gradients_reach_every_parameter(rng: np.random.Generator) -> None:
    policy = make(3, 2, (4, 4))
    parameters = torch.from_numpy(rng.standard_normal(policy.size)).requires_grad_()
    obs, actions = torch.randn(6, 3, dtype=torch.double), torch.randn(6, 2, dtype=torch.double)
    assert torch.autograd.gradcheck(lambda p: policy.log_probability(p, obs, actions), (parameters,))
    policy.log_probability(parameters, obs, actions).sum().backward()
    assert parameters.grad is not None
    assert (parameters.grad != 0).all()


def test_layer_widths_must_be_positive() -> None:
    with pytest.raises(ValueError, match=r"positive layer widths, not \[256, 0\]"):
        make(hidden=(256, 0))
