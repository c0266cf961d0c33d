"""Train an agent from preferences.

    python -m pbrl.train agent=ncrs env=walker_walk
    python -m pbrl.train experiment=quick              # a minute or two
    python -m pbrl.train -m agent=ncrs,zpg seed=0,1,2  # a sweep: docs/sweeps.md
    python -m pbrl.train agent=zpg --help              # the settings of zpg

In Python, `pbrl.train.train(overrides=["agent=ncrs", "env=walker_walk"])` does what the first of them does.

The same command continues an unfinished run and leaves a finished one alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from traceback import extract_tb
from typing import Any

import hydra
import torch
import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.utils import execution_whitelist
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

import conf
from pbrl.ledger import BudgetError
from pbrl.run import command_line, loop, summary, sweep
from pbrl.run.checkpoint import CheckpointError
from pbrl.run.films import Films
from pbrl.run.finished import is_finished
from pbrl.run.folder import lock, prepare
from pbrl.run.job import ALREADY_FINISHED, FINISHED, in_sweep, owns_terminal, run_job, stop_signal
from pbrl.run.mirrors import mirrors
from pbrl.run.questions import QuestionsError
from pbrl.run.record import RecordError, columns, read
from pbrl.run.settings import ConfigurationError, check, composition_message, plain_settings, suggest
from pbrl.run.terminal import log_messages, say
from pbrl.run.training import TrainingRun
from pbrl.simulation import native, tasks
from pbrl.threads import cores, threads_of_a_job

GROUPS = ("agent", "agent.sampler", "env", "oracle", "experiment")


def train(overrides: Sequence[str] = ()) -> Path:
    """Train as the command with these settings does, such as ["agent=ncrs", "seed=1"]; the folder of the run.

    Settings that make no sense raise a ConfigurationError. `pbrl.load` takes the folder.
    """
    if is_sweep(overrides):
        raise ConfigurationError("this experiment is a sweep of many runs: python -m pbrl.train runs it")
    settings = compose_settings(overrides)
    train_to_end(settings)
    return Path(settings["folder"])


def compose_settings(overrides: Sequence[str]) -> dict[str, Any]:
    """All settings of a run, given those that differ from conf/train.yaml."""
    suggest(overrides, GROUPS)
    try:
        with initialize_config_module("conf"):
            return plain_settings(compose("train", list(overrides), return_hydra_config=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigurationError(composition_message(error, overrides, "train")) from None


def train_to_end(settings: Mapping[str, Any], sweep_folder: Path | None = None) -> str:
    """Compose the run and let it go on to its last iteration: FINISHED, or ALREADY_FINISHED."""
    check(settings)
    if is_finished(settings):
        print(f"{settings['folder']}: nothing is left to do; resume=false would start over", flush=True)
        return ALREADY_FINISHED
    torch.set_num_threads(settings["threads"] or cores())
    try:
        run = TrainingRun(settings)  # first of all: what cannot be run leaves no folder behind
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    prepare(settings)
    with lock(run.folder):
        try:
            follow_and_film(run, settings, sweep_folder)
        except loop.DivergedError as error:
            save_last_good_state(settings, error)
            raise
    metrics = columns(read(run.folder / loop.RECORD))
    curve = summary.draw_curve(run.folder, metrics)
    if sweep_folder is None:
        Console().print(summary.table(metrics))
        print(f"the curve: {curve}", flush=True)
    elif owns_terminal():
        print(summary.line(metrics), flush=True)
    return FINISHED


def follow_and_film(run: TrainingRun, settings: Mapping[str, Any], sweep_folder: Path | None) -> None:
    """The loop, with those beside it: wandb and TensorBoard follow the record, a process films the policy."""
    if not native.is_cached():
        say("compiling the simulator, which takes some ten seconds this first time")
    run.compile()
    video, last = settings["video"], settings["iterations"] - 1
    films = Films(run.folder, **{**video, "steps": min(video["steps"], run.simulator.steps)})

    def film(iteration: int) -> None:
        if video["every"] and (iteration % video["every"] == 0 or iteration == last):
            films.film(iteration, run.save_policy)

    try:
        loop.run(
            run,
            iterations=settings["iterations"],
            checkpoint_every=settings["checkpoint_every"],
            mirrors=lambda record: mirrors(
                record, wandb=settings["wandb"], tensorboard=settings["tensorboard"], **labels(settings)
            ),
            progress_bar=owns_terminal(),
            keep_bar=sweep_folder is None,
            asked_to_stop=lambda: stop_signal(sweep_folder) if sweep_folder is not None else 0,
            after_iteration=film,
        )
        run.ledger.close()
        films.finish()
    finally:
        films.stop()


def save_last_good_state(settings: Mapping[str, Any], error: loop.DivergedError) -> None:
    """Make the iterations between the last checkpoint and the one that diverged again, and save them."""
    if error.iteration:
        loop.run(
            TrainingRun(settings),
            iterations=error.iteration,
            checkpoint_every=settings["checkpoint_every"],
            mirrors=lambda _: [],
            progress_bar=False,
        )


def labels(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What wandb shows a run by."""
    task, teacher = settings["env"]["name"], settings["choices"]["oracle"]
    plain = {"agent_name": settings["name"], "task": task, "teacher": teacher}  # to group and filter by, as the seed
    curve = f"{task}/{settings['name']}/{teacher}"  # what differs in the seed alone
    return {"job_type": curve, "name": str(settings["folder"]), "config": {**settings, **plain}}


