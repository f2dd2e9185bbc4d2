"""Stores BM25's index on disk: it is built once, and every later start maps its arrays into memory.

A folder is rejected if it is damaged or incomplete, or if its index was built from other documents,
with other parameters, another VERSION or other Unicode tables. A rejected folder is not rebuilt,
because another process may be reading it. Left out: adding documents.
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

# Raise VERSION when the code changes the format of the files, the tokenization or the weights.
# The version of Python's Unicode tables, on which the tokenization depends, is stored beside it.
VERSION = 2
ARRAYS = ("start", "postings", "weights")


def load_or_build(
    where: str, documents: list[Document], parameters: tuple, build: Callable
) -> tuple:
    """Returns (vocabulary, start, postings, weights), read from the folder `where`. If the folder
    is empty or missing, build(documents, *parameters) first makes the index, which is stored there.
    Raises an InputError if the folder is rejected (see the top of this file) or cannot be written.
    """
    folder = Path(where).resolve()
    made_of = [VERSION, unicodedata.unidata_version, fingerprint(documents), *parameters]
    if not any(folder.glob("*")):
        write(folder, made_of, lambda: build(documents, *parameters))
    wrong, file, stored = wrong_with(folder), folder / "index.json", {}
    if file.exists() and not wrong:
        stored = json.loads(file.read_text(encoding="utf-8"))
    if stored.get("made_of") != made_of:
        problem = wrong or "it was built from other documents or parameters, or by another version"
        raise InputError(
            f"--index {where}: {problem}: give another folder, or remove this one so that it is "
            "built again"
        )
    # asarray, because slicing a memmap takes several times as long as slicing an array
    arrays = [np.asarray(np.load(folder / f"{name}.npy", mmap_mode="r")) for name in ARRAYS]
    return {word: term for term, word in enumerate(stored["words"])}, *arrays


def fingerprint(documents: list[Document]) -> str:
    """Returns a hash of all titles and texts in their order. It leaves out the ids, because the
    index does not contain them.
    """
    digest = hashlib.sha256()
    for document in documents:  # repr, so that "ab", "c" and "a", "bc" differ
        digest.update(repr((document.title, document.text)).encode())
    return digest.hexdigest()[:20]


def write(folder: Path, made_of: list, build: Callable) -> None:
    """Builds and stores the index in one process; the others wait until the folder is complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_name(f".{folder.name}.lock"), "w") as file:
            lock(file, fcntl.LOCK_EX)
            if any(folder.glob("*")):
                return
            words, *arrays = build()
            with written_whole(folder) as aside:
                text = json.dumps({"made_of": made_of, "words": [*words]})
                (aside / "index.json").write_text(text, encoding="utf-8")
                for name, array in zip(ARRAYS, arrays, strict=True):
                    np.save(aside / f"{name}.npy", array)
    except OSError as error:
        raise InputError(
            f"--index {folder}: cannot be written there ({error.strerror}): give another folder"
        ) from None
