"""Files are replaced as a whole: whatever fails leaves the old content, and nothing else."""

import errno
import multiprocessing
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pbrl.run.files import unused_name, write_atomically
from pbrl.run.policy_file import policy_bytes


@given(contents=st.lists(st.binary(max_size=200) | st.text(max_size=50), min_size=1, max_size=4))
def test_the_last_content_is_there_and_no_other_file(tmp_path_factory, contents):
    path = tmp_path_factory.mktemp("files") / "new" / "folder" / "file.txt"
    for content in contents:
        write_atomically(path, content)
        assert path.read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_the_mode_follows_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_atomically(tmp_path / "file", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


class PowerCutError(BaseException):
    """The machine stops."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), PowerCutError()])
@pytest.mark.parametrize("operation", ["open", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_no_temporary_file(tmp_path, monkeypatch, operation, error):
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(*_args, **_kwargs):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os if operation == "fsync" else Path, operation, fail)
        with pytest.raises(type(error)):
            write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomically(path, "new")
    assert path.read_text() == "new"


def test_the_file_is_on_disk_before_it_gets_its_name_and_its_folders_after(tmp_path, monkeypatch):
    path, happened = tmp_path / "a" / "b" / "file", []
    fsync, replace = os.fsync, Path.replace

    def noted_fsync(number):
        happened.append(os.fstat(number).st_ino)
        fsync(number)

    def noted_replace(self, target):
        happened.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "replace", noted_replace)
    write_atomically(path, "content")
    file, *folders = (each.stat().st_ino for each in [path, *path.parents][:4])
    assert happened == [file, "replace", *folders]


def write_often(path, letter):
    for length in range(1, 60):
        write_atomically(path, letter * length * 1000)


def test_processes_that_write_at_once_never_mix(tmp_path):
    path = tmp_path / "file"
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=write_often, args=(path, letter)) for letter in "abc"]
    for writer in writers:
        writer.start()
    seen = set()
    while any(writer.is_alive() for writer in writers):
        if path.exists():
            content = path.read_text()
            assert len(set(content)) == 1
            assert len(content) % 1000 == 0
            seen.add(content[0])
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen
    assert list(tmp_path.iterdir()) == [path]


def test_names_to_keep_things_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert unused_name(path) == tmp_path / "metrics~1.jsonl"
    (tmp_path / "metrics~1.jsonl").touch()
    assert unused_name(path) == tmp_path / "metrics~2.jsonl"
    assert unused_name(tmp_path / "preferences") == tmp_path / "preferences~1"


def test_a_policys_bytes_do_not_depend_on_the_order_of_what_is_said_about_it():
    parameters = np.ones(3, np.float32)
    assert policy_bytes(parameters, task="a", iteration="1") == policy_bytes(parameters, iteration="1", task="a")
