"""Sweeps: many runs by one command, one after the other or through any of Hydra's launchers.

    python -m pbrl.train -m agent=ncrs,zpg seed=0,1,2 hydra/launcher=joblib

Every job writes its state to the sweep's folder, in whatever process or on whatever machine it runs. A job that fails
does not end the others. The process that launched the sweep reads the states at the end and prints a summary, with the
command that runs the unfinished jobs again. All that a launcher needs is a disk that all its jobs see.

    runs/sweeps/agent-seed-1f3a9c2e/    the same for the same command
        jobs/3.json                     a job's state and its settings
        jobs/3.txt                      the traceback, if it failed
        stop                            a signal was received: running jobs save and stop, no other job starts
        summary.txt                     what was printed at the end
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, read_write
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.markup import escape

from pbrl.run.files import write_atomically
from pbrl.run.job import ALREADY_FINISHED, FINISHED, NOT_STARTED, RUNNING, STOPPED, request_stop, stop_signal
from pbrl.run.record import last_iteration
from pbrl.run.settings import IDENTITY, ConfigurationError
from pbrl.run.signals import STOP_SIGNALS
from pbrl.run.terminal import ProgressBar, say

PLUGINS = {  # the package that each needs, and the extra of pyproject.toml that installs it
    "hydra/launcher=joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "hydra/launcher=submitit_local": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "hydra/launcher=submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "hydra/launcher=ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "hydra/sweeper=optuna": ("hydra_plugins.hydra_optuna_sweeper", "optuna"),
    "experiment=tune": ("hydra_plugins.hydra_optuna_sweeper", "optuna"),
}
LOST = "lost"  # the state of a job that was running when the sweep ended
COLOURS = {FINISHED: "green", ALREADY_FINISHED: "dim", STOPPED: "yellow", NOT_STARTED: "yellow"}
BEST = "optimization_results.yaml"  # written by the Optuna sweeper
RUNNING_BAR = "  {n_fmt} of {total_fmt}, {remaining} left: {desc}"
POLL_SECONDS = 2.0
AGAIN = "PBRL_LAUNCHED_AGAIN"  # set in the environment of a sweep that runs what another left
LONGEST_NAME = 64  # letters of a sweep's name before its digest

sweeps: list[Sweep] = []  # launched by this process; the last one is under way


class Sweep:
    """A sweep, in the process that launched it."""

    def __init__(
        self,
        folder: Path,
        jobs: Sequence[Mapping[str, Any]],  # the run and the overrides of each job; empty if they are not known before
        hydra_overrides: list[str] | None,  # that launched the jobs, for the command to rerun; None: a search
        *,
        total: int,  # number of jobs
        progress_bar: bool,
    ) -> None:
        self.folder, self.jobs, self.hydra_overrides, self.total = folder, jobs, hydra_overrides, total
        (folder / "jobs").mkdir(parents=True, exist_ok=True)
        for earlier in [*(folder / "jobs").iterdir(), *(folder / name for name in ("stop", "summary.txt", BEST))]:
            earlier.unlink(missing_ok=True)
        self.handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            self.handlers = {number: signal.signal(number, self.handle_signal) for number in STOP_SIGNALS}
        self.over = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)
        if progress_bar:
            self.watcher.start()

    def watch(self) -> None:
        """Show a progress bar of the jobs that have ended, one of each that runs, and a line when one ends."""
        say(str(self.folder))
        running: dict[str, ProgressBar] = {}  # by run
        ended: set[str] = set()
        with ProgressBar(total=self.total, name=str(self.folder), unit="run", position=0, dynamic_ncols=True) as bar:
            over = False
            while not over:
                over = self.over.wait(POLL_SECONDS)
                states = {state["run"]: state for state in self.states() if state["state"] != NOT_STARTED}
                for run, state in states.items():
                    if state["state"] == RUNNING and run not in running and not bar.in_lines:
                        running[run] = ProgressBar(
                            total=state["iterations"], desc=run, leave=False, dynamic_ncols=True, bar_format=RUNNING_BAR
                        )
                    if run in running:
                        running[run].update(last_iteration(Path(run)) + 1 - running[run].n)
                    if state["state"] != RUNNING and run not in ended:
                        ended.add(run)
                        if run in running:
                            running.pop(run).close()
                        say(outcome(state))
                bar.update(len(ended) - bar.n)
            for each in running.values():
                each.close()

    def states(self) -> list[dict[str, Any]]:
        """The state of every job, in their order; also of those that have not started."""
        states = {number: {**job, "state": NOT_STARTED} for number, job in enumerate(self.jobs)}
        for path in (self.folder / "jobs").glob("*.json"):
            states[int(path.stem)] = json.loads(path.read_text())
        return [states[number] for number in sorted(states)]

    def left(self) -> list[dict[str, Any]]:
        """The jobs that no process is at work on, although they have not ended; after the launcher has failed."""
        return [state for state in self.states() if state["state"] in (NOT_STARTED, RUNNING)]

    def launch_again(self) -> None:
        """Run what a failed launcher left: all of it by the same launcher, and then what is still left one by one.

        A killed worker takes joblib's others down. One that is killed each time must not keep them from ending.
        """
        left = self.left()
        if self.hydra_overrides is None or os.environ.get(AGAIN):  # a search, or a launch of what another left
            return
        if len(left) == len(self.jobs) and all(state["state"] == NOT_STARTED for state in left):
            return  # the sweep could not be launched at all
        print(f"the launcher failed: launching again the {len(left)} jobs that it left", flush=True)
        self.run_commands(commands([state["overrides"] for state in left], self.hydra_overrides))
        if left := self.left():
            print(f"it failed again: running the {len(left)} jobs that are left one by one", flush=True)
            self.run_commands([line for state in left for line in commands([state["overrides"]], [])])

    def run_commands(self, lines: Sequence[str]) -> None:
        """Run commands one after the other, and take over the states of the jobs that they ran."""
        begin = time.time()
        for line in lines:
            if stop_signal(self.folder):
                break
            process = subprocess.Popen([sys.executable, *shlex.split(line)[1:]], env={**os.environ, AGAIN: "1"})
            told = 0
            while process.poll() is None:
                time.sleep(0.1)
                if not told and (told := stop_signal(self.folder)):
                    process.send_signal(told)
        self.adopt_states(since=begin)

    def adopt_states(self, since: float) -> None:
        """Take over what another sweep, launched by this one, has written about this sweep's jobs."""
        numbers = {job["run"]: number for number, job in enumerate(self.jobs)}
        for path in self.folder.parent.glob("*/jobs/*.json"):
            if path.parents[1] != self.folder and path.stat().st_mtime >= since:
                state = json.loads(path.read_text())
                if state["run"] in numbers:
                    write_atomically(self.folder / "jobs" / f"{numbers[state['run']]}.json", path.read_text())

    def end(self) -> None:
        """Remove the progress bar and the signal handlers."""
        self.over.set()
        if self.watcher.is_alive():
            self.watcher.join()
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def handle_signal(self, number: int, _: Any) -> None:
        """Ask all jobs to save and stop; a second signal ends this process at once."""
        if (self.folder / "stop").exists():
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        request_stop(self.folder, number)
        say("the runs finish their iterations; repeat the signal to stop at once", file=sys.stderr)

    def summarise(self, error: BaseException | None) -> int:
        """Print the state of every job and how to run the unfinished ones again; the exit code.

        error: what ended the sweep, if anything did.
        """
        states, stopped = self.states(), stop_signal(self.folder)
        if error is not None and not stopped and all(state["state"] == NOT_STARTED for state in states):
            raise error  # the sweep could not be launched
        for state in states:
            if state["state"] == RUNNING:
                state |= {"state": LOST, "why": "its process ended without reporting, or is still running"}
        missing = [state for state in states if state["state"] not in (FINISHED, ALREADY_FINISHED)]
        lines = [f"{len(states) - len(missing)} of {max(len(states), self.total)} runs are finished"]
        if stopped:
            lines[0] += "; stopped by a signal: the same command continues"
        elif error is not None:
            lines[0] += "; the launcher failed: the same command runs what is missing"
        if (self.folder / BEST).exists():
            lines.append(f"the best settings are in {self.folder / BEST}")
        if missing:
            lines.append(f"to run {'it' if len(missing) == 1 else 'them'} again:")
            if self.hydra_overrides is None:  # a search finds its finished runs on disk
                rerun = [shlex.join(["python", "-m", "pbrl.train", *sys.argv[1:]])]
            else:
                rerun = commands([state["overrides"] for state in missing], self.hydra_overrides)
            lines += [f"  {line}" for line in rerun]
        summary = io.StringIO()
        for console in (Console(), Console(file=summary, width=160)):
            for line in _lines(states):
                console.print(line, soft_wrap=True, highlight=False)
            print(*lines, sep="\n", file=console.file)
        write_atomically(self.folder / "summary.txt", summary.getvalue())
        print(f"this is also in {self.folder / 'summary.txt'}", flush=True)
        if stopped:
            return 128 + stopped
        return 1 if missing or error is not None else 0


