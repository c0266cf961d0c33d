"""Check this machine, with advice for every problem.

    python -m pbrl.doctor    # versions, disk, cores, physics, pictures, wandb

It asks no questions, uses no network and leaves no files. Its exit code is 1
if there is a problem that prevents training. Packages are imported only when
they are checked, so that a broken package is a line in the table.
"""

from __future__ import annotations

import argparse
import netrc
import os
import platform
import shutil
import tempfile
import textwrap
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console
from rich.text import Text

from pbrl.simulation import gl

Status = Literal["ok", "warning", "problem"]
COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
LITTLE, TOO_LITTLE = 1e9, 5e7  # bytes of free space; a run leaves some millions


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    status: Status
    what: str
    found: str
    advice: str = ""  # what to do about it


def declared() -> tuple[str, list[Requirement], dict[str, list[Requirement]]]:
    """What pyproject.toml declares: the range of Python, the required packages, and those that each extra adds."""
    try:
        about = metadata.metadata("pbrl")
        python, extras = about["Requires-Python"], about.get_all("Provides-Extra") or []
        lines = metadata.requires("pbrl") or []
    except metadata.PackageNotFoundError:  # from a clone, without installing
        project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
        python, extras = project["requires-python"], list(project["optional-dependencies"])
        lines = project["dependencies"] + [
            f"{line}{' and' if ';' in line else ';'} extra == '{extra}'"
            for extra in extras
            for line in project["optional-dependencies"][extra]
        ]

    def needed_for(extra: str) -> list[Requirement]:
        every = [Requirement(line) for line in lines]
        return [each for each in every if each.marker is None or each.marker.evaluate({"extra": extra})]

    required = needed_for("")
    return python, required, {extra: [each for each in needed_for(extra) if each not in required] for extra in extras}


def trouble(requirement: Requirement) -> str:
    """What is wrong with a package; empty if it is installed in a suitable version."""
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "is not installed"
    return "" if requirement.specifier.contains(installed, prereleases=True) else f"is {installed}"


def install(requirements: Iterable[Requirement]) -> str:
    """The command that installs these packages."""
    return " ".join(["pip install", *(f"'{each.name}{each.specifier}'" for each in requirements)])


def versions() -> Iterator[Finding]:
    """Compare Python and the packages with the declared ranges."""
    python, required, _ = declared()
    fits = SpecifierSet(python).contains(platform.python_version(), prereleases=True)
    advice = "" if fits else f"make an environment with a Python {python}"
    yield Finding("ok" if fits else "problem", "python", platform.python_version(), advice)
    wrong = {each.name: trouble(each) for each in required if trouble(each)}
    for each in required:
        if each.name in wrong:
            found = f"{each.name} {wrong[each.name]}; pbrl needs {each.specifier}"
            yield Finding("problem", "packages", found, install([each]))
    right = [f"{each.name} {metadata.version(each.name)}" for each in required if each.name not in wrong]
    yield Finding("ok", "packages", ", ".join(right))


def extras() -> Iterator[Finding]:
    """Optional packages."""
    for extra, requirements in declared()[2].items():
        missing = [each for each in requirements if trouble(each)]
        found = ", ".join(f"{each.name} {trouble(each)}" for each in missing) or "installed"
        yield Finding("ok", f"extra {extra}", found, f"if you want it: {install(missing)}" if missing else "")


def names() -> Iterator[Finding]:
    """Other packages called agents, oracles or conf, which may be imported in place of pbrl's."""
    distributions = metadata.packages_distributions()
    others = {name: {*distributions.get(name, ())} - {"pbrl"} for name in ("agents", "oracles", "conf")}
    for name, owners in others.items():
        for owner in sorted(owners):
            advice = f"pip uninstall {owner}, or keep it in an environment of its own"
            yield Finding(
                "warning", "names", f"{owner} also has a package `{name}`: one of the two hides the other", advice
            )
    if not any(others.values()):
        yield Finding("ok", "names", "agents, oracles and conf are pbrl's own")


def folder() -> Iterator[Finding]:
    """Check that a run can be written to this folder."""
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"pbrl")
    except OSError as error:
        yield Finding("problem", "folder", f"{here} cannot be written: {error.strerror}", "change to another folder")
        return
    free = shutil.disk_usage(here).free
    status: Status = "problem" if free < TOO_LITTLE else "warning" if free < LITTLE else "ok"
    advice = (
        "" if status == "ok" else "free some space, or use another disk: a run keeps checkpoints and all comparisons"
    )
    yield Finding(status, "folder", f"{here} can be written, {free / 1e9:.1f} GB are free", advice)


def quota() -> float | None:
    """How many cores this container may use, by its cgroup; None if there is no limit."""
    limit = Path("/sys/fs/cgroup/cpu.max")
    share, _, period = limit.read_text().partition(" ") if limit.exists() else ("max", "", "")
    return None if share == "max" else int(share) / int(period)


def cores() -> Iterator[Finding]:
    """Count cores and threads."""
    import torch

    from pbrl import threads

    count = threads.cores()
    openmp = os.environ.get("OMP_NUM_THREADS", "not set")
    found = f"{count} of {os.cpu_count()}; torch has {torch.get_num_threads()} threads, OMP_NUM_THREADS is {openmp}"
    yield Finding("ok", "cores", found, "a run takes one thread per core for both; threads=N for less")
    allowed = quota()
    if allowed is not None and allowed < count:
        advice = f"set threads={max(1, round(allowed))}: more threads would only wait for each other"
        yield Finding("warning", "cores", f"this container may use {allowed:.1f} of them", advice)
    if os.getloadavg()[0] > count:
        advice = "runs take longer, because they share the cores; their results are the same"
        yield Finding("warning", "cores", f"busy: {os.getloadavg()[0]:.1f} processes want to run", advice)


