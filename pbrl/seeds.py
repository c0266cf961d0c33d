"""Random streams by name: one seed for a run, and from it an independent stream for each purpose."""

from __future__ import annotations

import numpy as np


def streams(seed: int, *names: str) -> dict[str, np.random.SeedSequence]:
    """A stream for each name. More names at the end do not move the others."""
    return dict(zip(names, np.random.SeedSequence(seed).spawn(len(names)), strict=True))


def as_number(stream: np.random.SeedSequence) -> int:
    """A stream as one number, for those who take nothing else."""
    return int(stream.generate_state(1)[0])
