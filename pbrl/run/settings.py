"""A run's settings: are they ones that can be run, and the objects that they describe.

A configuration is data. What it names in a `_target_` is imported only if it belongs to a trusted package, and called
only if it is a class: a function, such as `pbrl.train.train`, may do anything with its arguments.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf

import conf

# Whose classes a configuration may name; users add their own packages, functions included, with `allow=[mine]`.
TRUSTED = ("agents", "oracles", "pbrl.finetune", "pbrl.policy", "pbrl.ridge", "pbrl.search")

LARGEST = 1e30  # number that a setting may have, so that nothing overflows before it is refused in a sentence
MOST_THREADS = 10_000  # torch takes no number at all, and the system has its own limit below

# What the runner offers to the class of a node, beside the node's own settings.
OFFERED = {
    "agent": ("policy", "rng", "trajectories", "pairs", "iterations"),
    "agent.policy": ("obs_size", "act_size", "action_bounds"),
    "oracle": ("rng", "folder"),
    "method": ("parameters", "seed", "threads"),
    "model": ("cache_folder", "seed"),
    "task": ("rng",),
}

# Settings that make a run what it is; the others may change when it is continued.
IDENTITY = (
    "env",
    "agent",
    "oracle",
    "seed",
    "trajectories",
    "pairs",
    "bits",
    "remember",
    "normalise_observations",
    "evaluation",
    "calibration",
    *("task", "model", "method", "batch_size"),  # of fine-tuning
)


class ConfigurationError(ValueError):
    """A setting that makes no sense, alone or beside another."""


# Objects from settings


def instantiate(node: Any, *, allow: Sequence[str] = (), **arguments: Any) -> Any:
    """The object that a node describes by its `_target_`, with these arguments added."""
    node = checked(node, allow=allow)
    trusted = [f"{package}.*" for package in (*TRUSTED, *allow)]
    arguments = {"_convert_": "all", **arguments}
    try:
        return hydra_instantiate(node, **arguments, _execution_whitelist_=trusted)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    except TypeError as error:
        if not re.search(
            r"missing \d+ required", str(error)
        ):  # what is missing from a `_partial_` node is found so late
            raise
        raise ConfigurationError(str(error)) from error


def build(node: Any, kind: Any = object, *, allow: Sequence[str] = (), **offered: Any) -> Any:
    """The object that a node describes, with what its class asks for of what is offered. kind: what it must be."""
    node = checked(node, allow=allow)
    parameters = inspect.signature(resolve(node["_target_"], "", allow=allow)).parameters.values()
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    wanted = {each.name for each in parameters}
    found = instantiate(
        node, allow=allow, **{name: value for name, value in offered.items() if takes_all or name in wanted}
    )
    if not isinstance(found, kind):
        raise ConfigurationError(f"a setting names {node['_target_']}, which makes no {kind.__name__}")
    return found


def checked(node: Any, *, allow: Sequence[str] = ()) -> Any:
    """A node as plain data, if all that it names at any depth may be called; otherwise nothing is imported."""
    if OmegaConf.is_config(node):
        node = OmegaConf.to_container(node, resolve=True)
    check_targets(node, allow=allow)
    for target in _targets(node):
        resolve(target, "", allow=allow)
    return node


def check_targets(node: Any, path: str = "", *, allow: Sequence[str] = ()) -> None:
    """Refuse a node that names, at any depth, something of a package that is not trusted. Nothing is imported."""
    if isinstance(node, Mapping):
        if "_target_" in node:
            check_target(node["_target_"], path, allow=allow)
        for key, value in node.items():
            check_targets(value, f"{path}.{key}".lstrip("."), allow=allow)
    elif isinstance(node, list | tuple):
        for value in node:
            check_targets(value, path, allow=allow)
    elif isinstance(node, str) and "${" in node:  # Hydra would put something in its place after this check
        raise ConfigurationError(f"{path or 'a setting'} must be a value, not {node!r}")


def _targets(node: Any) -> list[str]:
    """All that a node names in a `_target_`, at any depth."""
    below = node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
    own = [node["_target_"]] if isinstance(node, Mapping) and "_target_" in node else []
    return [*own, *(target for each in below for target in _targets(each))]


def _of(name: str, packages: Iterable[str]) -> bool:
    """Whether a dotted name is of one of these packages or modules."""
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def check_target(target: Any, path: str, *, allow: Sequence[str] = ()) -> None:
    """Refuse the name of something in a package that is not trusted."""
    if not isinstance(target, str) or not _of(target, (*TRUSTED, *allow)) or not target.isprintable():
        raise ConfigurationError(
            f"{path or 'a setting'} names {target!r}, which is not of {', '.join(TRUSTED)}: "
            f"if you trust the package, add allow=[{str(target).partition('.')[0]}]"
        )


def resolve(target: str, path: str, *, allow: Sequence[str] = ()) -> Any:
    """The class of that name, if it is there and was made in a trusted package; of what users allow, functions, too."""
    check_target(target, path, allow=allow)
    try:
        found = get_object(target)
    except Exception as error:
        raise ConfigurationError(f"{path or 'a setting'} names {target}, which cannot be imported: {error}") from None
    made_in = getattr(found, "__module__", None) or ""
    if not callable(found) or not _of(made_in, (*TRUSTED, *allow)):
        raise ConfigurationError(f"{path or 'a setting'} names {target}, which is of {made_in or 'nowhere'}")
    if not inspect.isclass(found) and not _of(made_in, allow):
        raise ConfigurationError(f"{path or 'a setting'} names {target}, which is not a class")
    return found


# Choices


def choices(group: str, folders: Iterable[Path] = ()) -> list[str]:
    """What a group of the configuration offers, here and in folders of the user's."""
    places = [Path(conf.__file__).parent, *folders]
    return sorted({path.stem for place in places for path in (place / group).glob("*.yaml")})


