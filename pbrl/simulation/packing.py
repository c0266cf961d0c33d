"""Policies packed into the arrays that the compiled loops read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pbrl.policy import Change, LowRank, Policy
from pbrl.simulation import native
from pbrl.types import Float32, Int64


def pack(policy: Policy, parameters: Float32 | LowRank) -> native.Policies:
    """K parameter vectors [K, size], packed; or one of them and K changes of low rank."""
    if isinstance(parameters, LowRank):
        weights = policy.export(parameters.base[None])
        std = None if weights.std is None else weights.std * np.exp(parameters.log_std)
        changes = parameters.folded(policy.normaliser)
    else:
        weights = policy.export(np.atleast_2d(parameters))
        std, changes = weights.std, []
    low, high = weights.log_std_bounds or (0.0, 0.0)
    centre, scale = weights.centre_and_scale or (np.zeros(0), np.zeros(0))
    return native.Policies(
        layers=_packed_layers(weights.layers),
        ranks=np.array([change.V.shape[1] for change in changes], np.int64),
        changes=_packed_changes(changes) if changes else np.zeros((0, 0), np.float32),
        sizes=np.array(policy.sizes),
        relu=weights.activation == "relu",
        squashed=std is None,
        std=np.zeros((0, 0), np.float32) if std is None else std,
        low_log_std=np.float32(low),
        high_log_std=np.float32(high),
        centre=centre.astype(np.float32),
        scale=scale.astype(np.float32),
    )


def _packed_layers(layers: Sequence[tuple[Float32, Float32]]) -> Float32:
    """All layers of each policy [K, packed]: panel by panel the bias and the weights of a few outputs, padded by 0."""
    sizes = [(weights.shape[1] + 1) * native.padded(weights.shape[2]) for weights, _ in layers]
    packed = np.zeros((len(layers[0][0]), sum(sizes)), np.float32)
    for (weights, bias), part in zip(layers, np.split(packed, np.cumsum(sizes[:-1]), axis=1), strict=True):
        K, inputs, outputs = weights.shape
        panels = part.reshape(K, -1, inputs + 1, native.LANES)  # a view
        for panel, first in enumerate(range(0, outputs, native.LANES)):
            some = slice(first, min(first + native.LANES, outputs))
            panels[:, panel, 0, : some.stop - first] = bias[:, some]
            panels[:, panel, 1:, : some.stop - first] = weights[:, :, some]
    return packed


def _packed_changes(changes: Sequence[Change]) -> Float32:
    """All changes of each policy [K, packed]: in each layer of the bias, then U's columns and V's rows by turns."""
    parts = []
    for U, V, bias in changes:
        parts.append(bias)
        for r in range(U.shape[2]):
            parts += [U[:, :, r], V[:, r]]
    padded = [np.pad(part, ((0, 0), (0, native.padded(part.shape[1]) - part.shape[1]))) for part in parts]
    return np.concatenate(padded, axis=1).astype(np.float32)


def mean_actions(policy: Policy, parameters: Float32 | LowRank, obs: Float32, which: Int64 | None = None) -> Float32:
    """As `Policy.mean_actions`, compiled: the numbers that the loops compute."""
    actions = np.empty((len(obs), policy.act_size), np.float32)
    rows = np.zeros(len(obs), np.int64) if which is None else np.asarray(which, np.int64)
    no_noise = np.empty((0, 0, policy.act_size), np.float32)
    native.act(pack(policy, parameters), rows, np.ascontiguousarray(obs, np.float32), no_noise, 0, actions)
    return actions
