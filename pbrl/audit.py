"""What a teacher really does: rates of mistakes, skips and ties, agreement by gap, confidence, calibration.

    python -m pbrl.audit oracle=irrational env=walker_walk  # untrained policies
    python -m pbrl.audit run=FOLDER    # what it, or people, answered in a run

It prints a table, and writes audit.csv and two figures.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import matplotlib as mpl
import numpy as np
import pyarrow as pa
from hydra.core.hydra_config import HydraConfig
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest

from pbrl.run.answer_table import answer_table
from pbrl.run.command_line import mistakes_answered, run_main
from pbrl.run.preference_log import answers_of, read
from pbrl.run.questions import ANSWERS, QuestionsError
from pbrl.run.settings import ConfigurationError, check_node, instantiate
from pbrl.run.terminal import ProgressBar
from pbrl.seeds import streams
from pbrl.types import Answers, Bool, Float64, Oracle, Question, Reason

if TYPE_CHECKING:  # anything with its `collect` will do
    from pbrl.policy import GaussianPolicy
    from pbrl.simulation.simulator import Simulator

TOGETHER = 16  # trajectories collected between two looks at the progress bar


@dataclass(frozen=True, kw_only=True)
class Share:
    """One number of the audit: how many of how many, with a 95 % interval (Wilson)."""

    figure: str  # the rate or the curve that it belongs to
    at: float  # where on the curve; 0 for a rate
    share: float
    low: float
    high: float
    count: int  # of how many


def share(figure: str, hits: Bool, at: float = 0.0) -> Share:
    """The share of hits [P]."""
    if len(hits) == 0:
        return Share(figure=figure, at=at, share=np.nan, low=0.0, high=1.0, count=0)
    test = binomtest(int(hits.sum()), len(hits))
    interval = test.proportion_ci(method="wilson")
    return Share(
        figure=figure,
        at=at,
        share=float(test.statistic),
        low=float(interval.low),
        high=float(interval.high),
        count=len(hits),
    )


def rates(answers: Answers) -> list[Share]:
    """How often the teacher skips, calls equal, is mistaken, and is wrong."""
    reason = answers.reason
    judged = (reason == Reason.ANSWERED) | (reason == Reason.MISTAKEN)
    return [
        share("skipped, of all asked", reason == Reason.SKIPPED),
        share("called equal, of all answered", (reason == Reason.EQUAL)[answers.preferences.answered]),
        share("mistaken, of all judged", (reason == Reason.MISTAKEN)[judged]),
        share("wrong for any reason, of all decided", answers.wrong[answers.decided]),
    ]


def agreement(answers: Answers, bins: int) -> list[Share]:
    """How often the label agrees with the true order, by the gap between the sums; equally filled bins."""
    gap = np.abs(answers.second_sum - answers.first_sum)[answers.decided]
    right = ~answers.wrong[answers.decided]
    order = np.argsort(gap, kind="stable")
    return [
        share("agreement", right[rows], at=float(np.median(gap[rows])))
        for rows in np.array_split(order, bins)
        if len(rows) > 0
    ]


def calibration(answers: Answers, bins: int) -> list[Share]:
    """How often the second clip is preferred, and how often it is better, by the probability that was stated."""
    stated = answers.preferences.probability[answers.decided]
    named = answers.preferences.label[answers.decided] == 1.0
    better = named != answers.wrong[answers.decided]
    of_bin = np.minimum((stated * bins).astype(int), bins - 1)
    return [
        share(figure, second[of_bin == k], at=float(stated[of_bin == k].mean()))
        for figure, second in (("second named", named), ("second better", better))
        for k in np.unique(of_bin)
    ]


def people(table: pa.Table) -> list[Share]:
    """How far each person agrees with the true order, with themselves when asked twice, and with the others.

    Of all answers that were not undone and name one of the two clips.
    """
    rows = [row for row in table.to_pylist() if not row["undone"] and row["prefers"] in ("first", "second")]
    said = {(row["annotator"], row["question"]): row["prefers"] for row in rows}
    shares = []
    for name in sorted({row["annotator"] for row in rows}):
        mine = [row for row in rows if row["annotator"] == name]
        true = [row for row in mine if None not in (row["first_sum"], row["second_sum"])]
        right = [
            row["prefers"] == ("second" if row["second_sum"] > row["first_sum"] else "first")
            for row in true
            if row["second_sum"] != row["first_sum"]
        ]
        again = [row["prefers"] == said[name, row["repeats"]] for row in mine if (name, row["repeats"]) in said]
        others = [
            row["prefers"] == prefers
            for row in mine
            for (other, question), prefers in said.items()
            if other != name and question == row["question"]
        ]
        shares += [
            share(f"{name}: agrees with the true order", np.array(right, np.bool_)),
            share(f"{name}: answers as before when asked again", np.array(again, np.bool_)),
            share(f"{name}: agrees with others", np.array(others, np.bool_)),
        ]
    return shares


def ask(
    oracle: Oracle,
    simulator: Simulator,
    policy: GaussianPolicy,
    *,
    trajectories: int,
    pairs: int,
    rng: np.random.Generator,
) -> Answers:
    """An oracle's answers about random pairs of trajectories, each of its own freshly initialised policy."""

    def rewards(iteration: int) -> Float64:
        parameters = np.stack([policy.initial(rng) for _ in range(trajectories)])
        parts = []
        with ProgressBar(total=trajectories, desc="trajectories", unit="", leave=False) as bar:
            for start in range(0, trajectories, TOGETHER):
                some = parameters[start : start + TOGETHER]
                collected = simulator.collect(
                    policy,
                    some,
                    np.arange(len(some)),
                    iteration=iteration,
                    first_trajectory=start,
                    mean_actions=False,
                    common_start=False,
                    keep=(),
                )
                parts.append(collected.task_rewards)
                bar.update(len(some))
        return np.concatenate(parts)

    if getattr(oracle, "needs_calibration", False):
        oracle.calibrate(rewards(1))  # type: ignore[attr-defined]  # an optional part of it
    clips = rewards(0)
    first = rng.integers(trajectories, size=pairs)
    second = (first + rng.integers(1, trajectories, size=pairs)) % trajectories  # another one
    return oracle.compare(
        Question(
            first=first,
            second=second,
            steps=clips.shape[1],
            episode_steps=clips.shape[1],
            rewards=clips,
            mean_return=float(clips.sum(axis=1).mean()),
        )
    )


