"""pbrl: a benchmark suite for preference-based reinforcement learning.

Importing it makes every task known to gymnasium: `gymnasium.make_vec("pbrl/walker_walk-v0", num_envs=64)`.
"""

from importlib.resources import files as _files

import gymnasium as _gymnasium

for _path in sorted(_path.name for _path in (_files("conf") / "env").iterdir()):
    if _path.endswith(".yaml") and f"pbrl/{_path[:-5]}-v0" not in _gymnasium.registry:
        _gymnasium.register(
            f"pbrl/{_path[:-5]}-v0",
            entry_point="pbrl.vector:SingleEnv",
            vector_entry_point="pbrl.vector:BatchedEnv",
            kwargs={"task": _path[:-5]},
        )
