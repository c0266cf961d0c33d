"""Which trajectories to compare, where the comparisons may be more or fewer than the trajectories."""

from __future__ import annotations

import numpy as np

from pbrl.types import Behaviour, Int64, Pairs


def by_index(first: Int64, second: Int64, pairs: int, *, experts: int = 1) -> Pairs:
    """Compare the i-th of one arm with the i-th of the other, by number [n]; once through, with the next, and so on."""
    i, n = np.arange(pairs), len(first)
    return Pairs.whole(first[i % n], second[(i + i // n) % n], experts=experts)


def at_random(behaviour: Behaviour, pairs: int, rng: np.random.Generator) -> Pairs:
    """Random pairs of trajectories: disjoint ones as long as there are any, then anew."""
    half = len(behaviour) // 2
    rounds = [rng.permutation(len(behaviour))[: 2 * half].reshape(2, half) for _ in range(-(-pairs // half))]
    first, second = np.concatenate(rounds, axis=1)[:, :pairs]
    return Pairs.whole(behaviour.number[first], behaviour.number[second])
