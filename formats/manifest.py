"""Detects damaged folders: manifest.json has the step, file sizes, and the sha256 of small files.

    written_whole   writes a folder under another name, adds the manifest, forces both to the disk
                    and renames the folder
    wrong_with      returns "" if a folder agrees with its manifest, else the first difference

If the process is killed, the folder is complete or does not exist. After a power cut, a disk error
or a careless command, files may be truncated, zeroed or exchanged, so a folder is checked before it
is read. A large file has no sha256, because all processes would wait while it is computed (a 7B
checkpoint has 85 GB). Only its size is compared; if it is a safetensors file, its header must also
be readable, and its tensors must end where the file ends. Left out: bytes that change inside a
large file, and a signature of the writer.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from errors import InputError

NAME = "manifest.json"
LARGE = 100_000_000  # bytes; a file of this size or more has no sha256


@contextlib.contextmanager
def written_whole(path: Path, step: int | None = None) -> Iterator[Path]:
    """Yields a folder to write into, which is then renamed to `path`. After an error it is removed,
    because an incomplete folder would only fill the disk.
    """
    aside = path.with_name(path.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        seal(aside, step)
        aside.rename(path)
        sync(path.parent)
    except Exception as error:  # each tensor library raises its own error for a full disk
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        advice = (
            "make room on the disk, or give another path"
            if aside.is_dir()
            else "its folder was removed meanwhile"
        )
        raise InputError(f"{path}: cannot be saved ({reason}): {advice}") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def seal(folder: Path, step: int | None) -> None:
    files = {}
    for path in files_of(folder):
        sync(path)
        size = path.stat().st_size
        files[path.relative_to(folder).as_posix()] = [size, digest(path) if size < LARGE else ""]
    text = json.dumps({"step": step, "files": files}, indent=1)
    (folder / NAME).write_text(text + "\n", encoding="utf-8")
    sync(folder / NAME)
    sync(folder)


def files_of(folder: Path) -> list[Path]:
    """Returns all files in the folder and its subfolders, except the folder's manifest.json."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / NAME)


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Forces a file or folder onto the disk. A power cut could otherwise leave an empty file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def wrong_with(folder: Path, step: int | None = None) -> str:
    """Describes the first difference between the folder and its manifest; "" if there is none. A
    file that the manifest does not list is no difference. If `step` is given, the manifest must
    have this step.
    """
    try:
        written = json.loads((folder / NAME).read_text(encoding="utf-8"))
        if step not in (None, written["step"]):
            return f"it is of step {written['step']}"
        for name, (size, sha256) in written["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != size:
                return f"{name} has {path.stat().st_size} bytes and was written with {size}"
            if not (digest(path) == sha256 if sha256 else has_whole_header(path)):
                return f"{name} is not what was written"
    except FileNotFoundError:
        return f"it has no {NAME}"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"its {NAME} cannot be read"
    return ""


def has_whole_header(path: Path) -> bool:
    """Returns whether a safetensors file is as long as its header says, which `safe_open` checks.
    Any other file counts as whole.
    """
    with contextlib.suppress(SafetensorError):
        if path.suffix == ".safetensors":
            with safe_open(path, "numpy"):
                pass
        return True
    return False
