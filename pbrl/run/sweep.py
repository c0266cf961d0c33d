"""Sweeps: many runs by one command, sequentially or through any of Hydra's launchers.

    python -m pbrl.train -m agent=ncrs,zpg seed=0,1,2 hydra/launcher=joblib

Wherever a job runs, it leaves a note in the sweep's folder of what became of it, and a job that fails is no more than
such a note. The process that launched the sweep reads them at the end, and says what to do. So nothing is asked of a
launcher but that its jobs see the same disk.

    runs/sweeps/agent-seed-1f3a9c2e/    the same for the same command
        jobs/3.json                     what became of the job
        jobs/3.txt                      the traceback, if it failed
        stop                            a signal came: runs save and end, jobs to come do not begin
        summary.txt                     what was printed at the end
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from tqdm import tqdm

from pbrl.run.job import asked_to_stop, stop
from pbrl.run.settings import IDENTITY, ConfigurationError

PLUGINS = {  # the package of each, and the extra of pyproject.toml
    "hydra/launcher=joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "hydra/launcher=submitit_local": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "hydra/launcher=submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "hydra/launcher=ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "hydra/sweeper=optuna": ("hydra_plugins.hydra_optuna_sweeper", "optuna"),
    "experiment=tune": ("hydra_plugins.hydra_optuna_sweeper", "optuna"),
}
COLOURS = {"finished": "green", "left alone": "dim", "stopped": "yellow", "not begun": "yellow"}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
DONE = ("finished", "left alone")
BEST = "optimization_results.yaml"  # of the Optuna sweeper
WATCH_SECONDS = 2.0
LONGEST_NAME = 64  # letters of a sweep's name before its digest

launched: list[Launched] = []  # by this process; the last one is the one under way


class Launched:
    """A sweep as the process sees it that launched it."""

    def __init__(self, folder: Path, hydra_overrides: list[str] | None, *, jobs: int, elsewhere: bool) -> None:
        self.folder = folder
        self.hydra_overrides = hydra_overrides  # to launch jobs again as they were; None in a search
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        for earlier in [*(folder / "jobs").iterdir(), *(folder / name for name in ("stop", "summary.txt", BEST))]:
            earlier.unlink(missing_ok=True)
        self.handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.signal(number, self.note_signal) for number in SIGNALS}
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch, args=[jobs], daemon=True)
        if elsewhere:  # runs in this process have a bar of their own
            self.watcher.start()

    def watch(self, jobs: int) -> None:
        """A progress bar of the jobs that are done with."""
        with tqdm(total=jobs, desc=str(self.folder), unit="run") as bar:
            while not self.over.wait(WATCH_SECONDS):
                bar.update(sum(note["state"] != "begun" for note in self.notes()) - bar.n)

    def notes(self) -> list[dict[str, Any]]:
        """What became of the jobs, in their order."""
        paths = sorted((self.folder / "jobs").glob("*.json"), key=lambda path: int(path.stem))
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> None:
        """No more bar, and signals go where they went before."""
        self.over.set()
        if self.watcher.is_alive():
            self.watcher.join()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def note_signal(self, number: int, _: Any) -> None:
        """Ask all jobs to save and end; a second signal is obeyed at once."""
        if (self.folder / "stop").exists():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        stop(self.folder, number)
        print("\nthe runs finish their iterations; once more to stop at once", file=sys.stderr)

    def conclude(self, broken: BaseException | None) -> int:
        """Print what became of the jobs, and what to do; the exit code."""
        notes = self.notes()
        if broken is not None and not notes:
            raise broken  # it was no sweep that could be launched
        for note in notes:
            if note["state"] == "begun":
                note |= {"state": "broken off", "why": "its process ended without a word, or is still at work"}
        missing = [note for note in notes if note["state"] not in DONE]
        lines = [f"{len(notes) - len(missing)} of {len(notes)} runs are finished"]
        stopped = asked_to_stop(self.folder)
        if stopped:
            lines[0] += "; stopped by a signal, and the same command goes on"
        elif broken is not None:
            lines[0] += "; the launcher broke off, and the same command runs what is missing"
        if (self.folder / BEST).exists():
            lines.append(f"the best settings are in {self.folder / BEST}")
        if missing:
            same = shlex.join(["python", "-m", "pbrl.train", *sys.argv[1:]])  # a search leaves alone what it has
            again = commands([note["overrides"] for note in missing], self.hydra_overrides or [])
            lines += [f"to run {'it' if len(missing) == 1 else 'those'} again:"]
            lines += [f"  {line}" for line in ([same] if self.hydra_overrides is None else again)]
        with (self.folder / "summary.txt").open("w") as file:
            for console in (Console(), Console(file=file, width=160)):
                console.print(_table(notes))
                print(*lines, sep="\n", file=console.file)
        print(f"this is also in {self.folder / 'summary.txt'}", flush=True)
        if stopped:
            return 128 + stopped
        return 1 if missing or broken is not None else 0


class Begin(Callback):
    """Prepares a sweep before its first job is launched; named in conf/train.yaml."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Give the sweep its folder and its wandb group, and a name of its own to each run that would lack it."""
        if "minimize" in str(config.hydra.sweeper.get("direction")):
            raise SystemExit(
                "pbrl.train: this would search for the lowest return: "
                "use experiment=tune, or add hydra.sweeper.direction=maximize"
            )
        params = config.hydra.sweeper.get("params") or {}
        given = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
        parsed = {each.get_key_element(): each for each in OverridesParser.create().parse_overrides(given)}
        swept = [key for key, override in parsed.items() if override.is_sweep_override()]
        settings = OmegaConf.to_container(config, resolve=False)
        assert isinstance(settings, dict)
        digest = hashlib.sha256(" ".join(sorted(given)).encode()).hexdigest()[:8]
        name = "-".join(sorted(key.split(".")[-1].strip("+/") for key in swept))[:LONGEST_NAME]
        sweep = f"{name or 'runs'}-{digest}"
        added = [] if {"name", "folder"} & {*parsed} else told_apart(swept, settings["name"], settings["folder"])
        if config.wandb.group is None:
            added.append(f"wandb.group={sweep}")
        folder = Path(config.hydra.sweep.dir) / sweep
        own = ("hydra.mode", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")
        again = [each for each in config.hydra.overrides.hydra if not each.startswith(own)]
        elsewhere = not config.hydra.launcher["_target_"].endswith("BasicLauncher")
        combinations = [sum(1 for _ in each.sweep_iterator()) for each in parsed.values() if each.is_discrete_sweep()]
        trials = config.hydra.sweeper.get("n_trials")
        jobs = trials or math.prod(combinations)
        launched.append(Launched(folder, None if trials else again, jobs=jobs, elsewhere=elsewhere))
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(folder)
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")
            config.hydra.overrides.task.extend(added)


def told_apart(swept: Sequence[str], name: str, folder: str) -> list[str]:
    """Overrides that give runs of different settings different folders, and names in tables.

    Agents, tasks, teachers and seeds are in the folder's name already. A teacher's settings are added to the teacher's,
    since a report tells teachers apart by itself; all others to the run's name.
    """

    def suffix(keys: Sequence[str]) -> str:
        return "".join(f"_{key.split('.', 1)[-1]}_${{{key}}}" for key in keys)

    plain = [key.lstrip("+") for key in swept]
    matter = [key for key in plain if key.split(".")[0] in IDENTITY and key not in ("agent", "env", "oracle", "seed")]
    teacher = [key for key in matter if key.startswith("oracle.")]
    others = [key for key in matter if key not in teacher]
    added = [f"name='{name}{suffix(others)}'"] if others else []
    choice = "${hydra:runtime.choices.oracle}"
    if teacher and choice in folder:
        added.append(f"folder='{folder.replace(choice, choice + suffix(teacher))}'")
    return added


def see_that_plugins_are_there(arguments: Sequence[str]) -> None:
    """Refuse a command line that needs a plugin which is not installed, and say which extra has it."""
    for argument in arguments:
        plugin, extra = PLUGINS.get(argument, ("hydra", ""))
        if importlib.util.find_spec(plugin) is None:
            raise ConfigurationError(
                f"{argument} needs a plugin of Hydra's that is not installed: pip install 'pbrl[{extra}]', "
                f"in a clone pip install -c constraints.txt -e '.[{extra}]'"
            )


@contextmanager
def overseen() -> Iterator[None]:
    """Around Hydra's main: whatever ends a sweep, say what became of it. Single runs pass through."""
    launched.clear()
    broken: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        broken = error
    finally:
        for sweep in launched:
            sweep.end()
    if launched and (code := launched[-1].conclude(broken)):
        raise SystemExit(code)
    if broken is not None:
        raise broken


def commands(jobs: Sequence[Sequence[str]], hydra_overrides: Sequence[str]) -> list[str]:
    """The commands that run these jobs again and no others, as few as merging one setting after the other gives."""
    lines: list[dict[str, str]] = [dict(each.split("=", 1) for each in overrides) for overrides in jobs]
    for key in dict.fromkeys(key for line in lines for key in reversed(line)):
        merged: dict[tuple[tuple[str, str], ...], dict[str, None]] = {}
        for line in lines:
            if key in line:
                rest = tuple((name, "" if name == key else value) for name, value in line.items())
                merged.setdefault(rest, {})[line[key]] = None
        lines = [line for line in lines if key not in line] + [
            {**dict(rest), key: ",".join(values)} for rest, values in merged.items()
        ]
    for line in lines:
        if re.fullmatch(r"'[\w./-]+'", line.get("name", "")):
            line["name"] = line["name"].strip("'")  # needs no quotes, once it is known
    how = ["python", "-m", "pbrl.train", "-m"]
    return [shlex.join([*how, *hydra_overrides, *(f"{key}={value}" for key, value in line.items())]) for line in lines]


def _table(notes: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(Column("run", overflow="fold"), "", Column("evaluation, or why not", overflow="fold"))
    for note in notes:
        why = note.get("why", "")
        if "evaluation" in note:
            why = "" if note["evaluation"] is None else f"{note['evaluation']:.1f}"
        colour = COLOURS.get(note["state"], "bold red")
        table.add_row(escape(note["run"]), f"[{colour}]{note['state']}[/]", escape(why))
        if "traceback" in note:
            table.add_row("", "", f"[dim]see {escape(note['traceback'])}[/]")
    return table