def simulation() -> Iterator[Finding]:
    """Check that the physics equals dm_control's, and measure its speed."""
    import numpy as np

    from pbrl.policy import GaussianPolicy
    from pbrl.simulation.simulator import Simulator

    fast, plain = (Simulator("walker_walk", seed=0, steps=100, native=native) for native in (True, False))
    gains = {"hidden_gain": 2**0.5, "output_gain": 0.01, "initial_log_std": -1.2}
    policy = GaussianPolicy(fast.obs_size, fast.act_size, hidden=[256, 256], **gains)
    parameters, rows = policy.initial(np.random.default_rng(0))[None], np.zeros(16 * fast.threads, np.int64)
    ours, theirs = (
        each.collect(policy, parameters, rows[:2], iteration=0, keep=["observations"]) for each in (fast, plain)
    )
    # NumPy's exponential, which dm_control's rewards use, rounds differently on different processors.
    equal = np.allclose(ours.task_rewards, theirs.task_rewards, rtol=0, atol=1e-14)
    equal = equal and np.array_equal(ours.observations, theirs.observations)  # type: ignore[arg-type]  # kept, so not None
    advice = "" if equal else "results will not be comparable: try the versions in constraints.txt, and report it"
    found = f"2 x {fast.steps} steps of walker_walk {'equal' if equal else 'differ from'} dm_control's"
    yield Finding("ok" if equal else "problem", "parity", found, advice)

    steps, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + 1.0:
        steps += int(fast.collect(policy, parameters, rows, iteration=steps).lengths.sum())
    speed = steps / (time.perf_counter() - begin)
    yield Finding("ok", "speed", f"{speed:,.0f} steps of walker_walk per second on {fast.threads} threads")


def pictures() -> Iterator[Finding]:
    """Check that pbrl.play can draw and write videos."""
    from pbrl.simulation import video

    named = os.environ.get("MUJOCO_GL")
    obstacles = {name: gl.obstacle(name) for name in ([named] if named else gl.candidates())}
    usable = [name for name, reason in obstacles.items() if reason is None]
    unusable = [f"not {name} ({reason})" for name, reason in obstacles.items() if reason is not None]
    advice = "" if usable else f"only pbrl.play needs it; {'unset MUJOCO_GL, or ' if named else ''}{gl.PACKAGES}"
    yield Finding("ok" if usable else "warning", "OpenGL", ", ".join(usable + unusable), advice)
    encoder = video.encoder()
    advice = "" if encoder else "pip install imageio-ffmpeg for mp4"
    yield Finding("ok", "video", encoder or "no ffmpeg: pbrl.play writes GIF", advice)


def wandb() -> Iterator[Finding]:
    """Check whether wandb is logged in, without network and without showing a key."""
    if trouble(Requirement("wandb")):
        yield Finding("ok", "wandb", "not installed; runs are recorded without it", "pip install wandb to mirror runs")
        return
    if mode := os.environ.get("WANDB_MODE"):
        yield Finding("ok", "wandb", f"WANDB_MODE is {mode}")
        return
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    places = [Path(os.environ["NETRC"])] if "NETRC" in os.environ else [Path.home() / ".netrc", Path.home() / "_netrc"]
    file = next((path for path in places if path.exists()), None)
    try:
        known = "WANDB_API_KEY" in os.environ or (file is not None and bool(netrc.netrc(file).authenticators(host)))
    except (netrc.NetrcParseError, OSError) as error:
        yield Finding("warning", "wandb", f"{file} cannot be read: {error}", "correct the file, then `wandb login`")
        return
    advice = "`wandb login`; or wandb.mode=disabled, if you do not want it"
    yield (
        Finding("ok", "wandb", f"logged in to {host}")
        if known
        else Finding("warning", "wandb", f"not logged in to {host}: runs are kept offline", advice)
    )


def examine(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check; if the check itself fails, that is a finding."""
    try:
        return list(check())
    except Exception as error:
        advice = "solve the problems above first; if it stays, report it with this table"
        return [Finding("problem", check.__name__, f"{type(error).__name__}: {error}", advice)]


def show(finding: Finding, console: Console) -> None:
    """Print a finding, and below it what to do, on one line: commands in it can be copied."""
    indent = " " * 27
    lines = textwrap.wrap(f"{finding.what:<19}{finding.found}", console.width - 8, subsequent_indent=indent[8:])
    for status, line in zip([finding.status, *[""] * len(lines)], lines, strict=False):
        console.print(Text(f"{status:<8}", COLOURS[finding.status]) + line, soft_wrap=True, highlight=False)
    if finding.advice:
        console.print(Text(f"{indent}-> {finding.advice}", "dim"), soft_wrap=True, highlight=False)


def main(arguments: list[str] | None = None) -> None:
    """Run all checks and print their findings."""
    form = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser("python -m pbrl.doctor", description=__doc__, formatter_class=form).parse_args(arguments)
    console, findings = Console(), []
    for check in (versions, extras, names, folder, cores, simulation, pictures, wandb):
        with console.status(f"checking {check.__name__}"):
            findings += examine(check)
    for each in findings:
        show(each, console)
    problems = sum(each.status == "problem" for each in findings)
    console.print(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
