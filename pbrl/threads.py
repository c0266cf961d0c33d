"""Cores and threads: how many there are, and learning on several of them.

Torch's own threads wait for each other after every operation. That costs little on an idle machine and nearly all the
time on a busy one, where some thread is always late. A pair of trajectories is enough work for one thread, so our
threads take whole pairs and wait only when all pairs are done. Results come back in order, so they do not depend on
the number of threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Workers(ThreadPoolExecutor):
    """So many threads, of which the one that asks is one: it works, too, rather than wait for the others to wake up."""

    def __init__(self, threads: int) -> None:
        # What torch was told holds for the thread that told it: another begins with a thread per core.
        super().__init__(max(1, threads - 1), initializer=torch.set_num_threads, initargs=(1,))
        self.threads = threads

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **_: Any) -> Iterator[Any]:
        """The results in order, when all are there."""
        calls = list(zip(*iterables, strict=False))
        if self.threads == 1:
            return iter([fn(*call) for call in calls])
        futures = [self.submit(fn, *call) for call in calls]
        own = {}  # results of calls that no worker has begun, from the last on
        for i in reversed(range(len(calls))):
            if futures[i].cancel():
                own[i] = fn(*calls[i])
        return iter([own[i] if i in own else futures[i].result() for i in range(len(calls))])


@contextmanager
def workers() -> Iterator[Workers]:
    """As many threads as torch may use. Meanwhile each torch operation, here or in a worker, runs on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Workers(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)


def threads_of_a_job(launcher: Mapping[str, Any], cores: int) -> int:
    """A job's share of the cores, by its launcher's settings (`conf/hydra/launcher`)."""
    if "n_jobs" in launcher:  # joblib: -1 is one job per core, -2 leaves one core alone
        jobs = int(launcher["n_jobs"])
        jobs = jobs if jobs > 0 else cores + 1 + jobs
        return max(1, cores // max(1, jobs))
    granted = launcher["ray"]["remote"].get("num_cpus") if "ray" in launcher else launcher.get("cpus_per_task")
    return max(1, min(cores, int(granted or cores)))