def config_folders(arguments: Sequence[str]) -> list[Path] | None:
    """The folders that a command line adds with --config-dir; None if it changes Hydra's search path, too."""
    if any("hydra.searchpath" in argument for argument in arguments):
        return None
    found = []
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, equals, value = argument.partition("=")
        if name in ("--config-dir", "-cd"):
            found.append(Path(value if equals else following))
    return found


def suggest(arguments: Sequence[str], groups: Collection[str]) -> None:
    """Refuse a command line that chooses what a group does not have, with near matches."""
    folders = config_folders(arguments)
    if folders is None:
        return
    for argument in arguments:
        group, equals, values = argument.partition("=")
        if not equals or group not in groups:
            continue
        for value in values.split(","):
            if value not in (offered := choices(group, folders)) and value != "null" and value.isidentifier():
                near = difflib.get_close_matches(value, offered, n=5, cutoff=0.5)
                hint = f"did you mean {', '.join(near)}?" if near else f"there are {', '.join(offered)}"
                raise ConfigurationError(f"there is no {group} {value!r}; {hint}")


def composition_message(error: Exception, arguments: Sequence[str], program: str) -> str:
    """What Hydra could not compose, in a sentence, with a near match for a setting that does not exist."""
    text = str(error)
    if missing := re.match(r"Missing mandatory value: ([\w.]+)", text):
        return f"{missing[1]} must be given: {missing[1]}=..."
    found = re.match(r"Could not override '([\w.@/]+)'", text)
    if found is None:
        return " ".join(text.split("\n\n")[0].split()) or f"Hydra cannot compose these settings: {error!r}"
    path, groups = (
        found[1],
        [each for each in arguments if re.fullmatch(r"(agent|env|oracle|task|model|method)=\w+", each)],
    )
    with contextlib.suppress(Exception), initialize_config_module("conf"):
        known = _paths(OmegaConf.to_container(compose(program, overrides=groups)))
        near = [each for each in known if each.rpartition(".")[0] == path.rpartition(".")[0]]
        return f"{path}: unknown setting{_did_you_mean(path, near)}"
    return f"{path}: unknown setting"


