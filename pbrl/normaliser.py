"""Observations scaled to mean 0 and standard deviation 1, by what a run has seen so far.

The moments change only between iterations, so that all policies of an iteration see the same. Normalising is affine,
so a policy's first layer can do it: (x - mean) / std @ W + b = x @ (W / std) + (b - mean / std @ W).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pbrl.types import Float32, Float64


class Normaliser:
    """Running mean and standard deviation of each observation [obs]; at first 0 and 1."""

    def __init__(self, obs_size: int) -> None:
        self.count, self.mean = 0, np.zeros(obs_size)
        self.deviations = np.zeros(obs_size)  # sum of squared deviations from the mean

    @property
    def std(self) -> Float64:
        """The standard deviation, 1 where the observation has never changed."""
        variance = self.deviations / max(1, self.count)
        return np.where(variance > 1e-12, np.sqrt(variance), 1.0)

    def include(self, obs: Float32) -> None:
        """Include more observations [n, obs], by Chan, Golub and LeVeque's rule for joining two samples."""
        if len(obs) == 0:
            return
        seen = obs.astype(np.float64)
        mean, total = seen.mean(axis=0), self.count + len(seen)
        apart = mean - self.mean
        self.deviations = (
            self.deviations + ((seen - mean) ** 2).sum(axis=0) + apart**2 * (self.count * len(seen) / total)
        )
        self.mean, self.count = self.mean + apart * (len(seen) / total), total

    def __call__(self, obs: Float32) -> Float32:
        """The observations [..., obs], normalised."""
        return ((obs - self.mean) / self.std).astype(np.float32)

    def fold(self, weights: Float32, bias: Float32) -> tuple[Float32, Float32]:
        """The layer with weights [..., obs, out] and bias [..., out], changed to take observations as they are."""
        scaled = weights / self.std[:, None]
        return scaled.astype(np.float32), (bias - self.mean @ scaled).astype(np.float32)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue exactly."""
        return {"count": self.count, "mean": self.mean, "deviations": self.deviations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.count, self.mean, self.deviations = state["count"], state["mean"], state["deviations"]
