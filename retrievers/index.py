"""BM25's index on disk: built once, and every later start maps its arrays into memory.

A folder that is cut, or of other passages, parameters or another version, is refused and never
built anew: another server may read it. Left out: passages that are added later.
"""

import fcntl
import hashlib
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np

from data import Document
from errors import InputError
from formats.manifest import written_whole, wrong_with
from formats.records import lock

VERSION = 1  # one more when files, words or weights change; what a word is, Unicode says
ARRAYS = ("start", "postings", "weights")


def kept(where: str, documents: list[Document], parameters: tuple, build: Callable) -> tuple:
    """(vocabulary, start, postings, weights) as build(documents, *parameters) gives them, from the
    folder `where`, which is made if it is not there. InputError: it holds anything else.
    """
    folder = Path(where).resolve()
    made_of = {
        "version": f"{VERSION}, Unicode {unicodedata.unidata_version}",
        "k1, b, epsilon, title_boost": str(parameters),
        "corpus": f"{len(documents):,} passages, sha256 {fingerprint(documents)}",
    }
    if not any(folder.glob("*")):
        write(folder, made_of, lambda: build(documents, *parameters))
    if wrong := wrong_with(folder) or other(folder, made_of):
        what = "give another folder, or remove this one and it is built anew"
        raise InputError(f"--index {where}: {wrong}: {what}")
    words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    # asarray: a slice of numpy's own memmap takes several times as long
    arrays = [np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS]
    return dict(zip(words, range(len(words)), strict=True)), *arrays


def fingerprint(documents: list[Document]) -> str:
    """Of titles and texts, in order: ids are not searched."""
    digest = hashlib.sha256()
    for one in documents:
        digest.update(repr((one.title, one.text)).encode())  # quotes: "ab", "c" is not "a", "bc"
    return digest.hexdigest()[:20]


def other(folder: Path, made_of: dict[str, str]) -> str:
    """The first in which it is not what is asked for; or ""."""
    path = folder / "made_of.json"
    there = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    names = [name for name in made_of if there.get(name) != made_of[name]]
    return f"its {names[0]} is {there.get(names[0])}, not {made_of[names[0]]}" if names else ""


def write(folder: Path, made_of: dict[str, str], build: Callable) -> None:
    """Of several processes one builds; the others wait, and find it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(folder.with_name(f".{folder.name}.lock"), "w")  # noqa: SIM115
        lock(file, fcntl.LOCK_EX)
    except OSError as error:
        why = f"cannot be written there ({error.strerror}): give another folder"
        raise InputError(f"--index {folder}: {why}") from None
    with file:
        if any(folder.glob("*")):
            return
        words, *arrays = build()
        with written_whole(folder) as aside:
            for name, value in (("made_of", made_of), ("words", [*words])):
                (aside / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
            for name, array in zip(ARRAYS, arrays, strict=True):
                np.save(aside / f"{name}.npy", array)
