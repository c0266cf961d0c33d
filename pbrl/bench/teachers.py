"""How long comparing takes, compared with reading the rewards once."""

from __future__ import annotations

import time
from statistics import median

import numpy as np

from pbrl.types import Oracle, Question


def seconds(oracle: Oracle, *, pairs: int, steps: int, repeats: int, rng: np.random.Generator) -> tuple[float, float]:
    """Medians over alternating repeats: summing the rewards of all clips, and comparing the pairs (with it).

    No clip is in two pairs, which is the slowest case.
    """
    first, second = rng.random((2, pairs, steps))
    question = Question.about_rewards(first, second, mean_return=steps / 2, episode_steps=steps)
    reading, comparing = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        first.sum(), second.sum()
        reading.append(time.perf_counter() - start)
        start = time.perf_counter()
        oracle.compare(question)
        comparing.append(time.perf_counter() - start)
    return median(reading), median(comparing)
