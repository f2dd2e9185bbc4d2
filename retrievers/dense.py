"""Query -> the passages whose vectors are nearest: dense retrieval, exact.

    v_i = encoder(passage i)      score(q, i) = <encoder(q), v_i>      the k largest

    passages -> vectors, once, shard by shard -> RUNS/vectors/<name-hash>/00000.npy, ...
    queries -> one product per shard -> torch.topk -> the k best of all shards

The encoder is sentence-transformers' (extra `dense`), pooled as its own files say; without them a
causal model (Qwen3-Embedding) by its last token, any other by the mean. Before a text stands what
its family was trained with (PREFIXES), else what the model itself brings. Vectors are kept in fp16
(21M of 768: 32 GB) and multiplied in fp32: a score of unit vectors is off by at most 2^-11. An
interrupted run goes on: a shard has its name once it is whole, and ends in a checksum; one that is
damaged, or has none, is encoded anew. Left out: approximate search.
"""

import hashlib
import io
import os
import re
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Document
from errors import InputError, rank_of
from retrievers.net import shown

SHARD = 16_384  # passages: what an interruption can cost, and the rows of one product
PREFIXES = {  # by a part of the name, the first that is in it: before a query, before a passage
    "e5": ("query: ", "passage: "),
    "bge-m3": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}


class Encoder:
    """(texts, kind) -> [n, d] fp32, each of length 1; `version` names all that they depend on."""

    def __init__(self, name: str, device: str = ""):
        try:
            from sentence_transformers import SentenceTransformer  # optional extra

            model = SentenceTransformer(name, device=device or None, trust_remote_code=False)
        except ImportError:
            raise InputError(f"encoder {name}: pip install sentence-transformers") from None
        except Exception as error:  # a broken file raises whatever its format's reader does
            why = f"cannot be loaded ({shown(str(error))})"
            raise InputError(f"encoder {name}: {why}: give a directory or a hub name") from None
        self.model = model if model.device.type == "cpu" else model.half()  # finer than bf16
        self.name, (query, passage) = name, prefixes(name)
        self.prefix = {"query": query, "passage": passage}
        self.version = fingerprint(model, passage)

    def __call__(self, texts: list[str], kind: str = "query") -> np.ndarray:
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        texts = [text.encode(errors="replace").decode() for text in texts]  # no lone surrogate
        vectors = encode(texts, prompt=self.prefix[kind], normalize_embeddings=True).astype("f4")
        if not np.isfinite(vectors).all():
            raise InputError(f"encoder {self.name}: its vectors are not finite: damaged weights?")
        return vectors


def prefixes(name: str) -> tuple[str | None, str | None]:
    """(of a query, of a passage), by the last part of a name or path; None: the model's own."""
    hub = re.search(r"models--([^/]+)/snapshots", name)  # its folders end in a hash
    family = (hub[1] if hub else Path(name).name).lower()
    return next((PREFIXES[part] for part in PREFIXES if part in family), (None, None))


def fingerprint(model, prefix: str | None) -> str:
    """By content: a directory keeps its name when its files change."""
    vocabulary = sorted(model.tokenizer.get_vocab().items())
    digest = hashlib.sha256(f"{model} {prefix} {vocabulary}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if ".pooler." not in name:  # random where the file has none, and not used
            digest.update(tensor.float().cpu().contiguous().numpy())
    return digest.hexdigest()


def passage_text(document: Document) -> str:
    return f"{document.title} {document.text}".strip()


class DenseRetriever:
    """By an `Encoder`, or the name of one. `index_file`: a flat FAISS index, row i of passage i.
    Without it the vectors are kept in the folder `runs`.
    """

    def __init__(self, documents: list[Document], encoder, device="", index_file="", runs="runs"):
        if not documents:
            raise InputError("the corpus is empty: dense retrieval needs at least one passage")
        if not encoder:
            raise InputError("retriever dense needs --encoder: give a directory or a hub name")
        self.documents = documents
        self.encoder = Encoder(encoder, device) if isinstance(encoder, str) else encoder
        if index_file:
            self.shards = read_index(index_file, len(documents), self.encoder([""]).shape[1])
        else:
            self.shards = passage_vectors(documents, self.encoder, runs)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        size = sum(shard.nbytes for shard in self.shards)
        if "cuda" in self.device and 2 * size < torch.cuda.mem_get_info(self.device)[0]:
            self.shards = [x.to(self.device) for x in self.shards]  # room for models is left

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        if not queries:
            return []
        rows = nearest(self.shards, self.encoder(queries, "query"), k, self.device)  # [B, k]
        return [[self.documents[row] for row in best] for best in rows.tolist()]


@torch.inference_mode()
def nearest(shards: list[torch.Tensor], queries: np.ndarray, k: int, device="cpu") -> np.ndarray:
    """The rows [B, k] of the shards [n, d] with the k largest inner products with each query.

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> nearest([rows[:3], rows[3:]], np.array([[1.0, 0.0]]), k=3).tolist()
    [[1, 3, 2]]
    """
    asked = torch.as_tensor(queries, dtype=torch.float32, device=device)  # [B, d]
    scores, rows, first = [], [], 0
    for shard in shards:
        best = (asked @ shard.to(device).float().T).topk(min(k, len(shard)))
        scores.append(best.values.cpu().numpy())
        rows.append(best.indices.cpu().numpy() + first)
        first += len(shard)
    scores, rows = np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)
    order = np.lexsort((rows, -scores))[:, :k]  # by score, then by row
    return np.take_along_axis(rows, order, axis=1)


