"""Is this configuration one that can be run? If not, a sentence that says which setting, and what is allowed."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hydra.utils import get_object
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import OmegaConf

import conf

# Whose classes a configuration may name; a user adds their own packages with `allow=[mine]`.
TRUSTED = ("agents", "oracles", "pbrl")

# What the runner adds to a node's own settings.
RUNTIME = {
    "agent": ("policy", "rng", "trajectories"),
    "agent.policy": ("obs_size", "act_size"),
    "agent.ppo": ("policy", "rng"),
    "agent.reward_model": ("obs_size", "act_size", "rng"),
    "oracle": ("rng",),
    "method": ("parameters", "seed", "threads"),
    "model": ("seed",),
    "task": ("rng",),
}


class ConfigurationError(ValueError):
    """A setting that makes no sense, alone or beside another."""


def instantiate(node: Any, *, allow: Sequence[str] = (), **arguments: Any) -> Any:
    """The object that a node's `_target_` describes, with these arguments added.

    Only classes of pbrl's own packages, and of those in `allow`, are ever imported: a configuration is data.
    """
    trusted = [f"{package}.*" for package in (*TRUSTED, *allow)]
    check_targets(node, allow=allow)
    return hydra_instantiate(node, **arguments, _execution_whitelist_=trusted)


def check_targets(node: Any, path: str = "", *, allow: Sequence[str] = ()) -> None:
    """Refuse a node that names, at any depth, something of a package that is not trusted. Nothing is imported."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    if isinstance(node, Mapping):
        target = node.get("_target_")
        if target is not None and (not isinstance(target, str) or target.partition(".")[0] not in (*TRUSTED, *allow)):
            package = str(target).partition(".")[0]
            raise ConfigurationError(
                f"{path or 'a node'} names {target!r}: only {', '.join(TRUSTED)} and the packages that you allow are used. "
                f"If it is yours, add allow=[{package}]"
            )
        for key, value in node.items():
            check_targets(value, f"{path}.{key}".lstrip("."), allow=allow)
    elif isinstance(node, list | tuple):
        for value in node:
            check_targets(value, path, allow=allow)


def choices(group: str) -> list[str]:
    """What a group of the configuration offers."""
    return sorted(path.stem for path in (Path(conf.__file__).parent / group).glob("*.yaml"))


def suggest(arguments: Sequence[str], groups: Collection[str]) -> None:
    """Refuse a command line that chooses what a group does not have, with near matches."""
    for argument in arguments:
        group, equals, values = argument.partition("=")
        if not equals or group not in groups:
            continue
        for value in values.split(","):
            if value not in (offered := choices(group)) and value != "null" and value.isidentifier():
                near = difflib.get_close_matches(value, offered, n=5, cutoff=0.5) or offered
                raise ConfigurationError(f"there is no {group} {value!r}; did you mean {', '.join(near)}?")


def check(cfg: Mapping[str, Any]) -> None:
    """Refuse settings that make no sense, by name."""
    for name in ("iterations", "trajectories", "pairs", "checkpoint_every"):
        _at_least(cfg, name, 1)
    _at_least(cfg, "seed", 0)
    _at_least(cfg["evaluation"], "every", 1, "evaluation.")
    _at_least(cfg["evaluation"], "trajectories", 1, "evaluation.")
    _at_least(cfg["calibration"], "trajectories", 2, "calibration.")
    if not isinstance(cfg["normalise_observations"], bool):
        raise ConfigurationError(f"normalise_observations must be true or false, not {cfg['normalise_observations']!r}")
    if cfg["threads"] is not None:
        _at_least(cfg, "threads", 1)
    if cfg["video"]["every"] is not None:
        _at_least(cfg["video"], "every", 1, "video.")
    for name, minimum in {"steps": 1, "width": 64, "height": 64}.items():
        _at_least(cfg["video"], name, minimum, "video.")
    if cfg["trajectories"] % 2:
        raise ConfigurationError(
            f"trajectories must be even, since they are compared in pairs, not {cfg['trajectories']}"
        )
    if cfg["pairs"] < cfg["trajectories"] // 2:
        raise ConfigurationError(
            f"pairs={cfg['pairs']} leaves some of the {cfg['trajectories']} trajectories uncompared: "
            f"use pairs={cfg['trajectories'] // 2}, or fewer trajectories"
        )
    if cfg["wandb"]["mode"] not in ("auto", "online", "offline", "disabled"):
        raise ConfigurationError(f"wandb.mode must be auto, online, offline or disabled, not {cfg['wandb']['mode']!r}")
    for group in ("agent", "oracle"):
        check_node(cfg[group], group)


# Settings that make a run what it is; the others may change when it is continued.
IDENTITY = (
    "env",
    "agent",
    "oracle",
    "seed",
    "trajectories",
    "pairs",
    "normalise_observations",
    "evaluation",
    "calibration",
    *("task", "model", "method", "batch_size"),  # of fine-tuning
)


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two configurations describe different runs: `agent.votes: 32, not 16`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in {**one, **other} if path or key in IDENTITY]
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]
    return [] if one == other else [f"{path}: {other}, not {one}"]


def _at_least(node: Mapping[str, Any], name: str, minimum: int, prefix: str = "") -> None:
    value = node[name]
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigurationError(f"{prefix}{name} must be a whole number of at least {minimum}, not {value!r}")


def check_node(node: Any, path: str) -> None:
    """Compare a node's settings with what its `_target_` takes: missing, surplus and mistyped ones have a name."""
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        check_node(value, f"{path}.{key}")
    if "_target_" not in node or node["_target_"].startswith("hydra."):
        return
    target = get_object(node["_target_"])
    parameters = inspect.signature(target, eval_str=True).parameters
    given = {key: value for key, value in node.items() if not key.startswith("_")}
    for key, value in given.items():
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, n=1)
            raise ConfigurationError(
                f"{path}.{key} is a setting that nobody reads" + (f"; did you mean {path}.{near[0]}?" if near else "")
            )
        if not _fits(value, parameters[key].annotation):
            raise ConfigurationError(f"{path}.{key} must be {_named(parameters[key].annotation)}, not {value!r}")
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in given and key not in RUNTIME.get(path, ()):
            raise ConfigurationError(f"{path}.{key} is missing: {node['_target_']} needs it")


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a plain value is of the annotated type; what is not plain is left to the object itself."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation in (bool, str):
        return isinstance(value, annotation)
    if annotation is type(None):
        return value is None
    return not isinstance(value, int | float | str)


def _named(annotation: Any) -> str:
    """A type in words."""
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(each) for each in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_named(each) for each in typing.get_args(annotation))
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", type(None): "null"}
    return words.get(annotation, str(annotation))
