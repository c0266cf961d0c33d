"""Questions for people and their answers, on disk: all that a run and the page share.

    <run>/questions/round.json       what is asked now: its questions in order, and how they are asked
    <run>/questions/<name>.json      a question: its two clips, and which is on the left; there once they are drawn
    <run>/questions/<name>.webp      a clip
    <run>/questions/page.txt         where the page is served, or was
    <run>/answers.jsonl              what happened, a line each: an answer, one undone, answers taken up by the run

A name is a digest of what it names. So a run that is continued asks under the same names, and finds the answers.

Both programs append to `answers.jsonl` under a lock, and a line is on disk before anyone is told. A line without its
newline was never called saved: readers ignore it, and the next writer removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pbrl.run.files import ASIDE, sync_folder, write_atomically

FORMAT = 1
FOLDER, ROUND, PAGE, ANSWERS = "questions", "round.json", "page.txt", "answers.jsonl"
NAME = re.compile(r"[0-9a-f]{32}")  # of a question, a clip, an answer
CLIP = re.compile(r"[0-9a-f]{32}\.webp")  # file of a clip
ANNOTATOR = re.compile(r"[\w .@+-]{1,40}")  # what a person may be called
LARGEST, LONGEST_TEXT = 1_000_000, 500  # bytes of a file or a line, characters

Verdict = Literal["left", "right", "equal", "skip"]
Kind = TypeVar("Kind", bound="Round | ShownQuestion | Answer")


class QuestionsError(RuntimeError):
    """A file of questions or answers is not what pbrl writes; the message says which and why."""


class RefusedError(ValueError):
    """An answer that cannot be accepted; the message is for the person who gave it."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What a run asks at one time."""

    iteration: int
    iterations: int  # of the whole run
    text: str  # what the person is asked
    answers: int  # wanted for each question, all by different people
    levels: int  # of confidence
    lease_seconds: float  # how long a question is one person's
    seconds: float | None  # time limit of a question; None: none
    questions: list[str]  # in the order of asking

    def __post_init__(self) -> None:
        _check(0 <= self.iteration < self.iterations, "iteration")
        _check(0 < len(self.text) <= LONGEST_TEXT, "text")
        _check(1 <= self.answers <= 1000, "answers")
        _check(1 <= self.levels <= 9, "levels")
        _check(0 < self.lease_seconds < math.inf, "lease_seconds")
        _check(self.seconds is None or 0 < self.seconds < math.inf, "seconds")
        _check(len(self.questions) > 0 and all(map(_is_name, self.questions)), "questions")


@dataclass(frozen=True, kw_only=True)
class ShownQuestion:
    """Two clips as a person sees them. Which is first and which second is for the run: no page says it."""

    name: str
    iteration: int
    first: int  # number of the trajectory in the run
    second: int
    first_step: int  # where the clip begins
    second_step: int
    steps: int  # control steps of a clip
    swapped: bool  # the first clip is on the right
    repeats: str | None  # the question that this one asks again, with the sides swapped: a check of attention
    left: str  # name of the clip
    right: str

    def __post_init__(self) -> None:
        _check(_is_name(self.name), "name")
        _check(self.repeats is None or _is_name(self.repeats), "repeats")
        _check(_is_name(self.left) and _is_name(self.right), "clips")
        _check(min(self.iteration, self.first, self.second, self.first_step, self.second_step) >= 0, "numbers")
        _check(self.steps >= 1, "steps")

    def prefers_second(self, verdict: Verdict) -> bool:
        """Whether a verdict for one side is for the second clip."""
        return (verdict == "right") != self.swapped


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a person said."""

    id: str  # chosen by the page, so that an answer that is sent twice counts once
    question: str
    annotator: str
    verdict: Verdict
    confidence: int | None  # level, from 1; None for "equal" and "skip"
    seconds: float  # from showing to answering
    at: str  # when it was saved
    timed_out: bool = False  # skipped because the question's time was up
    replays: int = 0  # how often the clips were started again by hand
    speed: float = 1.0  # of the clips at the end

    def __post_init__(self) -> None:
        _check(_is_name(self.id) and _is_name(self.question), "id")
        _check(ANNOTATOR.fullmatch(self.annotator) is not None, "annotator")
        _check(self.verdict in get_args(Verdict), "verdict")
        if self.verdict in ("left", "right"):
            _check(self.confidence is not None and 1 <= self.confidence <= 9, "confidence")
        else:
            _check(self.confidence is None, "confidence")
        _check(0 <= self.seconds < 1e7, "seconds")
        _check(len(self.at) <= 40, "at")
        _check(not self.timed_out or self.verdict == "skip", "timed_out")
        _check(0 <= self.replays < 1e6 and 0 < self.speed <= 100, "replays")


def now() -> str:
    """The time, as it is written into files."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


