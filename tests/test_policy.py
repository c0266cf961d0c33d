"""One flat vector, one network: in NumPy, in torch and by hand; probabilities as torch.distributions has them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import AffineTransform, Normal, TanhTransform, TransformedDistribution

from pbrl.normaliser import Normaliser
from pbrl.policy import GaussianPolicy, Policy, SquashedGaussianPolicy, log_probability_and_score
from pbrl.types import Float32

BOUNDS = np.array([-0.5, -1.0, 0.25]), np.array([1.5, 1.0, 0.5])


def gaussian(obs: int = 17, act: int = 6, hidden: tuple[int, ...] = (256, 256), log_std: float = 0.0) -> GaussianPolicy:
    return GaussianPolicy(obs, act, hidden=hidden, hidden_gain=2**0.5, output_gain=0.01, initial_log_std=log_std)


def squashed(
    obs: int = 17, act: int = 6, hidden: tuple[int, ...] = (256, 256), **changes: Any
) -> SquashedGaussianPolicy:
    settings = {"activation": "relu", "hidden_gain": 1.0, "output_gain": 1.0, "log_std_bounds": (-5, 2)} | changes
    return SquashedGaussianPolicy(obs, act, hidden=hidden, **settings)


def by_hand(policy: Any, parameters: Float32, obs: Float32) -> tuple[np.ndarray, np.ndarray]:
    """The network's outputs in double precision, straight from the layout in the docstring, and what is left over."""
    x, rest = obs.astype(np.float64), parameters.astype(np.float64)
    for layer, (n, m) in enumerate(zip(policy.sizes[:-1], policy.sizes[1:], strict=True)):
        weights, bias, rest = rest[: n * m].reshape(n, m), rest[n * m : n * m + m], rest[n * m + m :]
        x = x @ weights + bias
        if layer < len(policy.sizes) - 2:
            x = np.tanh(x) if policy.network.activation == "tanh" else x * (x > 0)
    return x, rest


def some(policy: Policy, rng: np.random.Generator, scale: float = 0.1) -> Float32:
    return policy.initial(rng) + scale * rng.standard_normal(policy.size).astype(np.float32)


def test_the_papers_architecture_and_initialisation(rng: np.random.Generator) -> None:
    policy = gaussian(log_std=-1.0)
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


def test_the_squashed_policy_has_twice_the_outputs_and_nothing_else(rng: np.random.Generator) -> None:
    policy = squashed(5, 3, (8,))
    assert policy.sizes == (5, 8, 6)
    assert policy.initial(rng).shape == (policy.size,) == (5 * 8 + 8 + 8 * 6 + 6,)


def test_orthogonal_matrices_are_drawn_uniformly() -> None:
    """Signs included: the mean of the draws is zero, which QR without its sign correction misses."""
    policy = gaussian(4, 1, (4,))
    draws = np.stack([policy.initial(np.random.default_rng(seed))[:16] for seed in range(2000)])
    assert np.abs(draws.mean(axis=0)).max() < 5 * np.sqrt(2) * 0.5 / np.sqrt(2000)


@pytest.mark.parametrize(
    "sizes", [(17, 6, (256, 256)), (24, 6, (32,)), (67, 21, (40, 24, 8)), (1, 1, (3,)), (9, 8, (7, 5))]
)
def test_gaussian_means_in_numpy_and_torch_equal_those_by_hand(
    sizes: tuple[int, int, tuple[int, ...]], rng: np.random.Generator
) -> None:
    policy = gaussian(*sizes)
    parameters, obs = some(policy, rng), rng.standard_normal((13, policy.obs_size)).astype(np.float32)
    expected, rest = by_hand(policy, parameters, obs)
    assert len(rest) == policy.act_size
    np.testing.assert_allclose(policy.mean_actions(parameters, obs), expected, rtol=1e-4, atol=1e-4)
    mean = policy.mean(torch.from_numpy(parameters).double(), torch.from_numpy(obs).double())
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_squashed_means_in_numpy_and_torch_equal_those_by_hand(
    activation: str, bounds: Any, rng: np.random.Generator
) -> None:
    policy = squashed(5, 3, (16, 12), activation=activation, action_bounds=bounds)
    parameters, obs = some(policy, rng), rng.standard_normal((13, 5)).astype(np.float32)
    outputs, rest = by_hand(policy, parameters, obs)
    assert len(rest) == 0
    low, high = bounds or (-1, 1)
    expected = low + (np.tanh(outputs[:, :3]) + 1) / 2 * (np.array(high) - low)
    np.testing.assert_allclose(policy.mean_actions(parameters, obs), expected, rtol=1e-4, atol=1e-5)
    mean = policy.mean(torch.from_numpy(parameters).double(), torch.from_numpy(obs).double())
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-12, atol=1e-12)
    assert (expected > low).all()
    assert (expected < high).all()


