"""Cosine heads with many sets of weights at once: what the search for their weights costs is one pass over the states.

The network below the head is frozen, so an example is its two states u and v, known beforehand. With the gain g and
the shift s of the last LayerNorm, a head gives the scores of `pbrl.finetune.language.CosineHead`:

    x = g u + s,  y = g v + s,  score = slope * <x, y> / (|x| |y|) + bias

Two choices of what is tuned, θ, of R sets of which are evaluated at once:

    Norm       g and s, D = 2 width
    LowRank    an adapter above them (Hu et al. 2022), x + B A x, with a random A [rank, width] that is frozen (Zhang et
               al. 2023) and B [width, rank] tuned from 0, D = rank width

`Subset` tunes some of these weights only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import numba
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pbrl.compilation import with_sound_cache
from pbrl.types import Float32

Function = TypeVar("Function", bound=Callable[..., Any])


class Encoded(NamedTuple):
    """Examples as a frozen network leaves them, and what scores them before tuning."""

    states: Tensor  # [n, 2, width], normalised
    labels: Tensor  # [n] int64
    gain: Tensor  # [width] of the last LayerNorm
    shift: Tensor  # [width]


class Head(Protocol):
    """Cosines of examples under many sets of weights."""

    start: Tensor  # θ0 [D]

    def features(self, states: Tensor) -> tuple[Tensor, ...]:
        """What is known of examples [n, 2, width] whatever the weights are; [n, ...] each."""

    def cosines(self, theta: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        """The cosines [n, R] for weights [R, D]."""


def _compiled(function: Function) -> Function:
    """Compile, cache on disk, and allow sums in any order, so that loops become vector code; NaN stays NaN."""
    options = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"reassoc", "contract", "nsz"}}
    return cast(Function, with_sound_cache(numba.njit(**options)(function)))


@_compiled
def _norm_cosines(states: Float32, theta: Float32) -> tuple[Float32, Float32]:
    """The cosines [n, R] of states [n, 2, width] for gains and shifts [R, 2 width], and |x|^2, |y|^2 [n, R, 2]."""
    n, R, width = len(states), len(theta), states.shape[2]
    cosines, squares = np.empty((n, R), np.float32), np.empty((n, R, 2), np.float32)
    for i in range(n):
        u, v = states[i, 0], states[i, 1]
        for r in range(R):
            gain, shift = theta[r, :width], theta[r, width:]
            xy, xx, yy = np.float32(0), np.float32(1e-9), np.float32(1e-9)  # nothing is divided by 0
            for j in range(width):
                x, y = gain[j] * u[j] + shift[j], gain[j] * v[j] + shift[j]
                xy += x * y
                xx += x * x
                yy += y * y
            cosines[i, r], squares[i, r, 0], squares[i, r, 1] = xy / np.sqrt(xx * yy), xx, yy
    return cosines, squares


@_compiled
def _norm_gradient(states: Float32, theta: Float32, cosines: Float32, squares: Float32, outer: Float32) -> Float32:
    """The gradient in theta [R, 2 width], from that in the cosines [n, R]: d cos / dx = y / |x||y| - cos x / |x|^2."""
    width = states.shape[2]
    found = np.empty((len(theta), 2 * width), np.float32)
    for r in range(len(theta)):
        gain, shift = theta[r, :width], theta[r, width:]
        of_gain, of_shift = np.zeros(width, np.float32), np.zeros(width, np.float32)
        for i in range(len(states)):
            u, v, xx, yy = states[i, 0], states[i, 1], squares[i, r, 0], squares[i, r, 1]
            across = outer[i, r] / np.sqrt(xx * yy)
            own_x, own_y = outer[i, r] * cosines[i, r] / xx, outer[i, r] * cosines[i, r] / yy
            for j in range(width):
                x, y = gain[j] * u[j] + shift[j], gain[j] * v[j] + shift[j]
                dx, dy = across * y - own_x * x, across * x - own_y * y
                of_gain[j] += dx * u[j] + dy * v[j]
                of_shift[j] += dx + dy
        found[r, :width], found[r, width:] = of_gain, of_shift
    return found


class _NormCosines(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, theta: Tensor, states: Tensor) -> Tensor:
        inputs = states.numpy(), theta.detach().contiguous().numpy()
        cosines, squares = _norm_cosines(*inputs)
        ctx.known = (*inputs, cosines, squares)
        return torch.from_numpy(cosines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        states, theta, cosines, squares = ctx.known
        outer = gradients[0].contiguous().numpy()
        return torch.from_numpy(_norm_gradient(states, theta, cosines, squares, outer)), None


class Norm:
    """Gain and shift are tuned."""

    def __init__(self, encoded: Encoded) -> None:
        self.start = torch.cat([encoded.gain, encoded.shift])

    def features(self, states: Tensor) -> tuple[Tensor, ...]:
        """The states themselves."""
        return (states,)

    def cosines(self, theta: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        """The cosines [n, R] for weights [R, D]."""
        found: Tensor = _NormCosines.apply(theta, *features)  # type: ignore[no-untyped-call]
        return found


class LowRank:
    """An adapter of low rank is tuned."""

    def __init__(self, encoded: Encoded, *, rank: int, rng: np.random.Generator) -> None:
        width = len(encoded.gain)
        self.rank, self.gain, self.shift = rank, encoded.gain, encoded.shift
        self.down = torch.tensor(rng.standard_normal((width, rank)) / width**0.5, dtype=torch.float32)  # A transposed
        self.start = torch.zeros(width * rank)

    def features(self, states: Tensor) -> tuple[Tensor, ...]:
        """x, y [n, 2, width], A x and A y [n, 2, rank], and <x, y>, <x, x>, <y, y> [n, 3]."""
        both = states * self.gain + self.shift
        x, y = both.unbind(1)
        return both, both @ self.down, torch.stack([(x * y).sum(1), (x * x).sum(1), (y * y).sum(1)], 1)

    def cosines(self, theta: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        """The cosines [n, R] for weights [R, D]: <x + B a, y + B b> = <x, y> + <Bx, b> + <By, a> + <a, BB b>."""
        both, down, products = features
        B = theta.view(len(theta), -1, self.rank)  # [R, width, rank]
        wide = (len(both), 2, len(theta), self.rank)  # [n, 2, R, rank] of x and y: B x, and BB a
        up = (both @ B.permute(1, 0, 2).flatten(1)).view(wide)
        square = (down @ (B.transpose(1, 2) @ B).permute(1, 0, 2).flatten(1)).view(wide)
        (bx, by), (sa, sb), (a, b) = up.unbind(1), square.unbind(1), down[:, :, None].unbind(1)
        xy = products[:, 0, None] + (bx * b + by * a + sa * b).sum(2)
        xx = products[:, 1, None] + ((2 * bx + sa) * a).sum(2)
        yy = products[:, 2, None] + ((2 * by + sb) * b).sum(2)
        return xy * (xx * yy).clamp_min(1e-12).rsqrt()


class Subset:
    """Another head, of which only the chosen weights are tuned; theirs are the distances from where they start."""

    def __init__(self, head: Head, chosen: Tensor) -> None:
        self.head, self.chosen, self.start = head, chosen, torch.zeros(len(chosen))

    def features(self, states: Tensor) -> tuple[Tensor, ...]:
        """As of the other head."""
        return self.head.features(states)

    def cosines(self, theta: Tensor, features: tuple[Tensor, ...]) -> Tensor:
        """The cosines [n, R] for distances [R, d]."""
        whole = self.head.start.repeat(len(theta), 1).index_add(1, self.chosen, theta)
        return self.head.cosines(whole, features)


class Split:
    """A head, and the training and validation examples of one seed.

    Training examples are shuffled once and cut into minibatches, of which an iteration draws one: a minibatch is then a
    part of an array, and nothing is copied.
    """

    def __init__(
        self,
        head: Head,
        encoded: Encoded,
        *,
        training: np.ndarray[tuple[int], np.dtype[np.int64]],  # indices, in random order
        validation: np.ndarray[tuple[int], np.dtype[np.int64]],
        batch_size: int,
        line: tuple[float, float],  # slope and bias
    ) -> None:
        self.head, (self.slope, self.bias) = head, line
        parts = np.array_split(training, max(1, round(len(training) / batch_size)))
        self._batches = [self._part(encoded, part) for part in parts]
        self._validation = self._part(encoded, validation)

    def _part(self, encoded: Encoded, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> tuple[Tensor, ...]:
        chosen = torch.from_numpy(rows)
        return encoded.labels[chosen, None].float(), *self.head.features(encoded.states[chosen])

    def losses(self, theta: Tensor, rng: np.random.Generator) -> Tensor:
        """f_B of weights [R, D] on the minibatch that `rng` draws: the mean cross-entropies [R]."""
        labels, *features = self._batches[rng.integers(len(self._batches))]
        scores = self.slope * self.head.cosines(theta, tuple(features)) + self.bias
        return (functional.softplus(scores) - labels * scores).mean(0)

    @property
    def majority(self) -> float:
        """The validation accuracy of always predicting the more frequent class."""
        share = float(self._validation[0].double().mean())
        return max(share, 1 - share)

    @torch.inference_mode()
    def evaluate(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracies and mean cross-entropies [R] on the validation set."""
        labels, *features = self._validation
        scores = self.slope * self.head.cosines(theta, tuple(features)) + self.bias
        return ((scores > 0) == (labels > 0)).float().mean(0), (functional.softplus(scores) - labels * scores).mean(0)
