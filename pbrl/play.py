"""A video of what a run has learnt.

    RUN=runs/walker_walk/ncrs/irrational/seed_0
    python -m pbrl.play $RUN             # its policy, in its folder: play.mp4
    python -m pbrl.play $RUN --pair      # two, and the teacher's answer
    python -m pbrl.play $RUN --learning  # its first policy beside its best

It needs no display. It reads what a run leaves on disk and writes one file, which appears when it is complete: it can
film a run that is still going on, from a process of its own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hydra.errors import InstantiationException
from safetensors import SafetensorError

from pbrl.run import checkpoint
from pbrl.run.command_line import wrapped
from pbrl.run.films import kept_policy
from pbrl.run.folder import check_task_and_policy, read_settings
from pbrl.run.policy_file import KEPT, read_policy
from pbrl.run.record import read
from pbrl.run.settings import build, check_node, check_targets
from pbrl.run.terminal import ProgressBar
from pbrl.simulation import gl, video
from pbrl.types import Answers, Float32, Oracle, Question, Trajectories

if TYPE_CHECKING:  # these load dm_control, which has to wait until MUJOCO_GL is chosen
    from pbrl.policy import Policy
    from pbrl.simulation.simulator import Simulator


class PlayError(ValueError):
    """What was asked for cannot be shown."""


def settings_of(run: Path) -> dict[str, Any]:
    """A run's settings, or what is wrong with the folder."""
    if not (run / "config.yaml").exists():
        inside = sorted(str(path.parent) for path in run.glob("**/policy.safetensors"))
        hint = f"did you mean {', '.join(inside[:5])}?" if inside else "name the folder that pbrl.train wrote to"
        raise PlayError(f"{run} is not the folder of a run: it has no config.yaml; {hint}")
    return read_settings(run)


def check_shape(settings: Mapping[str, Any]) -> None:
    """Refuse settings that lack what a video needs; `config.yaml` may be anybody's."""
    check_task_and_policy(settings)
    for key in ("name", "seed", "oracle", "calibration"):
        if key not in settings:
            raise PlayError(f"the run's config.yaml has no {key}")


def destination(options: argparse.Namespace) -> Path:
    """Where the video goes, in a format that can be written."""
    can_mp4 = video.encoder() is not None
    default = ".mp4" if can_mp4 and not options.gif else ".gif"
    output: Path = options.output or options.run / (
        "pair" if options.pair else "learning" if options.learning else "play"
    )
    if not output.suffix:
        output = output.with_suffix(default)
    if output.suffix not in video.FORMATS or (options.gif and output.suffix != ".gif"):
        raise PlayError(
            f"--output must end in {'.gif' if options.gif else ' or '.join(video.FORMATS)}, unlike {output}"
        )
    if output.suffix == ".mp4" and not can_mp4:
        raise PlayError("mp4 needs an ffmpeg: `pip install imageio-ffmpeg`, or let --output end in .gif")
    return output


def kept_policies(run: Path, options: argparse.Namespace) -> dict[str, tuple[int, Float32]]:
    """What is to be shown, by name: the iteration and the parameters [size] of each policy."""
    if options.learning:
        return {"before": policy_of(run, "first"), "after": policy_of(run, "best")}
    found = policy_of(run, options.policy) if options.iteration is None else policy_after(run, options.iteration)
    return dict.fromkeys("AB", found) if options.pair else {"": found}


def policy_of(run: Path, which: str) -> tuple[int, Float32]:
    """The iteration and the parameters of the last policy, the best or the first."""
    path = run / KEPT[which]
    if not path.exists() and which == "last":
        raise PlayError(f"{run} has no policy yet: a run leaves one with each of its checkpoints")
    if not path.exists():
        raise PlayError(f"{run} has no {path.name}: an earlier version of pbrl kept the last policy alone")
    return read_policy(path)


