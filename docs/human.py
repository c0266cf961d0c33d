"""Show `experiment=human` with a simulated person at the page, and measure how long people wait.

    python docs/human.py --folder /tmp/human --seed 0 --seconds 3
    python docs/human.py --folder /tmp/human --seed 1 --direct

The person is a teacher who makes one mistake in ten and says how sure it is in five words only. It sits at a real
Chromium (`apt-get install chromium chromium-driver`) and answers by the keys. Writes the curve and the pictures of
docs/human.md, and prints how long the page took. Asked directly, the teacher gives the same run, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path
from typing import Any

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
from pbrl.run.record import read  # noqa: E402
from pbrl.run.settings import instantiate  # noqa: E402
from pbrl.run.training import TrainingRun  # noqa: E402

IMAGES = ROOT / "docs" / "images"
PERSON = ["oracle=mistake", "oracle.tau={error_rate: 0.2}"]  # one mistake in ten, and unsure where clips differ little


def settings_of(folder: Path, seed: int, overrides: list[str]) -> tuple[dict[str, Any], Any]:
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


def go(run: TrainingRun, settings: dict[str, Any]) -> None:
    """A run to its last iteration."""
    prepare(settings)
    loop.run(run, iterations=run.iterations, checkpoint_every=10, mirrors=lambda _: [], progress_bar=True)
    run.ledger.close()


def ask_directly(folder: Path, seed: int, overrides: list[str]) -> None:
    """The same run without a page: the teacher is asked, and answers in the same words."""
    settings, teacher = settings_of(folder / "direct" / f"seed_{seed}", seed, overrides)
    run = TrainingRun(settings)
    run.ledger.oracle = LevelledTeacher(teacher, run.ledger.oracle.confidence)
    go(run, settings)


def show(folder: Path, seed: int, seconds: float, overrides: list[str]) -> None:
    """A run with a person at the page who takes at least so many seconds an answer."""
    settings, teacher = settings_of(folder / "runs" / f"seed_{seed}", seed, overrides)
    run = TrainingRun(settings)
    prompter = Prompter(run.ledger.oracle, LevelledTeacher(teacher, run.ledger.oracle.confidence), run.ledger)
    over = threading.Event()

    def learn() -> None:
        try:
            go(run, settings)
        finally:
            over.set()

    (folder / "runs").mkdir(parents=True, exist_ok=True)
    with chromedriver() as driver, label(folder / "runs") as address:
        learning = threading.Thread(target=learn)
        learning.start()
        browser = Browser(driver, folder / f"profile_{seed}")
        browser.look(1280, 800, "light")
        open_page(browser, address, "person")
        shown(browser, seconds=600)
        take_pictures(browser)
        answer_all(browser, prompter, over, seconds)
        learning.join()
        marks = browser.script(
            "return performance.getEntriesByName('shown').map(each => (performance.timeOrigin + each.startTime) / 1000)"
        )
        waits = browser.script("return performance.getEntriesByName('next question').map(each => each.duration)")
        browser.close()
    after = [min(mark - asked for mark in marks if mark >= asked) for asked in prompter.asked]
    report(settings, waits, after)


def report(settings: dict[str, Any], waits: list[float], after: list[float]) -> None:
    """Print medians of how long the page took: from an answer on (waits, in ms), from a collection's end on (in s)."""
    pairs = settings["pairs"]
    within = [wait for number, wait in enumerate(waits, 1) if number % pairs]  # not those for the next iteration
    between = np.array(waits[pairs - 1 :: pairs]) / 1000
    print(
        f"from an answer to the next question: {np.median(within):.0f} ms, at most {max(within):.0f} ms ({len(within)})"
    )
    print(f"from the last answer of an iteration to the next question: {np.median(between):.1f} s")
    print(
        f"from the end of a collection to its first question: {np.median(after[1:]):.1f} s; the first: {after[0]:.1f} s"
    )


def take_pictures(browser: Browser) -> None:
    """Of the page, as docs/human.md shows it."""
    browser.script("player.time = 0.6 * player.duration; play(false)")
    for width, height, scheme, name in ((1280, 800, "light", "label"), (390, 700, "dark", "label_phone")):
        browser.look(width, height, scheme)
        time.sleep(0.5)
        browser.picture(IMAGES / f"{name}.png")
    browser.look(1280, 800, "light")


def draw(folder: Path) -> None:
    """The return against the answers given: at the page, and of all seeds that were asked directly."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    ends = []
    for where, colour, width in (("direct", "tab:grey", 0.8), ("runs", "tab:blue", 1.6)):
        for number, run in enumerate(sorted((folder / where).glob("seed_*"))):
            rows = read(run / loop.RECORD)
            name = {"direct": "asked directly", "runs": f"at the page, {run.name.replace('_', ' ')}"}[where]
            answers, returns = ([row[key] for row in rows] for key in ("pairs_asked", "return_mean"))
            axes.plot(answers, returns, color=colour, linewidth=width, label=name if number == 0 else None)
            ends.append((where, run.name, round(rows[0]["eval_return"], 1), round(rows[-1]["eval_return"], 1)))
    axes.set(xlabel="answers", ylabel="mean true return of the clips")
    axes.legend(frameon=False)
    figure.savefig(IMAGES / "label_curve.png", dpi=120)
    print("true return of mean actions, first and last iteration:", *ends, sep="\n  ")


def main() -> None:
    """Show, then draw all that was shown so far."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0, help="that the person takes for an answer, at least")
    parser.add_argument("--direct", action="store_true", help="without a page: for more seeds")
    parser.add_argument("overrides", nargs="*", help="settings of the run")
    options = parser.parse_args()
    if options.direct:
        ask_directly(options.folder, options.seed, options.overrides)
    else:
        show(options.folder, options.seed, options.seconds, options.overrides)
    draw(options.folder)


if __name__ == "__main__":
    main()
