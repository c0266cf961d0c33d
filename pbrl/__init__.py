"""pbrl: a benchmark suite for preference-based reinforcement learning.

Importing it makes every task known to gymnasium: `gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)`.
`pbrl.load(folder)` is the policy that a run has learnt, see `pbrl.run.saved`.
"""

from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path
from typing import TYPE_CHECKING

import gymnasium as _gymnasium

if TYPE_CHECKING:
    from pbrl.run.saved import load as load

_home = _Path(__file__).parent.parent
for _name in ("agents", "oracles", "conf"):
    _spec = _find_spec(_name)
    if _spec is None or _spec.origin is None or _Path(_spec.origin).parent.parent != _home:
        raise ImportError(
            f"pbrl comes with a package `{_name}`, but `import {_name}` finds "
            f"{_spec.origin if _spec and _spec.origin else 'nothing'}: uninstall the other package of that name, "
            "or run from a folder that has none"
        )

for _task in sorted(_path.stem for _path in (_home / "conf" / "env").glob("*.yaml")):
    if f"pbrl/{_task}-v0" not in _gymnasium.registry:
        _gymnasium.register(
            f"pbrl/{_task}-v0",
            entry_point="pbrl.simulation.vector:SingleEnv",
            vector_entry_point="pbrl.simulation.vector:BatchedEnv",
            kwargs={"task": _task},
        )


def __getattr__(name: str) -> object:
    if name == "load":
        from pbrl.run.saved import load  # now, and not before: it imports torch and dm_control

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
