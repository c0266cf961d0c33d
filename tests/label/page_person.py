"""A simulated person at the page: what they would say comes from a teacher, how they say it from a keyboard."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from browser import Browser, BrowserError

from oracles.human import Human, clip_names, films_of, shown_questions
from oracles.teacher import Teacher
from pbrl.ledger import Ledger
from pbrl.run.folder import read_settings
from pbrl.run.questions import ShownQuestion
from pbrl.types import Answers, Preferences, Question, Reason

SHOWN = "(current && !document.querySelector('dialog[open]')) ? current.question : ''"


@contextlib.contextmanager
def label(folder: Path, *options: str) -> Iterator[str]:
    """`python -m pbrl.label` in a process of its own: the address that it prints."""
    command = [sys.executable, "-u", "-m", "pbrl.label", str(folder), "--no-browser", "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield next(line.strip() for line in process.stdout if "token=" in line)
        finally:
            process.terminate()


def open_page(browser: Browser, address: str, name: str) -> None:
    """What a person does on the first visit."""
    browser.open(address)
    browser.wait("document.querySelector('#introduction').open")
    browser.type("#name", name)
    browser.click("#begin")


def shown(browser: Browser, seconds: float = 120.0) -> str:
    """The name of the question on the screen, once there is one."""
    return str(browser.wait(SHOWN, seconds=seconds))


def say(browser: Browser, verdict: str, level: int | None) -> None:
    """Answer what is on the screen by the keys, and wait until it is saved."""
    question = shown(browser)
    if level is None:
        browser.press({"equal": "down", "skip": "s"}[verdict])
    else:
        browser.press(verdict)
        browser.press(str(level))
    browser.wait("!outbox.length && (!current || current.question !== arguments[0])", question)


class LevelledTeacher:
    """A teacher who can say how sure it is in a person's few words only."""

    sees: Literal["rewards", "behaviour"] = "rewards"

    def __init__(self, teacher: Teacher, levels: Sequence[float]) -> None:
        self.teacher, self.levels = teacher, np.array(levels)

    @property
    def needs_calibration(self) -> bool:
        return self.teacher.needs_calibration

    def calibrate(self, clips: Any) -> float:
        return self.teacher.calibrate(clips)

    def verdicts(self, question: Question) -> list[tuple[str, int | None]]:
        """For each pair: "first", "second", "equal" or "skip", and how sure, from 1."""
        found: list[tuple[str, int | None]] = []
        answers = self.teacher.compare(question)
        for q, reason in zip(answers.preferences.probability, answers.reason, strict=True):
            if reason == Reason.SKIPPED or q == 0.5:
                found.append(("skip" if reason == Reason.SKIPPED else "equal", None))
            else:
                level = int(np.abs(self.levels - max(q, 1.0 - q)).argmin()) + 1
                found.append(("second" if q > 0.5 else "first", level))
        return found

    def compare(self, question: Question) -> Answers:
        """The answers, without a page."""
        verdicts = self.verdicts(question)
        sure = np.array([0.5 if level is None else self.levels[level - 1] for _, level in verdicts])
        probability = np.where([verdict == "first" for verdict, _ in verdicts], 1.0 - sure, sure)
        reasons = {"skip": Reason.SKIPPED, "equal": Reason.EQUAL}
        reason = np.array([reasons.get(verdict, Reason.ANSWERED) for verdict, _ in verdicts], np.uint8)
        sums = question.rewards.sum(axis=1)  # type: ignore[union-attr]
        return Answers(
            preferences=Preferences(
                probability=probability,
                score=2.0 * probability - 1.0,
                label=np.heaviside(probability - 0.5, 0.5),
                answered=reason != Reason.SKIPPED,
            ),
            reason=reason,
            first_sum=sums[question.first],
            second_sum=sums[question.second],
            bits=(reason != Reason.SKIPPED).astype(np.int64),
            tau=np.nan,
        )

    def state_dict(self) -> dict[str, Any]:
        return self.teacher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.teacher.load_state_dict(state)


class Prompter:
    """Stands between a ledger and its `Human`: knows the true rewards, and what a teacher would say."""

    sees: Literal["rewards", "behaviour"] = "behaviour"

    def __init__(self, human: Human, teacher: LevelledTeacher, ledger: Ledger) -> None:
        self.human, self.teacher, self.ledger = human, teacher, ledger
        self.lines: dict[str, tuple[str, int | None]] = {}  # verdict, as the page has it, and level; by question
        self.asked: list[float] = []  # when questions came, in seconds since 1970
        self.members = human.members
        ledger.oracle = self

    @property
    def needs_calibration(self) -> bool:
        return self.teacher.needs_calibration

    def calibrate(self, clips: Any) -> float:
        return self.teacher.calibrate(clips)

    def compare(self, question: Question) -> Answers:
        self.asked.append(time.time())
        film = question.film
        assert film is not None
        known = self.ledger._known(film.trajectories.number)
        steps = film.step[:, None] + np.arange(question.steps)
        rewards = known.task_rewards[known.rows(film.trajectories.number)[:, None], steps]
        seen = replace(question, film=None, rewards=rewards, mean_return=self.ledger._recent_mean_return())
        clips = clip_names(films_of(film, question.steps), read_settings(self.human.folder))
        pairs = shown_questions(question, film, clips)
        for pair, (verdict, level) in zip(pairs, self.teacher.verdicts(seen), strict=True):
            self.lines[pair.name] = (on_the_page(pair, verdict), level)
        return self.human.compare(question)

    def state_dict(self) -> dict[str, Any]:
        return self.teacher.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.teacher.load_state_dict(state)


def on_the_page(pair: ShownQuestion, verdict: str) -> str:
    """A verdict about first and second as one about left and right."""
    if verdict not in ("first", "second"):
        return verdict
    return "right" if (verdict == "second") != pair.swapped else "left"


def answer_all(browser: Browser, prompter: Prompter, until: threading.Event, seconds: float = 0.0) -> None:
    """Answer whatever the page shows, as the teacher would, after looking for some seconds."""
    while not until.is_set():
        try:
            question = shown(browser, seconds=0.5)
        except BrowserError:  # nothing was shown for a while
            continue
        time.sleep(seconds)
        say(browser, *prompter.lines[question])
