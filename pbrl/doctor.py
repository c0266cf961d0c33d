"""Is all well here? Versions, disk, cores, physics, pictures, wandb; and what to do about what is not.

    python -m pbrl.doctor

It asks nothing, contacts nobody, and leaves nothing behind. Its exit code is 1 if something is in the way of training.
Little is imported before it is looked at, so that a broken package is a line in the table.
"""

from __future__ import annotations

import netrc
import os
import platform
import shutil
import tempfile
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
from rich.markup import escape
from rich.table import Table

from pbrl.simulation import gl

Status = Literal["ok", "warning", "problem"]
COLOURS = {"ok": "green", "warning": "yellow", "problem": "bold red"}
LITTLE, TOO_LITTLE = 1e9, 5e7  # bytes of free space; a run leaves some millions


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    status: Status
    what: str
    found: str
    advice: str = ""  # what to do about it


def declared() -> tuple[str, list[Requirement], dict[str, list[Requirement]]]:
    """What pyproject.toml declares: the range of Python, what is required, and what each extra adds."""
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
    """What is wrong with a package; nothing if it is installed in a version that will do."""
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return "is not installed"
    return "" if requirement.specifier.contains(installed, prereleases=True) else f"is {installed}"


def install(requirements: Iterable[Requirement]) -> str:
    """The command."""
    return " ".join(["pip install", *(f"'{each.name}{each.specifier}'" for each in requirements)])


def versions() -> Iterator[Finding]:
    """Python and the packages, against the declared ranges."""
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
    """What can be installed on top."""
    for extra, requirements in declared()[2].items():
        missing = [each for each in requirements if trouble(each)]
        found = ", ".join(f"{each.name} {trouble(each)}" for each in missing) or "installed"
        yield Finding("ok", f"extra {extra}", found, f"if you want it: {install(missing)}" if missing else "")


def names() -> Iterator[Finding]:
    """Packages that would be imported for ours from another folder; that ours are found here, pbrl has seen to."""
    distributions = metadata.packages_distributions()
    others = {name: {*distributions.get(name, ())} - {"pbrl"} for name in ("agents", "oracles", "conf")}
    for name, owners in others.items():
        for owner in sorted(owners):
            advice = f"pip uninstall {owner}, or keep it in an environment of its own"
            yield Finding("warning", "names", f"{owner} brings a package `{name}`, too: one hides the other", advice)
    if not any(others.values()):
        yield Finding("ok", "names", "agents, oracles and conf are pbrl's own")


def folder() -> Iterator[Finding]:
    """Can a run be written here?"""
    here = Path.cwd()
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            file.write(b"pbrl")
    except OSError as error:
        yield Finding("problem", "folder", f"{here} cannot be written: {error.strerror}", "go to one that can")
        return
    free = shutil.disk_usage(here).free
    status: Status = "problem" if free < TOO_LITTLE else "warning" if free < LITTLE else "ok"
    advice = "" if status == "ok" else "make room, or go to another disk: a run keeps checkpoints and all comparisons"
    yield Finding(status, "folder", f"{here} can be written, {free / 1e9:.1f} GB are free", advice)


def quota() -> float | None:
    """How many cores' worth of time Linux grants this container; None if there is no limit."""
    limit = Path("/sys/fs/cgroup/cpu.max")
    share, _, period = limit.read_text().partition(" ") if limit.exists() else ("max", "", "")
    return None if share == "max" else int(share) / int(period)


def cores() -> Iterator[Finding]:
    """How much can be done at once?"""
    import torch

    from pbrl.simulation import simulator

    count = simulator.cores()
    openmp = os.environ.get("OMP_NUM_THREADS", "not set")
    found = f"{count} of {os.cpu_count()}; torch has {torch.get_num_threads()} threads, OMP_NUM_THREADS is {openmp}"
    yield Finding("ok", "cores", found, "a run takes one thread per core for both; threads=N for less")
    allowed = quota()
    if allowed is not None and allowed < count:
        advice = f"set threads={max(1, round(allowed))}: more would only wait for each other"
        yield Finding("warning", "cores", f"this container may use {allowed:.1f} of them", advice)
    if os.getloadavg()[0] > count:
        advice = "runs share the cores with others and take longer; what they compute is the same"
        yield Finding("warning", "cores", f"they are busy: {os.getloadavg()[0]:.1f} processes want to run", advice)


def simulation() -> Iterator[Finding]:
    """Does the physics run, how fast, and is it dm_control's?"""
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
    # NumPy's exponential, which dm_control's reward is made of, rounds differently on different processors.
    equal = np.allclose(ours.task_rewards, theirs.task_rewards, rtol=0, atol=1e-14)
    equal = equal and np.array_equal(ours.observations, theirs.observations)  # type: ignore[arg-type]  # they are kept
    advice = "" if equal else "results will not be comparable: try the versions in constraints.txt, and report it"
    found = f"2 x {fast.steps} steps of walker_walk {'equal' if equal else 'differ from'} dm_control's"
    yield Finding("ok" if equal else "problem", "parity", found, advice)

    steps, begin = 0, time.perf_counter()
    while time.perf_counter() < begin + 1.0:
        steps += int(fast.collect(policy, parameters, rows, iteration=steps).lengths.sum())
    speed = steps / (time.perf_counter() - begin)
    yield Finding("ok", "speed", f"{speed:,.0f} steps of walker_walk per second on {fast.threads} threads")


def pictures() -> Iterator[Finding]:
    """Can pbrl.play draw and write?"""
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
    """Will runs appear in wandb? Nobody is asked, and no key is shown."""
    if trouble(Requirement("wandb")):
        yield Finding(
            "ok", "wandb", "not installed; the record is complete without", "pip install wandb to mirror runs"
        )
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
        yield Finding("warning", "wandb", f"{file} cannot be read: {error}", "put it right, then `wandb login`")
        return
    advice = "`wandb login`; or wandb.mode=disabled, if you do not want it"
    yield (
        Finding("ok", "wandb", f"logged in to {host}")
        if known
        else Finding("warning", "wandb", f"not logged in to {host}: runs are kept offline", advice)
    )


def examine(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """What a check finds; that it fails is a finding, too."""
    try:
        return list(check())
    except Exception as error:
        advice = "see to the problems above first; then report it, with this table"
        return [Finding("problem", check.__name__, f"{type(error).__name__}: {error}", advice)]


def main() -> None:
    """Look at everything, and say so."""
    console, findings = Console(), []
    for check in (versions, extras, names, folder, cores, simulation, pictures, wandb):
        with console.status(f"looking at {check.__name__}"):
            findings += examine(check)
    table = Table("", "", "found", "what to do", title="pbrl.doctor")
    for each in findings:
        status = f"[{COLOURS[each.status]}]{each.status}[/]"
        table.add_row(status, each.what, escape(each.found), escape(each.advice))
    console.print(table)
    problems = sum(each.status == "problem" for each in findings)
    console.print(f"{problems or 'no'} problem{'' if problems == 1 else 's'}")
    raise SystemExit(1 if problems else 0)


if __name__ == "__main__":
    main()