def policy_after(run: Path, iteration: int) -> tuple[int, Float32]:
    """The same of an iteration, if it is still there.

    It may be one of those that a run keeps, wait to be filmed (`pbrl.run.films`), or have a checkpoint.
    """
    for path in [*(run / name for name in KEPT.values()), kept_policy(run, iteration)]:
        if path.exists() and (found := read_policy(path))[0] == iteration:
            return found
    saved = checkpoint.load(run / "checkpoint", iteration)
    assert saved is not None, "an iteration that is not there is refused"
    if "parameters" not in saved[1]:
        raise PlayError(f"the checkpoints of {run} are of an earlier version: leave out --iteration")
    return saved[0], saved[1]["parameters"]


def mean_return_of(run: Path, iteration: int, default: float) -> float:
    """The mean return of an iteration's trajectories, by which teachers skip pairs and find them equal."""
    record = run / "metrics.jsonl"
    rows = read(record) if record.exists() else []
    return next((row["return_mean"] or 0.0 for row in rows if row["iteration"] == iteration), default)


def answer(
    settings: Mapping[str, Any],
    simulator: Simulator,
    policy: Policy,
    parameters: Float32,
    pair: Trajectories,
    *,
    mean_return: float,
    rng: np.random.Generator,
    allow: Sequence[str],
) -> Answers:
    """What the run's teacher says of two clips."""
    steps = pair.task_rewards.shape[1]
    try:
        check_targets(settings["oracle"], "oracle", allow=allow)
        check_node(settings["oracle"], "oracle", allow=allow)
        folder = Path(settings.get("folder", "."))
        oracle: Oracle = build(settings["oracle"], Oracle, allow=allow, rng=rng, folder=folder)
        if oracle.sees != "rewards":
            raise ValueError("it looks at behaviour")
        if getattr(oracle, "needs_calibration", False):
            rows = np.zeros(settings["calibration"]["trajectories"], np.int64)
            clips = simulator.collect(policy, parameters[None], rows, iteration=1).task_rewards[:, :steps]
            oracle.calibrate(clips)  # type: ignore[attr-defined]  # an optional part of it
        first, second = pair.task_rewards[:, None]
        return oracle.compare(
            Question.about_rewards(first, second, mean_return=mean_return, episode_steps=simulator.steps)
        )
    except (ValueError, TypeError, LookupError, MemoryError, InstantiationException) as error:
        raise PlayError(f"the run's teacher cannot be asked ({error.__cause__ or error}): leave out --pair") from error


def verdict(answers: Answers) -> tuple[str, int | None]:
    """The answer in words, and the row that it prefers."""
    preferences, label = answers.preferences, answers.preferences.label[0]
    if not preferences.answered[0]:
        return "the teacher skips this pair: both are too poor", None
    words = "calls them equal" if label == 0.5 else f"prefers {'AB'[int(label)]}"
    wrong = ", and is wrong" if answers.wrong[0] else ""
    return (
        f"the teacher {words}{wrong}   P(B better) = {preferences.probability[0]:.3f}",
        None if label == 0.5 else int(label),
    )


