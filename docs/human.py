"""Show `experiment=human` with a simulated person at the page, and measure how long people wait.

    python docs/human.py --folder /tmp/human [--seed 0] [--seconds 0]

The person is a teacher who errs in a fifth of all answers and says how sure it is in five words only. It sits at a real
Chromium (`apt-get install chromium chromium-driver`) and answers by the keys. Writes the curve and the pictures of
docs/human.md, and prints how long the page took.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
from hydra import compose, initialize_config_module
from matplotlib.figure import Figure
from omegaconf import OmegaConf, open_dict

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tests" / "label"), str(ROOT)]

from browser import Browser, chromedriver  # noqa: E402
from page_person import LevelledTeacher, Prompter, answer_all, label, open_page, shown  # noqa: E402

from pbrl.run import loop  # noqa: E402
from pbrl.run.folder import prepare  # noqa: E402
from pbrl.run.settings import instantiate  # noqa: E402
from pbrl.run.training import TrainingRun  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PERSON = ["oracle=mistake", "oracle.tau={error_rate: 0.2}"]  # one mistake in ten, and unsure where clips differ little


def settings_of(folder: Path, seed: int, overrides: list[str]) -> tuple[dict[str, object], object]:
    """Of `experiment=human`, and the teacher who answers."""
    with initialize_config_module("conf"):
        given = [
            "experiment=human",
            f"seed={seed}",
            f"folder={folder}",
            "name=human",
            "wandb.mode=disabled",
            *overrides,
        ]
        cfg = compose("train", given, return_hydra_config=True)
        choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
        with open_dict(cfg):
            cfg.choices = {name: choices[name] for name in ("agent", "env", "oracle")}
            del cfg["hydra"]
        node = compose("train", PERSON).oracle
        teacher = instantiate(node, rng=np.random.default_rng(seed))
    return dict(OmegaConf.to_container(cfg, resolve=True)), teacher


def show(folder: Path, seed: int, seconds: float, overrides: list[str]) -> None:
    """A run to its last iteration, with a person at the page who takes at least so many seconds an answer."""
    settings, teacher = settings_of(folder / "runs" / f"seed_{seed}", seed, overrides)
    run = TrainingRun(settings)
    person = LevelledTeacher(teacher, run.ledger.oracle.confidence)
    prompter = Prompter(run.ledger.oracle, person, run.ledger)
    over = threading.Event()

    def learn() -> None:
        prepare(settings)
        try:
            loop.run(run, iterations=run.iterations, checkpoint_every=10, mirrors=lambda _: [], progress_bar=True)
            run.ledger.close()
        finally:
            over.set()

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs").mkdir(exist_ok=True)
    begin = time.monotonic()
    with chromedriver() as driver, label(folder / "runs") as address:
        learning = threading.Thread(target=learn)
        learning.start()
        browser = Browser(driver, folder / f"profile_{seed}")
        browser.look(1280, 800, "light")
        open_page(browser, address, "person")
        shown(browser, seconds=600)
        pictures(browser)
        answer_all(browser, prompter, over, seconds)
        learning.join()
        marks = browser.script(
            "return performance.getEntriesByName('shown').map(each => performance.timeOrigin + each.startTime)"
        )
        waits = browser.script("return performance.getEntriesByName('next question').map(each => each.duration)")
        browser.close()
    first = [
        min((mark / 1000 - asked for mark in marks if mark / 1000 >= asked), default=np.nan) for asked in prompter.asked
    ]
    report(settings, waits, first, time.monotonic() - begin, folder / f"seed_{seed}.json")


def pictures(browser: Browser) -> None:
    """Of the page, as docs/human.md shows it."""
    browser.script("player.time = 0.6 * player.duration; play(false)")
    for width, height, scheme, name in ((1280, 800, "light", "label"), (390, 700, "dark", "label_phone")):
        browser.look(width, height, scheme)
        time.sleep(0.5)
        browser.picture(IMAGES / f"{name}.png")
    browser.look(1280, 800, "light")


def report(settings: dict, waits: list[float], first: list[float], seconds: float, file: Path) -> None:
    """Print and keep what was measured."""
    rows = [json.loads(line) for line in (Path(settings["folder"]) / loop.RECORD).read_text().splitlines()]
    pairs = settings["pairs"]
    within = [wait for number, wait in enumerate(waits, 1) if number % pairs]  # not those for the next iteration
    found = {
        "answers": rows[-1]["pairs_asked"],
        "minutes": seconds / 60,
        "minutes_without_answers": sum(row["seconds_collect"] + row["seconds_learn"] for row in rows) / 60,
        "first_question_seconds": first,
        "next_question_ms": within,
        "next_iteration_ms": waits[pairs - 1 :: pairs],
        "evaluations": {row["iteration"]: row["eval_return"] for row in rows if "eval_return" in row},
        "pairs_asked": [row["pairs_asked"] for row in rows],
        "returns": [row["return_mean"] for row in rows],
    }
    file.write_text(json.dumps(found, indent=1))
    print(f"{found['answers']} answers in {found['minutes']:.1f} minutes; returns {found['evaluations']}")
    print(f"first question of the run after {first[0]:.2f} s, of later rounds {np.median(first[1:]):.2f} s (median)")
    print(
        f"next question {np.median(within):.0f} ms after an answer (median of {len(within)}), {max(within):.0f} ms at most"
    )
    print(
        f"next iteration's first question {np.median(found['next_iteration_ms']) / 1000:.1f} s after the last answer (median)"
    )


def draw(folder: Path) -> None:
    """The return against the answers given, of all seeds that are there."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    for file in sorted(folder.glob("seed_*.json")):
        found = json.loads(file.read_text())
        axes.plot(found["pairs_asked"], found["returns"], label=file.stem.replace("_", " "))
    axes.set(xlabel="answers given at the page", ylabel="mean return of the clips asked from")
    axes.legend(frameon=False)
    figure.savefig(IMAGES / "label_curve.png", dpi=120)


def main() -> None:
    """Show, then draw all that was shown so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="that the person takes for an answer, at least")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    options = parser.parse_args()
    show(options.folder, options.seed, options.seconds, options.overrides)
    draw(options.folder)


if __name__ == "__main__":
    main()
