"""Numba's cache of compiled code on disk, which a full disk or a crash may leave damaged."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)


def with_sound_cache(function: Any) -> Any:
    """A function that Numba compiles with cache=True: if its files are damaged, it is compiled and cached again."""
    cache = function._cache
    load = cache.load_overload

    def load_overload(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # what pickle raises for damaged files may be of any kind
            logger.warning(
                "the compiled code of %s on disk is damaged (%r): compiling it again", function.__name__, error
            )
            cache.flush()
            return None

    cache.load_overload = load_overload
    return function
