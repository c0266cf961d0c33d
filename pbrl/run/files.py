"""Files that are replaced as a whole: whatever interrupts a write leaves the old content or the new."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

ASIDE = re.compile(r"~\d+$")  # what `unused_name` adds to a folder: `resume=false` keeps the earlier run as seed_0~1


def write_atomically(path: Path, content: bytes | str) -> None:
    """Write a file and make its folder if needed. The content is on disk when this returns.

    Readers see the old content or the new, never a part of it. Several processes may write the same file at once: the
    last one wins. The file's mode follows the umask.
    """
    new_folders = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        with temporary.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for folder in dict.fromkeys([path.parent, *(each.parent for each in new_folders)]):
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Put a folder's list of files on disk, so that new names in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unused_name(path: Path) -> Path:
    """A name to keep a file or folder aside: with ~1 before a file's suffix, or the first number that is not in use."""
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    names = (path.with_name(f"{stem}~{number}{suffix}") for number in range(1, 1_000_000))
    return next(name for name in names if not name.exists())
