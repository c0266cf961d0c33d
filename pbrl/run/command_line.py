"""The command lines of the programs that Hydra configures: their --help, and mistakes answered with a sentence."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.errors import HydraException, InstantiationException
from hydra.utils import execution_whitelist
from omegaconf.errors import OmegaConfBaseException

import conf
from pbrl.run.settings import ConfigurationError, choices, composition_message, config_folders, suggest

CONF = Path(conf.__file__).parent
TRUSTED_BY_HYDRA = ("hydra.*", "hydra_plugins.*", "pbrl.run.*")
_NOT_SETTINGS = r"(_target_|_partial_):"  # lines of a YAML file that a user does not set


def run_main(main: Callable[[], Any], *, program: str, config: str, groups: Sequence[str], about: str) -> None:
    """Run Hydra's main of a program, or show its help. What a user can mend ends it with a sentence.

    config: its YAML in conf. groups: those of its settings that are chosen by name. about: its docstring.
    """
    show_help(sys.argv[1:], program=program, config=config, groups=groups, about=about)
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it cannot compose, and we say it shorter
    with mistakes_answered(program, config):
        suggest(sys.argv[1:], groups)
        with execution_whitelist([*TRUSTED_BY_HYDRA]):
            main()


@contextmanager
def mistakes_answered(program: str, config: str) -> Iterator[None]:
    """End the program with a sentence about what a user can mend. Inside Hydra's main, too: it would add its own."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ConfigurationError, OSError) as error:
        raise SystemExit(f"{program}: {user_message(error, sys.argv[1:], config)}") from None


def user_message(error: Exception, arguments: Sequence[str], config: str) -> str:
    """What to tell a user about an error of theirs."""
    if isinstance(error, InstantiationException):
        return str(error.__cause__ or error)
    if isinstance(error, HydraException | OmegaConfBaseException):
        return composition_message(error, arguments, config)
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {error.filename}"
    return str(error)


def show_help(arguments: Sequence[str], *, program: str, config: str, groups: Sequence[str], about: str) -> None:
    """If the command line asks for help, print it and end the program."""
    if {"-h", "--help"} & {*arguments}:
        text = help_text(arguments, program=program, config=config, groups=groups, about=about)
        try:
            print(text, flush=True)
        except BrokenPipeError:  # `--help | head` has read enough; what is left in the buffer goes nowhere
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0)


def help_text(arguments: Sequence[str], *, program: str, config: str, groups: Sequence[str], about: str) -> str:
    """What a program does, what can be chosen, and the settings of what is chosen, with the comments of their YAML."""
    folders = config_folders(arguments) or []
    chosen = {**_defaults(CONF / f"{config}.yaml"), **dict(each.split("=", 1) for each in arguments if "=" in each)}
    lines = [wrapped(about)]
    if groups:
        lines += ["", f"Chosen by name, such as {groups[0]}={choices(groups[0])[0]}:"]
    for group in groups:
        now = f" (now {chosen[group]})" if chosen.get(group) else ""
        offered = f"{group}{now}: {', '.join(choices(group, folders))}"
        lines += textwrap.wrap(offered, _width(), initial_indent="  ", subsequent_indent="      ")
    lines += ["", "Set by name, such as seed=1 (what follows # says what a setting is):", *_settings(f"{config}.yaml")]
    for group in groups:
        name = f"{group}/{chosen.get(group)}.yaml"
        if group != "experiment" and any((folder / name).exists() for folder in (CONF, *folders)):
            example = f"{group}.NAME=VALUE, of {group}={chosen[group]} (what stands lower holds):"
            lines += ["", example, *_settings(name, folders)]
    return "\n".join([*lines, "", f"All settings together: python -m {program} … --cfg job"])


def wrapped(about: str) -> str:
    """A docstring for the terminal: its paragraphs as wide as that is, its examples as they stand."""
    blocks = about.strip("\n").split("\n\n")
    return "\n\n".join(each if each.startswith(" ") else textwrap.fill(each, _width()) for each in blocks)


def _width() -> int:
    return min(120, shutil.get_terminal_size().columns)


def _defaults(path: Path) -> dict[str, str]:
    """The choices that a YAML file makes in its defaults list, its bases' included."""
    found: dict[str, str] = {}
    for each in yaml.safe_load(path.read_text()).get("defaults", []):
        if isinstance(each, str) and each != "_self_":
            found |= _defaults(path.with_name(f"{each}.yaml"))
        elif isinstance(each, Mapping):
            found |= {str(group): str(choice) for group, choice in each.items() if choice is not None}
    return found


def _settings(name: str, folders: Sequence[Path] = ()) -> list[str]:
    """The lines of a YAML file that a user may set, with those of the files that its defaults list names."""
    path = next(folder / name for folder in (CONF, *folders) if (folder / name).exists())
    lines: list[str] = []
    for each in yaml.safe_load(path.read_text()).get("defaults", []):
        if isinstance(each, str) and each != "_self_":
            lines += _settings(f"{each}.yaml")
        for base, choice in each.items() if isinstance(each, Mapping) else ():
            group, _, at = str(base).partition("@")
            if group.startswith("/"):  # a part that several share, such as the policy
                shared = _settings(f"{group[1:]}/{choice}.yaml")
                lines += shared if at == "_here_" else [f"  {at}:", *(f"  {line}" for line in shared)]
    block = ""  # the name at the margin under which a line stands
    for line in path.read_text().splitlines():
        if found := re.match(r"(\w+):", line):
            block = found[1]
        hidden = block in ("defaults", "hydra", "choices") or re.match(rf"\s*{_NOT_SETTINGS}", line)
        if line.strip() and not hidden and not line.startswith(("# python -m", "# @package")):
            in_comment = 0 <= f"  {line}".find(" #") < _width()  # where the line breaks; or else in a long value
            indent = " " * (len(line) - len(line.lstrip()) + 6) + "# " * in_comment
            lines += textwrap.wrap(
                f"  {line}", _width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return lines
