"""Multilayer perceptrons for learning, near the speed of their matrix products.

Torch's own tanh takes as long as the product before it, and its autograd moves every array through memory several
times. Here a pass works on blocks of rows that stay in the cache, and the activations are compiled. Mathematics and
gradients are the same; the tanh is within 4e-7 of the true one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

import numba
import numpy as np
import torch
from torch import Tensor

from pbrl.compilation import with_sound_cache
from pbrl.types import Float32

Activation = Literal["tanh", "relu", "leaky_relu"]
SLOPES = {"relu": 0.0, "leaky_relu": 0.01}  # below zero

_BLOCK = 500  # rows: two hidden layers of 256 fit in the cache
_LANES = 8  # pieces that threads take: fixed, so that sums do not depend on the number of threads


def mlp(
    x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], activation: Activation, pool: Executor | None = None
) -> Tensor:
    """The output [n, out] for inputs x [n, in], differentiable in the layers' weights [in, out] and biases [out].

    x gets a gradient if it wants one. With a pool, rows are spread over its threads.
    """
    out: Tensor = _MLP.apply(x, activation, pool, *(tensor for layer in layers for tensor in layer))  # type: ignore[no-untyped-call]
    return out


def mlp_with_gradient(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor]],
    activation: Activation,
    gradient_of: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor, list[Tensor]]:
    """The output [n, out], and the gradients of W1, b1, W2, b2, ... in the same pass: nothing leaves the cache.

    gradient_of: a gradient of the output for some rows [out, rows], from the output for them [out, rows]; it must
    need no other rows.
    """
    weights, biases = [weight.detach() for weight, _ in layers], [bias.detach() for _, bias in layers]
    out = x.new_empty(weights[-1].shape[1], len(x))
    sums = _zeros([tensor for layer in layers for tensor in layer])
    buffers, spare = _buffers(x, weights), _buffers(x, weights)
    with torch.no_grad():
        for block in _blocks(slice(0, len(x))):
            rows = block.stop - block.start
            inputs = _forward(
                x[block], weights, biases, activation, [buffer[:rows] for buffer in buffers], out[:, block]
            )
            _backward(gradient_of(out[:, block], block), inputs, weights, activation, spare, sums)
    return out.T, sums


def forward(x: Tensor, layers: Sequence[tuple[Tensor, Tensor]], activation: Activation) -> tuple[Tensor, list[Tensor]]:
    """The output [n, out], and the inputs of each layer, which `backward` takes.

    There is no graph: for a small minibatch, autograd takes as long as the products.
    """
    weights, biases = zip(*layers, strict=True)
    hidden = [x.new_empty(len(x), weight.shape[1]) for weight in weights[:-1]]
    out = x.new_empty(weights[-1].shape[1], len(x))
    with torch.no_grad():
        return out.T, _forward(x, weights, biases, activation, hidden, out)


def backward(
    d_out: Tensor,
    inputs: Sequence[Tensor],
    layers: Sequence[tuple[Tensor, Tensor]],
    activation: Activation,
    sums: Sequence[Tensor] = (),
) -> Tensor:
    """The gradient of what the first layer gives [n, width], before its activation, from that of the output [n, out].

    Those of W1, b1, W2, b2, ... are added to sums, if any.
    """
    weights = [weight for weight, _ in layers]
    spare = [torch.empty_like(each) for each in inputs[1:]]
    with torch.no_grad():
        return _backward(d_out.T, inputs, weights, activation, spare, sums)


def segment_sums(
    x: Tensor, lengths: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]], activation: Activation
) -> Tensor:
    """The sums of a network's one output over segments of x, of so many rows each; differentiable in the layers.

    A segment's sum has the same gradient for whatever is made of it, but for a factor. So where segments are long, and
    few, forward and backward are one pass.
    """
    if torch.is_grad_enabled() and len(x) >= _BLOCK * len(lengths):
        parameters = (tensor for layer in layers for tensor in layer)
        sums: Tensor = _SegmentSums.apply(x, lengths, activation, *parameters)  # type: ignore[no-untyped-call]
        return sums
    return torch.stack([part.sum() for part in torch.split(mlp(x, layers, activation)[:, 0], list(lengths))])


class _SegmentSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], activation: Activation, *parameters: Tensor) -> Tensor:
        layers = list(zip(parameters[::2], parameters[1::2], strict=True))
        segments = [
            mlp_with_gradient(segment, layers, activation, lambda out, _: torch.ones_like(out))
            for segment in torch.split(x, list(lengths))
        ]
        ctx.gradients = [gradients for _, gradients in segments]
        return torch.stack([out.sum() for out, _ in segments])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        factors = gradients[0].tolist()
        sums = [torch.zeros_like(tensor) for tensor in ctx.gradients[0]]
        for factor, segment in zip(factors, ctx.gradients, strict=True):
            for total, part in zip(sums, segment, strict=True):
                total.add_(part, alpha=factor)
        return None, None, None, *sums


class _MLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: Activation, pool: Executor | None, *parameters: Tensor) -> Tensor:
        weights, biases = parameters[::2], parameters[1::2]
        hidden = [x.new_empty(len(x), weight.shape[1]) for weight in weights[:-1]]
        out = x.new_empty(weights[-1].shape[1], len(x))

        @torch.no_grad()  # of the thread that runs it
        def run(lane: slice) -> None:
            for block in _blocks(lane):
                _forward(x[block], weights, biases, activation, [each[block] for each in hidden], out[:, block])

        _in_lanes(run, len(x), pool)
        ctx.save_for_backward(x, *parameters, *hidden)
        ctx.activation, ctx.pool = activation, pool
        return out.T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *saved = ctx.saved_tensors
        layers = (len(saved) + 1) // 3
        weights, inputs = saved[: 2 * layers : 2], [x, *saved[2 * layers :]]
        d_out = gradients[0].T.contiguous()
        d_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        learns = any(ctx.needs_input_grad[3:])  # or its weights are fixed, and only x wants a gradient

        @torch.no_grad()
        def run(lane: slice) -> list[Tensor]:
            sums = _zeros(saved[: 2 * layers]) if learns else []
            spare = _buffers(x[lane], weights)
            for block in _blocks(lane):
                d = _backward(d_out[:, block], [each[block] for each in inputs], weights, ctx.activation, spare, sums)
                if d_x is not None:
                    torch.mm(d, weights[0].T, out=d_x[block])
            return sums

        first, *rest = _in_lanes(run, len(x), ctx.pool)
        for lane in rest:
            for total, part in zip(first, lane, strict=True):
                total += part
        return d_x, None, None, *(first or [None] * 2 * layers)


def _forward(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: Activation,
    hidden: Sequence[Tensor],
    out: Tensor,
) -> list[Tensor]:
    """Fill the hidden layers [rows, width] and the output [out, rows] of a block; the inputs of each layer.

    A narrow matrix is multiplied four times as fast from the left: the output is made transposed.
    """
    inputs = [x]
    for weight, bias, output in zip(weights, biases, hidden, strict=False):
        torch.addmm(bias, inputs[-1], weight, out=output)
        _activate(output, activation)
        inputs.append(output)
    torch.addmm(biases[-1][:, None], weights[-1].T, inputs[-1].T, out=out)
    return inputs


def _backward(
    d_out: Tensor,
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    activation: Activation,
    spare: Sequence[Tensor],
    sums: Sequence[Tensor],
) -> Tensor:
    """Add a block's gradients to those of W1, b1, W2, b2, ..., if any; the gradient of the first layer's output."""
    if sums:
        sums[-2].T.addmm_(d_out, inputs[-1])
        sums[-1].add_(d_out.sum(1))
    d = d_out.T
    for layer in reversed(range(len(weights) - 1)):
        d = torch.mm(d, weights[layer + 1].T, out=spare[layer][: len(d)])
        _through_activation(d, inputs[layer + 1], activation)
        if sums:
            sums[2 * layer].addmm_(inputs[layer].T, d)
            sums[2 * layer + 1].add_(d.sum(0))
    return d


def _zeros(parameters: Sequence[Tensor]) -> list[Tensor]:
    """For the gradients of W1, b1, W2, b2, ...; those of the last weights are made transposed, as the output is."""
    zeros = [torch.zeros(tensor.shape) for tensor in parameters]
    zeros[-2] = torch.zeros(parameters[-2].T.shape).T
    return zeros


def _buffers(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """For the hidden layers of a block of x."""
    return [x.new_empty(min(_BLOCK, len(x)), weight.shape[1]) for weight in weights[:-1]]


def _blocks(lane: slice) -> list[slice]:
    """The lane's rows in pieces that fit in the cache."""
    return [slice(start, min(start + _BLOCK, lane.stop)) for start in range(lane.start, lane.stop, _BLOCK)]