def write(answers: Answers, folder: Path, *, title: str, bins: int, persons: Sequence[Share] = ()) -> None:
    """Print the rates; write audit.csv, audit.png and audit.svg into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    everything = [[*rates(answers), *persons], agreement(answers, bins), calibration(answers, bins)]
    with (folder / "audit.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, [field.name for field in fields(Share)])
        rows.writeheader()
        rows.writerows(asdict(each) for shares in everything for each in shares)
    _print(answers, everything[0], title)
    mpl.rcParams["svg.hashsalt"] = "pbrl"  # the same numbers give the same file
    figure = _draw(answers, *everything[1:], title=title)
    figure.savefig(folder / "audit.png", dpi=150)
    figure.savefig(folder / "audit.svg", metadata={"Date": None})
    print(f"audit.csv, audit.png and audit.svg are in {folder}")


def _print(answers: Answers, shares: Sequence[Share], title: str) -> None:
    table = Table("what", "share", "95 % interval", "of", title=title)
    for each in shares:
        interval = f"{each.low:.4f} .. {each.high:.4f}" if each.count else ""
        table.add_row(each.figure, f"{each.share:.4f}" if each.count else "none", interval, f"{each.count}")
    confidence = np.abs(answers.preferences.score[answers.preferences.answered])
    if len(confidence) > 0:
        table.add_row("mean confidence, of all answered", f"{confidence.mean():.4f}", "", f"{len(confidence)}")
    if np.isfinite(answers.tau):  # a person has none
        table.add_row("temperature, in return units", f"{answers.tau:.4g}", "", "")
    table.add_row("bits", "", "", f"{answers.bits.sum()}")
    Console().print(table)


def _draw(answers: Answers, by_gap: Sequence[Share], by_probability: Sequence[Share], *, title: str) -> Figure:
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    _curve(left, by_gap, "tab:blue", "")
    left.axhline(0.5, color="grey", linewidth=0.8, linestyle=":")
    left.set(xlabel="gap between the true sums", ylabel="agrees with the true order", ylim=(0, 1.02))
    middle.hist(np.abs(answers.preferences.score[answers.preferences.answered]), bins=20, range=(0, 1))
    middle.set(xlabel="confidence |2q - 1|", ylabel="answered pairs")
    right.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle=":")
    for name, colour in (("second named", "tab:blue"), ("second better", "tab:orange")):
        _curve(right, [each for each in by_probability if each.figure == name], colour, name)
    right.set(xlabel="stated probability q of the second", ylabel="share", ylim=(-0.02, 1.02))
    right.legend(frameon=False)
    return figure


def _curve(axes: Axes, shares: Sequence[Share], colour: str, label: str) -> None:
    at, middle = [each.at for each in shares], np.array([each.share for each in shares])
    below, above = middle - [each.low for each in shares], np.array([each.high for each in shares]) - middle
    spread = np.maximum([below, above], 0.0)  # rounding, where the share is 0 or 1
    axes.errorbar(at, middle, spread, color=colour, label=label, marker="o", markersize=3, linewidth=1)


def audit_run(cfg: DictConfig) -> None:
    """Audit the answers in a run's preference log."""
    log = Path(cfg.run) / "preferences"
    answers = answers_of(read(log))
    if len(answers) == 0:
        raise SystemExit(f"{log} holds no comparisons: is it a run's folder, and was it made with a preference log?")
    persons = people(answer_table(Path(cfg.run))) if (Path(cfg.run) / ANSWERS).exists() else []
    write(answers, Path(cfg.run) / "audit", title=cfg.run, bins=cfg.bins, persons=persons)


