"""The clips that pairs speak of: whole trajectories, or a stretch of each."""

from __future__ import annotations

import numpy as np

from oracles.oracle import Impressions, Oracle
from pbrl.types import Float64, Int64, Pairs


def watch(oracle: Oracle, pairs: Pairs, rewards: Float64) -> tuple[Impressions, Impressions]:
    """Show an oracle the first and the second clip of each pair, cut from the rewards [N, T].

    A whole trajectory is watched once, however many pairs it is in.
    """
    trajectories, steps = rewards.shape
    _check("first", pairs.first, len(pairs), trajectories)
    _check("second", pairs.second, len(pairs), trajectories)
    if pairs.first_step is None and pairs.second_step is None and pairs.clip_steps is None:
        seen = oracle.watch(rewards)
        return seen[pairs.first], seen[pairs.second]
    if pairs.first_step is None or pairs.second_step is None or pairs.clip_steps is None:
        raise ValueError("clips need first_step, second_step and clip_steps; whole trajectories none of them")
    if not 1 <= pairs.clip_steps <= steps:
        raise ValueError(f"clip_steps must be in 1 .. {steps}, the trajectory's steps, not {pairs.clip_steps}")
    starts = steps - pairs.clip_steps + 1
    _check("first_step", pairs.first_step, len(pairs), starts)
    _check("second_step", pairs.second_step, len(pairs), starts)
    offsets = np.arange(pairs.clip_steps)
    return (
        oracle.watch(rewards[pairs.first[:, None], pairs.first_step[:, None] + offsets]),
        oracle.watch(rewards[pairs.second[:, None], pairs.second_step[:, None] + offsets]),
    )


def _check(name: str, rows: Int64, count: int, limit: int) -> None:
    """Refuse what is not one index in 0 .. limit - 1 for each pair, and an empty question."""
    rows = np.asarray(rows)
    if rows.shape != (count,) or count == 0 or rows.dtype.kind not in "iu":
        raise ValueError(f"{name} must be one integer for each of at least one pair, not {rows.dtype} {rows.shape}")
    if rows.min() < 0 or rows.max() >= limit:
        raise ValueError(f"{name} must be in 0 .. {limit - 1}, not {rows.min()} .. {rows.max()}")
