"""A teacher to start from: rational, unless a test says otherwise. And the settings of presets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

import conf
from oracles import links
from oracles.teacher import Teacher

# All that judge by rewards: a person looks at behaviour, and has tests of their own.
PRESETS = sorted({path.stem for path in (Path(conf.__file__).parent / "oracle").glob("*.yaml")} - {"human"})

RATIONAL = partial(
    Teacher,
    link=links.logistic,
    tau=0.0,
    gamma=1.0,
    eps_mistake=0.0,
    eps_skip=0.0,
    eps_equal=0.0,
    tie="equal",
    bpref_compat=False,
)


def preset(name: str, *overrides: str) -> dict[str, Any]:
    """The settings of `oracle=<name>`, as the training program composes them."""
    with initialize_config_module("conf"):
        composed = compose("train", [f"oracle={name}", *overrides])
    return dict(OmegaConf.to_container(composed.oracle, resolve=True))  # type: ignore[arg-type]
