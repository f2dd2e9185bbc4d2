"""A folder that proves itself: manifest.json has its step, and size and sha256 of every file.

    written_whole   a folder is written aside, forced to the disk, sealed, and renamed
    wrong_with      "" while it is as it was written; else what is not

A kill leaves a folder or none. A power cut, a failing disk or a hand leave files that are cut,
zeroed, exchanged: what reads the folder again looks first. Left out: who wrote it (no signature).
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from errors import InputError

NAME = "manifest.json"


@contextlib.contextmanager
def written_whole(path: Path, step: int | None = None) -> Iterator[Path]:
    """The folder to write into. Behind an error there is neither: half of one would fill a disk."""
    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        seal(aside, step)
        aside.rename(path)
        sync(path.parent)
    except Exception as error:  # each writer of tensors has an error of its own for a full disk
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        how = "make room on the disk" if aside.is_dir() else "its folder was removed meanwhile"
        raise InputError(f"{path}: cannot be saved ({why}): {how}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path, step: int | None) -> None:
    files = {}
    for path in files_of(folder):
        sync(path)
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, digest(path)]
    text = json.dumps({"step": step, "files": files}, indent=1)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")
    sync(folder / NAME)
    sync(folder)


def files_of(folder: Path) -> list[Path]:
    """Without the manifest."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != NAME)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """To the disk itself: a name may get there before its bytes do."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def stamps(folder: Path) -> list:
    """What changes with the files."""
    its = [(path.name, path.stat()) for path in files_of(folder)]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in its]


def wrong_with(folder: Path, step: int | None = None) -> str:
    """The first thing that is not as it was written, of this step if there is one; or ""."""
    manifest = folder / NAME
    when = manifest.stat().st_mtime_ns if manifest.is_file() else 0
    return _wrong_with(folder, step, f"{when} {stamps(folder)}")


@functools.lru_cache(maxsize=8)  # of 7B these are 70 GB: once will do
def _wrong_with(folder: Path, step: int | None, _: str) -> str:
    try:
        written = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if step not in (None, written["step"]):
            return f"it is of step {written['step']}"
        if not written["files"]:
            return f"its {NAME} names no file"
        for name, (size, sha256) in written["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes and was written with {size}"
            if digest(path) != sha256:
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"its {NAME} cannot be read"
    return ""
