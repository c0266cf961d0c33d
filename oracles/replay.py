"""Answers from a preference log: the same answers again, or those of another teacher to the same questions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from oracles.panel import Panel
from oracles.teacher import Impressions, Teacher, rewards_of
from pbrl.run.preference_log import PreferenceLog, answers_of, questions, read
from pbrl.run.settings import ConfigurationError
from pbrl.types import Answers, Question

OTHER_RUN = "the log is of another run, so it cannot answer this one"


class Replay:
    """Answers a run's questions from the log of an earlier run, in order, as long as they are the same questions.

    Two questions are the same if they have the same number of pairs and experts and the same true sums.
    """

    sees: Literal["rewards", "behaviour"] = "rewards"

    def __init__(self, *, log: str, rng: np.random.Generator) -> None:
        del rng  # nothing is random: the answers are in the log
        folder = Path(log).absolute()
        if not any(folder.glob("*.parquet")):
            raise ConfigurationError(
                f"there is no preference log in {folder}: set oracle.log to the folder `preferences` of a run"
            )
        try:
            table = read(folder)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ConfigurationError(f"the preference log in {folder} cannot be read: {error}") from error
        if len(table) == 0:
            raise ConfigurationError(f"the preference log in {folder} is empty: there are no answers to repeat")
        if missing := [name for name in table.column_names if table[name].null_count]:
            raise ConfigurationError(f"the preference log in {folder} has no values for {', '.join(missing)}")
        self.log = log
        self.questions = questions(table)
        self.question = 0  # the next one

    def compare(self, question: Question) -> Answers:
        """Answer P pairs as the log does, or refuse."""
        sums = np.ascontiguousarray(rewards_of(question), dtype=np.float64).sum(axis=1)
        first, second, experts = sums[question.first], sums[question.second], question.experts
        where = f"question {self.question} in {self.log}"
        if self.question >= len(self.questions):
            raise ConfigurationError(
                f"there is no {where}: the log ends before this run, after {len(self.questions)} questions"
            )
        table = self.questions[self.question]
        asked = table["experts"][0].as_py()
        if len(table) != len(first) or asked != experts:
            raise ConfigurationError(
                f"{where} is about {len(table)} pairs for {asked} experts, this one about {len(first)} for {experts}: "
                f"{OTHER_RUN}"
            )
        answers = answers_of(table)
        same = (answers.first_sum == first) & (answers.second_sum == second)
        if not same.all():
            pair = int(np.flatnonzero(~same)[0])
            raise ConfigurationError(
                f"{where} has other clips: pair {pair} has the true returns {answers.first_sum[pair]} and "
                f"{answers.second_sum[pair]}, here {first[pair]} and {second[pair]}: {OTHER_RUN}"
            )
        self.question += 1
        return answers

    def state_dict(self) -> dict[str, Any]:
        """The position in the log."""
        return {"question": self.question}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`."""
        self.question = state["question"]


def relabel(table: pa.Table, oracle: Teacher | Panel, log: PreferenceLog) -> None:
    """Ask another oracle the questions of a log, and write its answers to a new log.

    A log has the clips' sums and not their steps: enough for every trait of a teacher but myopia.
    """
    gamma = oracle.teacher.gamma if isinstance(oracle, Panel) else oracle.gamma
    if gamma != 1.0:
        raise ValueError(
            f"a log keeps sums, not steps: a teacher with gamma = {gamma} cannot judge by them, only gamma = 1"
        )
    for question in questions(table):
        row = question.slice(0, 1).to_pylist()[0]
        shared = {name: row[name] for name in ("mean_return", "episode_steps", "experts")}
        first, second = (
            Impressions(undiscounted=sums, myopic=sums, steps=row["clip_steps"])
            for sums in (question["first_sum"].to_numpy(), question["second_sum"].to_numpy())
        )
        log.append(
            oracle.compare_seen(first, second, iteration=row["iteration"], **shared),
            iteration=row["iteration"],
            first=question["first"].to_numpy(),
            second=question["second"].to_numpy(),
            first_step=question["first_step"].to_numpy(),
            second_step=question["second_step"].to_numpy(),
            clip_steps=row["clip_steps"],
            **shared,
        )
    log.close()