# Questions


def write_round(run: Path, asked: Round) -> None:
    """Say what is asked now."""
    write_atomically(run / FOLDER / ROUND, json.dumps({"format": FORMAT, **asdict(asked)}, indent=1))


def read_round(run: Path) -> Round | None:
    """What is asked now; None if nothing was asked yet."""
    return _read(run / FOLDER / ROUND, Round)


def write_question(run: Path, question: ShownQuestion) -> None:
    """Say that a question can be shown: its clips are there."""
    content = json.dumps({"format": FORMAT, **asdict(question)}, indent=1)
    write_atomically(run / FOLDER / f"{question.name}.json", content)


def read_question(run: Path, name: str) -> ShownQuestion | None:
    """A question; None as long as its clips are not drawn."""
    return _read(run / FOLDER / f"{name}.json", ShownQuestion)


def write_page(run: Path, address: str) -> None:
    """Say where a run's questions are shown."""
    write_atomically(run / FOLDER / PAGE, address + "\n")


def read_page(run: Path) -> str | None:
    """Where a run's questions are shown, or were; None if they never were."""
    try:
        address = (run / FOLDER / PAGE).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None
    return address if re.fullmatch(r"http://[\w.:\[\]-]{1,100}/?", address) else None


def clip_path(run: Path, clip: str) -> Path:
    """The file of a clip, which is there once it is drawn."""
    return run / FOLDER / f"{clip}.webp"


def is_drawn(run: Path, question: ShownQuestion) -> bool:
    """Whether a question can be shown."""
    files = [
        run / FOLDER / f"{question.name}.json",
        *(clip_path(run, clip) for clip in (question.left, question.right)),
    ]
    return all(file.is_file() for file in files)


def asking_folders(folder: Path) -> list[Path]:
    """The folders of runs that ask people, at any depth, `folder` itself among them."""
    found = []
    for path, folders, files in os.walk(folder):
        asks = FOLDER in folders and (Path(path) / FOLDER / ROUND).is_file()
        if asks:
            found.append(Path(path))
        if asks or "config.yaml" in files:
            folders.clear()  # there is no run inside a run
        folders[:] = [each for each in folders if not each.startswith(".") and not ASIDE.search(each)]
    return found