def _paths(node: Any, path: str = "") -> list[str]:
    """The full names of all settings."""
    if not isinstance(node, Mapping):
        return [path]
    return [path, *(each for key, value in node.items() for each in _paths(value, f"{path}.{key}".lstrip(".")))]


# Settings of a run


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """A configuration that Hydra composed, its own node `hydra` included, as plain settings without that node."""
    hydra = HydraConfig.instance()
    before = hydra.cfg
    try:
        hydra.set_config(cfg)  # in which the names of agent, task and teacher are
        own = OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key != "hydra"])
        settings: Any = OmegaConf.to_container(own, resolve=True)
    finally:
        hydra.cfg = before
    return dict(settings)


# Checks


def check(settings: Mapping[str, Any]) -> None:
    """Refuse settings of training that make no sense, by name."""
    for key in settings:
        if key not in known_settings():
            raise ConfigurationError(f"{key}: unknown setting{_did_you_mean(key, known_settings())}")
    check_groups(settings)
    check_env(settings["env"])
    allow = settings["allow"]
    if not isinstance(allow, list) or not all(isinstance(each, str) and each.isidentifier() for each in allow):
        raise ConfigurationError(f"allow must be a list of packages, such as [mine], not {allow!r}")
    for name in ("iterations", "pairs", "checkpoint_every"):
        check_whole(settings, name, 1)
    check_whole(settings, "trajectories", 2)
    check_whole(settings, "seed", 0)
    check_whole(settings["evaluation"], "every", 1, "evaluation.")
    check_whole(settings["evaluation"], "trajectories", 1, "evaluation.")
    check_whole(settings["calibration"], "trajectories", 2, "calibration.")
    check_flags(settings, ("normalise_observations", "resume", "preference_log", "tensorboard"))
    check_threads(settings)
    for name, minimum in (("bits", 1), ("remember", settings["trajectories"])):
        if settings[name] is not None:
            check_whole(settings, name, minimum)
    check_video(settings["video"])
    check_wandb(settings["wandb"])
    check_name("name", settings["name"])
    folder = settings["folder"]
    if not isinstance(folder, str) or not folder.strip() or not folder.isprintable():
        raise ConfigurationError(f"folder must be the path of a folder, not {folder!r}")
    for group in ("agent", "oracle"):
        check_targets(settings[group], group, allow=settings["allow"])
        check_node(settings[group], group, allow=settings["allow"])
    check_targets(settings["env"], "env", allow=settings["allow"])


def check_groups(settings: Mapping[str, Any]) -> None:
    """Every setting of conf/train.yaml is there, and every group is one."""
    for name, default in {"agent": {}, "env": {}, "oracle": {}, **shipped_settings()}.items():
        if name not in settings:
            raise ConfigurationError(f"{name} is missing")
        if not isinstance(default, Mapping):
            continue
        if not isinstance(settings[name], Mapping):
            raise ConfigurationError(f"{name} is a group of settings, such as {name}.x=..., not {settings[name]!r}")
        for key in default:
            if key not in settings[name]:
                raise ConfigurationError(f"{name}.{key} is missing")
        for key in settings[name] if default else ():
            if key not in default:
                raise ConfigurationError(f"{name}.{key}: unknown setting{_did_you_mean(key, default, f'{name}.')}")
    for path in ("agent._target_", "agent.policy", "oracle._target_", "env.name", "env.steps"):
        group, _, key = path.partition(".")
        if key not in settings[group]:
            raise ConfigurationError(f"{path} is missing")
    if not isinstance(settings["agent"]["policy"], Mapping) or "_target_" not in settings["agent"]["policy"]:
        raise ConfigurationError(f"agent.policy must be a node with a _target_, not {settings['agent']['policy']!r}")