def _in_lanes(run: Any, rows: int, pool: Executor | None) -> list[Any]:
    """Let the pool's threads take pieces of the rows; all rows at once without a pool."""
    if pool is None:
        return [run(slice(0, rows))]
    ends = np.linspace(0, rows, _LANES + 1).astype(int).tolist()
    return list(pool.map(run, map(slice, ends[:-1], ends[1:])))


def _activate(x: Tensor, activation: Activation) -> None:
    """Apply the activation in place."""
    if activation == "tanh":
        tanh_in_place(x.numpy())
    else:
        torch.nn.functional.leaky_relu_(x, SLOPES[activation])


def _through_activation(d: Tensor, h: Tensor, activation: Activation) -> None:
    """Multiply gradients d in place by the activation's derivative, which follows from its output h."""
    if activation == "tanh":
        _through_tanh(d.numpy(), h.numpy())
    else:
        _through_slope(d.numpy(), h.numpy(), np.float32(SLOPES[activation]))


def compile_activations() -> None:
    """Compile what the activations call, which happens when they are first used."""
    x = np.zeros((1, 1), np.float32)
    tanh_in_place(x)
    _through_tanh(x, x)
    _through_slope(x, x, np.float32(0))


def _compiled(function: Any) -> Any:
    options = {"nogil": True, "cache": True, "error_model": "numpy", "fastmath": {"contract", "nsz"}}
    return with_sound_cache(numba.njit(**options)(function))