@pytest.mark.parametrize("make", [gaussian, squashed])
def test_each_row_acts_under_its_own_parameters(make: Any, rng: np.random.Generator) -> None:
    policy = make(5, 3, (16,))
    parameters = np.stack([some(policy, rng) for _ in range(3)])
    obs, which = rng.standard_normal((9, 5)).astype(np.float32), np.array([2, 0, 0, 1, 2, 2, 0, 1, 0])
    together = policy.mean_actions(parameters, obs, which)
    for i, k in enumerate(which):
        np.testing.assert_allclose(policy.mean_actions(parameters[k], obs[i : i + 1])[0], together[i], rtol=1e-5)


@pytest.mark.parametrize("make", [gaussian, squashed])
def test_exported_weights_give_the_same_actions(make: Any, rng: np.random.Generator) -> None:
    policy = make(5, 3, (16, 8))
    policy.normaliser = Normaliser(5)
    policy.normaliser.include(rng.normal(3, 2, (40, 5)).astype(np.float32))
    parameters, obs = np.stack([some(policy, rng)] * 2), rng.normal(3, 2, (9, 5)).astype(np.float32)
    weights, x = policy.export(parameters), obs
    for layer, (matrix, bias) in enumerate(weights.layers):
        x = x @ matrix[1] + bias[1]
        if layer < len(weights.layers) - 1:
            x = np.tanh(x) if weights.activation == "tanh" else np.maximum(x, 0)
    if weights.centre_and_scale is not None:
        centre, scale = weights.centre_and_scale
        x = centre + scale * np.tanh(x[:, :3])
    expected = policy.mean(torch.from_numpy(parameters[1]), torch.from_numpy(obs)).numpy()
    np.testing.assert_allclose(x, expected, rtol=1e-3, atol=1e-4)


def test_log_probability_is_the_gaussians(rng: np.random.Generator) -> None:
    policy = gaussian(5, 3, (8,), log_std=0.3)
    parameters = torch.from_numpy(some(policy, rng, scale=1.0)).double()
    obs, actions = torch.randn(4, 7, 5, dtype=torch.double), torch.randn(4, 7, 3, dtype=torch.double)
    normal = Normal(policy.mean(parameters, obs), parameters[-3:].exp())
    torch.testing.assert_close(
        policy.log_probability(parameters, obs, actions), normal.log_prob(actions).sum(-1), rtol=1e-10, atol=1e-10
    )
    noise = torch.randn(4, 7, 3, dtype=torch.double)
    drawn, log_probability = policy.sample(parameters, obs, noise)
    torch.testing.assert_close((drawn - normal.mean) / normal.stddev, noise)
    torch.testing.assert_close(log_probability, normal.log_prob(drawn).sum(-1))


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("bounds", [None, BOUNDS])
def test_log_probability_is_the_squashed_gaussians(activation: str, bounds: Any, rng: np.random.Generator) -> None:
    policy = squashed(5, 3, (8,), activation=activation, action_bounds=bounds, log_std_bounds=(-4, 1))
    flat = some(policy, rng, scale=0.3)
    parameters, obs = torch.from_numpy(flat).double(), torch.randn(4, 7, 5, dtype=torch.double)
    outputs = torch.from_numpy(by_hand(policy, flat, obs.numpy())[0])
    std = torch.exp(-4 + 5 / 2 * (torch.tanh(outputs[..., 3:]) + 1))
    low, high = (torch.as_tensor(bound, dtype=torch.double) for bound in bounds or (-np.ones(3), np.ones(3)))
    into_bounds = [TanhTransform(cache_size=1), AffineTransform((low + high) / 2, (high - low) / 2)]
    reference = TransformedDistribution(Normal(outputs[..., :3], std), into_bounds)
    actions = reference.sample()
    torch.testing.assert_close(
        policy.log_probability(parameters, obs, actions), reference.log_prob(actions).sum(-1), rtol=1e-7, atol=1e-7
    )
    noise = torch.randn(4, 7, 3, dtype=torch.double)
    drawn, log_probability = policy.sample(parameters, obs, noise)
    expected = outputs[..., :3] + std * noise
    for transform in into_bounds:
        expected = transform(expected)
    torch.testing.assert_close(drawn, expected)
    torch.testing.assert_close(log_probability, reference.log_prob(expected).sum(-1), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(log_probability, policy.log_probability(parameters, obs, drawn), rtol=1e-6, atol=1e-6)


def test_saturated_actions_have_finite_log_probabilities_and_gradients() -> None:
    """tanh rounds to 1 in single precision; 1 - tanh(x)^2 is then 0, and its logarithm infinite."""
    policy = squashed(1, 1, (2,))
    parameters = torch.zeros(policy.size)
    parameters[-2] = 40.0  # the bias of the mean
    parameters.requires_grad_()
    obs = torch.zeros(3, 1)
    action, log_probability = policy.sample(parameters, obs, torch.tensor([[-1.0], [0.0], [1.0]]))
    assert (action == 1).all()
    std = -1.5  # the middle of the bounds of the log-std
    x = 40 + np.exp(std) * np.array([-1.0, 0.0, 1.0])
    expected = -0.5 * np.array([1.0, 0.0, 1.0]) - std - 0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - x)
    np.testing.assert_allclose(log_probability.detach(), expected, rtol=1e-5)
    at_bound = policy.log_probability(parameters, obs, action.detach())
    assert torch.isfinite(at_bound).all()
    (log_probability + at_bound).sum().backward()
    assert torch.isfinite(parameters.grad).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [gaussian, squashed])
