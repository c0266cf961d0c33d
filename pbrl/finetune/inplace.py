"""Moving the weights of a network along random directions, in place, and back again without a trace.

Malladi et al. 2023 (MeZO) regenerate a direction from its seed instead of storing it, so that tuning takes the memory
of inference. Floating point spoils the way back: (theta + mu s) - mu s is not theta, and the error adds up. Here every
tensor lives on a grid 2^-q of its own, coarse enough that float32 represents all of its multiples up to `headroom`
times the largest weight exactly (24 bits), and every step c s is rounded to that grid. Then sums are exact:

    at(c) = theta + round(c s 2^q) 2^-q             a function of c alone, whatever way led there; at(0) = theta

One pass goes from at(a) to at(b), so that the way back and the update are one: MeZO takes three passes for an
iteration, RSGF two, NCRS one or two. Weights that outgrow their grid are noticed and reported.

    s_i ~ N(0, 1) by Box and Muller (1958), from two hashes of the counter i under the key of (seed, iteration)

A number depends on its place alone: neither blocks nor threads change it. Everything compiled is in this file, because
Numba recompiles what is kept on disk only when its own file changes. Tensors elsewhere than on the CPU are moved by
torch in blocks, on the same grid, with directions of torch's own generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pbrl.search import Rule
from pbrl.types import Float32

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 1024  # numbers that are made together
HALF = BLOCK // 2  # of them, with a radius each
PIECE = 256 * BLOCK  # of a tensor, the work of one thread at a time
MANTISSA = 24  # bits of a float32


class DivergedError(RuntimeError):
    """A search that can only end here; the message says why, and what to do."""


def _fused(function: Function) -> Function:
    """Compile, keep on disk, and let sums of products be one instruction."""
    options = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
    return cast(Function, numba.njit(**options)(function))


@_fused
def _hash(x: Any, key: NDArray[np.uint32], row: int) -> Any:
    """A permutation of 32-bit numbers, another one for each key: three rounds of multiply and xor-shift."""
    x = np.uint32(x + key[row])  # Numba widens every sum and product
    x = np.uint32(x ^ (x >> np.uint32(17)))
    x = np.uint32(x * np.uint32(0xED5AD4BB))
    x = np.uint32(x ^ (x >> np.uint32(11)))
    x = np.uint32(x + key[row + 1])
    x = np.uint32(x * np.uint32(0xAC4C1B51))
    x = np.uint32(x ^ (x >> np.uint32(15)))
    x = np.uint32(x + key[row + 2])
    x = np.uint32(x * np.uint32(0x31848BAB))
    return np.uint32(x ^ (x >> np.uint32(14)))


@_fused
def _normal(key: NDArray[np.uint32], counter: int, radius: Float32, angle: Float32, out: Float32) -> None:
    """Fill `out` [BLOCK] with N(0, 1) numbers; radius, angle: [BLOCK / 2] to work in. Loops compile to vector code.

    sqrt(-2 ln u) cos(2 pi v) and the same with sin, for u, v uniform in (0, 1).
    """
    bits = radius.view(np.int32)
    cosines, sines = out[:HALF], out[HALF:]
    for j in range(HALF):
        place = np.uint32(counter + j)
        u, v = _hash(place, key, 0), _hash(place, key, 3)
        radius[j] = (np.float32(np.int32(u >> np.uint32(1))) + np.float32(0.5)) * np.float32(2.0**-31)
        angle[j] = np.float32(np.int32(v)) * np.float32(2.0**-31)  # 2 v - 1 in [-1, 1], a half turn each way
    exponent = cosines  # free until the end
    for j in range(HALF):  # u = m 2^e with m in [sqrt(1/2), sqrt(2))
        shifted = np.int32(bits[j] - np.int32(0x3F3504F3))
        exponent[j] = np.float32(shifted >> np.int32(23))
        bits[j] = np.int32((shifted & np.int32(0x007FFFFF)) + np.int32(0x3F3504F3))
    for j in range(HALF):  # ln m = 2 artanh((m - 1) / (m + 1)), its series to 9th order: within 1e-7
        w = (radius[j] - np.float32(1)) / (radius[j] + np.float32(1))
        w2 = w * w
        p = np.float32(2 / 9)
        p = p * w2 + np.float32(2 / 7)
        p = p * w2 + np.float32(2 / 5)
        p = p * w2 + np.float32(2 / 3)
        p = p * w2 + np.float32(2)
        logarithm = exponent[j] * np.float32(0.6931471805599453) + w * p
        radius[j] = np.sqrt(max(np.float32(-2) * logarithm, np.float32(0)))
    for j in range(HALF):
        # With y in [-1/2, 1/2] quarter-way round, cos and sin of pi y by their series; the half turn flips both signs.
        turn = angle[j]
        y = turn - np.float32(1) if turn > np.float32(0.5) else turn
        y = y + np.float32(1) if y < np.float32(-0.5) else y
        sign = np.float32(1) if y == turn else np.float32(-1)
        a = y * np.float32(np.pi)
        a2 = a * a
        s = np.float32(-1 / 39916800)
        s = s * a2 + np.float32(1 / 362880)
        s = s * a2 + np.float32(-1 / 5040)
        s = s * a2 + np.float32(1 / 120)
        s = s * a2 + np.float32(-1 / 6)
        s = (s * a2 + np.float32(1)) * a
        c = np.float32(1 / 479001600)
        c = c * a2 + np.float32(-1 / 3628800)
        c = c * a2 + np.float32(1 / 40320)
        c = c * a2 + np.float32(-1 / 720)
        c = c * a2 + np.float32(1 / 24)
        c = c * a2 + np.float32(-1 / 2)
        c = c * a2 + np.float32(1)
        r = sign * radius[j]
        cosines[j] = r * c
        sines[j] = r * s


@_fused
def _go(weights: Float32, key: NDArray[np.uint32], first: int, here: float, there: float, grid: float) -> bool:
    """Move weights [n] from at(here) to at(there), in place; False if some outgrew the grid. first: the counter."""
    radius, angle = np.empty(HALF, np.float32), np.empty(HALF, np.float32)
    s = np.empty(BLOCK, np.float32)
    a, b, unit = np.float32(here / grid), np.float32(there / grid), np.float32(grid)
    limit = np.float32(2.0**MANTISSA * grid)
    outgrown = 0
    for begin in range(0, len(weights), BLOCK):
        _normal(key, first + begin // 2, radius, angle, s)
        block = weights[begin : begin + BLOCK]
        for j in range(len(block)):
            steps = np.rint(b * s[j]) - np.rint(a * s[j])
            new = block[j] + steps * unit
            outgrown |= int(not (abs(new) < limit))
            block[j] = new
    return outgrown == 0


def direction_key(seed: int, iteration: int) -> NDArray[np.uint32]:
    """What makes the direction of an iteration."""
    return np.random.SeedSequence([seed, iteration]).generate_state(6).astype(np.uint32)


@dataclass(frozen=True)
class Piece:
    """A stretch of a tensor."""

    name: str
    weights: torch.Tensor  # [n] a view
    counter: int  # of its first pair of numbers
    grid: float  # 2^-q


class InPlace:
    """A rule of `pbrl.search` at work on the float32 tensors of a network, two evaluations to an iteration."""

    def __init__(
        self, *, rule: Rule, parameters: Mapping[str, torch.Tensor], seed: int, headroom: float, threads: int
    ) -> None:
        if not headroom > 1:
            raise ValueError(f"headroom must be more than 1, the share that the weights themselves take: {headroom}")
        for name, tensor in parameters.items():
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tensor.dtype}: directions are added in place to contiguous float32 only")
        self.rule, self.seed, self.iteration = rule, seed, 0
        self._pool = ThreadPoolExecutor(threads)
        self._pieces = list(_pieces(parameters, headroom))
        for piece in self._pieces:  # Departure: rounds the weights once, by at most half a step of their grid
            piece.weights.copy_(torch.round(piece.weights / piece.grid) * piece.grid)
        self._offset = 0.0

    def go(self, offset: float) -> None:
        """Let the weights be theta + offset * s, s the direction of this iteration."""
        if offset == self._offset:
            return
        here, self._offset = self._offset, offset
        key = direction_key(self.seed, self.iteration)
        fits = list(self._pool.map(lambda piece: _move(piece, key, here, offset), self._pieces))
        if not all(fits):
            name = self._pieces[fits.index(False)].name
            raise DivergedError(
                f"iteration {self.iteration}: weights of {name} have outgrown the grid on which steps are exact. The "
                "search has probably diverged: take a smaller step or radius, or else a larger headroom"
            )

    @torch.inference_mode()
    def step(self, loss: Callable[[], torch.Tensor]) -> dict[str, float]:
        """One iteration: the mean loss of the two points, and how far along s it moved."""
        losses = []
        for offset in self.rule.offsets(self.iteration):
            self.go(float(offset))
            losses.append(float(loss()))
        if not all(math.isfinite(each) for each in losses):
            self.go(0.0)
            raise DivergedError(
                f"iteration {self.iteration}: the loss is {losses[0]} and {losses[1]} at the two points. "
                "The search has diverged: take a smaller step or radius"
            )
        move = float(self.rule.move(self.iteration, np.array([losses[0] - losses[1]]))[0])
        self.go(move)
        self._offset = 0.0  # theta is here now
        self.iteration += 1
        return {"loss": sum(losses) / 2, "moved": move}


def _pieces(parameters: Mapping[str, torch.Tensor], headroom: float) -> Iterator[Piece]:
    counter = 0
    for name, tensor in parameters.items():
        low, high = tensor.detach().aminmax()  # makes no copy, as abs() would
        largest = max(1.0, -float(low), float(high))
        grid = 2.0 ** (math.ceil(math.log2(headroom * largest)) - MANTISSA)
        flat = tensor.detach().view(-1)
        for begin in range(0, len(flat), PIECE):
            yield Piece(name, flat[begin : begin + PIECE], counter + begin // 2, grid)
        counter += -(-len(flat) // BLOCK) * (BLOCK // 2)


def _move(piece: Piece, key: NDArray[np.uint32], here: float, there: float) -> bool:
    if piece.weights.device.type == "cpu":
        return _go(piece.weights.numpy(), key, piece.counter, here, there, piece.grid)
    return move_by_torch(piece, key, here, there)


def move_by_torch(piece: Piece, key: NDArray[np.uint32], here: float, there: float) -> bool:
    """As `_go`, wherever torch keeps the tensor."""
    weights = piece.weights
    state = int(np.random.SeedSequence([*map(int, key), piece.counter]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator(weights.device).manual_seed(state)
    s = torch.empty_like(weights).normal_(generator=generator)
    steps = torch.round(s * (there / piece.grid)) - torch.round(s * (here / piece.grid))
    weights.add_(steps, alpha=piece.grid)
    return bool((weights.abs() < 2.0**MANTISSA * piece.grid).all())