def check_env(env: Mapping[str, Any]) -> None:
    """Of the task; whether there is one of that name is found out when it is loaded."""
    check_name("env.name", env["name"])
    if env["steps"] is not None:
        check_whole(env, "steps", 1, "env.")
    if env.get("task") is not None and not (isinstance(env["task"], Mapping) and "_target_" in env["task"]):
        raise ConfigurationError(f"env.task must be a node with a _target_, not {env['task']!r}")


def check_video(video: Mapping[str, Any]) -> None:
    """Of films during training."""
    if video["every"] is not None:
        check_whole(video, "every", 1, "video.")
    for name, minimum in {"steps": 1, "width": 64, "height": 64}.items():
        check_whole(video, name, minimum, "video.")
    _seconds(video, ("seconds", "finish_seconds"), "video.")


def check_wandb(wandb: Mapping[str, Any]) -> None:
    """Of curves in wandb."""
    if wandb["mode"] not in ("auto", "online", "offline", "disabled"):
        raise ConfigurationError(f"wandb.mode must be auto, online, offline or disabled, not {wandb['mode']!r}")
    _seconds(wandb, ("init_seconds", "finish_seconds"), "wandb.")
    for name in ("project", "entity", "group"):
        if not isinstance(wandb[name], str if name == "project" else str | None):
            raise ConfigurationError(f"wandb.{name} must be a word, not {wandb[name]!r}")
    if not isinstance(wandb["tags"], list) or not all(isinstance(tag, str) for tag in wandb["tags"]):
        raise ConfigurationError(f"wandb.tags must be a list of words, such as [a,b], not {wandb['tags']!r}")


def check_name(path: str, name: Any) -> None:
    """A name is part of a folder's: it must not lead out of it, nor spoil a terminal."""
    right = isinstance(name, str) and name.isprintable() and re.fullmatch(r"[^/\\]{1,200}", name)
    if not right or name in (".", ".."):
        raise ConfigurationError(f"{path} must be a name without slashes and control characters, not {name!r}")


@functools.cache
def known_settings() -> tuple[str, ...]:
    """All settings of conf/train.yaml."""
    return ("agent", "env", "oracle", *shipped_settings())


@functools.cache
def shipped_settings() -> dict[str, Any]:
    """What conf/train.yaml itself says."""
    found = yaml.safe_load((Path(conf.__file__).parent / "train.yaml").read_text())
    return {key: value for key, value in found.items() if key not in ("defaults", "hydra")}


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Where two configurations describe different runs: `agent.votes: 32, not 16`."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in {**one, **other} if path or key in IDENTITY]
        return [line for key in keys for line in differences(one.get(key), other.get(key), f"{path}.{key}".lstrip("."))]
    return [] if one == other else [f"{path}: {other}, not {one}"]


def digest(settings: Mapping[str, Any]) -> str:
    """A fingerprint of the settings that make a run what it is."""
    identity = {key: settings[key] for key in IDENTITY if key in settings}
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def check_whole(node: Mapping[str, Any], name: str, minimum: int, prefix: str = "") -> None:
    """Of a setting that is a whole number."""
    value = node[name]
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
        raise ConfigurationError(f"{prefix}{name} must be a whole number of at least {minimum}, not {value!r}")


def check_flags(node: Mapping[str, Any], names: Iterable[str]) -> None:
    """Of settings that are true or false; `no` is a word, and would count as true."""
    for name in names:
        if not isinstance(node[name], bool):
            raise ConfigurationError(f"{name} must be true or false, not {node[name]!r}")


def check_threads(node: Mapping[str, Any]) -> None:
    """Of the number of threads; null: one per core."""
    if node["threads"] is not None:
        check_whole(node, "threads", 1)
        if node["threads"] > MOST_THREADS:
            raise ConfigurationError(f"threads must be at most {MOST_THREADS}, not {node['threads']}")