class Begin(Callback):
    """Prepares a sweep before its first job starts; named in conf/train.yaml."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Prepare the sweep. Errors end the program: Hydra would turn them into warnings and launch the jobs."""
        try:
            self.prepare(config)
        except (ConfigurationError, HydraException, OmegaConfBaseException, OSError) as error:
            raise SystemExit(f"pbrl.train: {error}") from error
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    def prepare(self, config: DictConfig) -> None:
        """Give the sweep its folder and its wandb group, and every run a folder of its own."""
        sweeper = config.hydra.sweeper
        if "minimize" in str(sweeper.get("direction")):
            raise ConfigurationError(
                "this would search for the lowest return: use experiment=tune, or add hydra.sweeper.direction=maximize"
            )
        settings: Any = OmegaConf.to_container(config, resolve=False)  # ${...} is resolved in each job, not here
        params = settings["hydra"]["sweeper"].get("params") or {}
        given = [*(f"{key}={value}" for key, value in params.items()), *settings["hydra"]["overrides"]["task"]]
        parsed = {each.get_key_element(): each for each in OverridesParser.create().parse_overrides(given)}
        swept = [key for key, override in parsed.items() if override.is_sweep_override()]
        digest = hashlib.sha256(" ".join(sorted(given)).encode()).hexdigest()[:8]
        name = "-".join(sorted(key.split(".")[-1].strip("+/") for key in swept))[:LONGEST_NAME]
        sweep = f"{name or 'runs'}-{digest}"
        named = {"name", "folder"} & {*parsed}
        added = [] if named else naming_overrides(swept, settings["name"], settings["folder"])
        if config.wandb.group is None:
            added.append(f"wandb.group={sweep}")
        folder = Path(config.hydra.sweep.dir) / sweep
        is_search = not sweeper["_target_"].endswith("BasicSweeper")  # which knows its jobs only as it goes
        jobs = [] if is_search else plan(config, [*given, *added])
        own = ("hydra.mode", "hydra/sweeper", "hydra.sweeper", "hydra.sweep.")
        again = [each for each in settings["hydra"]["overrides"]["hydra"] if not each.startswith(own)]
        sweeps.append(
            Sweep(
                folder,
                jobs,
                None if is_search else again,
                total=int(sweeper.get("n_trials") or 0) if is_search else len(jobs),
                progress_bar=not config.hydra.launcher["_target_"].endswith("BasicLauncher"),  # else each run has one
            )
        )
        with read_write(config.hydra):
            config.hydra.sweep.dir = str(folder)
            config.hydra.overrides.hydra.append(f"hydra.sweep.dir='{folder}'")
            config.hydra.overrides.task.extend(added)