def test_torch_gradients_reach_every_parameter(make: Any, rng: np.random.Generator) -> None:
    policy = make(3, 2, (4, 4), **({} if make is gaussian else {"activation": "tanh"}))
    parameters = torch.from_numpy(rng.standard_normal(policy.size)).requires_grad_()
    obs, noise = torch.randn(6, 3, dtype=torch.double), torch.randn(6, 2, dtype=torch.double)
    actions = torch.tanh(torch.randn(6, 2, dtype=torch.double))
    assert torch.autograd.gradcheck(lambda p: policy.log_probability(p, obs, actions), (parameters,))
    assert torch.autograd.gradcheck(lambda p: policy.sample(p, obs, noise), (parameters,))
    policy.log_probability(parameters, obs, actions).sum().backward()
    assert parameters.grad is not None
    assert (parameters.grad != 0).all()


@pytest.mark.parametrize("make", [gaussian, squashed])
@pytest.mark.parametrize("normalised", [False, True])
def test_the_score_is_the_gradient_of_the_weighted_log_probabilities(
    make: Any, normalised: bool, rng: np.random.Generator
) -> None:
    policy = make(5, 3, (16, 8))
    if normalised:
        policy.normaliser = Normaliser(policy.obs_size)
        policy.normaliser.include(rng.normal(1, 2, (50, policy.obs_size)).astype(np.float32))
    theta = torch.from_numpy(some(policy, rng)).requires_grad_()
    obs, noise, weights = (
        torch.from_numpy(rng.standard_normal(shape, np.float32)) for shape in ((700, 5), (700, 3), 700)
    )
    actions = policy.sample(theta, obs, noise)[0].detach()
    expected = policy.log_probability(theta, obs, actions)
    log_pi, score = log_probability_and_score(policy, theta, obs, actions, weights)
    torch.testing.assert_close(log_pi, expected, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad((weights * expected).sum(), [theta])
    torch.testing.assert_close(score, gradient, rtol=1e-3, atol=1e-3)
    assert not log_pi.requires_grad
    assert not score.requires_grad


def test_unbounded_actions_are_squashed_to_one() -> None:
    policy = squashed(3, 2, (4,), action_bounds=(np.array([-np.inf, 0.0]), np.array([np.inf, 4.0])))
    np.testing.assert_array_equal(policy.centre, [0.0, 2.0])
    np.testing.assert_array_equal(policy.scale, [1.0, 2.0])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"positive layer widths, not \[256, 0\]"):
        gaussian(hidden=(256, 0))
    with pytest.raises(ValueError, match=r"positive layer widths, not \[\]"):
        squashed(hidden=())
    with pytest.raises(ValueError, match="tanh or relu, not gelu"):
        squashed(activation="gelu")
    with pytest.raises(ValueError, match=r"the lower first, not \[2, -5\]"):
        squashed(log_std_bounds=(2, -5))
    with pytest.raises(ValueError, match="action_bounds must be low < high"):
        squashed(act=1, action_bounds=(np.ones(1), -np.ones(1)))
