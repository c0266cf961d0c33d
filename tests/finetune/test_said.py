"""Training in a random subspace: its gradients, its limits, and a problem whose intrinsic dimension is known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pbrl.finetune.d90 import d90
from pbrl.finetune.said import Subspace, train_in_subspace


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine wait for their threads longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layer_of(name: str) -> str:
    return name.split(".")[0]


def network(seed: int = 0) -> nn.Sequential:
    """Two layers of two tensors each, 3 * 4 + 4 + 4 * 2 + 2 = 26 parameters."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    rng = np.random.default_rng(seed)
    for parameter in model.parameters():
        parameter.data = torch.from_numpy(rng.standard_normal(tuple(parameter.shape)))
    return model


def build(model: nn.Module, dimension: int, seed: int = 0) -> Subspace:
    rng = np.random.default_rng(seed)
    return Subspace(dict(model.named_parameters()), layer_of=layer_of, dimension=dimension, rng=rng)


def move_to(subspace: Subspace, z: list[float], scales: list[float]) -> None:
    with torch.no_grad():
        subspace.z.copy_(torch.tensor(z, dtype=torch.float64))
        subspace.scales.copy_(torch.tensor(scales, dtype=torch.float64))
    subspace.write()


def flat(model: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_it_starts_at_the_model_with_every_scale_one_and_counts_them_in_its_dimension() -> None:
    model = network()
    before, subspace = flat(model), build(model, dimension=7)
    subspace.write()
    assert torch.equal(flat(model), before)
    assert subspace.z.tolist() == [0.0] * 5
    assert subspace.scales.tolist() == [1.0, 1.0]


def test_a_scale_moves_the_tensors_of_its_layer_alone_in_proportion() -> None:
    model = network()
    start, subspace = flat(model), build(model, dimension=7)
    z = [1.0, -2.0, 0.5, 3.0, 0.1]
    move_to(subspace, z, [1.0, 1.0])
    move = flat(model) - start
    move_to(subspace, z, [3.0, -0.5])
    expected = move * torch.cat((torch.full((16,), 3.0), torch.full((10,), -0.5)))
    torch.testing.assert_close(flat(model) - start, expected.double())


def test_every_tensor_moves_as_far_as_z_on_average() -> None:
    model = network()
    start, squares = [p.detach().clone() for p in model.parameters()], []
    for seed in range(400):
        subspace = build(model, dimension=7, seed=seed)
        move_to(subspace, [2.0, 0.0, 0.0, 0.0, 1.0], [1.0, 1.0])
        pairs = zip(model.parameters(), start, strict=True)
        squares.append([float((parameter - origin).detach().square().sum()) for parameter, origin in pairs])
        subspace.restore()
    error = np.std(squares, axis=0) / math.sqrt(len(squares))
    assert (np.abs(np.mean(squares, axis=0) - 5.0) < 4 * error).all()


def test_restore_is_exact() -> None:
    model = network()
    before, subspace = flat(model), build(model, dimension=7)
    for _ in range(10):
        move_to(subspace, [0.3] * 5, [1.0, 7.0])
    assert not torch.equal(flat(model), before)
    subspace.restore()
    assert torch.equal(flat(model), before)


def test_the_seed_decides_the_subspace() -> None:
    models = [network(), network(), network()]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        move_to(build(model, dimension=7, seed=seed), [1.0] * 5, [1.0, 1.0])
    first, same, other = map(flat, models)
    assert torch.equal(first, same)
    assert not torch.isclose(first, other).any()


def loss_of(model: nn.Module) -> torch.Tensor:
    x = torch.linspace(-1, 1, 15, dtype=torch.float64).view(5, 3)
    return (model(x) - 1).square().sum()


def test_the_pulled_back_gradients_of_z_and_the_scales_agree_with_finite_differences() -> None:
    model = network()
    subspace = build(model, dimension=7)
    point = torch.tensor([0.2, -0.1, 0.4, 0.3, -0.6, 0.8, 1.3], dtype=torch.float64)  # z, then the scales

    def value(at: torch.Tensor) -> float:
        move_to(subspace, at[:5].tolist(), at[5:].tolist())
        return loss_of(model).item()

    steps = 1e-6 * torch.eye(7, dtype=torch.float64)
    differences = [(value(point + step) - value(point - step)) / 2e-6 for step in steps]
    value(point)
    loss_of(model).backward()
    subspace.pull_back()
    assert subspace.z.grad is not None
    assert subspace.scales.grad is not None
    gradient = torch.cat((subspace.z.grad, subspace.scales.grad))
    torch.testing.assert_close(gradient, torch.tensor(differences, dtype=torch.float64), rtol=1e-4, atol=1e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_scale_has_no_gradient_where_nothing_has_moved() -> None:
    model = network()
    subspace = build(model, dimension=7)
    subspace.write()
    loss_of(model).backward()
    subspace.pull_back()
    assert subspace.scales.grad is not None
    assert subspace.scales.grad.tolist() == [0.0, 0.0]


def test_a_parameter_that_the_loss_does_not_use_counts_as_zero() -> None:
    gradients = []
    for touch in (0.0, None):
        model = network()
        subspace = build(model, dimension=7)
        subspace.write()
        loss = model[0].weight.square().sum()
        if touch is not None:
            loss = loss + touch * sum(parameter.sum() for parameter in model.parameters())
        loss.backward()
        subspace.pull_back()
        gradients.append(subspace.z.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dimension", [-1, 0, 1, 2, 27])
def test_a_dimension_without_room_for_z_or_beyond_the_model_is_refused(dimension: int) -> None:
    with pytest.raises(
        ValueError, match=f"d' = {dimension} is not possible for 26 parameters in 2 layers: .* 3 <= d' <= 26"
    ):
        build(network(), dimension)


@pytest.mark.parametrize("dimension", [3, 26])
def test_the_smallest_and_the_largest_dimension_can_be_trained(dimension: int) -> None:
    model = network()
    training = train(model, build(model, dimension), iterations=50)
    assert training.accuracies[-1] > training.accuracies[0]


def test_what_cannot_be_a_subspace_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="none were given"):
        Subspace({}, layer_of=layer_of, dimension=5, rng=np.random.default_rng(0))
    model = network()
    model[2].bias.requires_grad_(False)
    with pytest.raises(ValueError, match=r"2\.bias is frozen"):
        build(model, dimension=7)
    model = network()
    model[2].float()
    with pytest.raises(ValueError, match=r"2\.weight is torch\.float32 on cpu, others are torch\.float64"):
        build(model, dimension=7)


def test_gradients_without_a_point_or_a_loss_are_refused() -> None:
    model = network()
    subspace = build(model, dimension=7)
    with pytest.raises(RuntimeError, match=r"without write\(\)"):
        subspace.pull_back()
    subspace.write()
    with pytest.raises(RuntimeError, match="depends on none"):
        subspace.pull_back()


def train(model: nn.Module, subspace: Subspace, **changes: Any) -> Any:
    settings: dict[str, Any] = {
        "loss": lambda _: loss_of(model),
        "batches": itertools.repeat(None),
        "accuracy": lambda: -loss_of(model).item(),
        "optimizer": partial(torch.optim.Adam, lr=0.01),
        "iterations": 10,
        "evaluate_every": 4,
        "progress": lambda iteration, loss: None,  # noqa: ARG005
    }
    return train_in_subspace(subspace, **{**settings, **changes})


@pytest.mark.parametrize(
    "optimizer", [partial(torch.optim.SGD, lr=1e-4, momentum=0.9), partial(torch.optim.Adam, lr=0.01)]
)
def test_training_is_that_of_the_same_function_by_autograd_alone(optimizer: Any) -> None:
    model, twin = network(), network()
    subspace = build(model, dimension=7)
    train(model, subspace, optimizer=optimizer)
    reference = build(twin, dimension=7)  # for its map: columns of P, by moving along each axis
    start, columns = flat(twin), []
    for axis in torch.eye(5):
        move_to(reference, axis.tolist(), [1.0, 1.0])
        columns.append(flat(twin) - start)
    P, z = torch.stack(columns, 1), torch.zeros(5, dtype=torch.float64, requires_grad=True)
    scales = torch.ones(2, dtype=torch.float64, requires_grad=True)
    steps = optimizer([z, scales])
    for _ in range(10):
        theta = start + torch.repeat_interleave(scales, torch.tensor([16, 10])) * (P @ z)
        weights = theta.split([12, 4, 8, 2])
        named = {n: w.view_as(p) for (n, p), w in zip(twin.named_parameters(), weights, strict=True)}
        steps.zero_grad()
        loss_of(partial(torch.func.functional_call, twin, named)).backward()
        steps.step()
    torch.testing.assert_close(subspace.z.detach(), z.detach())
    torch.testing.assert_close(subspace.scales.detach(), scales.detach())
    assert not torch.equal(scales.detach(), torch.ones(2, dtype=torch.float64))


def test_accuracy_is_measured_before_every_so_often_and_at_the_end_and_the_best_counts() -> None:
    model, seen = network(), []
    values = iter([0.5, 0.9, 0.7, 0.6])
    training = train(
        model,
        build(model, dimension=7),
        accuracy=lambda: next(values),
        progress=lambda iteration, loss: seen.append((iteration, loss)),
    )
    assert training.iterations == [0, 4, 8, 10]
    assert training.accuracies == [0.5, 0.9, 0.7, 0.6]
    assert training.best == 0.9
    assert training.diverged_at is None
    assert [iteration for iteration, _ in seen] == list(range(1, 11))
    assert seen[0][1] == pytest.approx(loss_of(network()).item())


def test_a_loss_that_is_not_finite_ends_the_training_and_keeps_what_was_measured() -> None:
    model = network()
    factors = iter([1.0, 1.0, 1.0, 1.0, 1.0, math.nan])
    training = train(model, build(model, dimension=7), loss=lambda factor: factor * loss_of(model), batches=factors)
    assert training.diverged_at == 6
    assert training.iterations == [0, 4]


@pytest.mark.parametrize("changes", [{"iterations": 0}, {"evaluate_every": 0}])
def test_training_without_iterations_or_evaluations_is_refused(changes: dict[str, int]) -> None:
    model = network()
    with pytest.raises(ValueError, match="must be positive"):
        train(model, build(model, dimension=7), **changes)


K = 10  # what the toy problem asks for


class Sums(nn.Module):
    """Li et al. 2018, section 2: a vector whose K blocks of coordinates must sum to given numbers. Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(700))
        self.goals = torch.arange(1.0, K + 1) / 4

    def loss(self) -> torch.Tensor:
        sums = torch.cat((self.first, self.second)).view(K, -1).sum(1)
        return (sums - self.goals).square().sum()


def solve(dimension: int, seed: int) -> float:
    model = Sums()
    training = train_in_subspace(
        build(model, dimension, seed),
        loss=lambda _: model.loss(),
        batches=itertools.repeat(None),
        accuracy=lambda: math.exp(-model.loss().item()),  # their measure of performance: 1 is solved
        optimizer=partial(torch.optim.Adam, lr=0.1, betas=(0.9, 0.95)),
        iterations=200,
        evaluate_every=100,
        progress=lambda iteration, loss: None,  # noqa: ARG005
    )
    return training.best


def test_a_problem_of_known_intrinsic_dimension_has_that_d90() -> None:
    # z of K numbers, d' = K + 2, can meet all K sums. Fewer than K + 1 numbers cannot: a common factor of the two
    # scales is one of z too, so they have d' - 1 degrees of freedom.
    accuracies = {dimension: [solve(dimension, seed) for seed in range(2)] for dimension in (5, 9, K + 2, 20)}
    assert max(accuracies[5] + accuracies[9]) < 0.9
    assert min(accuracies[K + 2] + accuracies[20]) > 0.99
    of_accuracy, of_gain = d90(accuracies, full=[1.0, 1.0], majority=0.0, resamples=100, seed=0)
    assert 9 < of_accuracy.value < K + 2
    assert of_gain.value == of_accuracy.value