def outcome(state: Mapping[str, Any]) -> str:
    """A line on a job that has ended."""
    evaluation, why = state.get("evaluation"), state.get("why")
    more = f": {why}" if why else f", evaluation {evaluation:.1f}" if evaluation else ""
    return f"{state['run']}: {state['state']}{more}"


def plan(config: DictConfig, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """The run (its folder) and the overrides of every job, in Hydra's order; two jobs with one folder are refused."""
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    jobs_in: dict[str, list[list[str]]] = defaultdict(list)
    planned = []
    controller = HydraConfig.instance().cfg
    try:
        for number, job in enumerate(jobs):
            cfg = loader.load_sweep_config(config, job)
            cfg.hydra.job.num, cfg.hydra.job.id = number, str(number)  # a launcher sets them, and a folder may use them
            HydraConfig.instance().set_config(cfg)
            planned.append({"run": str(cfg.folder), "overrides": job})
            jobs_in[str(cfg.folder)].append(job)
    finally:
        HydraConfig.instance().cfg = controller
    for folder, sharing in jobs_in.items():
        if len(sharing) > 1:
            one, other = ({*job} for job in sharing[:2])
            differing = " and ".join(" ".join(sorted(each)) for each in (one - other, other - one))
            raise ConfigurationError(
                f"{len(sharing)} runs of this sweep would share the folder {folder} "
                f"({differing if one != other else 'the same settings twice'}): "
                "put what you sweep into their name, for example name='${hydra:runtime.choices.agent}_${iterations}'"
            )
    return planned


def naming_overrides(swept: Sequence[str], name: str, folder: str) -> list[str]:
    """Overrides that give runs with different settings different folders, and different names in tables.

    The folder has the agent, the task, the teacher and the seed already. Swept settings of the teacher are added to the
    teacher's part of the folder, since a report distinguishes teachers by itself; all others to the run's name.
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


def check_plugins(arguments: Sequence[str]) -> None:
    """Refuse a command line that needs a plugin which is not installed, and name the extra that installs it."""
    for argument in arguments:
        if argument in PLUGINS and not _is_installed(PLUGINS[argument][0]):
            extra = PLUGINS[argument][1]
            raise ConfigurationError(
                f"{argument} needs a Hydra plugin that is not installed: pip install 'pbrl[{extra}]', "
                f"in a clone pip install -c constraints.txt -e '.[{extra}]'"
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent package is there
        return False


@contextmanager
def summary_at_end() -> Iterator[None]:
    """For Hydra's main: print a summary of the sweep, however it ended. A single run is not affected."""
    sweeps.clear()
    failure: BaseException | None = None
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        failure = error
        if isinstance(error, Exception) and sweeps and not stop_signal(sweeps[-1].folder):
            sweeps[-1].launch_again()
            failure = error if sweeps[-1].left() else None
    finally:
        for sweep in sweeps:
            sweep.end()
    if sweeps and (code := sweeps[-1].summarise(failure)):
        raise SystemExit(code)
    if failure is not None:
        raise failure


def commands(jobs: Sequence[Sequence[str]], hydra_overrides: Sequence[str]) -> list[str]:
    """The commands that run these jobs again and no others. Jobs that differ in one setting share a command."""
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
            line["name"] = line["name"].strip("'")  # needs no quotes
    how = ["python", "-m", "pbrl.train", "-m"]
    return [shlex.join([*how, *hydra_overrides, *(f"{key}={value}" for key, value in line.items())]) for line in lines]


def _lines(states: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The state of each run in rich's markup, its evaluation or what went wrong; paths last, so that none is cut."""
    for state in states:
        colour, evaluation = COLOURS.get(state["state"], "bold red"), state.get("evaluation")
        result = "" if evaluation is None else f"evaluation {evaluation:.1f}"
        yield f"[{colour}]{state['state']:16}[/] {result:18} {escape(state['run'])}"
        if "why" in state:
            yield f"    {escape(state['why'])}"
        if "traceback" in state:
            yield f"    [dim]see {escape(state['traceback'])}[/]"
