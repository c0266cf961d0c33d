"""Fastfood: a random linear map R^d -> R^D that costs O(D log d) time and O(D) memory.

Le, Sarlós and Smola 2013, Fastfood: Approximating Kernel Expansions in Loglinear Time. The input is padded with zeros
to n, the next power of two; ceil(D / n) independent blocks of n rows each give the output, the last one cut at D:

    V = S H G Π H B    B random signs, H Walsh-Hadamard, Π a permutation, G a Gaussian diagonal, S a scaling

With S = 1 / |G|, one number per block, and the factor 1 / sqrt(D), every row of P has length sqrt(n / D) in R^n and
has a uniformly random direction, so that over the draws

    E |P z|^2 = |z|^2,   and any D' of the D outputs have D' / D of it

for any d and D. No matrix is ever formed: B, Π and G take 9 bytes per output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pbrl.threads import workers

Result = TypeVar("Result")
_RADIX = 16  # of the fast transform; 8 to 32 are about equally fast
_CHUNK = 2**18  # outputs worked on at once: 1 MB of float32 stays in the cache


class Fastfood:
    """The map P of one draw: `project` is P z, `transpose` is P^T y, a call is P z with a gradient."""

    def __init__(
        self, inputs: int, outputs: int, *, rng: np.random.Generator, dtype: torch.dtype, device: torch.device
    ) -> None:
        if inputs < 1 or outputs < 1:
            raise ValueError(f"a projection needs at least one input and one output, not {inputs} and {outputs}")
        self.inputs, self.outputs = inputs, outputs
        n = 1 << (inputs - 1).bit_length()
        blocks = -(-outputs // n)
        signs = 2 * rng.integers(2, size=(blocks, n), dtype=np.int8) - 1
        permutation = rng.permuted(np.broadcast_to(np.arange(n, dtype=np.int32), (blocks, n)), axis=1)
        gaussian = rng.standard_normal((blocks, n), dtype=np.float32)
        self.signs = torch.from_numpy(signs).to(device)  # B [blocks, n]
        self.permutation = torch.from_numpy(permutation).to(device)  # Π [blocks, n]
        self.gaussian = torch.from_numpy(gaussian).to(device, dtype)  # S G / sqrt(D) [blocks, n]
        self.gaussian /= self.gaussian.norm(dim=1, keepdim=True) * outputs**0.5

    def __call__(self, z: Tensor) -> Tensor:
        """P z [D] of z [d], for autograd: its gradient is the transposed map."""
        projected: Tensor = _Projection.apply(z, self)  # type: ignore[no-untyped-call]
        return projected

    def project(self, z: Tensor) -> Tensor:
        """P z [D] of z [d]."""
        blocks, n = self.signs.shape
        padded = pad(z.detach(), (0, n - self.inputs))
        output = padded.new_empty(blocks, n)

        def work(rows: slice) -> None:
            x = hadamard(self.signs[rows] * padded)
            x = x.gather(1, self.permutation[rows].long())
            output[rows] = hadamard(self.gaussian[rows] * x)

        self._in_chunks(work)
        return output.view(-1)[: self.outputs]

    def transpose(self, y: Tensor) -> Tensor:
        """P^T y [d] of y [D]: the same factors in reverse; each but Π is its own transpose."""
        blocks, n = self.signs.shape
        padded = pad(y.detach(), (0, blocks * n - self.outputs)).view(blocks, n)

        def work(rows: slice) -> Tensor:
            x = self.gaussian[rows] * hadamard(padded[rows])
            x = torch.empty_like(x).scatter_(1, self.permutation[rows].long(), x)
            return (self.signs[rows] * hadamard(x)).sum(0)

        return torch.stack(self._in_chunks(work)).sum(0)[: self.inputs]

    def _in_chunks(self, work: Callable[[slice], Result]) -> list[Result]:
        """Do the work for all rows in chunks; the results do not depend on the number of threads."""
        blocks, n = self.signs.shape
        step = max(1, _CHUNK // n)
        chunks = [slice(first, first + step) for first in range(0, blocks, step)]
        if len(chunks) == 1 or self.signs.device.type != "cpu":
            return [work(rows) for rows in chunks]
        with workers() as pool:
            return list(pool.map(work, chunks))


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, fastfood: Fastfood) -> Tensor:
        ctx.fastfood = fastfood
        return fastfood.project(z)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.fastfood.transpose(gradients[0]), None


def hadamard(x: Tensor) -> Tensor:
    """H x along the last axis, of length n a power of two; H is n x n of -1 and +1, H H = n I.

    H of size a b is the Kronecker product of H of size a and of size b. Factors of 16 keep the cost at O(n log n) like
    the textbook's factors of 2, with a quarter of the passes through memory, each of them a matrix product.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ValueError(f"the length of a Walsh-Hadamard transform must be a power of two, not {n}")
    shape, done = x.shape, 1
    while done < n:
        size = min(_RADIX, n // done)
        factor = _small_hadamard(size, x.dtype, x.device)
        x = x.reshape(-1, size) @ factor if done == 1 else factor @ x.view(-1, size, done)
        done *= size
    return x.view(shape)


@cache
def _small_hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """H, by Sylvester's construction."""
    matrix, two = torch.ones(1, 1), torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    while len(matrix) < size:
        matrix = torch.kron(two, matrix)
    return matrix.to(device, dtype)
