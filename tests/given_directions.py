"""Directions that a test chooses, for optimisers that would draw them at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pbrl.search import Directions


@dataclass(frozen=True)
class Given(Directions):
    """One after the other."""

    kind: str = "gaussian"
    directions: list[Any] = field(default_factory=list)

    def draw(self, rng: Any, shape: Any, dtype: Any) -> Any:  # noqa: ARG002
        return np.broadcast_to(np.array(self.directions.pop(0), dtype), shape)
