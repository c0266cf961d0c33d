"""The Fastfood map against Hadamard's matrix, its own transpose, and what it promises on average."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard as scipy_hadamard

from pbrl.finetune.fastfood import Fastfood, hadamard

CPU = torch.device("cpu")
SHAPES = {"inputs": st.integers(1, 70), "outputs": st.integers(1, 300), "seed": st.integers(0, 2**32 - 1)}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations on a busy machine wait for their threads longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(inputs: int, outputs: int, seed: int, dtype: torch.dtype = torch.float64) -> Fastfood:
    return Fastfood(inputs, outputs, rng=np.random.default_rng(seed), dtype=dtype, device=CPU)


def matrix(fastfood: Fastfood) -> torch.Tensor:
    return torch.stack([fastfood.project(row) for row in torch.eye(fastfood.inputs, dtype=torch.float64)], dim=1)


def normal(size: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(size))


@pytest.mark.parametrize("n", [2**power for power in range(12)])  # one, two and three factors of 16, and remainders
def test_the_transform_is_hadamards_matrix(n: int, rng: np.random.Generator) -> None:
    x = rng.standard_normal((3, n))
    np.testing.assert_allclose(hadamard(torch.from_numpy(x)).numpy(), x @ scipy_hadamard(n), atol=1e-10)


@pytest.mark.parametrize("n", [0, 3, 24])
def test_a_length_that_is_no_power_of_two_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=f"length of a Walsh-Hadamard transform must be a power of two, not {n}"):
        hadamard(torch.zeros(2, n))


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 5), (5, 0)])
def test_an_empty_map_is_refused(inputs: int, outputs: int) -> None:
    with pytest.raises(ValueError, match=f"not {inputs} and {outputs}"):
        build(inputs, outputs, seed=0)


def test_it_is_the_product_of_its_factors_written_out() -> None:
    fastfood, n = build(5, 20, seed=0), 8
    H, blocks = scipy_hadamard(n), []
    for signs, permutation, gaussian in zip(fastfood.signs, fastfood.permutation, fastfood.gaussian, strict=True):
        blocks.append(H @ np.diag(gaussian) @ np.eye(n)[permutation.numpy()] @ H @ np.diag(signs))
    np.testing.assert_allclose(matrix(fastfood), np.vstack(blocks)[:20, :5], atol=1e-12)


@given(**SHAPES)
def test_the_transpose_is_the_adjoint(inputs: int, outputs: int, seed: int) -> None:
    fastfood, z, y = build(inputs, outputs, seed), normal(inputs, seed), normal(outputs, seed + 1)
    there, back = fastfood.project(z) @ y, z @ fastfood.transpose(y)
    torch.testing.assert_close(there, back, rtol=0, atol=1e-12 * float(z.norm() * y.norm()) * inputs)


@given(**SHAPES)
def test_it_is_linear(inputs: int, outputs: int, seed: int) -> None:
    fastfood, z, w = build(inputs, outputs, seed), normal(inputs, seed), normal(inputs, seed + 1)
    torch.testing.assert_close(fastfood.project(3 * z - w), 3 * fastfood.project(z) - fastfood.project(w))


def test_many_chunks_are_one_map(monkeypatch: pytest.MonkeyPatch) -> None:
    fastfood, z, y = build(60, 5000, seed=0), normal(60, 1), normal(5000, 2)
    whole = fastfood.project(z), fastfood.transpose(y)
    monkeypatch.setattr("pbrl.finetune.fastfood._CHUNK", 256)  # 4 of 79 blocks at a time
    alone = fastfood.project(z), fastfood.transpose(y)
    torch.testing.assert_close(alone, whole)
    torch.set_num_threads(3)
    assert all(map(torch.equal, (fastfood.project(z), fastfood.transpose(y)), alone))


@settings(max_examples=20)
@given(**SHAPES)
def test_every_row_has_the_same_length_before_the_padding_is_cut(inputs: int, outputs: int, seed: int) -> None:
    n = 1 << (inputs - 1).bit_length()
    rows = matrix(build(n, outputs, seed)).square().sum(1)
    torch.testing.assert_close(rows, torch.full_like(rows, n / outputs))


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 50), (3, 50), (20, 1000), (64, 64), (100, 110), (33, 40)])
def test_norms_are_preserved_on_average_in_whole_and_in_part(inputs: int, outputs: int) -> None:
    # Over 400 draws; a z that is far from typical, so that the signs and the permutation have something to do.
    z, part = torch.zeros(inputs, dtype=torch.float64), outputs // 3
    z[0], z[-1] = 2.0, 1.0
    squares = np.array([build(inputs, outputs, seed).project(z).square().numpy() for seed in range(400)])
    for share, measured in ((1.0, squares.sum(1)), (part / outputs, squares[:, -part:].sum(1))):
        error = measured.std() / np.sqrt(len(measured))
        assert measured.mean() == pytest.approx(share * float(z @ z), abs=4 * error + 1e-6)


def test_one_large_map_nearly_preserves_every_norm_and_angle() -> None:
    fastfood = build(50, 200_000, seed=0)
    first, second = normal(50, 1), normal(50, 2)
    P_first, P_second = fastfood.project(first), fastfood.project(second)
    assert float(P_first @ P_first) == pytest.approx(float(first @ first), rel=0.05)
    assert float(P_first @ P_second) == pytest.approx(float(first @ second), abs=0.05 * 50)


def test_the_seed_decides_the_map() -> None:
    z = normal(30, 0)
    first, same, other = (build(30, 500, seed).project(z) for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert abs(float(torch.corrcoef(torch.stack((first, other)))[0, 1])) < 0.3


def test_the_map_is_the_same_in_single_precision() -> None:
    z, y = normal(30, 0), normal(500, 1)
    double, single = build(30, 500, seed=1), build(30, 500, seed=1, dtype=torch.float32)
    torch.testing.assert_close(single.project(z.float()), double.project(z).float())
    torch.testing.assert_close(single.transpose(y.float()), double.transpose(y).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), [(16, 16), (13, 13), (17, 20), (31, 500)])
def test_no_input_is_lost(inputs: int, outputs: int) -> None:
    for seed in range(20):
        assert torch.linalg.matrix_rank(matrix(build(inputs, outputs, seed))) == inputs


@pytest.mark.parametrize("inputs", [6, 8])  # with padding and without
@pytest.mark.parametrize("chunk", [8, 2**18])
def test_the_gradient_agrees_with_finite_differences(inputs: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pbrl.finetune.fastfood._CHUNK", chunk)
    assert torch.autograd.gradcheck(build(inputs, 30, seed=0), (normal(inputs, 1).requires_grad_(),))
