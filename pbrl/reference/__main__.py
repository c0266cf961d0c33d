"""The reference results: the runs behind them, and the pages made of them.

    python -m pbrl.reference run       # make the runs that are missing
    python -m pbrl.reference run protocol=short workers=2
    python -m pbrl.reference write     # the pages made of them

`run` is safe to stop at any time, and the same command goes on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pbrl.reference import pages
from pbrl.reference.protocol import plan
from pbrl.reference.runner import Results, make
from pbrl.report.tables import Bootstrap
from pbrl.run.command_line import show_help, wrapped
from pbrl.run.folder import lock
from pbrl.run.settings import ConfigurationError


def run(settings: Mapping[str, Any]) -> int:
    """Make what is missing; the exit code."""
    runs = plan(settings)
    results = Results(Path(settings["results"]))
    how = {key: settings[key] for key in ("workers", "niceness", "changed", "poll_seconds")}
    with ExitStack() as locks:
        for protocol in dict.fromkeys(each.protocol for each in runs):
            folder = Path(settings["folder"]) / protocol
            folder.mkdir(parents=True, exist_ok=True)
            locks.enter_context(lock(folder))
        failed = make(runs, results, **how)
    for folder, why in failed.items():
        print(f"failed: {folder}: {why}")
    print(f"{len(runs) - len(failed)} of {len(runs)} runs are in {settings['results']}")
    write(settings)
    return 1 if failed else 0


def write(settings: Mapping[str, Any]) -> int:
    """Write the pages; the exit code."""
    results = Results(Path(settings["results"]))
    every = plan({**settings, "protocol": None})
    how = Bootstrap(**settings["bootstrap"]), pages.Yardstick(**settings["yardstick"]), settings["tried_on"]
    pages.write(every, results, map(Path, settings["pages"]), *how)
    print(f"wrote {results.folder / 'README.md'}")
    return 0


def read_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """conf/reference.yaml with the overrides of a command line."""
    with initialize_config_module("conf"):
        settings: Any = OmegaConf.to_container(compose("reference", overrides=list(overrides)), resolve=True)
    if settings["changed"] not in ("run", "keep"):
        raise ConfigurationError(f"changed must be run or keep, not {settings['changed']!r}")
    if not isinstance(settings["workers"], int) or settings["workers"] < 1:
        raise ConfigurationError(f"workers must be a whole number of at least 1, not {settings['workers']!r}")
    for name, fields in {"bootstrap": {"resamples", "seed"}, "yardstick": {"names", "steps"}}.items():
        if not isinstance(settings[name], dict) or set(settings[name]) != fields:
            raise ConfigurationError(f"{name} has the settings {', '.join(sorted(fields))}, not {settings[name]!r}")
    for name, values, kind, what in (
        ("yardstick.names", settings["yardstick"]["names"], str, "names of yardsticks"),
        ("yardstick.steps", settings["yardstick"]["steps"], int, "whole numbers"),
        ("tried_on", settings["tried_on"], str, "names of tasks"),
    ):
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            raise ConfigurationError(f"{name} must be a list of {what}, not {values!r}")
    return dict(settings)


COMMANDS = {"run": run, "write": write}


def main() -> None:
    """Read the command line."""
    show_help(sys.argv[1:], program="pbrl.reference", config="reference", groups=(), about=__doc__ or "")
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(wrapped(__doc__ or ""))
    try:
        code = COMMANDS[sys.argv[1]](read_settings(sys.argv[2:]))
    except (ConfigurationError, HydraException, OmegaConfBaseException, OSError) as error:
        raise SystemExit(f"pbrl.reference: {error}") from None
    raise SystemExit(code)


if __name__ == "__main__":
    main()
