"""A sweep continues after a run that is refused, and lists the refused runs at its end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from pbrl.run.settings import ConfigurationError

refused: list[str] = []  # in this process: the overrides of each run, and why it was refused


def refuse(program: str, why: str) -> None:
    """End a single run with a message; in a sweep, keep the message and return, so that the next run starts."""
    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN:
        raise SystemExit(f"{program}: {why}")
    line = f"{' '.join(hydra.overrides.task)}: {why}"
    print(f"{program}: refused {line}", file=sys.stderr, flush=True)
    if not hydra.launcher["_target_"].endswith("BasicLauncher"):  # another process: only an exception gets back
        raise ConfigurationError(line) from None
    refused.append(line)


@contextmanager
def listed_refusals(program: str) -> Iterator[None]:
    """Around Hydra's main: at the end, list the refused runs and exit with 1 if there are any."""
    refused.clear()
    try:
        yield
    finally:
        if refused:
            print(f"{program}: {len(refused)} runs of this sweep were refused:", file=sys.stderr)
            print(*(f"  {line}" for line in refused), sep="\n", file=sys.stderr, flush=True)
    if refused:
        raise SystemExit(1)
