"""People's answers as one table: a row for each answer, with its question, and the truth that nobody saw."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from pbrl.run import preference_log
from pbrl.run.folder import read_settings
from pbrl.run.questions import Answer, AnswerLog, QuestionsError, ShownQuestion, read_question

SCHEMA = pa.schema(
    {
        "run": pa.string(),  # its folder
        "task": pa.string(),
        "agent": pa.string(),
        "seed": pa.int64(),
        "iteration": pa.int32(),
        "question": pa.string(),
        "repeats": pa.string(),  # the question that this one asks again, with the sides swapped; null: it is no check
        "left": pa.string(),  # file of the clip in the folder `questions`
        "right": pa.string(),
        "swapped": pa.bool_(),  # the first clip is on the right
        "first": pa.int64(),  # number of the trajectory in the run
        "second": pa.int64(),
        "first_step": pa.int32(),  # where the clip begins
        "second_step": pa.int32(),
        "clip_steps": pa.int32(),
        "annotator": pa.string(),
        "verdict": pa.string(),  # left, right, equal, skip
        "prefers": pa.string(),  # the same as first, second, equal, skip
        "confidence": pa.int8(),  # level, from 1; null for equal and skip
        "probability": pa.float64(),  # that the second clip is the better one, as the run understands it; null for skip
        "seconds": pa.float64(),  # from showing to answering
        "saved_at": pa.string(),
        "timed_out": pa.bool_(),
        "replays": pa.int32(),  # how often the clips were started again by hand
        "speed": pa.float64(),  # of the clips at the end
        "undone": pa.bool_(),
        "taken": pa.bool_(),  # whether the run has learnt from it, or will
        "first_sum": pa.float64(),  # true rewards of the clips, from the preference log; null until they are there
        "second_sum": pa.float64(),
    }
)


def answer_table(run: Path) -> pa.Table:
    """All answers of a run's people, in the order of answering; those that were undone, too."""
    log, about, levels = AnswerLog(run), *_settings(run)
    log.refresh()
    undone = {*log.undone.values()}
    taken = {each for ids in log.taken.values() for each in ids}
    sums = _true_sums(run)
    rows = []
    for answer in log.answers.values():
        question = read_question(run, answer.question)
        if question is None:
            raise QuestionsError(f"{run} has an answer to {answer.question}, but not the question itself")
        first_sum, second_sum = sums.get(_key(vars(question)), (None, None))
        rows.append(
            {
                **about,
                **_about(question, answer, levels),
                "undone": answer.id in undone,
                "taken": answer.id in taken and question.repeats is None,
                "first_sum": first_sum,
                "second_sum": second_sum,
            }
        )
    return pa.Table.from_pylist(rows, SCHEMA)


def _settings(run: Path) -> tuple[dict[str, Any], list[float]]:
    """What the table says of a run, and what its levels of confidence mean."""
    settings = read_settings(run)
    try:
        about = {"task": str(settings["env"]["name"]), "agent": str(settings["name"]), "seed": int(settings["seed"])}
        return {"run": str(run), **about}, [float(each) for each in settings["oracle"]["confidence"]]
    except (KeyError, TypeError, ValueError):
        raise QuestionsError(f"{run / 'config.yaml'} is not of a run that asks people") from None


def _about(question: ShownQuestion, answer: Answer, levels: list[float]) -> dict[str, Any]:
    """What was asked and what was said."""
    prefers: str = answer.verdict
    probability = None if answer.verdict == "skip" else 0.5
    if answer.confidence is not None:
        if answer.confidence > len(levels):
            raise QuestionsError(f"an answer has confidence {answer.confidence}, of {len(levels)} levels")
        stated, second = levels[answer.confidence - 1], question.prefers_second(answer.verdict)
        prefers, probability = ("second", stated) if second else ("first", 1.0 - stated)
    shared = ("iteration", "repeats", "swapped", "first", "second", "first_step", "second_step")
    said = ("annotator", "verdict", "confidence", "seconds", "timed_out", "replays", "speed")
    return {
        "question": question.name,
        **{name: getattr(question, name) for name in shared},
        "left": f"{question.left}.webp",
        "right": f"{question.right}.webp",
        "clip_steps": question.steps,
        **{name: getattr(answer, name) for name in said},
        "prefers": prefers,
        "probability": probability,
        "saved_at": answer.at,
    }


def _key(row: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(row[name] for name in ("iteration", "first", "second", "first_step", "second_step"))


def _true_sums(run: Path) -> dict[tuple[int, ...], tuple[float, float]]:
    """The true sums of the pairs that the run has logged."""
    rows = preference_log.read(run / "preferences").to_pylist()
    return {_key(row): (row["first_sum"], row["second_sum"]) for row in rows}
