"""The published formats, and what is said of a file that is none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pbrl.finetune.paraphrases import DataError, Example, load, put_aside, read

MICROSOFT = (
    '\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t1\t2\tHe said "no.\tHe said no\r\n0\t3\t4\tA b\tC\r\n'
)
GLUE_QQP = "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\tWhat?\tWhy?\t0\n"
QUORA = (
    '"id"\t"qid1"\t"qid2"\t"question1"\t"question2"\t"is_duplicate"\n"0"\t"1"\t"2"\t"One\nor ""two""?"\t"Why?"\t"1"\n'
)


def write(folder: Path, text: str, name: str = "data.tsv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


def load_from(path: Path | None, **changes: Any) -> Any:
    settings = {"name": "mrpc", "hub_name": "x/y", "hub_configuration": "mrpc", "share": 1.0, "validation": 1}
    return load(
        path=None if path is None else str(path),
        malformed="error",
        rng=np.random.default_rng(0),
        **{**settings, **changes},
    )


def test_microsofts_file_is_read_with_its_quotation_marks(tmp_path: Path) -> None:
    assert read(write(tmp_path, MICROSOFT), "error") == [
        Example('He said "no.', "He said no", 1),
        Example("A b", "C", 0),
    ]


def test_glues_questions_are_read(tmp_path: Path) -> None:
    assert read(write(tmp_path, GLUE_QQP), "error") == [Example("What?", "Why?", 0)]


def test_quoras_questions_may_contain_line_ends(tmp_path: Path) -> None:
    assert read(write(tmp_path, QUORA), "error") == [Example('One\nor "two"?', "Why?", 1)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("1\t5\t6\tonly one", "4 fields between tabs, where the header has 5"),
        ("yes\t5\t6\tA\tB", "label in 'Quality' is 'yes', neither 0 nor 1"),
        ("1\t5\t6\t \tB", "a sentence is empty"),
    ],
)
def test_a_malformed_line_is_named_with_its_reason(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path, MICROSOFT + line + "\n0\t7\t8\tA\tB\n")
    with pytest.raises(DataError, match=f"data.tsv, line 4: .*{reason}"):
        read(path, "error")
    assert len(read(path, "skip")) == 3


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 1: the header names no column Quality or is_duplicate"):
        read(write(tmp_path, "a\tb\n1\t2\n"), "error")
    with pytest.raises(DataError, match="has no examples"):
        read(write(tmp_path, MICROSOFT.splitlines()[0] + "\n"), "error")
    path = tmp_path / "latin.tsv"
    path.write_bytes(MICROSOFT.encode() + b"1\t1\t1\tcaf\xe9\tA\n")
    with pytest.raises(DataError, match=r"latin.tsv, line 4: byte 0xe9 is not UTF-8"):
        read(path, "error")
    with pytest.raises(DataError, match=r"neither a file nor a folder with one of train\.tsv"):
        load_from(tmp_path / "nowhere")


def test_a_folder_with_a_validation_set_is_taken_as_it_is(tmp_path: Path) -> None:
    write(tmp_path, MICROSOFT, "train.tsv")
    write(tmp_path, GLUE_QQP, "dev.tsv")
    data = load_from(tmp_path, validation=500)
    assert (len(data.training), data.validation) == (2, [Example("What?", "Why?", 0)])


def test_what_is_put_aside_is_not_trained_on_and_has_the_same_share_of_paraphrases() -> None:
    examples = [Example(str(i), "", int(i % 3 > 0)) for i in range(300)]
    aside, rest = put_aside(examples, 60, np.random.default_rng(0))
    assert sorted([*aside, *rest]) == sorted(examples)
    assert (len(aside), sum(each.label for each in aside)) == (60, 40)
    assert aside != put_aside(examples, 60, np.random.default_rng(1))[0]


def test_a_share_is_part_of_the_training_set_before_the_same_validation_set(tmp_path: Path) -> None:
    lines = "".join(f"{i % 2}\t0\t0\t{i}\tx\n" for i in range(100))
    path = write(tmp_path, MICROSOFT.replace("\r", "") + lines)
    whole, half = load_from(path, validation=20), load_from(path, validation=20, share=0.5)
    assert half.validation == whole.validation
    assert len(half.training) == 41
    assert set(half.training) < set(whole.training)
    for wrong in ({"share": 0.0}, {"validation": 102}):
        with pytest.raises(DataError, match=f"task.{next(iter(wrong))}"):
            load_from(path, **wrong)


def test_without_a_path_and_without_datasets_both_ways_out_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"task\.path=\.\.\., or, .*pip install datasets"):
        load_from(None)
