"""Measure what the ingredients of a search agent are worth, and write the tables of docs/search.md.

    python docs/search.py run STUDY ... [--runs docs/search.csv]     every run that is not yet in the file
    python docs/search.py table [STUDY ...] [--runs docs/search.csv]
    python docs/search.py quadratic                                  the rule for the step, where distances are known

A study is a fractional factorial: every run has a seed of its own and makes every choice one way or the other, so that
every run speaks about every choice; an effect is from least squares on all choices at once. A run is `python -m
pbrl.train` with the settings that stand in its line of the file.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from scipy import stats

from pbrl.run.training import TrainingRun

COLUMNS = ["study", "seed", "settings", "evaluations", "result", "collected", "seconds"]


@dataclass(frozen=True)
class Study:
    """Runs that differ in choices, each with two levels: the default first."""

    fixed: Sequence[str]  # settings of all runs
    choices: Mapping[str, Mapping[str, Sequence[str]]]  # choice -> level -> its settings
    runs: int
    first_seed: int

    def jobs(self) -> Iterator[tuple[int, list[str], dict[str, str]]]:
        """Seed, settings and levels of each run, as a fractional factorial.

        In run n, a choice has its second level if an odd number of the bits of its mask are in n. So any two choices
        are made in all four ways, equally often. With the masks for 16 runs, the effect of a choice is not mixed with
        what two others do together; with those for 8 it is.
        """
        masks = {8: (1, 2, 4, 7, 3, 5, 6), 16: (1, 2, 4, 8, 7, 11, 13, 14)}[self.runs]
        columns = {
            choice: [list(levels)[(mask & n).bit_count() % 2] for n in range(self.runs)]
            for (choice, levels), mask in zip(self.choices.items(), masks, strict=False)
        }
        for n in range(self.runs):
            levels = {choice: column[n] for choice, column in columns.items()}
            settings = resolved(self.fixed, *(self.choices[choice][level] for choice, level in levels.items()))
            yield self.first_seed + n, settings, levels


def resolved(*parts: Sequence[str]) -> list[str]:
    """Settings one after the other; a*=2 doubles what a was before."""
    settings: dict[str, str] = {}
    for part in parts:
        for setting in part:
            name, value = setting.split("=", 1)
            if name.endswith("*"):
                name = name[:-1]
                value = f"{float(settings[name]) * float(value):g}"
            settings[name] = value
    return [f"{name}={value}" for name, value in settings.items()]


FIXED = ["env=cheetah_run", "env.steps=250", "agent.policy.hidden=[64,64]", "iterations=31"]
NORMALISED = {"yes": ["normalise_observations=true"], "no": ["normalise_observations=false"]}
PES = {
    "subspace": {
        "linear": ["agent.subspace=linear", "agent.sigma=0.4", "agent.step.maximum=0.2", "agent.step.minimum=0.02"],
        "all": ["agent.subspace=all", "agent.sigma=0.04", "agent.step.maximum=0.02", "agent.step.minimum=0.002"],
    },
    "normalised": NORMALISED,
    "rate": {each: [f"agent.rate={each}"] for each in ("0.1", "0")},
    "momentum": {each: [f"agent.momentum={each}"] for each in ("0.5", "0")},
    "groups": {each: [f"agent.groups={each}"] for each in ("4", "1")},
    "votes": {each: [f"agent.votes={each}"] for each in ("1", "2")},
    "sigma": {"x 1": [], "x 2": ["agent.sigma*=2"]},
    "rank": {each: [f"agent.rank={each}"] for each in ("null", "1")},
}
NCRS = {
    "subspace": {
        "linear": ["agent.subspace=linear", "agent.step.maximum=0.4", "agent.step.minimum=0.04"],
        "all": ["agent.subspace=all", "agent.step.maximum=0.04", "agent.step.minimum=0.004"],
    },
    "normalised": NORMALISED,
    "adapt": {each: [f"agent.adapt={each}"] for each in ("votes", "null")},
    "votes": {
        "lead of 4": ["agent.at_a_time=4", "agent.lead=4"],
        "all": ["agent.at_a_time=null", "agent.lead=null"],
    },
    "memory": {each: [f"agent.memory={each}"] for each in ("0.3", "0")},
    "actions": {
        "mean, common start": ["agent.collect=mean", "agent.common_start=true"],
        "sampled": ["agent.collect=sampled", "agent.common_start=false"],
    },
}
STUDIES = {
    "pes": Study(["agent=pes", "agent.normalise=false", *FIXED], PES, runs=16, first_seed=1600),
    "ncrs": Study(["agent=ncrs_adaptive", *FIXED], NCRS, runs=16, first_seed=1720),
}
PILOTS = {  # of runs that are in the file and were chosen one after the other
    "pilot": {
        "agent": {"ncrs_adaptive": ["agent=ncrs_adaptive"], "pes": ["agent=pes"]},
        "normalised": {each: [f"normalise_observations={each}"] for each in ("false", "true")},
        "subspace": {each: ["env=cheetah_run", f"agent.subspace={each}"] for each in ("all", "last", "linear")},
    },
}
PILOTS["pilot_pes"] = {**PILOTS["pilot"], "agent": {"pes": ["agent=pes"]}}


def run(names: Sequence[str], path: Path) -> None:
    """All runs of the studies that are not in the file, taking turns."""
    done = {(row["study"], row["settings"]) for row in rows(path)}
    jobs = [[(name, seed, settings) for seed, settings, _ in STUDIES[name].jobs()] for name in names]
    for name, seed, settings in filter(None, itertools.chain(*itertools.zip_longest(*jobs))):
        settings = [*settings, f"seed={seed}"]
        if (name, " ".join(settings)) in done:
            continue
        begin = time.process_time()
        evaluations, collected = train(settings)
        row = {
            "study": name,
            "seed": seed,
            "settings": " ".join(settings),
            "evaluations": " ".join(f"{iteration}:{value:.1f}" for iteration, value in evaluations.items()),
            "result": f"{np.mean(list(evaluations.values())[-2:]):.1f}",
            "collected": f"{collected:.1f}",
            "seconds": f"{time.process_time() - begin:.0f}",
        }
        new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        print(*row.values(), flush=True)


def train(settings: list[str]) -> tuple[dict[int, float], float]:
    """Evaluations by iteration, and the mean return of the trajectories of the last five iterations."""
    fixed = ["threads=1", "evaluation.every=10", "preference_log=false", "wandb.mode=disabled"]
    named = ["name=search", "folder=none", *(f"choices.{each}=none" for each in ("agent", "env", "oracle"))]
    with initialize_config_module("conf"):
        config = compose("train", overrides=[*settings, *fixed, *named])
    training: Any = TrainingRun(OmegaConf.to_container(config, resolve=True))  # type: ignore[arg-type]
    metrics = [training.iterate(iteration) for iteration in range(training.iterations)]
    evaluations = {int(each["iteration"]): each["eval_return"] for each in metrics if "eval_return" in each}
    return evaluations, float(np.mean([each["return_mean"] for each in metrics[-5:]]))


def rows(path: Path) -> list[dict[str, str]]:
    """What has been run."""
    if not path.exists():
        return []
    with path.open() as file:
        return list(csv.DictReader(file))


def table(name: str, path: Path) -> None:
    """Each level's mean over the runs that had it, and its effect against the choice's first level, at 95 %."""
    results = {row["settings"]: float(row["result"]) for row in rows(path) if name.startswith(row["study"])}
    if name in STUDIES:
        choices = STUDIES[name].choices
        jobs = [(levels, " ".join([*settings, f"seed={seed}"])) for seed, settings, levels in STUDIES[name].jobs()]
    else:
        choices = PILOTS[name]
        jobs = [(made(choices, settings.split()), settings) for settings in results]
    done = [(levels, results[settings]) for levels, settings in jobs if levels and settings in results]
    contrasts = [(choice, level) for choice, levels in choices.items() for level in list(levels)[1:]]
    X = np.array([[1.0, *(levels[choice] == level for choice, level in contrasts)] for levels, _ in done])
    y = np.array([value for _, value in done])
    effects, _, rank, _ = np.linalg.lstsq(X, y, rcond=None)
    half = np.full(len(effects), np.nan)
    if rank == X.shape[1] and len(y) > rank + 2:
        variance = ((y - X @ effects) ** 2).sum() / (len(y) - rank) * np.linalg.inv(X.T @ X).diagonal()
        half = stats.t.ppf(0.975, len(y) - rank) * np.sqrt(variance)
    print(f"\n{name}: {len(done)} runs\n\n| choice | level | runs | mean | effect |\n|---|---|--:|--:|--:|")
    for choice, levels in choices.items():
        for level in levels:
            values = [value for drawn, value in done if drawn[choice] == level]
            effect = ""
            if (choice, level) in contrasts:
                where = 1 + contrasts.index((choice, level))
                effect = f"{effects[where]:+.0f} ± {half[where]:.0f}"
            print(f"| {choice} | {level} | {len(values)} | {np.mean(values):.0f} | {effect} |")


def made(choices: Mapping[str, Mapping[str, Sequence[str]]], settings: Sequence[str]) -> dict[str, str]:
    """Which level of each choice a run's settings have; empty if of some choice none."""
    levels = {
        choice: level
        for choice, known in choices.items()
        for level, needed in known.items()
        if {*needed} <= {*settings}
    }
    return levels if len(levels) == len(choices) else {}