def user_message(error: Exception) -> str | None:
    """What to tell a user; None for what only a traceback can explain."""
    expected = (ConfigurationError, BudgetError, tasks.UnknownTaskError, CheckpointError, RecordError, QuestionsError)
    if isinstance(error, expected):
        return str(error)
    if isinstance(error, loop.DivergedError):
        kept = f"the state before it is saved in {loop.CHECKPOINT}/" if error.iteration else "it was the first one"
        return f"{error} ({kept})"
    if isinstance(error, MemoryError):
        return f"this needs more memory than there is: {error}"
    if isinstance(error, HydraException | OmegaConfBaseException):
        return command_line.user_message(error, sys.argv[1:], "train")
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}; nothing that was saved is lost"
    return None


@hydra.main(config_path="pkg://conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    """Train, and answer what goes wrong with a sentence; a search needs the final evaluation."""
    log_messages(logging.WARNING if in_sweep() else logging.INFO)
    if in_sweep():
        cfg.threads = cfg.threads or threads_of_a_job(HydraConfig.get().launcher, cores())
        return run_job(cfg, lambda cfg, folder: train_to_end(plain(cfg), folder), user_message)
    try:
        train_to_end(plain(cfg))
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        raise SystemExit(f"pbrl.train: {message}") from None
    return None


def plain(cfg: DictConfig) -> dict[str, Any]:
    """Hydra's configuration as plain settings: `cfg` goes no further than this program."""
    settings: Any = OmegaConf.to_container(cfg, resolve=True)
    return dict(settings)


def is_sweep(arguments: Sequence[str]) -> bool:
    """Whether an experiment on the command line describes a sweep, which Hydra wants to be told by -m."""
    chosen = [value for name, _, value in (argument.partition("=") for argument in arguments) if name == "experiment"]
    files = [Path(conf.__file__).parent / "experiment" / f"{name}.yaml" for name in chosen]
    settings = [yaml.safe_load(file.read_text()) for file in files if file.exists()]
    return any("sweeper" in each.get("hydra", {}) for each in settings)


def command() -> None:
    """What `python -m pbrl.train` does."""
    command_line.show_help(sys.argv[1:], program="pbrl.train", config="train", groups=GROUPS, about=__doc__ or "")
    if is_sweep(sys.argv) and not {"-m", "--multirun"} & {*sys.argv}:
        sys.argv.append("--multirun")
    try:
        suggest(sys.argv[1:], GROUPS)
        sweep.check_plugins(sys.argv[1:])
    except ConfigurationError as error:
        raise SystemExit(f"pbrl.train: {error}") from None
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises what it cannot compose, and we say it shorter
    try:
        with sweep.summary_at_end(), execution_whitelist([*command_line.TRUSTED_BY_HYDRA]):
            main()
    except KeyboardInterrupt:
        print("\npbrl.train: stopped; the same command goes on", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        ours = any(
            frame.name == main.__name__ and frame.filename == __file__ for frame in extract_tb(error.__traceback__)
        )
        if ours and not isinstance(error, HydraException | OmegaConfBaseException):
            raise
        raise SystemExit(f"pbrl.train: {composition_message(error, sys.argv[1:], 'train')}") from None


if __name__ == "__main__":
    from pbrl import train as importable  # a launcher's processes find by name what is not in __main__

    importable.command()
