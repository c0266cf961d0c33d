"""Where runs come from: the commands that repeat them, the settings in which they differ, their versions."""

from __future__ import annotations

import copy
import functools
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pbrl.report.text import label
from pbrl.run import settings as run_settings
from pbrl.run.folder import link_names
from pbrl.run.versions import noted_versions, versions

Settings = Mapping[str, Any]
GROUPS = ("agent", "oracle")
# Settings that do not change what is learnt.
INCIDENTAL = (
    *("choices", "folder", "resume", "checkpoint_every", "preference_log", "threads"),
    *("video", "wandb", "tensorboard"),
)


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """Every preset of an agent and an oracle by name, and under "train" the settings beside them."""
    offered = [run_settings.choices(group) for group in GROUPS]
    found: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    with initialize_config_module("conf"):
        for pair in zip_longest(*offered):
            chosen = {group: name for group, name in zip(GROUPS, pair, strict=True) if name is not None}
            cfg = compose("train", overrides=[f"{group}={name}" for group, name in chosen.items()])
            for group, name in chosen.items():
                found[group][name] = link_names(OmegaConf.to_container(cfg[group]))
    found["train"] = OmegaConf.to_container(cfg)  # type: ignore[assignment]
    return found


def upgrade(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A run's settings as the present version would have recorded them.

    What an earlier version did not record is added: the names of the presets, and the defaults of newer settings.
    """
    upgraded: dict[str, Any] = link_names(settings)
    recorded = upgraded.get("choices")
    recorded = recorded if isinstance(recorded, dict) else {}
    names = {name: value for name, value in recorded.items() if isinstance(value, str)}
    for group in GROUPS:
        if group not in names:
            name = names[group] = _preset_by_folder(group, upgraded, folder)
            preset = presets()[group].get(name, {})
            if preset.get("_target_") == upgraded[group]["_target_"]:
                upgraded[group] = _with_defaults(upgraded[group], preset, upgraded, group)
    task = names.setdefault("env", str(upgraded["env"].get("name")))
    upgraded["choices"] = names
    if task in run_settings.choices("env"):
        upgraded["env"] = _with_defaults(upgraded["env"], presets()["train"]["env"], upgraded, "env")
    defaults = {key: each for key, each in presets()["train"].items() if key not in (*GROUPS, *INCIDENTAL, "env")}
    return _with_defaults(upgraded, defaults, upgraded)


def _preset_by_folder(group: str, settings: Settings, folder: Path) -> str:
    """The preset of a run that did not record it: by its folder, runs/<env>/<agent>/<oracle>/seed_<n>."""
    target = settings[group]["_target_"]
    for path in (Path(str(settings.get("folder"))), folder.absolute()):  # the folder may have been moved
        name = (path.parent if group == "oracle" else path.parent.parent).name
        if presets()[group].get(name, {}).get("_target_") == target:
            return name
    return str(settings["name"] if group == "agent" else target)


def _with_defaults(node: dict[str, Any], default: Settings, settings: Settings, path: str = "") -> dict[str, Any]:
    """The node, with defaults for the settings that it lacks."""
    found = dict(node)
    for key, each in default.items():
        below = f"{path}.{key}".lstrip(".")
        if key not in found:
            found[key] = copy.deepcopy(_resolve(each, settings, below))
        elif isinstance(found[key], dict) and isinstance(each, Mapping):
            found[key] = _with_defaults(found[key], each, settings, below)
    return found


def _resolve(default: Any, settings: Settings, path: str) -> Any:
    """A default whose references, such as `${pairs}`, are replaced by the values of a run.

    Only references in our own presets are followed. In a run's settings they are text: they could read anything.
    """
    if isinstance(default, Mapping):
        return {key: _resolve(each, settings, f"{path}.{key}".lstrip(".")) for key, each in default.items()}
    if not isinstance(default, str) or "${" not in default:
        return default
    try:
        config = OmegaConf.create(_without_references(settings))
        OmegaConf.update(config, path, default)
        value = OmegaConf.select(config, path)
        return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException:
        return default


def _without_references(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {str(key): _without_references(each) for key, each in node.items()}
    if isinstance(node, list):
        return [_without_references(each) for each in node]
    return node if node is None or isinstance(node, bool | int | float) else str(node).replace("${", "$ {")


def changes(settings: Any, default: Any, path: str = "") -> dict[str, Any]:
    """The overrides that turn a default into these settings: `agent.votes: 16`; `+` adds a setting, `~` removes it."""
    if not isinstance(settings, Mapping) or not isinstance(default, Mapping):
        return {} if settings == default else {path: settings}
    found: dict[str, Any] = {}
    for key in {**default, **settings}:
        below = f"{path}.{key}".lstrip(".")
        if key not in settings:
            found[f"~{below}"] = None
        elif key not in default:
            found[f"+{below}"] = settings[key]
        else:
            found |= changes(settings[key], default[key], below)
    return found


def preset_changes(group: str, settings: Settings) -> dict[str, Any]:
    """What a run changed of its preset, as overrides; all of its settings if the preset is not one of pbrl's."""
    preset = presets()[group].get(settings["choices"][group])
    if preset is None:
        return {f"{group}.{key}": value for key, value in settings[group].items() if key != "_target_"}
    return changes(settings[group], _resolve(preset, settings, group), group)


def teacher_name(settings: Settings) -> str:
    """The preset of a run's teacher, and what was changed of it: `irrational eps_mistake=0.2`."""
    changed = preset_changes("oracle", settings)
    words = [f"{path.replace('oracle.', '', 1)}={in_words(value)}" for path, value in changed.items()]
    return " ".join([settings["choices"]["oracle"], *words])


def overrides(settings: Settings) -> dict[str, str]:
    """The overrides that repeat a run, without those that do not change what is learnt."""
    chosen = {**settings["choices"], "seed": settings["seed"]}
    every = {key: chosen[key] for key in ("agent", "env", "oracle", "seed")}
    for group in GROUPS:
        every |= preset_changes(group, settings)
    apart = (*GROUPS, "env", "seed", *INCIDENTAL)
    rest = {key: value for key, value in settings.items() if key not in apart}
    default = {key: _resolve(value, settings, key) for key, value in presets()["train"].items() if key not in apart}
    default["name"] = chosen["agent"]
    if chosen["env"] in run_settings.choices("env"):
        default["env"] = {**_resolve(presets()["train"]["env"], settings, "env"), "name": chosen["env"]}
        rest["env"] = settings["env"]
    else:  # a task of the user's own
        every |= {f"env.{key}": value for key, value in settings["env"].items() if key not in ("_target_", "name")}
    return {key: in_words(value) for key, value in {**every, **changes(rest, default)}.items()}


def commands(every_settings: Iterable[Settings]) -> list[str]:
    """As few commands as possible that repeat these runs."""
    lines = [overrides(settings) for settings in every_settings]
    for key in ("seed", "env", "agent", "oracle"):
        merged: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
        for line in lines:
            rest = tuple((name, "" if name == key else value) for name, value in line.items())
            merged.setdefault(rest, {})[line[key]] = None
        lines = [{**dict(rest), key: ",".join(values)} for rest, values in merged.items()]
    return [_command(line) for line in lines]


def _command(line: Mapping[str, str]) -> str:
    several = any("," in line[key] for key in ("seed", "env", "agent", "oracle"))
    arguments = [key if key.startswith("~") else f"{key}={value}" for key, value in line.items()]
    return shlex.join(["python", "-m", "pbrl.train", *(["-m"] if several else []), *arguments])


def in_words(value: Any) -> str:
    """A setting as it is written on Hydra's command line."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{in_words(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(in_words(each) for each in value) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def leaves(settings: Any, path: str = "") -> dict[str, str]:
    """Every setting under its full name."""
    if not isinstance(settings, Mapping):
        return {path: in_words(settings)}
    return {k: v for key, below in settings.items() for k, v in leaves(below, f"{path}.{key}".lstrip(".")).items()}


def disagreements(named: Sequence[tuple[str, Settings]]) -> dict[str, dict[str, list[str]]]:
    """Settings with different values in different runs: for each the values, and the names of the runs that have them.

    A setting that a run does not have is not a difference.
    """
    found: dict[str, dict[str, list[str]]] = {}
    for name, settings in named:
        for path, value in leaves(settings).items():
            if path.split(".")[0] in ("seed", "name", *INCIDENTAL) or path in ("env.name", "agent._target_"):
                continue
            names = found.setdefault(path, {}).setdefault(value, [])
            if name not in names:
                names.append(name)
    return {path: values for path, values in found.items() if len(values) > 1}


def compare_versions(folders: Sequence[Path]) -> list[str]:
    """For each package: the version that the report was made with, and those of the runs."""
    report = versions()
    noted = [noted_versions(folder) or [dict.fromkeys(report, "not noted")] for folder in folders]
    lines = []
    for package, version in report.items():
        count = Counter(each for run in noted for each in {entry.get(package, "not noted"): 0 for entry in run})
        lines.append(f"{package} {version}; runs: {', '.join(f'{label(k)} ({many})' for k, many in count.items())}")
    return lines
