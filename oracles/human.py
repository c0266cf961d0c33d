"""A person who compares clips on the page of `python -m pbrl.label`.

The run writes its questions to its folder and waits for the answers to arrive there (see `pbrl.run.questions`). The
clips are drawn by a process of their own, `pbrl.label.draw`, in the order of asking.

A person knows no true sums: they are NaN here. The ledger knows them, and adds them to the log.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from pbrl.run import questions
from pbrl.run.folder import read_settings
from pbrl.run.questions import Answer, AnswerLog, QuestionsError, Round, ShownQuestion, digest
from pbrl.run.settings import ConfigurationError
from pbrl.run.signals import Stopped, caught_signal
from pbrl.types import Answers, Film, Int64, Preferences, Question, Reason

DRAW = (sys.executable, "-m", "pbrl.label.draw")
POLL_SECONDS = 0.05  # between two looks at the answers
RECENT = 20  # answers, for the time that one takes

log = logging.getLogger(__name__)


class Human:
    """Asks people. A pair that was answered before is not asked again.

    With several `answers_per_question`, each is of another person. A share `attention` of the questions is asked
    twice, the second time with the sides swapped: that answer is for the audit alone.
    """

    sees: Literal["rewards", "behaviour"] = "behaviour"

    def __init__(
        self,
        *,
        text: Mapping[str, str],  # what people are asked, by task; `default` for others
        confidence: Sequence[float],  # probability that the clip named is the better one, by level
        answers_per_question: int,
        attention: float,
        seconds_per_question: float | None,  # after which it counts as skipped; None: no limit
        lease_seconds: float,  # how long a question is one person's, of several
        undo_seconds: float,  # how long the last answer can still be undone
        report_seconds: float,  # between two lines about waiting
        clips: Mapping[str, int],  # width and height in pixels
        folder: Path,  # of the run
    ) -> None:
        if not 1 <= len(confidence) <= 9 or not all(0.5 < each <= 1.0 for each in confidence):
            raise ValueError(f"confidence must be one to nine probabilities above 0.5 and up to 1, not {confidence}")
        if list(confidence) != sorted({*confidence}):
            raise ValueError(f"confidence must grow from level to level, unlike {confidence}")
        if answers_per_question < 1:
            raise ValueError(f"answers_per_question must be at least 1, not {answers_per_question}")
        if not 0.0 <= attention <= 1.0:
            raise ValueError(f"attention must be a share between 0 and 1, not {attention}")
        for name, value in {
            "lease_seconds": lease_seconds,
            "report_seconds": report_seconds,
            "seconds_per_question": 1.0 if seconds_per_question is None else seconds_per_question,
        }.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, not {value}")
        if {*clips} != {"width", "height"} or min(clips.values()) < 16:
            raise ValueError(f"clips must be a width and height of at least 16 pixels, not {dict(clips)}")
        if "default" not in text:
            raise ValueError("text needs an entry `default`, for tasks without one of their own")
        self.text, self.confidence, self.attention = dict(text), tuple(confidence), attention
        self.members = answers_per_question  # as in a panel: the ledger counts each answer
        self.seconds_per_question, self.lease_seconds = seconds_per_question, lease_seconds
        self.undo_seconds, self.report_seconds = undo_seconds, report_seconds
        self.clips, self.folder = dict(clips), Path(folder)
        self.log = AnswerLog(self.folder)
        self.drawer = Drawer(self.folder)

    def compare(self, question: Question) -> Answers:
        """Ask P pairs, and wait until all are answered."""
        if question.film is None:
            raise ValueError("a person looks at behaviour: this question has none to show")
        settings = read_settings(self.folder)
        films = films_of(question.film, question.steps)
        clips = clip_names(films, settings)
        pairs = shown_questions(question, question.film, clips)
        shown = with_checks([*{pair.name: pair for pair in pairs}.values()], self.attention)
        asked = Round(
            iteration=question.iteration or 0,
            iterations=settings["iterations"],
            text=self._text(str(settings["env"]["name"])),
            answers=self.members * question.experts,
            levels=len(self.confidence),
            lease_seconds=self.lease_seconds,
            seconds=self.seconds_per_question,
            questions=[each.name for each in shown],
        )
        if not self.log.take(asked):
            questions.write_round(self.folder, asked)
            still_open = {*self.log.open(asked)}
            self.drawer.draw(
                [each for each in shown if each.name in still_open and not questions.is_drawn(self.folder, each)],
                films=dict(zip(clips, films, strict=True)),
                size=(self.clips["width"], self.clips["height"]),
            )
            self._wait(asked)
        said = [[self.log.answers[each] for each in self.log.taken[pair.name]] for pair in pairs]
        return self._pool(pairs, said, by_label=question.experts > 1)

    def _text(self, task: str) -> str:
        return self.text.get(task, self.text["default"].format(task=task.replace("_", " ")))

    def _wait(self, asked: Round) -> None:
        """Until all questions have their answers, and the time to undo the last one is over."""
        changed, reported = time.monotonic(), -np.inf
        while True:
            if number := caught_signal():
                print("stopped while waiting for answers; the same command goes on, with all that are given meanwhile")
                raise Stopped(number)
            self.drawer.check()
            if self.log.refresh():
                changed = time.monotonic()
            still_open, now = self.log.open(asked), time.monotonic()
            if not still_open and now >= changed + self.undo_seconds and self.log.take(asked):
                return
            if now >= reported + self.report_seconds:
                log.info("%s", self._progress(asked, len(still_open)))
                reported = now
            time.sleep(POLL_SECONDS)

    def _progress(self, asked: Round, still_open: int) -> str:
        """Where the page is, how much is open, and how long a person takes."""
        recent = [each.seconds for each in self.log.answers.values()][-RECENT:]
        takes = f", {np.mean(recent):.1f} s an answer so far" if recent else ""
        page = questions.read_page(self.folder)
        where = f"at {page}" if page else "on a page that is not served yet"
        command = f"python -m pbrl.label {self.folder} serves it"
        return f"{still_open} of {len(asked.questions)} questions are open {where} ({command}){takes}"

    def _pool(self, pairs: Sequence[ShownQuestion], said: Sequence[Sequence[Answer]], *, by_label: bool) -> Answers:
        """One answer for each pair from those of its people, without those who skipped it.

        The probability is the mean of what they stated, or by_label the share of those who prefer the second clip.
        """
        probability, label = np.full((2, len(pairs)), 0.5)
        reason, bits = np.full(len(pairs), Reason.SKIPPED, np.uint8), np.zeros(len(pairs), np.int64)
        for row, (pair, answers) in enumerate(zip(pairs, said, strict=True)):
            stated = [self._probability(pair, each) for each in answers if each.verdict != "skip"]
            if not stated:
                continue
            votes = np.heaviside(np.array(stated) - 0.5, 0.5)
            probability[row] = np.mean(votes if by_label else stated)
            label[row] = np.heaviside(np.mean(votes) - 0.5, 0.5)
            reason[row] = Reason.EQUAL if (votes == 0.5).all() else Reason.ANSWERED
            bits[row] = len(stated)
        unknown = np.full(len(pairs), np.nan)
        return Answers(
            preferences=Preferences(
                probability=probability, score=2.0 * probability - 1.0, label=label, answered=reason != Reason.SKIPPED
            ),
            reason=reason,
            first_sum=unknown,
            second_sum=unknown.copy(),
            bits=bits,
            tau=np.nan,
        )

    def _probability(self, pair: ShownQuestion, answer: Answer) -> float:
        """That the second clip is the better one, as a person stated it."""
        if answer.confidence is None:
            return 0.5
        if answer.confidence > len(self.confidence):
            raise QuestionsError(
                f"{self.log.path} has confidence {answer.confidence}, of {len(self.confidence)} levels"
            )
        stated = self.confidence[answer.confidence - 1]
        return stated if pair.prefers_second(answer.verdict) else 1.0 - stated

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all that is known is in the run's folder."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""


# What is shown


def films_of(film: Film, steps: int) -> list[dict[str, Any]]:
    """What the drawing process needs of each clip: where it starts, and the actions up to its end."""
    trajectories, found = film.trajectories, []
    assert trajectories.actions is not None, "the ledger keeps actions for an oracle that looks at behaviour"
    for row, step in enumerate(film.step.tolist()):
        actions = trajectories.actions[row, : min(int(trajectories.lengths[row]), step + steps)]
        coded = base64.b64encode(actions.astype("<f4").tobytes()).decode()
        found.append(
            {"start": trajectories.start[row].tolist(), "step": step, "steps": steps, "actions": coded}
            | {"act_size": actions.shape[1]}
        )
    return found


def clip_names(films: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> list[str]:
    """A name for each clip: a digest of all that decides what it shows."""
    task = json.dumps([settings["env"], settings["seed"]], sort_keys=True)
    return [digest(task, json.dumps(film, sort_keys=True)) for film in films]


def shown_questions(question: Question, film: Film, clips: Sequence[str]) -> list[ShownQuestion]:
    """The pairs as a person sees them, left and right by a random stream of the question's own."""
    trajectory, step = film.trajectories.number.tolist(), film.step.tolist()
    shown = []
    for first, second in zip(question.first.tolist(), question.second.tolist(), strict=True):
        name = digest(clips[first], clips[second])
        swapped = bool(np.random.default_rng(int(name, 16)).random() < 0.5)
        left, right = (second, first) if swapped else (first, second)
        shown.append(
            ShownQuestion(
                name=name,
                iteration=question.iteration or 0,
                first=trajectory[first],
                second=trajectory[second],
                first_step=step[first],
                second_step=step[second],
                steps=question.steps,
                swapped=swapped,
                repeats=None,
                left=clips[left],
                right=clips[right],
            )
        )
    return shown


