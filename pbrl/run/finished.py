"""Whether a run is finished: its last iteration is saved, and so is all that a run leaves.

A run that was killed after its last checkpoint, or whose files were cut or deleted since, is not: the same command
makes what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from pbrl.run import checkpoint, loop, record, summary
from pbrl.run.folder import holds_this_run
from pbrl.run.policy_file import POLICY, policy_bytes, read_policy
from pbrl.run.preference_log import PreferenceLog
from pbrl.run.settings import digest
from pbrl.run.training import LOG

logger = logging.getLogger(__name__)


def is_finished(settings: Mapping[str, Any]) -> bool:
    """Whether this run is there already, as a whole. Asked before anything heavy is made."""
    folder = Path(settings["folder"])
    if not settings["resume"] or not holds_this_run(settings):
        return False
    saved = checkpoint.load(folder / loop.CHECKPOINT, settings_digest=digest(settings))
    if saved is None or saved[0] + 1 < settings["iterations"]:
        return False
    try:
        missing = what_is_missing(folder, *saved, settings)
    except (TypeError, LookupError, AttributeError):  # not a state of training: whoever continues says so
        missing = [loop.CHECKPOINT]
    if missing:
        logger.info("%s: all iterations were saved, but not all that a run leaves: %s", folder, ", ".join(missing))
    return not missing


def what_is_missing(folder: Path, iteration: int, state: Mapping[str, Any], settings: Mapping[str, Any]) -> list[str]:
    """The files of a finished run that are missing, or not as its last state says."""
    logged = state["ledger"]["preference_log"] if settings["preference_log"] else None
    whole = {
        loop.RECORD: record.find_problem(folder / loop.RECORD, iteration, state.get("record", ())) is None,
        POLICY: _is_policy(folder / POLICY, iteration, state),
        LOG: logged is None or PreferenceLog(folder / LOG).is_whole(logged),
        summary.CURVE: (folder / summary.CURVE).is_file(),
    }
    return [name for name, is_whole in whole.items() if not is_whole]


def _is_policy(path: Path, iteration: int, state: Mapping[str, Any]) -> bool:
    try:
        if "policy" not in state:  # of an earlier version
            found, parameters = read_policy(path)
            return found == iteration and np.array_equal(parameters, state["parameters"])
        return path.read_bytes() == policy_bytes(state["parameters"], **state["policy"], iteration=str(iteration))
    except (OSError, ValueError, LookupError, TypeError, SafetensorError):
        return False
