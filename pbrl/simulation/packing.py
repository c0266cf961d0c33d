"""Policies packed into the arrays that the compiled loops read."""

from __future__ import annotations

import numpy as np

from pbrl.policy import Policy
from pbrl.simulation import native
from pbrl.types import Float32, Int64


def pack(policy: Policy, parameters: Float32) -> native.Policies:
    """K parameter vectors [K, size], packed."""
    weights = policy.export(np.atleast_2d(parameters))
    layers = []
    for matrix, bias in weights.layers:
        layer = np.concatenate([matrix, bias[:, None]], axis=1)  # the bias is one more row
        layer = np.pad(layer, ((0, 0), (0, 0), (0, native.padded(bias.shape[1]) - bias.shape[1])))
        layers.append(layer.reshape(len(layer), -1))
    low, high = weights.log_std_bounds or (0.0, 0.0)
    centre, scale = weights.centre_and_scale or (np.zeros(0), np.zeros(0))
    return native.Policies(
        layers=np.concatenate(layers, axis=1),
        sizes=np.array(policy.sizes),
        relu=weights.activation == "relu",
        squashed=weights.std is None,
        std=np.zeros((0, 0), np.float32) if weights.std is None else weights.std,
        low_log_std=np.float32(low),
        high_log_std=np.float32(high),
        centre=centre.astype(np.float32),
        scale=scale.astype(np.float32),
    )


def mean_actions(policy: Policy, parameters: Float32, obs: Float32, which: Int64 | None = None) -> Float32:
    """As `Policy.mean_actions`, compiled: the numbers that the loops compute."""
    actions = np.empty((len(obs), policy.act_size), np.float32)
    rows = np.zeros(len(obs), np.int64) if which is None else np.asarray(which, np.int64)
    no_noise = np.empty((0, 0, policy.act_size), np.float32)
    native.act(pack(policy, parameters), rows, np.ascontiguousarray(obs, np.float32), no_noise, 0, actions)
    return actions
