"""What the page asks and what it is told: the open questions of all runs below a folder, and their answers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pbrl.run.questions import (
    FOLDER,
    Answer,
    AnswerLog,
    QuestionsError,
    RefusedError,
    Round,
    ShownQuestion,
    asking_folders,
    clip_path,
    digest,
    is_drawn,
    now,
    read_question,
    read_round,
    write_page,
)

SIDES = ("left", "right")
AHEAD = 2  # questions that a person has at a time: one to look at, one to load meanwhile
SCAN_SECONDS = 1.0  # between two searches for runs
RECENT = 20  # answers, for the time that one takes

log = logging.getLogger(__name__)


class AskingRun:
    """A run that asks people. The page knows it by a key, which does not say whose run it is."""

    def __init__(self, folder: Path, key: str) -> None:
        self.folder, self.key = folder, key
        self.answers = AnswerLog(folder)
        self.leases: dict[tuple[str, str], float] = {}  # until when, by question and person
        self._shown: dict[str, ShownQuestion] = {}

    def question(self, name: str) -> ShownQuestion | None:
        """A question, once its clips are drawn."""
        if name not in self._shown and (found := read_question(self.folder, name)) is not None:
            self._shown[name] = found
        return self._shown.get(name)

    def for_person(self, asked: Round, annotator: str) -> list[str]:
        """The next questions for a person: theirs for a while, and then also anybody's."""
        valid, moment, names = self.answers.valid(), time.monotonic(), []
        for name in self.answers.open(asked):
            given = [each.annotator for each in valid.get(name, [])]
            others = sum(
                until > moment and question == name and person != annotator and person not in given
                for (question, person), until in self.leases.items()
            )
            if annotator in given or len(given) + others >= asked.answers or self.question(name) is None:
                continue
            self.leases.setdefault((name, annotator), moment + asked.lease_seconds)  # looking on does not renew it
            names.append(name)
            if len(names) == AHEAD:
                break
        return names

    def shown(self, name: str, asked: Round) -> dict[str, Any]:
        """A question as the page gets it: nothing in it says which clip is whose."""
        question = self.question(name)
        if question is None or not is_drawn(self.folder, question):
            raise RefusedError("the clips of this question are not there any more")
        clips = {side: f"/clips/{self.key}/{clip_path(self.folder, getattr(question, side)).name}" for side in SIDES}
        limits = {"levels": asked.levels, "seconds": asked.seconds}
        return {"run": self.key, "question": name, "text": asked.text, **limits, **clips}

    def progress(self, asked: Round, annotator: str) -> dict[str, Any]:
        """How far the round and the run are, and how long this person takes."""
        answered = len(asked.questions) - len(self.answers.open(asked))
        mine = [each.seconds for each in self.answers.answers.values() if each.annotator == annotator][-RECENT:]
        each_round = len(asked.questions)
        return {
            "answered": answered,
            "of": each_round,
            "run_answered": asked.iteration * each_round + answered,
            "run_of": asked.iterations * each_round,
            "seconds": sum(mine) / len(mine) if mine else None,
        }


class Desk:
    """All runs below a folder that ask people. One thread at a time."""

    def __init__(self, folder: Path, *, secret: str, address: str) -> None:
        self.folder, self.secret, self.address = folder, secret, address
        self._runs: dict[str, AskingRun] = {}
        self._scanned = -SCAN_SECONDS
        self._complaints: set[str] = set()

    def runs(self) -> list[AskingRun]:
        """All runs, by path; new ones are noticed."""
        if time.monotonic() >= self._scanned + SCAN_SECONDS:
            for folder in asking_folders(self.folder):
                key = digest(self.secret, str(folder))
                if key not in self._runs:
                    self._runs[key] = AskingRun(folder, key)
                    write_page(folder, self.address)
            self._scanned = time.monotonic()
        return sorted(self._runs.values(), key=lambda run: run.folder)

    def _find(self, key: Any) -> AskingRun | None:
        """The run that the page knows by a key, perhaps from before this program was started again."""
        return next((run for run in self.runs() if run.key == key), None)

    def _asking(self) -> Iterator[tuple[AskingRun, Round]]:
        """The runs with their rounds. What is wrong with one run is no reason to leave out others."""
        for run in self.runs():
            try:
                asked = read_round(run.folder)
                run.answers.refresh()
            except (QuestionsError, OSError) as error:
                if str(error) not in self._complaints:
                    log.warning("%s", error)
                    self._complaints.add(str(error))
                continue
            if asked is not None:
                yield run, asked

    def next(self, annotator: str | None) -> dict[str, Any]:
        """What a person should look at now and next, and how far everything is."""
        progress, text = None, None
        for run, asked in self._asking():
            text = text or asked.text
            if annotator is None:
                break
            try:
                names = run.for_person(asked, annotator)
                questions = [run.shown(name, asked) for name in names]
            except (QuestionsError, RefusedError):
                continue
            if questions:
                return {"questions": questions, "progress": run.progress(asked, annotator), "text": text}
            progress = run.progress(asked, annotator)
        return {"questions": [], "progress": progress, "text": text}

    def answer(self, key: Any, **given: Any) -> dict[str, Any]:
        """Save an answer; it is on disk when this returns."""
        run = self._find(key)
        asked = None if run is None else read_round(run.folder)
        if run is None or asked is None:
            raise RefusedError("this question is not asked any more")
        answer = Answer(**given, at=now())
        run.answers.answer(answer, asked)
        run.leases.pop((answer.question, answer.annotator), None)
        return {"saved": answer.id, **self.next(answer.annotator)}

    def undo(self, request: str, annotator: str) -> dict[str, Any]:
        """Undo a person's last answer, of whatever run, and show its question again."""
        runs = dict(self._asking())
        last = {run: answer for run in runs if (answer := run.answers.last(annotator)) is not None}
        done = [run for run in runs if request in run.answers.undone]
        run = done[0] if done else max(last, key=lambda run: last[run].at, default=None)
        if run is None:
            raise RefusedError("there is nothing to undo: the run has taken up your answers so far")
        answer = run.answers.undo(request, annotator)
        run.leases[answer.question, annotator] = time.monotonic() + runs[run].lease_seconds
        again = run.shown(answer.question, runs[run])
        return {"undone": again, **self.next(annotator)}

    def clip(self, key: str, file: str) -> Path | None:
        """The file of a clip: a file in the folder of a run's questions, and nothing else."""
        run = self._find(key)
        if run is None:
            return None
        path = run.folder / FOLDER / file
        inside = path.resolve().parent == run.folder.resolve() / FOLDER
        return path if inside and path.is_file() and not path.is_symlink() else None
