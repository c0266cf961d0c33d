"""A policy on disk: one flat vector of parameters, its task and sizes, as safetensors.

The same policy gives the same bytes: the header is sorted, which the safetensors library does not promise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from pbrl.run.files import write_atomically
from pbrl.types import Float32

# The policies that a run keeps. The best is that of the highest evaluation.
KEPT = {"last": "policy.safetensors", "best": "policy_best.safetensors", "first": "policy_first.safetensors"}
POLICY = KEPT["last"]


def save_policy(path: Path, parameters: Float32, **about: str) -> None:
    """Write parameters [size] in the safetensors format. The file appears when it is complete."""
    write_atomically(path, policy_bytes(parameters, **about))


def policy_bytes(parameters: Float32, **about: str) -> bytes:
    """What `save_policy` writes."""
    data = np.ascontiguousarray(parameters, "<f4").tobytes()
    tensor = {"dtype": "F32", "shape": list(parameters.shape), "data_offsets": [0, len(data)]}
    header = json.dumps({"__metadata__": dict(sorted(about.items())), "parameters": tensor}).encode()
    header += b" " * (-len(header) % 8)  # tensors begin at a multiple of eight bytes
    return len(header).to_bytes(8, "little") + header + data


def read_policy(path: Path) -> tuple[int, Float32]:
    """The iteration after which a policy was written (-1: before the first), and its parameters [size]."""
    with safe_open(path, "numpy") as file:
        return int(file.metadata()["iteration"]), file.get_tensor("parameters")
