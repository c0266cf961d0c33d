from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from asking_run import answer_by_files


@pytest.fixture
def people() -> Iterator[Callable[..., None]]:
    """Starts people who answer by files, each in a thread."""
    enough, threads = threading.Event(), []

    def start(folder: Path, *how: Any, **more: Any) -> None:
        threads.append(threading.Thread(target=answer_by_files, args=(folder, enough, *how), kwargs=more, daemon=True))
        threads[-1].start()

    def stop() -> None:
        enough.set()
        for thread in threads:
            thread.join(10)

    start.stop = stop
    yield start
    stop()
