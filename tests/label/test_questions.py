"""The files between a run and the page: nothing asked is lost, nothing saved is lost or counted twice."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import signal
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from asking_run import (
    AskingRun,
    Person,
    begin,
    human,
    opinion,
    run,
    run_alone,
    serve_page,
    what_came_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from safetensors.numpy import load_file
from teachers import RATIONAL

from pbrl.label.__main__ import token_of
from pbrl.run import loop
from pbrl.run.questions import (
    Answer,
    AnswerLog,
    QuestionsError,
    RefusedError,
    Round,
    digest,
    now,
    read_question,
    read_round,
    write_round,
)
from pbrl.run.signals import Stopped

NAMES = [digest(str(number)) for number in range(3)]
ROUND = Round(
    iteration=0, iterations=1, text="?", answers=1, levels=5, lease_seconds=120.0, seconds=None, questions=NAMES
)


def answer_to(question: str, annotator: str = "ann", verdict: str = "left", **changes: object) -> Answer:
    confidence = 3 if verdict in ("left", "right") else None
    made = Answer(
        id=secrets.token_hex(16), question=question, annotator=annotator, verdict=verdict, confidence=confidence,
        seconds=1.0, at=now(),
    )  # fmt: skip
    return replace(made, **changes)


# The log of answers


def test_an_answer_is_there_for_every_reader(tmp_path: Path) -> None:
    log, other = AnswerLog(tmp_path), AnswerLog(tmp_path)
    given = answer_to(NAMES[0])
    log.answer(given, ROUND)
    assert other.refresh()
    assert other.answers == {given.id: given}
    assert not other.refresh()
    assert other.open(ROUND) == NAMES[1:]


def test_the_same_answer_sent_twice_counts_once(tmp_path: Path) -> None:
    given = answer_to(NAMES[0])
    for _ in range(2):
        AnswerLog(tmp_path).answer(given, ROUND)
    assert (tmp_path / "answers.jsonl").read_text().count("\n") == 1


def test_what_cannot_be_answered_is_refused(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    log.answer(answer_to(NAMES[0]), ROUND)
    for wrong, why in (
        (answer_to(NAMES[0]), "you have answered this question already"),
        (answer_to(digest("other")), "not asked any more"),
        (answer_to(NAMES[1], confidence=6), "confidence goes from 1 to 5"),
    ):
        with pytest.raises(RefusedError, match=why):
            log.answer(wrong, ROUND)
    assert len(log.answers) == 1


def test_undo_goes_back_as_far_as_the_run_has_not_taken_up(tmp_path: Path) -> None:
    log = AnswerLog(tmp_path)
    for name in NAMES[:2]:
        log.answer(answer_to(name), ROUND)
    log.answer(answer_to(NAMES[2], annotator="bob"), ROUND)
    requests = [secrets.token_hex(16) for _ in range(3)]
    assert log.undo(requests[0], "ann").question == NAMES[1]
    assert log.undo(requests[0], "ann").question == NAMES[1]  # the same request again: a page that did not hear us
    assert log.undo(requests[1], "ann").question == NAMES[0]
    with pytest.raises(RefusedError, match="nothing to undo"):
        log.undo(requests[2], "ann")
    assert log.open(ROUND) == NAMES[:2]
    assert not log.take(ROUND)
    for name in NAMES[:2]:
        log.answer(answer_to(name, verdict="right"), ROUND)
    assert log.take(ROUND)
    with pytest.raises(RefusedError, match="the run has taken up your answers"):
        log.undo(requests[2], "ann")
    with pytest.raises(RefusedError, match="already taken up"):
        log.answer(answer_to(NAMES[0], annotator="carl"), ROUND)
    assert [log.answers[log.taken[name][0]].verdict for name in NAMES] == ["right", "right", "left"]


def test_several_people_answer_each_question(tmp_path: Path) -> None:
    log, asked = AnswerLog(tmp_path), replace(ROUND, answers=2, questions=NAMES[:1])
    for name in ("ann", "bob", "carl"):
        assert not log.take(asked) or name == "carl"
        if name != "carl":
            log.answer(answer_to(NAMES[0], annotator=name), asked)
    assert log.take(asked)
    assert [log.answers[each].annotator for each in log.taken[NAMES[0]]] == ["ann", "bob"]


@pytest.mark.parametrize("cut", [1, 10, 100])
def test_a_line_cut_short_was_never_saved(tmp_path: Path, cut: int) -> None:
    log = AnswerLog(tmp_path)
    for name in NAMES[:2]:
        log.answer(answer_to(name), ROUND)
    content = log.path.read_bytes()
    log.path.write_bytes(content[:-cut])
    other = AnswerLog(tmp_path)
    other.refresh()
    assert [each.question for each in other.answers.values()] == NAMES[:1]
    other.answer(answer_to(NAMES[2]), ROUND)
    lines = [json.loads(line)["question"] for line in log.path.read_text().splitlines()]
    assert lines == [NAMES[0], NAMES[2]]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = AnswerLog(tmp_path)
    log.answer(answer_to(NAMES[0]), ROUND)
    real = os.write

    def write_half(descriptor: int, content: bytes) -> int:
        if len(content) < 100:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content[:80])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write_half)
        with pytest.raises(OSError, match="No space left"):
            log.answer(answer_to(NAMES[1]), ROUND)
    log.answer(answer_to(NAMES[2]), ROUND)
    assert [json.loads(line)["question"] for line in log.path.read_text().splitlines()] == [NAMES[0], NAMES[2]]


@pytest.mark.parametrize(
    "line",
    [
        "garbage",
        "[]",
        '{"event": "answer"}',
        '{"event": "news"}',
        '{"event": "undone", "id": "x", "answer": "y"}',
        '{"event": "taken", "answers": {"a": ["nobody"]}}',
        "[" * 100_000,
        json.dumps({"event": "answer", **vars(answer_to(NAMES[0])), "confidence": 3.5}),
        json.dumps({"event": "answer", **vars(answer_to(NAMES[0])), "annotator": "<script>"}),
        json.dumps({"event": "answer", **vars(answer_to(NAMES[0])), "seconds": float("inf")}),
        json.dumps({"event": "answer", **vars(answer_to(NAMES[0])), "surplus": 1}),
    ],
)
def test_a_line_that_is_no_answer_is_named(tmp_path: Path, line: str) -> None:
    log = AnswerLog(tmp_path)
    log.answer(answer_to(NAMES[0]), ROUND)
    with log.path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(QuestionsError, match=r"answers.jsonl, line 2 cannot be used"):
        AnswerLog(tmp_path).refresh()


@pytest.mark.parametrize(
    "content",
    ["", "garbage", "[]", "{}", '{"format": 1}', '{"format": 2}', "[" * 100_000, " " * 1_000_001]
    + [
        json.dumps({"format": 1, **vars(ROUND), **change})
        for change in (
            {"questions": ["../../etc/passwd"]},
            {"questions": []},
            {"levels": 0},
            {"levels": True},
            {"text": "x" * 501},
            {"lease_seconds": "long"},
            {"iteration": 1},
            {"more": 1},
        )
    ],
)
def test_a_round_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    write_round(tmp_path, ROUND)
    assert read_round(tmp_path) == ROUND
    (tmp_path / "questions" / "round.json").write_text(content)
    with pytest.raises(QuestionsError, match=r"round.json cannot be used"):
        read_round(tmp_path)


class ManyPeople(RuleBasedStateMachine):
    """Whatever people do in whatever order, through several logs of one file: a plain model says what is there."""

    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.run = self.folder / secrets.token_hex(8)
        self.run.mkdir()
        self.logs = [AnswerLog(self.run) for _ in range(2)]
        self.given: list[tuple[str, str]] = []  # person and question, in the order of answering
        self.taken = False

    @rule(log=st.integers(0, 1), who=st.sampled_from("ab"), question=st.sampled_from(NAMES))
    def answer(self, log: int, who: str, question: str) -> None:
        allowed = not self.taken and (who, question) not in self.given
        try:
            self.logs[log].answer(answer_to(question, annotator=who), ROUND)
            assert allowed
            self.given.append((who, question))
        except RefusedError:
            assert not allowed

    @rule(log=st.integers(0, 1), who=st.sampled_from("ab"))
    def undo(self, log: int, who: str) -> None:
        mine = [each for each in self.given if each[0] == who]
        try:
            undone = self.logs[log].undo(secrets.token_hex(16), who)
            assert not self.taken
            assert (who, undone.question) == mine[-1]
            self.given.remove(mine[-1])
        except RefusedError:
            assert self.taken or not mine

    @rule(log=st.integers(0, 1))
    def take(self, log: int) -> None:
        complete = {question for _, question in self.given} == {*NAMES}
        assert self.logs[log].take(ROUND) == complete
        if complete and not self.taken:
            self.taken = True
            first = {name: next(who for who, each in self.given if each == name) for name in NAMES}
            log_ = self.logs[log]
            assert {name: log_.answers[ids[0]].annotator for name, ids in log_.taken.items()} == first

    @invariant()
    def all_readers_agree(self) -> None:
        for log in [*self.logs, AnswerLog(self.run)]:
            log.refresh()
            valid = [(each.annotator, each.question) for all_ in log.valid().values() for each in all_]
            assert sorted(valid) == sorted(self.given)


def test_any_order_of_answers_undos_and_taking_up(tmp_path: Path) -> None:
    ManyPeople.folder = tmp_path
    run_state_machine_as_test(ManyPeople, settings=settings(max_examples=30, stateful_step_count=20))


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_random_bytes_are_refused_in_a_sentence(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("random")
    (folder / "questions").mkdir()
    (folder / "questions" / f"{NAMES[0]}.json").write_bytes(content)
    with pytest.raises(QuestionsError, match="cannot be used"):
        read_question(folder, NAMES[0])


# Runs with people


def parameters(folder: Path) -> np.ndarray:
    newest = max((folder / loop.CHECKPOINT).iterdir())
    return load_file(newest / "arrays.safetensors")


def same_run(one: Path, other: Path) -> None:
    assert what_came_of(one) == what_came_of(other)
    np.testing.assert_equal(parameters(one), parameters(other))


def test_a_teacher_who_answers_through_the_files_gives_the_same_run(tmp_path: Path, people) -> None:
    direct = run(tmp_path / "direct", RATIONAL(rng=np.random.default_rng(0)), iterations=6)
    asked = tmp_path / "asked"
    work = AskingRun(asked, human(asked, 6))

    def truth(question) -> tuple[str, int | None]:
        """The side with the higher true return, certainly; `equal` on a tie, as the rational teacher says."""
        known = work.ledger._known(np.array([question.first, question.second]))
        first, second = known.returns[known.rows(np.array([question.first, question.second]))]
        if first == second:
            return "equal", None
        return ("right" if (second > first) != question.swapped else "left"), 5

    people(asked, truth)
    loop.run(work, iterations=6, checkpoint_every=1, mirrors=lambda _: [], progress_bar=False)
    np.testing.assert_array_equal(work.agent.parameters, direct.agent.parameters)
    assert work.agent.rng.bit_generator.state == direct.agent.rng.bit_generator.state
    for mine, theirs in zip(what_came_of(asked), what_came_of(tmp_path / "direct"), strict=True):
        assert "teacher_tau" not in mine  # a person has none
        assert theirs.pop("teacher_tau") == 0.0
        assert mine == theirs


def test_a_run_that_is_continued_finds_its_answers(tmp_path: Path, people) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    people(whole)
    run(whole, human(whole, 5), iterations=5)
    people(cut)
    run(cut, human(cut, 5), iterations=3, checkpoint_every=10)
    shutil.rmtree(cut / loop.CHECKPOINT)
    answers = len((cut / "answers.jsonl").read_text().splitlines())
    clips = {path.name: path.stat().st_mtime_ns for path in (cut / "questions").iterdir()}
    run(cut, human(cut, 5), iterations=3, checkpoint_every=10)  # from the start, all answers known
    assert len((cut / "answers.jsonl").read_text().splitlines()) == answers
    assert {path.name: path.stat().st_mtime_ns for path in (cut / "questions").iterdir()} == clips
    run(cut, human(cut, 5), iterations=5)
    same_run(whole, cut)


@pytest.mark.parametrize("when", ["waiting", "before"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_a_run_that_waits(tmp_path: Path, people, capsys, when: str, number: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    people(whole)
    run(whole, human(whole, 2), iterations=2)
    oracle = human(cut, 2)
    if when == "before":  # while it collects
        compare = oracle.compare
        oracle.compare = lambda question: (signal.raise_signal(number), compare(question))[1]
    else:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), number)).start()
    with pytest.raises(Stopped) as stopped:
        run(cut, oracle, iterations=2)
    assert stopped.value.code == 128 + number
    assert "the same command goes on" in capsys.readouterr().out
    people(cut)  # answered while nobody ran
    time.sleep(0.3)
    run(cut, human(cut, 2), iterations=2)
    same_run(whole, cut)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def killed(tmp_path: Path, people, *, kills: int, iterations: int) -> None:
    """Kill the run, the page or both at random moments, then let both finish."""
    whole, folder = tmp_path / "whole", tmp_path / "runs" / "killed"
    people(whole)
    run(whole, human(whole, iterations), iterations=iterations)
    folder.mkdir(parents=True)
    port, rng = free_port(), np.random.default_rng(kills)
    person = Person(port, token_of(tmp_path / "runs"))
    start = {"run": (run_alone, str(folder), iterations), "page": (serve_page, str(tmp_path / "runs"), port)}
    alive = {name: begin(*how) for name, how in start.items()}
    person.start()
    try:
        for _ in range(kills):
            enough = len(person.saved) + rng.integers(8)
            while len(person.saved) < enough and alive["run"].is_alive():
                time.sleep(0.001)
            time.sleep(rng.uniform(0.0, 0.03))
            assert alive["run"].is_alive(), "the run was over before the kills were"
            for name in (("run",), ("page",), ("run", "page"))[rng.integers(3)]:
                alive[name].kill()
                alive[name].join()
                alive[name] = begin(*start[name])
        deadline = time.monotonic() + 300
        while alive["run"].is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert alive["run"].exitcode == 0
    finally:
        person.enough.set()
        for process in alive.values():
            process.kill()
            process.join()
    person.join(20)
    lines = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    ids = Counter(line["id"] for line in lines if line["event"] == "answer")
    assert len(person.saved) == len({*person.saved})
    assert {each: ids[each] for each in person.saved} == dict.fromkeys(person.saved, 1)
    assert {*ids.values()} == {1}
    same_run(whole, folder)


@pytest.mark.slow
def test_killed_fifty_times(tmp_path: Path, people) -> None:
    killed(tmp_path, people, kills=50, iterations=100)


def test_the_person_answers_alike_everywhere() -> None:
    verdicts = Counter(opinion(digest(str(number)))[0] for number in range(1000))
    assert {*verdicts} == {"left", "right", "equal", "skip"}