def play(options: argparse.Namespace) -> Path:
    """Film a run; where the video is."""
    run: Path = options.run
    settings, output = settings_of(run), destination(options)
    check_shape(settings)
    task, agent = settings["env"]["name"], settings["agent"]
    check_targets([agent["policy"], settings["env"]], "the run's config.yaml", allow=options.allow)
    os.environ["MUJOCO_GL"] = gl.choose()
    from pbrl.run.training import build_policy, task_of
    from pbrl.simulation.simulator import Simulator

    simulator = Simulator(task_of(settings["env"], options.allow), seed=options.seed, steps=settings["env"]["steps"])
    environment = simulator.environment()
    model, timestep = environment.physics.model, environment.control_timestep()
    camera = video.camera_number([model.id2name(number, "camera") for number in range(model.ncam)], options.camera)
    steps = simulator.steps if options.steps is None else options.steps
    if not 1 <= steps <= simulator.steps:
        raise PlayError(f"--steps must be between 1 and {simulator.steps}, the run's episode, not {steps}")
    policy = build_policy(agent["policy"], simulator, allow=options.allow)
    shown = kept_policies(run, options)
    iteration, parameters = list(shown.values())[-1]

    sampled = options.pair or options.sampled
    trajectories = simulator.collect(
        policy,
        np.stack([each for _, each in shown.values()]),
        np.arange(len(shown)),
        iteration=0,
        mean_actions=not sampled,
        common_start=options.learning,
        keep=["actions"],
    )
    when = f"iteration {iteration}" if iteration >= 0 else "before the first iteration"
    title = f"{task}   {settings['name']}, seed {settings['seed']}, {when}"
    heading, preferred = [f"{title}   {'sampled' if sampled else 'mean'} actions"], None
    if options.pair:
        rng = np.random.default_rng(options.seed)
        mean_return = mean_return_of(run, iteration, default=float(trajectories.returns.mean()))
        trajectories = replace(trajectories, task_rewards=trajectories.task_rewards[:, :steps])  # judge what is shown
        answers = answer(
            settings, simulator, policy, parameters, trajectories, mean_return=mean_return, rng=rng, allow=options.allow
        )
        words, preferred = verdict(answers)
        heading.append(words)
    print("\n".join([*heading, f"true return {' and '.join(f'{each:.1f}' for each in trajectories.returns)}"]))

    every = video.stride(timestep)
    how = {"steps": steps, "every": every, "camera": camera, "size": options.size}
    views = [video.pictures(simulator.replay(trajectories, row), **how) for row in range(len(shown))]
    film = video.frames(
        trajectories, dict(zip(shown, views, strict=True)), timestep=timestep, heading=heading, preferred=preferred
    )
    bar = ProgressBar(film, desc="filming", total=steps // every + 1, unit="frame")
    video.write(output, bar, seconds=every * timestep, title=title)
    return output


def size_of(text: str) -> tuple[int, int]:
    """640x480 as width and height."""
    width, _, height = text.partition("x")
    if not (width.isdecimal() and height.isdecimal() and min(int(width), int(height)) >= 64):
        raise argparse.ArgumentTypeError(f"a size is WIDTHxHEIGHT in pixels, such as 640x480, not {text!r}")
    return int(width), int(height)


def parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = argparse.ArgumentParser(
        "python -m pbrl.play", description=wrapped(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="its folder: runs/<env>/<agent>/<oracle>/seed_<n>")
    two = parser.add_mutually_exclusive_group()
    two.add_argument("--pair", action="store_true", help="two sampled trajectories and the teacher's answer")
    two.add_argument("--learning", action="store_true", help="the first policy beside the best, from the same start")
    one = parser.add_mutually_exclusive_group()
    one.add_argument(
        "--policy", choices=[*KEPT], default="last", help="the last (default), the best evaluated, the first"
    )
    one.add_argument("--iteration", type=int, help="the policy of a checkpoint that is still there")
    parser.add_argument("--sampled", action="store_true", help="actions with their noise, as in training")
    parser.add_argument("--seed", type=int, default=0, help="of initial states, noise and the teacher's answer")
    parser.add_argument("--steps", type=int, help="control steps to show, and for --pair to judge; default: all")
    parser.add_argument("--size", type=size_of, default=(640, 480), help="of a picture; 640x480 by default")
    parser.add_argument("--camera", help="name or number; the task's first by default")
    parser.add_argument(
        "--allow", nargs="*", default=[], help="packages of your own whose classes the run may use; none by default"
    )
    parser.add_argument("--gif", action="store_true", help="GIF instead of mp4; so, too, where there is no ffmpeg")
    parser.add_argument(
        "--output",
        type=Path,
        help="default: play, pair or learning in the run's folder; .mp4 or .gif is added if missing",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Film a run, and answer what goes wrong with a sentence."""
    try:
        output = play(parser().parse_args(arguments))
    except InstantiationException as error:
        raise SystemExit(f"pbrl.play: {error.__cause__ or error}") from None
    except OSError as error:
        raise SystemExit(f"pbrl.play: {error.strerror}: {error.filename}") from None
    except (ValueError, RuntimeError, SafetensorError) as error:
        raise SystemExit(f"pbrl.play: {error}") from None
    print(f"written to {output}")


if __name__ == "__main__":
    main()
