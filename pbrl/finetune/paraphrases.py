"""Pairs of sentences and whether they mean the same: MRPC and QQP from the files in which they are published.

These can be the original files (Microsoft's msr_paraphrase_train.txt, Quora's quora_duplicate_questions.tsv), GLUE's
train.tsv and dev.tsv, or a name that `datasets` finds on a hub. Columns are found by their names in the header.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

LABEL, FIRST, SECOND = (
    ("Quality", "is_duplicate", "label"),
    ("#1 String", "question1", "sentence1"),
    ("#2 String", "question2", "sentence2"),
)
TRAINING = ("train.tsv", "msr_paraphrase_train.txt", "quora_duplicate_questions.tsv")
VALIDATION = ("dev.tsv", "validation.tsv")


class DataError(ValueError):
    """A data set that cannot be read; the message says where and why."""


class Example(NamedTuple):
    """Two sentences; label 1: one is a paraphrase of the other."""

    first: str
    second: str
    label: int


@dataclass(frozen=True)
class Data:
    """Training and validation examples."""

    training: Sequence[Example]
    validation: Sequence[Example]

    @property
    def majority(self) -> float:
        """The validation accuracy of always predicting the more frequent class."""
        share = sum(example.label for example in self.validation) / len(self.validation)
        return max(share, 1 - share)


def load(
    *,
    name: str,
    path: str | None,
    hub_name: str,
    hub_configuration: str,
    share: float,
    validation: int,
    malformed: Literal["error", "skip"],
    rng: np.random.Generator,
) -> Data:
    """The data set in a file or folder, or, without a path, by name from a hub.

    validation: the number of examples that `rng` draws from the training set if there is no validation set. share: of
    the remaining training examples, also drawn by `rng`.
    """
    if not 0 < share <= 1:
        raise DataError(f"task.share must be more than 0 and at most 1, not {share}")
    training, held_out = from_hub(name, hub_name, hub_configuration) if path is None else from_files(path, malformed)
    if held_out is None:
        if not 0 < validation < len(training):
            raise DataError(
                f"task.validation={validation} examples cannot be put aside from the {len(training)} of {path}"
            )
        held_out, training = put_aside(training, validation, rng)
    chosen = np.sort(rng.permutation(len(training))[: max(1, round(share * len(training)))])
    return Data([training[i] for i in chosen], held_out)


def put_aside(
    examples: Sequence[Example], number: int, rng: np.random.Generator
) -> tuple[list[Example], list[Example]]:
    """Split off a number of random examples with the same share of paraphrases; returns them and the others."""
    drawn = draw_aside(np.array([example.label for example in examples]), number, rng)
    aside = [example for example, chosen in zip(examples, drawn, strict=True) if chosen]
    return aside, [example for example, chosen in zip(examples, drawn, strict=True) if not chosen]


def draw_aside(labels: NDArray[np.int64], number: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which examples [n] to put aside: a number of random ones, with the same share of paraphrases."""
    paraphrases, others = np.flatnonzero(labels == 1), np.flatnonzero(labels == 0)
    count = round(number * len(paraphrases) / len(labels))
    drawn = np.zeros(len(labels), bool)
    drawn[rng.permutation(paraphrases)[:count]] = True
    drawn[rng.permutation(others)[: number - count]] = True
    return drawn


def from_files(path: str, malformed: str) -> tuple[list[Example], list[Example] | None]:
    """Training and validation set of a folder; of a file, the training set alone."""
    place = Path(path).expanduser()
    if place.is_file():
        return read(place, malformed), None
    training = [place / name for name in TRAINING if (place / name).is_file()]
    if not training:
        raise DataError(f"task.path={path} is neither a file nor a folder with one of {', '.join(TRAINING)}")
    held_out = [place / name for name in VALIDATION if (place / name).is_file()]
    return read(training[0], malformed), read(held_out[0], malformed) if held_out else None


def read(path: Path, malformed: str) -> list[Example]:
    """All examples of a file. A malformed line is skipped, or an error with its number."""
    found = []
    for number, problem_or_example in _lines(path):
        if isinstance(problem_or_example, Example):
            found.append(problem_or_example)
        elif malformed == "error":
            raise DataError(f"{path}, line {number}: {problem_or_example}")
    if not found:
        raise DataError(f"{path} has no examples")
    return found


class _Unquoted(csv.excel_tab):
    """Tab-separated, without quoting."""

    quoting = csv.QUOTE_NONE


def _lines(path: Path) -> Iterator[tuple[int, Example | str]]:
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, line {line}: byte {error.object[error.start]:#x} is not UTF-8") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    # Quora quotes every field, so a field may contain line ends; in the others, quotation marks are part of a sentence.
    dialect = csv.excel_tab() if text.startswith('"') else _Unquoted()
    rows = csv.reader(io.StringIO(text, newline=""), dialect, strict=True)
    try:
        header = next(rows, [])
        label, first, second = (_column(path, header, names) for names in (LABEL, FIRST, SECOND))
        for fields in rows:
            if len(fields) != len(header):
                yield rows.line_num, f"{len(fields)} fields between tabs, where the header has {len(header)}"
            elif fields[label] not in ("0", "1"):
                yield rows.line_num, f"the label in {header[label]!r} is {fields[label][:40]!r}, neither 0 nor 1"
            elif not fields[first].strip() or not fields[second].strip():
                yield rows.line_num, "a sentence is empty"
            else:
                yield rows.line_num, Example(fields[first].strip(), fields[second].strip(), int(fields[label]))
    except csv.Error as error:
        raise DataError(f"{path}, line {rows.line_num}: {error}") from None


def _column(path: Path, header: Sequence[str], names: Sequence[str]) -> int:
    for name in names:
        if name in header:
            return header.index(name)
    raise DataError(f"{path}, line 1: the header names no column {' or '.join(names)}: {', '.join(header)[:100]!r}")


def from_hub(name: str, hub_name: str, configuration: str) -> tuple[list[Example], list[Example]]:
    """Training and validation set by name."""
    ways = (
        f"Give the data set as a file or folder with task.path=..., or, to load {hub_name} by name, "
        "`pip install datasets` and be online with its hub."
    )
    try:
        import datasets  # type: ignore[import-not-found]
    except ImportError:
        raise DataError(f"{name} is not part of pbrl. {ways}") from None
    try:
        splits = datasets.load_dataset(hub_name, configuration)
    except Exception as error:  # a hub, a proxy or a cache may raise anything
        raise DataError(f"{name} could not be loaded by name ({' '.join(str(error).split())[:200]}). {ways}") from error
    columns = splits["train"].column_names
    label, first, second = (_column(Path(hub_name), columns, names) for names in (LABEL, FIRST, SECOND))
    training, validation = (
        [Example(row[columns[first]], row[columns[second]], int(row[columns[label]])) for row in splits[split]]
        for split in ("train", "validation")
    )
    return training, validation