def passage_vectors(documents: list[Document], encoder, runs="runs") -> list[torch.Tensor]:
    """[n, d] fp16 per shard, mapped from files; those that are not there yet are encoded now."""
    digest = hashlib.sha256(encoder.version.encode())
    for document in documents:
        digest.update(repr(passage_text(document)).encode())  # quotes: "ab", "c" is not "a", "bc"
    folder = Path(runs, "vectors", f"{Path(encoder.name).name}-{digest.hexdigest()[:20]}")
    paths = [folder / f"{i:05}.npy" for i in range(-(-len(documents) // SHARD))]
    # The processes of a run begin at places of their own, and skip what others have written.
    first = len(paths) * rank_of("RANK") // rank_of("WORLD_SIZE", 1)
    order = [*range(first, len(paths)), *range(first)]
    found = {}
    for i in tqdm(order, "vectors", unit=" shards", disable=len(paths) < 2):
        found[i] = read_shard(paths[i])
        if found[i] is None:
            texts = [passage_text(document) for document in documents[i * SHARD :][:SHARD]]
            save(paths[i], encoder(texts, "passage").astype(np.float16))
            found[i] = read_shard(paths[i])
    return [found[i] for i in range(len(paths))]


def read_shard(path: Path) -> torch.Tensor | None:
    """[n, d] fp16, mapped from its file; None where that is not as `save` wrote it."""
    if path.is_dir():
        raise InputError(f"{path}: a folder, and a file of vectors belongs there: remove it")
    data = path.read_bytes() if path.exists() else None
    if data is not None and data[-4:] == checksum(data[:-4]):
        # "c": the file is never written to, and torch takes only what it could write to.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    if data is not None:
        said = f"{path}: damaged, or of an earlier version: its passages are encoded anew"
        tqdm.write(said, file=sys.stderr)
    return None


def checksum(data: bytes) -> bytes:
    """What a shard's file ends in; numpy reads no further than its rows."""
    return zlib.crc32(data).to_bytes(4, "little")


def save(path: Path, vectors: np.ndarray) -> None:
    aside, file = path.with_name(f"{os.getpid()}.part.npy"), io.BytesIO()
    np.save(file, vectors)
    whole = file.getvalue()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(whole + checksum(whole))
        os.replace(aside, path)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{path}: vectors cannot be kept there ({why}): make room") from None


def read_index(path: str, n: int, d: int) -> list[torch.Tensor]:
    """[rows, d] fp16 per shard. The file holds kind, d, n, ... (45 bytes), and then fp32 rows."""
    try:
        with open(path, "rb") as file:
            if file.read(16) != struct.pack("<4siq", b"IxFI", d, n):
                raise ValueError
        vectors = np.memmap(path, np.float32, "r", 45, (n, d))
    except (OSError, ValueError):
        why = f"no flat FAISS index (IndexFlatIP) of {n:,} passages with {d} numbers each"
        raise InputError(f"--index_file {path}: {why}: build it of this corpus") from None
    rows = range(0, n, SHARD)
    return [torch.from_numpy(vectors[i : i + SHARD].astype(np.float16)) for i in rows]