def quadratic() -> None:
    """What is left of the loss after 100 iterations of PES on a quadratic, by how many steps the optimum is away."""
    k, P, seeds, step = 108, 32, 16, 0.1
    curvature = np.geomspace(1, 1000, k)
    away = (1, 3, 10, 30)
    print("| momentum | rate |", " | ".join(f"{each} steps away" for each in away), "|\n|--:|--:|" + "--:|" * len(away))
    for momentum, rate in itertools.product((0.0, 0.5, 0.9), (0.0, 0.1)):
        left = []
        for distance in away:
            rng = np.random.default_rng(0)
            x = rng.standard_normal((seeds, k)) * distance * step
            before, m, scale = (curvature * x**2).sum(-1), np.zeros_like(x), np.ones(seeds)
            for _ in range(100):
                eps = rng.standard_normal((seeds, P, k))
                scores = -np.sign(np.einsum("spk,sk->sp", eps, curvature * x))  # of x - sigma eps and x + sigma eps
                scores *= np.where(rng.random(scores.shape) < 0.1, -1, 1)  # mistakes
                g = np.einsum("sp,spk->sk", scores, eps) / P
                z = np.sqrt(P) * (g * m).sum(-1) / np.maximum(np.linalg.norm(m, axis=-1), 1e-12)
                scale = np.minimum(1, scale * np.exp(rate * z))
                m = momentum * m + (1 - momentum) * g
                x += step * scale[:, None] * m / np.sqrt((m**2).mean(-1, keepdims=True))
            left.append(np.median((curvature * x**2).sum(-1) / before))
        print(f"| {momentum:g} | {rate:g} |", " | ".join(f"{each:.1%}" for each in left), "|", flush=True)


def main() -> None:
    """Run, or tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table", "quadratic"])
    parser.add_argument("studies", nargs="*", default=[*PILOTS, *STUDIES], help=f"of {', '.join([*PILOTS, *STUDIES])}")
    parser.add_argument("--runs", type=Path, default=Path("docs/search.csv"))
    options = parser.parse_args()
    if unknown := {*options.studies} - {*PILOTS, *STUDIES}:
        parser.error(f"unknown study {', '.join(unknown)}; known are {', '.join([*PILOTS, *STUDIES])}")
    if options.what == "run":
        run([name for name in options.studies if name in STUDIES], options.runs)
    elif options.what == "quadratic":
        quadratic()
    else:
        for name in options.studies:
            table(name, options.runs)


if __name__ == "__main__":
    main()