def with_checks(shown: list[ShownQuestion], share: float) -> list[ShownQuestion]:
    """The questions, and a share of them a second time: anywhere later, with the sides swapped."""
    rng = np.random.default_rng(int(digest(*(each.name for each in shown)), 16))
    chosen: Int64 = rng.choice(len(shown), size=round(share * len(shown)), replace=False)
    result = list(shown)
    for number in chosen.tolist():
        one = shown[number]
        name, swapped = digest("once more", one.name), not one.swapped
        again = replace(one, name=name, repeats=one.name, swapped=swapped, left=one.right, right=one.left)
        result.insert(int(rng.integers(result.index(one) + 1, len(result) + 1)), again)
    return result


class Drawer:
    """The process that draws clips, `pbrl.label.draw`. It ends with this one, however that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def draw(
        self, shown: Sequence[ShownQuestion], films: Mapping[str, Mapping[str, Any]], size: tuple[int, int]
    ) -> None:
        """Draw the clips of questions, in order, and say so for each question as soon as it can be shown."""
        if not shown:
            return
        if self._process is None:
            self._process = self._start()
            weakref.finalize(self, _end, self._process, self._errors)
        orders = [
            {"question": asdict(each), "clips": {clip: films[clip] for clip in (each.left, each.right)}, "size": size}
            for each in shown
        ]
        content = b"".join(json.dumps(order).encode() + b"\n" for order in orders)
        threading.Thread(target=self._send, args=(self._process, content), daemon=True).start()

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        home = str(Path(__file__).parents[1])  # so that the process imports the same pbrl
        path = os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [*DRAW, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C goes to the run alone
        )

    @staticmethod
    def _send(process: subprocess.Popen[bytes], content: bytes) -> None:
        """Write to the process, which reads as it draws; if it has ended, `check` says why."""
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.write(content)
            process.stdin.flush()

    def check(self) -> None:
        """Raise what the process ended with, if it has ended."""
        if self._process is not None and self._process.poll() is not None:
            self._errors.seek(0)
            complaint = self._errors.read().decode(errors="replace").strip()
            words = complaint.partition("pbrl.label.draw: ")[2] or complaint.rpartition("\n")[2]
            code, self._process = self._process.returncode, None
            raise ConfigurationError(f"the clips cannot be drawn: {words or f'the process ended with code {code}'}")


def _end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """End a process that draws. What it was drawing is drawn again when it is asked for."""
    process.kill()
    process.wait()
    for file in filter(None, (process.stdin, errors)):
        with contextlib.suppress(OSError):  # what is still to be sent is not wanted any more
            file.close()