def digest(*parts: str | bytes) -> str:
    """A name for content: the same for the same, and for nothing else."""
    hashed = hashlib.sha256()
    for part in parts:
        content = part.encode() if isinstance(part, str) else part
        hashed.update(len(content).to_bytes(8) + content)
    return hashed.hexdigest()[:32]


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    """The content of a file, checked; None if there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except FileNotFoundError:
        return None
    try:
        if len(content) > LARGEST:
            raise ValueError(f"it has more than {LARGEST} bytes")
        found = json.loads(content)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ValueError(f"it is not of format {FORMAT}")
        return build(kind, found)
    except (ValueError, RecursionError) as error:
        raise QuestionsError(f"{path} cannot be used: {error}") from None


def build(kind: type[Kind], found: Mapping[str, Any]) -> Kind:
    """A checked object from plain data that somebody else may have written."""
    known = {each.name: str(each.type) for each in fields(kind)}
    if unknown := sorted({*found} - {*known}):
        raise ValueError(f"{unknown[0]!r} is unknown")
    for name, value in found.items():
        if not _fits(value, known[name]):
            raise ValueError(f"{name} is {str(value)[:40]!r}")
    try:
        return kind(**found)
    except TypeError:
        missing = [name for name in known if name not in found]
        raise ValueError(f"{', '.join(missing)} is missing") from None


def _fits(value: Any, annotation: str) -> bool:
    """Whether a value from JSON is of the annotated type."""
    if annotation.endswith(" | None"):
        return value is None or _fits(value, annotation.removesuffix(" | None"))
    if annotation == "float":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation == "int":
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    if annotation == "bool":
        return isinstance(value, bool)
    if annotation == "list[str]":
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    return isinstance(value, str)


def _is_name(text: str) -> bool:
    return NAME.fullmatch(text) is not None


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"{what} makes no sense")


# Answers


class AnswerLog:
    """The file `answers.jsonl` of a run. Several processes may read and write it; in each, one thread at a time."""

    def __init__(self, run: Path) -> None:
        self.path = run / ANSWERS
        self._forget()

    def _forget(self) -> None:
        self.answers: dict[str, Answer] = {}  # by id, in the order of answering
        self.undone: dict[str, str] = {}  # which answer, by the id of the request to undo one
        self.taken: dict[str, list[str]] = {}  # ids of the answers taken up, by question
        self._read, self._lines = 0, 0  # bytes and lines

    def valid(self) -> dict[str, list[Answer]]:
        """Answers that are not undone, by question."""
        found: dict[str, list[Answer]] = {}
        undone = {*self.undone.values()}
        for answer in self.answers.values():
            if answer.id not in undone:
                found.setdefault(answer.question, []).append(answer)
        return found

    def open(self, asked: Round) -> list[str]:
        """The questions of a round that lack answers."""
        valid = self.valid()
        return [name for name in asked.questions if name not in self.taken and len(valid.get(name, [])) < asked.answers]

    def last(self, annotator: str) -> Answer | None:
        """The last answer of a person that is neither undone nor taken up."""
        undone = {*self.undone.values()}
        mine = [each for each in self.answers.values() if each.annotator == annotator and each.id not in undone]
        return mine[-1] if mine and mine[-1].question not in self.taken else None

    def refresh(self) -> bool:
        """Read what is new; whether anything was."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:  # somebody has replaced it
                    self._forget()
                file.seek(self._read)
                content = file.read()
        except FileNotFoundError:
            return False
        complete = content[: content.rfind(b"\n") + 1]
        for line in complete.splitlines():
            self._include(line)
        self._read += len(complete)
        return bool(complete)

    def _include(self, line: bytes) -> None:
        self._lines += 1
        try:
            if len(line) > LARGEST:
                raise ValueError("it is too long")
            found = json.loads(line)
            event = found.pop("event", None) if isinstance(found, dict) else None
            if event == "answer":
                answer = build(Answer, found)
                self.answers.setdefault(answer.id, answer)
            elif event == "undone" and isinstance(found.get("id"), str) and found.get("answer") in self.answers:
                self.undone.setdefault(found["id"], found["answer"])
            elif event == "taken" and isinstance(found.get("answers"), dict):
                for question, ids in found["answers"].items():
                    if not isinstance(ids, list) or not all(each in self.answers for each in ids):
                        raise ValueError("it names answers that are not there")
                    self.taken.setdefault(question, ids)
            else:
                raise ValueError("it is none of answer, undone, taken")
        except (ValueError, TypeError, RecursionError) as error:
            number = self._lines
            self._forget()
            raise QuestionsError(f"{self.path}, line {number} cannot be used: {error}") from None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the file, with everything read: nobody else writes meanwhile."""
        created = not self.path.exists()
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if created:
                sync_folder(self.path.parent)
            self.refresh()
            self._remove_incomplete_line(descriptor)
            self._descriptor = descriptor
            yield
        finally:
            os.close(descriptor)

    def _remove_incomplete_line(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size > self._read:
            os.ftruncate(descriptor, self._read)

    def append(self, event: str, /, **content: Any) -> None:
        """Write a line, which is on disk when this returns. Call it while the file is locked."""
        line = json.dumps({"event": event, **content}, allow_nan=False).encode() + b"\n"
        try:
            written = 0
            while written < len(line):
                written += os.write(self._descriptor, line[written:])
            os.fsync(self._descriptor)
        except OSError:
            self._remove_incomplete_line(self._descriptor)
            raise
        self.refresh()

    def answer(self, answer: Answer, asked: Round) -> None:
        """Save an answer to a question of a round; the same one twice is saved once."""
        with self.locked():
            if answer.id in self.answers:
                return
            if answer.question not in asked.questions:
                raise RefusedError("this question is not asked any more")
            if answer.question in self.taken:
                raise RefusedError("the run has already taken up the answers to this question")
            if answer.confidence is not None and answer.confidence > asked.levels:
                raise RefusedError(f"confidence goes from 1 to {asked.levels}")
            if any(each.annotator == answer.annotator for each in self.valid().get(answer.question, [])):
                raise RefusedError("you have answered this question already")
            self.append("answer", **asdict(answer))

    def undo(self, request: str, annotator: str) -> Answer:
        """Undo a person's last answer; the same request twice undoes one."""
        with self.locked():
            if request not in self.undone:
                last = self.last(annotator)
                if last is None:
                    raise RefusedError("there is nothing to undo: the run has taken up your answers so far")
                self.append("undone", id=request, answer=last.id, annotator=annotator, at=now())
            return self.answers[self.undone[request]]

    def take(self, asked: Round) -> bool:
        """Take up the answers to all questions of a round, if they are there; whether they are.

        From then on they stay as they are.
        """
        with self.locked():
            if self.open(asked):
                return False
            valid = self.valid()
            new = [name for name in asked.questions if name not in self.taken]
            if new:
                ids = {name: [each.id for each in valid[name][: asked.answers]] for name in new}
                self.append("taken", iteration=asked.iteration, answers=ids, at=now())
            return True
