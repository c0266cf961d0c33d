"""Learning on several threads.

Torch's own threads meet after every operation. That costs little on an idle machine, and nearly everything on a busy
one, where some thread is always waited for. A pair of trajectories is work enough for one thread: several of them meet
only when all pairs are done. Results come back in order, so nothing depends on how many threads there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """As many threads as torch may use. Meanwhile an operation of torch, here or in a worker, has but its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            yield pool
    finally:
        torch.set_num_threads(threads)