def audit_teacher(cfg: DictConfig, name: str) -> None:
    """Ask the configured teacher, called by its preset's name."""
    from pbrl.simulation.simulator import Simulator  # the physics takes a while to import

    if name == "human":
        raise SystemExit("pbrl.audit: a person answers in a run; run=<its folder> audits those answers")
    check_node(OmegaConf.to_container(cfg.oracle, resolve=True), "oracle")
    stream = streams(cfg.seed, "simulation", "teacher", "questions")
    simulator = Simulator(cfg.env.name, seed=stream["simulation"], steps=cfg.env.steps)
    answers = ask(
        instantiate(cfg.oracle, rng=np.random.default_rng(stream["teacher"])),
        simulator,
        instantiate(cfg.policy, obs_size=simulator.obs_size, act_size=simulator.act_size),
        trajectories=cfg.trajectories,
        pairs=cfg.pairs,
        rng=np.random.default_rng(stream["questions"]),
    )
    title = f"oracle={name} env={cfg.env.name}"
    write(answers, Path("runs", "audit", cfg.env.name, name), title=title, bins=cfg.bins)


@hydra.main(config_path="pkg://conf", config_name="audit")
def main(cfg: DictConfig) -> None:
    """Audit a run if one is named, a teacher otherwise."""
    with mistakes_answered("pbrl.audit", "audit"):
        if cfg.run is None:
            audit_teacher(cfg, HydraConfig.get().runtime.choices["oracle"])
            return
        try:
            audit_run(cfg)
        except QuestionsError as error:
            raise ConfigurationError(str(error)) from None


def command() -> None:
    """What `python -m pbrl.audit` does."""
    run_main(main, program="pbrl.audit", config="audit", groups=("oracle", "env", "policy"), about=__doc__ or "")


if __name__ == "__main__":
    command()
