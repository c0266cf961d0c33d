"""How often the teacher agrees with the true order, by how far apart two clips are: from the runs' preference logs."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import pyarrow.parquet as pq

from pbrl.report import stats
from pbrl.report.curves import Curve, Plot
from pbrl.report.runs import RecordedRun
from pbrl.report.tables import names, select
from pbrl.run.preference_log import read
from pbrl.types import Bool, Float64

BINS = 10
MOST_ROWS = 10_000_000  # of a log; 600 iterations have 19,200

logger = logging.getLogger(__name__)


def agreement(runs: Sequence[RecordedRun]) -> Plot:
    """The agreement with every agent on every task, where there is a preference log."""
    curves: dict[str, dict[str, Curve]] = {}
    for task in names(runs, "task"):
        for agent in names(select(runs, task=task), "agent"):
            logs = [decided(run) for run in select(runs, task=task, agent=agent)]
            if logs := [(gap, right) for gap, right in logs if len(gap)]:
                curves.setdefault(task, {})[agent] = curve(logs)
    return Plot(curves, "gap between the true returns", "share of answers", whole=False, top=1.0)


def curve(logs: Sequence[tuple[Float64, Bool]], bins: int = BINS) -> Curve:
    """The mean over runs of the share of right answers, in bins of the gap that hold as many comparisons each."""
    every = np.concatenate([gap for gap, _ in logs])
    edges = np.unique(np.quantile(every, np.linspace(0, 1, bins + 1)[1:-1]))

    def bins_of(gap: Float64) -> list[Bool]:
        return [np.searchsorted(edges, gap, side="right") == k for k in range(len(edges) + 1)]

    at = [np.median(every[rows]) if rows.any() else np.nan for rows in bins_of(every)]
    shares = [[right[rows].mean() if rows.any() else np.nan for rows in bins_of(gap)] for gap, right in logs]
    known = np.isfinite(at)
    values = np.array(shares)[:, known]  # [runs, bins]
    mean, margin = np.nanmean(values, axis=0), stats.margin_of_mean(values)
    low, high = (np.clip(mean + side * margin, 0.0, 1.0) for side in (-1, 1))
    return Curve(np.array(at)[known], mean, low, high, np.ones(len(mean), np.bool_))


def decided(run: RecordedRun) -> tuple[Float64, Bool]:
    """The gaps of the comparisons that were decided [n], and which answers were right; none without a sound log."""
    folder = run.folder / "preferences"
    try:
        if (rows := sum(pq.read_metadata(part).num_rows for part in folder.glob("*.parquet"))) > MOST_ROWS:
            raise ValueError(f"it has {rows} rows")
        table = read(folder, columns=["label", "first_sum", "second_sum"])
    except Exception as error:  # whatever is wrong with a log, the report is made without it
        logger.warning("Left out of the teacher's agreement: %s cannot be read (%s)", folder, error)
        return np.empty(0), np.empty(0, np.bool_)
    label, first, second = (column.to_numpy() for column in table.columns)
    there = np.isfinite(first) & np.isfinite(second) & (first != second) & ((label == 0.0) | (label == 1.0))
    return np.abs(second - first)[there], ((label == 1.0) == (second > first))[there]