@_compiled
def tanh_in_place(x: Float32) -> None:
    """tanh of each element, as a ratio of polynomials; compiles to vector code."""
    flat = x.reshape(-1)
    for i in range(flat.size):
        y = min(max(flat[i], np.float32(-7.9053111)), np.float32(7.9053111))
        y2 = y * y
        p = np.float32(-2.76076847742355e-16)
        p = p * y2 + np.float32(2.00018790482477e-13)
        p = p * y2 + np.float32(-8.60467152213735e-11)
        p = p * y2 + np.float32(5.12229709037114e-08)
        p = p * y2 + np.float32(1.48572235717979e-05)
        p = p * y2 + np.float32(6.37261928875436e-04)
        p = p * y2 + np.float32(4.89352455891786e-03)
        q = np.float32(1.19825839466702e-06)
        q = q * y2 + np.float32(1.18534705686654e-04)
        q = q * y2 + np.float32(2.26843463243900e-03)
        q = q * y2 + np.float32(4.89352518554385e-03)
        flat[i] = y * p / q


@_compiled
def _through_tanh(d: Float32, h: Float32) -> None:
    gradient, output = d.reshape(-1), h.reshape(-1)
    for i in range(gradient.size):
        gradient[i] *= np.float32(1) - output[i] * output[i]


@_compiled
def _through_slope(d: Float32, h: Float32, slope: np.float32) -> None:
    gradient, output = d.reshape(-1), h.reshape(-1)
    for i in range(gradient.size):
        gradient[i] *= np.float32(1) if output[i] > 0 else slope