def _seconds(node: Mapping[str, Any], names: Sequence[str], prefix: str) -> None:
    for name in names:
        value = node[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise ConfigurationError(f"{prefix}{name} must be a number of seconds, not {value!r}")


def check_node(node: Any, path: str, *, allow: Sequence[str] = ()) -> None:
    """Compare a node's settings with what its `_target_` takes: missing, surplus and mistyped ones by name.

    A `_partial_` node is completed by its owner, so nothing can be missing from it.
    """
    if isinstance(node, list | tuple):
        for each in node:
            check_node(each, path, allow=allow)
    if not isinstance(node, Mapping):
        return
    for key, value in node.items():
        check_node(value, f"{path}.{key}", allow=allow)
    if "_target_" not in node:
        return
    parameters = inspect.signature(resolve(node["_target_"], path, allow=allow), eval_str=True).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    given = {key: value for key, value in node.items() if not key.startswith("_")}
    for key in {*node} - {*given, "_target_", "_partial_"}:
        raise ConfigurationError(f"{path}.{key}: unknown setting")
    if not isinstance(node.get("_partial_", False), bool):
        raise ConfigurationError(f"{path}._partial_ must be true or false, not {node['_partial_']!r}")
    for key, value in given.items():
        if value == "???":
            raise ConfigurationError(f"{path}.{key} must be given: {path}.{key}=...")
        if key not in parameters:
            if takes_all:
                continue
            raise ConfigurationError(f"{path}.{key}: unknown setting{_did_you_mean(key, parameters, f'{path}.')}")
        if not _fits(value, parameters[key].annotation):
            raise ConfigurationError(f"{path}.{key} must be {_named(parameters[key].annotation)}, not {value!r}")
    for key, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and not node.get("_partial_") and key not in given and key not in OFFERED.get(path, ()):
            raise ConfigurationError(f"{path}.{key} is missing: {node['_target_']} needs it")


def _did_you_mean(key: str, known: Iterable[str], prefix: str = "") -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of the annotated type, a node where an object is wanted; else it is left to the object."""
    origin = typing.get_origin(annotation)
    if annotation in (Any, inspect.Parameter.empty, object):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if origin is Literal:
        return value in typing.get_args(annotation)
    if annotation is float and isinstance(value, float):
        return -LARGEST <= value <= LARGEST
    if annotation in (int, float):
        return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63
    if annotation in (bool, str):
        return isinstance(value, annotation)
    if annotation is type(None):
        return value is None
    is_node = isinstance(value, Mapping) and "_target_" in value
    if origin is Mapping:
        return is_node or (
            isinstance(value, Mapping) and all(_fits(each, typing.get_args(annotation)[1]) for each in value.values())
        )
    if origin in (Sequence, list, tuple):
        each_one = typing.get_args(annotation)[0]
        return is_node or (isinstance(value, list | tuple) and all(_fits(each, each_one) for each in value))
    is_call = (origin or annotation) is Callable
    if is_call or (isinstance(value, Mapping) and inspect.isclass(annotation) and not issubclass(annotation, Mapping)):
        may_be_partial = is_call and typing.get_args(annotation)[:1] in ((), (...,))  # its owner completes it
        return is_node and (may_be_partial or not value.get("_partial_"))
    return not isinstance(value, int | float | str) and value is not None


def _named(annotation: Any) -> str:
    """A type in words."""
    if typing.get_origin(annotation) is Literal:
        return " or ".join(str(each) for each in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return " or ".join(_named(each) for each in typing.get_args(annotation))
    if typing.get_origin(annotation) in (Mapping, Sequence, list, tuple):
        is_group = typing.get_origin(annotation) is Mapping
        each_one = _named(typing.get_args(annotation)[1 if is_group else 0])
        return f"{'a group' if is_group else 'a list'} with {each_one} in each place"
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a word", type(None): "null"}
    return words.get(annotation, "a node with a _target_")
