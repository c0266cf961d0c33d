"""The fast perceptron: torch's own numbers and gradients, the same bits on any number of threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pbrl.network import Activation, backward, forward, mlp, mlp_with_gradient, segment_sums, tanh_in_place

TORCH = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "leaky_relu": lambda x: torch.nn.functional.leaky_relu(x, 0.01),
}


def problem(rows: int, sizes: tuple[int, ...], seed: int = 0) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Tensor]:
    """Inputs, layers, and a gradient for the outputs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    layers = [((normal(n, m) / n**0.5).requires_grad_(), normal(m).requires_grad_()) for n, m in pairwise(sizes)]
    return normal(rows, sizes[0]).requires_grad_(), layers, normal(rows, sizes[-1])


def plain(x: Tensor, layers: list[tuple[Tensor, Tensor]], activation: Activation) -> Tensor:
    """The same with torch's own operations, in double precision."""
    x = x.double()
    for number, (weights, bias) in enumerate(layers):
        x = x @ weights.double() + bias.double()
        x = TORCH[activation](x) if number < len(layers) - 1 else x
    return x


def gradients(out: Tensor, d_out: Tensor, x: Tensor, layers: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    wanted = [x, *(tensor for layer in layers for tensor in layer)]
    return list(torch.autograd.grad((out * d_out).sum(), wanted))


@pytest.mark.parametrize("activation", ["tanh", "relu", "leaky_relu"])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(7, (3, 5, 2)), (501, (17, 32, 16, 6)), (1300, (4, 8, 8, 8, 1)), (3, (2, 1)), (0, (3, 4, 2))],
)
def test_outputs_and_gradients_are_torchs(activation: Activation, rows: int, sizes: tuple[int, ...]) -> None:
    x, layers, d_out = problem(rows, sizes)
    out, expected = mlp(x, layers, activation), plain(x, layers, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(
        gradients(out, d_out, x, layers), gradients(expected, d_out.double(), x, layers), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * max(1, rows) ** 0.5)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    x, layers, d_out = problem(1003, (6, 16, 16, 3))
    results = []
    for count in (3, threads):
        with ThreadPoolExecutor(count) as pool:
            out = mlp(x, layers, "tanh", pool)
            results.append([out.detach(), *gradients(out, d_out, x, layers)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_weights_may_be_transposed_views_and_inputs_need_no_gradient() -> None:
    x, layers, d_out = problem(40, (5, 8, 2))
    linear = torch.nn.Linear(5, 8)
    mixed = [(linear.weight.T, linear.bias), layers[1]]
    out = mlp(x.detach(), mixed, "relu")
    (ours,) = torch.autograd.grad((out * d_out).sum(), [linear.weight])
    (theirs,) = torch.autograd.grad((plain(x.detach(), mixed, "relu") * d_out).sum(), [linear.weight])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_fixed_weights_pass_the_gradient_on_to_the_inputs() -> None:
    x, layers, d_out = problem(40, (5, 8, 2))
    fixed = [(weight.detach(), bias.detach()) for weight, bias in layers]
    (ours,) = torch.autograd.grad((mlp(x, fixed, "relu") * d_out).sum(), [x])
    (theirs,) = torch.autograd.grad((plain(x, fixed, "relu") * d_out).sum(), [x])
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["tanh", "relu", "leaky_relu"])
@pytest.mark.parametrize(
    ("rows", "sizes"), [(7, (3, 5, 2)), (1301, (17, 32, 16, 6)), (500, (4, 8, 1)), (3, (2, 1)), (0, (3, 4, 2))]
)
def test_gradients_in_the_same_pass_are_torchs(activation: Activation, rows: int, sizes: tuple[int, ...]) -> None:
    """For a gradient of the output that depends on the output: that of the sum of d * out^2 / 2."""
    x, layers, d = problem(rows, sizes)
    out, ours = mlp_with_gradient(x.detach(), layers, activation, lambda out, rows: d[rows].T * out)
    expected = plain(x, layers, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    _, *theirs = gradients(expected, d.double() * expected.detach(), x, layers)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * max(1, rows) ** 0.5)


@pytest.mark.parametrize("activation", ["tanh", "relu", "leaky_relu"])
@pytest.mark.parametrize(
    ("rows", "sizes"), [(7, (3, 5, 2)), (601, (17, 32, 16, 6)), (256, (4, 8, 8, 1)), (0, (3, 4, 2))]
)
def test_a_pass_without_a_graph_has_torchs_gradients(activation: Activation, rows: int, sizes: tuple[int, ...]) -> None:
    x, layers, d_out = problem(rows, sizes)
    expected = plain(x, layers, activation)
    of_x, *of_layers = gradients(expected, d_out.double(), x, layers)
    out, inputs = forward(x.detach(), layers, activation)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    sums = [torch.ones_like(tensor) for layer in layers for tensor in layer]
    for d in (
        backward(d_out, inputs, layers, activation),
        backward(d_out, inputs, layers, activation, sums),
    ):
        torch.testing.assert_close((d @ layers[0][0].T).detach(), of_x, rtol=1e-4, atol=1e-4)
    for one, other in zip(sums, of_layers, strict=True):  # what was there stays
        torch.testing.assert_close(one - 1, other, rtol=1e-4, atol=1e-4 * max(1, rows) ** 0.5)


@pytest.mark.parametrize("lengths", [[1300, 700], [2000], [5, 3, 0, 9], [0, 0], [600, 0, 900]])  # long ones, short ones
def test_sums_of_segments_and_their_gradients_are_torchs(lengths: list[int]) -> None:
    x, layers, _ = problem(sum(lengths), (6, 16, 16, 1))
    weights = torch.arange(1.0, len(lengths) + 1) / sum(lengths or [1])
    wanted = [tensor for layer in layers for tensor in layer]

    def sums(out: Tensor) -> Tensor:
        return torch.stack([part.sum() for part in torch.split(out[:, 0], lengths)])

    ours, theirs = segment_sums(x.detach(), lengths, layers, "leaky_relu"), sums(plain(x, layers, "leaky_relu"))
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(segment_sums(x, lengths, layers, "leaky_relu"), ours, rtol=1e-4, atol=1e-3)
    if sum(lengths):
        found = [torch.autograd.grad((weights * each**2).sum(), wanted) for each in (ours, theirs)]
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50))
def test_tanh_is_within_four_ten_millionths(values: list[float]) -> None:
    x = np.array(values, np.float32)
    expected = np.tanh(x.astype(np.float64))
    tanh_in_place(x)
    np.testing.assert_allclose(x, expected, atol=4e-7, rtol=0)
    assert (np.abs(x) <= 1).all()
