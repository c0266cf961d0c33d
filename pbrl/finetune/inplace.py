"""Move the weights of a network along random directions, in place, and back again exactly.

Malladi et al. 2023 (MeZO) regenerate a direction from its seed instead of storing it, so that tuning needs no more
memory than inference. In floating point, moving back is inexact: (theta + mu s) - mu s is not theta, and the errors
add up. Here the weights of each tensor are multiples of 2^-q, with q such that float32 (24 bits) represents all
multiples up to `headroom` times the largest weight exactly, and every step c s is rounded to this grid. Then sums are
exact:

    at(c) = theta + round(c s 2^q) 2^-q             depends on c only, not on earlier moves; at(0) = theta

One pass moves from at(a) to at(b), so that moving back and updating are a single pass: an iteration takes three passes
with MeZO, two with RSGF, one or two with NCRS. Weights that become too large for their grid are reported, and so are
steps that are too short for it: what is rounded to nothing is counted.

    s_i ~ N(0, 1) by Box and Muller (1958), from two hashes of the counter i under the key of (seed, iteration)

A number depends on its position only, not on blocks or threads. All compiled functions are in this file, because Numba
recompiles a function cached on disk only when the function's own file changes. Tensors that are not on the CPU are
moved by torch in blocks, on the same grid, with directions from torch's own generator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from pbrl.compilation import with_sound_cache
from pbrl.run.loop import DivergedError
from pbrl.search import Rule
from pbrl.types import Float32

Function = TypeVar("Function", bound=Callable[..., Any])

BLOCK = 1024  # numbers that are generated together
HALF = BLOCK // 2  # radii in a block
PIECE = 256 * BLOCK  # numbers of a tensor that one thread moves at a time
MANTISSA = 24  # bits of a float32
MOST_UNMOVED = 0.5  # share of the weights that steps may leave where they are without a warning

logger = logging.getLogger(__name__)


def _fused(function: Function) -> Function:
    """Compile, cache on disk, and allow fused multiply-add."""
    options = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
    return cast(Function, with_sound_cache(numba.njit(**options)(function)))


@_fused
def _hash(x: Any, key: NDArray[np.uint32], row: int) -> Any:
    """A permutation of 32-bit numbers that depends on the key: three rounds of multiply and xor-shift."""
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
    """Fill `out` [BLOCK] with N(0, 1) numbers; radius, angle: [BLOCK / 2] buffers. The loops compile to vector code.

    sqrt(-2 ln u) cos(2 pi v) and the same with sin, for u, v uniform in (0, 1).
    """
    bits = radius.view(np.int32)
    cosines, sines = out[:HALF], out[HALF:]
    for j in range(HALF):
        place = np.uint32(counter + j)
        u, v = _hash(place, key, 0), _hash(place, key, 3)
        radius[j] = (np.float32(np.int32(u >> np.uint32(1))) + np.float32(0.5)) * np.float32(2.0**-31)
        angle[j] = np.float32(np.int32(v)) * np.float32(2.0**-31)  # 2 v - 1 in [-1, 1], a half turn each way
    exponent = cosines  # used as a buffer until the end
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
        # cos and sin of pi y by their series, for y in [-1/2, 1/2]; a half turn flips both signs.
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
def _go(
    weights: Float32, key: NDArray[np.uint32], first: int, here: float, there: float, grid: float
) -> tuple[bool, int]:
    """Move weights [n] from at(here) to at(there). first: the counter.

    Returns whether they all fit into the grid, and how many are the same at(there) as at(0), the step being too short.
    """
    radius, angle = np.empty(HALF, np.float32), np.empty(HALF, np.float32)
    s = np.empty(BLOCK, np.float32)
    a, b, unit = np.float32(here / grid), np.float32(there / grid), np.float32(grid)
    limit = np.float32(2.0**MANTISSA * grid)
    outgrown = unmoved = 0
    for begin in range(0, len(weights), BLOCK):
        _normal(key, first + begin // 2, radius, angle, s)
        block = weights[begin : begin + BLOCK]
        for j in range(len(block)):
            target = np.rint(b * s[j])
            steps = target - np.rint(a * s[j])
            new = block[j] + steps * unit
            outgrown |= int(not (abs(new) < limit))
            unmoved += int(target == 0)
            block[j] = new
    return outgrown == 0, unmoved


def direction_key(seed: int, iteration: int) -> NDArray[np.uint32]:
    """The random key of the direction of an iteration."""
    return np.random.SeedSequence([seed, iteration]).generate_state(6).astype(np.uint32)


@dataclass(frozen=True)
class Piece:
    """A contiguous part of a tensor."""

    name: str
    weights: torch.Tensor  # [n] a view
    counter: int  # of its first two numbers
    grid: float  # 2^-q


class InPlace:
    """Moves the float32 tensors of a network by a rule of `pbrl.search`, with two evaluations per iteration."""

    def __init__(
        self, *, rule: Rule, parameters: Mapping[str, torch.Tensor], seed: int, headroom: float, threads: int
    ) -> None:
        if not headroom > 1:
            raise ValueError(f"headroom must be more than 1, so that the weights can grow, not {headroom}")
        for name, tensor in parameters.items():
            if tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name} is {tensor.dtype}: only contiguous float32 tensors can be moved in place")
        self.rule, self.seed, self.iteration = rule, seed, 0
        self._pool = ThreadPoolExecutor(threads)
        self._pieces = list(_pieces(parameters, headroom))
        for piece in self._pieces:  # Departure: the weights are rounded once, to their grid
            piece.weights.copy_(torch.round(piece.weights / piece.grid) * piece.grid)
        self._offset = 0.0
        self._unmoved = 0.0  # share of the weights that are the same at the offset as at 0, the step being too short
        self._warned = False

    def move_to(self, offset: float) -> None:
        """Set the weights to theta + offset * s, where s is the direction of this iteration."""
        if offset == self._offset:
            return
        here, self._offset = self._offset, offset
        key = direction_key(self.seed, self.iteration)
        moved = list(self._pool.map(lambda piece: _move(piece, key, here, offset), self._pieces))
        fits, unmoved = [each for each, _ in moved], sum(each for _, each in moved)
        self._unmoved = unmoved / sum(len(piece.weights) for piece in self._pieces) if offset else 0.0
        if not all(fits):
            name = self._pieces[fits.index(False)].name
            raise DivergedError(
                f"iteration {self.iteration}: weights of {name} are too large for the grid on which steps are exact. "
                "The search has probably diverged: use a smaller step or radius, or else a larger headroom"
            )

    @torch.inference_mode()
    def step(self, loss: Callable[[], torch.Tensor]) -> dict[str, float]:
        """One iteration; returns the mean loss of the two points, how far along s the weights moved, and `unmoved`.

        That is the share of the weights that a step, to be evaluated or taken, was too short to move.
        """
        losses, unmoved = [], []
        for offset in self.rule.offsets(self.iteration):
            self.move_to(float(offset))
            unmoved.append(self._unmoved)
            losses.append(float(loss()))
        if not all(math.isfinite(each) for each in losses):
            self.move_to(0.0)
            raise DivergedError(
                f"iteration {self.iteration}: the loss is {losses[0]} and {losses[1]} at the two points. "
                "The search has diverged: use a smaller step or radius"
            )
        move = float(self.rule.move(self.iteration, np.array([losses[0] - losses[1]]))[0])
        self.move_to(move)
        unmoved.append(self._unmoved)
        self._offset = self._unmoved = 0.0  # this is the new theta
        self.iteration += 1
        if max(unmoved) > MOST_UNMOVED and not self._warned:
            self._warned = True
            logger.warning(
                "iteration %d: a step was too short to move %.0f %% of the weights, which are multiples of %.1e: use a "
                "larger step or radius, or a smaller headroom. The record has `unmoved` for every iteration",
                self.iteration - 1,
                100 * max(unmoved),
                max(piece.grid for piece in self._pieces),
            )
        return {"loss": sum(losses) / 2, "moved": move, "unmoved": max(unmoved)}


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


def _move(piece: Piece, key: NDArray[np.uint32], here: float, there: float) -> tuple[bool, int]:
    if piece.weights.device.type == "cpu":
        return _go(piece.weights.numpy(), key, piece.counter, here, there, piece.grid)
    return move_by_torch(piece, key, here, there)


def move_by_torch(piece: Piece, key: NDArray[np.uint32], here: float, there: float) -> tuple[bool, int]:
    """As `_go`, for a tensor on any device of torch."""
    weights = piece.weights
    state = int(np.random.SeedSequence([*map(int, key), piece.counter]).generate_state(1, np.uint64)[0] >> 1)
    generator = torch.Generator(weights.device).manual_seed(state)
    s = torch.empty_like(weights).normal_(generator=generator)
    target = torch.round(s * (there / piece.grid))
    weights.add_(target - torch.round(s * (here / piece.grid)), alpha=piece.grid)
    return bool((weights.abs() < 2.0**MANTISSA * piece.grid).all()), int((target == 0).sum())
