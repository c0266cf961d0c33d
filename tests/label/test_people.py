"""People as an oracle: what becomes of their answers in a run, in tables and in the audit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from asking_run import SETTINGS, AskingRun, human, run, what_came_of
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from pyarrow import csv
from teachers import RATIONAL

import oracles.human
from oracles.human import Human
from oracles.replay import Replay, relabel
from pbrl.audit import people as audit_people
from pbrl.label.__main__ import main as label
from pbrl.run import loop
from pbrl.run.answer_table import answer_table
from pbrl.run.preference_log import PreferenceLog, answers_of, read
from pbrl.run.questions import Answer, AnswerLog, QuestionsError, read_question, read_round, write_page
from pbrl.run.settings import ConfigurationError, check_node
from pbrl.types import Question, Reason


def always(verdict: str, level: int | None = 4) -> Callable[[Any], tuple[str, int | None]]:
    """Whatever the clips: "first" and "second" wherever they are shown, or a side."""

    def say(question: Any) -> tuple[str, int | None]:
        if verdict in ("first", "second"):
            return ("right" if (verdict == "second") != question.swapped else "left"), level
        return verdict, level

    return say


def test_sides_are_shuffled_and_the_answers_put_straight(tmp_path: Path, people) -> None:
    people(tmp_path, always("second"))
    run(tmp_path, human(tmp_path, 6), iterations=6)
    rows = answer_table(tmp_path).to_pylist()
    assert {row["swapped"] for row in rows} == {True, False}
    assert {(row["prefers"], row["probability"]) for row in rows} == {("second", 0.9)}
    log = answers_of(read(tmp_path / "preferences"))
    assert (log.preferences.probability == 0.9).all()
    assert (log.preferences.score == 0.8).all()
    assert (log.preferences.label == 1.0).all()


@pytest.mark.parametrize(
    ("say", "expected"),
    [
        (always("first", 1), (0.4, 0.0, Reason.ANSWERED, 1)),
        (always("second", 5), (1.0, 1.0, Reason.ANSWERED, 1)),
        (always("equal", None), (0.5, 0.5, Reason.EQUAL, 1)),
        (always("skip", None), (0.5, 0.5, Reason.SKIPPED, 0)),
    ],
)
def test_what_an_answer_means(tmp_path: Path, people, say, expected) -> None:
    people(tmp_path, say)
    work = run(tmp_path, human(tmp_path), iterations=1)
    answers = answers_of(read(tmp_path / "preferences"))
    found = {*zip(answers.preferences.probability.tolist(), answers.preferences.label.tolist(), strict=True)}
    assert found == {expected[:2]}
    assert {*answers.reason.tolist()} == {expected[2]}
    assert {*answers.bits.tolist()} == {expected[3]}
    assert work.ledger.counts()["bits"] == 4 * expected[3]


def test_a_panel_of_people(tmp_path: Path, people) -> None:
    """Three people: two name the second clip, at 0.9 and 0.6, one the first at 0.8, or they skip."""
    for name, say in (("ann", always("second", 4)), ("bob", always("second", 1)), ("carl", always("first", 3))):
        people(tmp_path, say, name=name)
    run(tmp_path, human(tmp_path, answers_per_question=3), iterations=1, bits=12)
    answers = answers_of(read(tmp_path / "preferences"))
    np.testing.assert_allclose(answers.preferences.probability, (0.9 + 0.6 + 0.2) / 3)
    assert (answers.preferences.label == 1.0).all()
    assert (answers.bits == 3).all()
    shares = {each.figure: each for each in audit_people(answer_table(tmp_path))}
    agreed = {name: shares[f"{name}: agrees with others"] for name in ("ann", "bob", "carl")}
    assert {name: (each.share, each.count) for name, each in agreed.items()} == {
        "ann": (0.5, 8), "bob": (0.5, 8), "carl": (0.0, 8)
    }  # fmt: skip


def test_who_skips_has_no_say_in_a_panel(tmp_path: Path, people) -> None:
    people(tmp_path, always("skip", None), name="ann")
    people(tmp_path, always("first", 5), name="bob")
    run(tmp_path, human(tmp_path, answers_per_question=2), iterations=1, bits=8)
    answers = answers_of(read(tmp_path / "preferences"))
    assert (answers.preferences.probability == 0.0).all()
    assert (answers.bits == 1).all()


def test_checks_of_attention_swap_the_sides_and_are_not_charged(tmp_path: Path, people) -> None:
    """Who always says left contradicts themselves; who means a clip does not."""
    for name, say, agrees in (("left", always("left"), 0.0), ("clip", always("second"), 1.0)):
        folder = tmp_path / name
        people(folder, say, name=name)
        work = run(folder, human(folder, 3, attention=0.5), iterations=3)
        assert work.ledger.counts()["pairs_asked"] == work.ledger.counts()["bits"] == 12
        rows = answer_table(folder).to_pylist()
        checks = [row for row in rows if row["repeats"]]
        assert (len(rows), len(checks)) == (18, 6)
        assert not any(row["taken"] for row in checks)
        originals = {row["question"]: row for row in rows}
        order = [row["question"] for row in rows]
        for check in checks:
            original = originals[check["repeats"]]
            assert (check["left"], check["right"]) == (original["right"], original["left"])
            assert order.index(check["question"]) > order.index(check["repeats"])
        (share,) = [each for each in audit_people(answer_table(folder)) if "asked again" in each.figure]
        assert (share.share, share.count) == (agrees, 6)


def test_the_audit_knows_the_true_order(tmp_path: Path, people) -> None:
    work = AskingRun(tmp_path, human(tmp_path, 3))

    def right_but_once(question: Any) -> tuple[str, int | None]:
        known = work.ledger._known(np.array([question.first, question.second]))
        first, second = known.returns[known.rows(np.array([question.first, question.second]))]
        wrong = question.first == 0
        return ("right" if ((second > first) != question.swapped) != wrong else "left"), 5

    people(tmp_path, right_but_once, name="ann")
    loop.run(work, iterations=3, checkpoint_every=1, mirrors=lambda _: [], progress_bar=False)
    work.ledger.close()
    truth = audit_people(answer_table(tmp_path))[0]
    assert (truth.figure, truth.share, truth.count) == ("ann: agrees with the true order", 11 / 12, 12)
    assert what_came_of(tmp_path)[0]["teacher_error_rate"] == 0.25
    assert what_came_of(tmp_path)[1]["teacher_error_rate"] == 0.0


def test_answers_that_were_undone_are_in_the_table_and_not_in_the_audit(tmp_path: Path, people) -> None:
    people(tmp_path, always("first"))
    run(tmp_path, human(tmp_path), iterations=1)
    table = answer_table(tmp_path)
    assert len(audit_people(table)) == 3
    undone = table.set_column(table.column_names.index("undone"), "undone", [[True] * len(table)])
    assert audit_people(undone) == []


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_answers_as_one_table(tmp_path: Path, people, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    for name in ("one", "@two"):  # the second is a formula
        people(tmp_path / name, name=name)
        run(tmp_path / name, human(tmp_path / name, 2), iterations=2)
    file = tmp_path / f"answers.{suffix}"
    label([str(tmp_path), "--export", str(file)])
    assert f"16 answers of 2 runs are in {file}" in capsys.readouterr().out
    table = csv.read_csv(file) if suffix == "csv" else pq.read_table(file)
    assert Counter(table["annotator"].to_pylist()) == {"one": 8, "'@two" if suffix == "csv" else "@two": 8}
    logged = read(tmp_path / "one" / "preferences").to_pylist()
    rows = [row for row in table.to_pylist() if row["annotator"] == "one"]
    for row in rows:
        (same,) = [each for each in logged if (each["first"], each["second"]) == (row["first"], row["second"])]
        assert (row["first_sum"], row["second_sum"]) == (same["first_sum"], same["second_sum"])
        assert row["prefers"] == "skip" or row["probability"] == same["probability"]


def test_an_export_that_cannot_be_made_is_said_in_a_sentence(tmp_path: Path, people) -> None:
    with pytest.raises(SystemExit, match=r"--export takes a file that ends in .csv or .parquet, not answers.txt"):
        label([str(tmp_path), "--export", "answers.txt"])
    people(tmp_path / "run")
    run(tmp_path / "run", human(tmp_path / "run"), iterations=1)
    people.stop()  # they would read what is spoilt now
    export = [str(tmp_path), "--export", str(tmp_path / "answers.csv")]
    for spoilt, why in (("config.yaml", "not of a run that asks people"), ("answers.jsonl", "line 1 cannot be used")):
        content = (tmp_path / "run" / spoilt).read_text()
        (tmp_path / "run" / spoilt).write_text("env: garbage\n")
        with pytest.raises(SystemExit, match=why):
            label(export)
        (tmp_path / "run" / spoilt).write_text(content)
    next((tmp_path / "run" / "questions").glob("[0-9a-f]*.json")).unlink()
    with pytest.raises(SystemExit, match="but not the question itself"):
        label(export)
    assert not (tmp_path / "answers.csv").exists()


def test_a_persons_log_is_replayed(tmp_path: Path, people) -> None:
    people(tmp_path / "asked")
    asked = run(tmp_path / "asked", human(tmp_path / "asked", 4), iterations=4)
    log = tmp_path / "asked" / "preferences"
    again = run(tmp_path / "again", Replay(log=str(log), rng=np.random.default_rng(0)), iterations=4)
    np.testing.assert_array_equal(asked.agent.parameters, again.agent.parameters)
    assert what_came_of(tmp_path / "asked") == what_came_of(tmp_path / "again")
    tables = [read(folder).drop_columns(["tau"]) for folder in (log, tmp_path / "again" / "preferences")]  # it is NaN
    assert tables[0].equals(tables[1])


def test_another_teacher_is_asked_what_a_person_was_asked(tmp_path: Path, people) -> None:
    people(tmp_path)
    run(tmp_path, human(tmp_path, 2), iterations=2)
    table = read(tmp_path / "preferences")
    relabel(table, RATIONAL(rng=np.random.default_rng(0)), PreferenceLog(tmp_path / "teacher"))
    teacher, person = answers_of(read(tmp_path / "teacher")), answers_of(table)
    np.testing.assert_array_equal(teacher.first_sum, person.first_sum)
    assert not teacher.wrong.any()


# While a run waits


def test_a_run_says_where_the_page_is_and_what_is_open(tmp_path: Path, people, caplog) -> None:
    caplog.set_level("INFO")
    oracle = human(tmp_path)
    people(tmp_path, always("left"))
    run(tmp_path, oracle, iterations=1)
    command = f"(python -m pbrl.label {tmp_path} serves it)"
    assert caplog.messages == [f"4 of 4 questions are open on a page that is not served yet {command}"]
    write_page(tmp_path, "http://127.0.0.1:8765/")
    said = oracle._progress(read_round(tmp_path), 3)
    assert said == f"3 of 4 questions are open at http://127.0.0.1:8765/ {command}, 1.0 s an answer so far"


def test_a_run_that_cannot_draw_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle = human(tmp_path)
    for code, why in (
        (
            "raise SystemExit('pbrl.label.draw: nothing here can draw')",
            "the clips cannot be drawn: nothing here can draw",
        ),
        ("import os; os._exit(3)", "the process ended with code 3"),
    ):
        monkeypatch.setattr(oracles.human, "DRAW", (sys.executable, "-c", code))
        with pytest.raises(ConfigurationError, match=why):
            run(tmp_path, oracle, iterations=1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"confidence": [0.6, 0.5]}, "above 0.5"),
        ({"confidence": []}, "one to nine"),
        ({"confidence": [0.9, 0.6]}, "must grow"),
        ({"answers_per_question": 0}, "at least 1"),
        ({"attention": 1.5}, "between 0 and 1"),
        ({"text": {}}, "needs an entry `default`"),
        ({"lease_seconds": 0}, "lease_seconds must be positive"),
        ({"seconds_per_question": -1}, "seconds_per_question must be positive"),
        ({"clips": {"width": 320}}, "width and height"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Human(**{**SETTINGS, **change}, folder=tmp_path)


def test_a_question_without_behaviour_is_refused(tmp_path: Path) -> None:
    question = Question.about_rewards(np.ones((1, 5)), np.ones((1, 5)), mean_return=1.0, episode_steps=5)
    with pytest.raises(ValueError, match="a person looks at behaviour"):
        human(tmp_path).compare(question)


def test_spoilt_answers_stop_a_run_in_a_sentence(tmp_path: Path) -> None:
    oracle = human(tmp_path)
    (tmp_path / "answers.jsonl").write_text("garbage\n")
    with pytest.raises(QuestionsError, match="line 1 cannot be used"):
        run(tmp_path, oracle, iterations=1)


def test_more_confidence_than_there_is_stops_a_run_in_a_sentence(tmp_path: Path) -> None:
    names = {"id": "0" * 32, "question": "1" * 32, "annotator": "ann"}
    answer = Answer(**names, verdict="left", confidence=5, seconds=1.0, at="")
    with pytest.raises(QuestionsError, match="has confidence 5, of 2 levels"):
        human(tmp_path, confidence=[0.7, 0.9])._probability(None, answer)


def test_every_task_has_its_question(tmp_path: Path) -> None:
    oracle = human(tmp_path, text={"default": "Which is better at: {task}?", "walker_walk": "Which walks better?"})
    assert oracle._text("walker_walk") == "Which walks better?"
    assert oracle._text("hopper_hop") == "Which is better at: hopper hop?"


def test_the_experiment_for_one_person_takes_half_an_hour() -> None:
    with initialize_config_module("conf"):
        settings = OmegaConf.to_container(compose("train", ["experiment=human"]).copy(), resolve=False)
    check_node(settings["agent"], "agent")
    check_node(settings["oracle"], "oracle")
    assert settings["oracle"]["_target_"] == "oracles.human.Human"
    assert settings["iterations"] * settings["pairs"] * 4.0 <= 20 * 60.0  # 4 s an answer, and ten minutes for the rest


def test_a_pair_asked_twice_is_shown_once(tmp_path: Path, people) -> None:
    people(tmp_path)
    run(tmp_path, human(tmp_path), iterations=1)
    names = read_round(tmp_path).questions
    assert len(names) == len({*names}) == 4
    log = AnswerLog(tmp_path)
    log.refresh()
    assert all(read_question(tmp_path, name) for name in log.taken)
