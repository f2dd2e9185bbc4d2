"""BM25's index on disk: it is built once, and every later start maps its arrays into memory.

A folder that is incomplete, or was built from other documents, parameters or another version, is
rejected and never rebuilt, because another server may be reading it. Left out: adding documents.
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

VERSION = 1  # raise it when files, tokenization or weights change; Unicode has its own version
ARRAYS = ("start", "postings", "weights")


def load_or_build(
    where: str, documents: list[Document], parameters: tuple, build: Callable
) -> tuple:
    """Returns (vocabulary, start, postings, weights) of build(documents, *parameters), read from
    the folder `where`; the folder is made if it is missing. Raises an InputError if it holds
    another index.
    """
    folder = Path(where).resolve()
    made_of = {
        "version": f"{VERSION}, Unicode {unicodedata.unidata_version}",
        "k1, b, epsilon, title_boost": str(parameters),
        "corpus": f"{len(documents):,} passages, sha256 {fingerprint(documents)}",
    }
    if not any(folder.glob("*")):
        write(folder, made_of, lambda: build(documents, *parameters))
    if wrong := wrong_with(folder) or difference(folder, made_of):
        advice = "give another folder, or remove this one so that it is built again"
        raise InputError(f"--index {where}: {wrong}: {advice}")
    words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
    # asarray, because slicing numpy's memmap takes several times as long
    arrays = [np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS]
    return dict(zip(words, range(len(words)), strict=True)), *arrays


def fingerprint(documents: list[Document]) -> str:
    """Returns a hash of titles and texts in their order; ids are not searched."""
    digest = hashlib.sha256()
    for document in documents:  # repr, so that "ab", "c" and "a", "bc" differ
        digest.update(repr((document.title, document.text)).encode())
    return digest.hexdigest()[:20]


def difference(folder: Path, made_of: dict[str, str]) -> str:
    """Returns the first property in which the folder differs from `made_of`, or ""."""
    path = folder / "made_of.json"
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, value in made_of.items():
        if stored.get(name) != value:
            return f"its {name} is {stored.get(name)}, not {value}"
    return ""


def write(folder: Path, made_of: dict[str, str], build: Callable) -> None:
    """Builds the index in one process; others wait and then find the folder."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        file = open(folder.with_name(f".{folder.name}.lock"), "w")  # noqa: SIM115
        lock(file, fcntl.LOCK_EX)
    except OSError as error:
        problem = f"cannot be written there ({error.strerror}): give another folder"
        raise InputError(f"--index {folder}: {problem}") from None
    with file:
        if any(folder.glob("*")):
            return
        words, *arrays = build()
        with written_whole(folder) as aside:
            for name, value in (("made_of", made_of), ("words", [*words])):
                (aside / f"{name}.json").write_text(json.dumps(value), encoding="utf-8")
            for name, array in zip(ARRAYS, arrays, strict=True):
                np.save(aside / f"{name}.npy", array)
