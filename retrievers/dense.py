"""Exact dense retrieval: query -> the documents whose vectors have the largest inner products.

    v_i = encoder(passage i)      score(q, i) = <encoder(q), v_i>      the k largest

    passages -> vectors, once, shard by shard -> RUNS/vectors/<name-hash>/00000.npy, ...
    queries -> one product per shard -> torch.topk -> the k best of all shards

The encoder comes from sentence-transformers (extra `dense`) and pools as the model's files say;
without such files a causal model (Qwen3-Embedding) takes its last token, any other model the mean.
Each text gets the prefix that the model's family was trained with (PREFIXES), or the model's own.
Vectors are stored in fp16 (21M of 768: 32 GB) and multiplied in fp32: a score of unit vectors is
off by at most 2^-11. An interrupted run goes on: a shard gets its name when it is complete, and
ends in a checksum; a shard that is damaged or has no checksum is encoded again. Left out:
approximate search.
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

SHARD = 16_384  # documents per file, and rows of one matrix product
PREFIXES = {  # part of the model's name -> (prefix of a query, prefix of a document); first match
    "e5": ("query: ", "passage: "),
    "bge-m3": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}


class Encoder:
    """Maps (texts, kind) to unit vectors [n, d] in fp32. `version` identifies the model, its prefix
    and its vocabulary.
    """

    def __init__(self, name: str, device: str = ""):
        try:
            from sentence_transformers import SentenceTransformer  # optional extra

            model = SentenceTransformer(name, device=device or None, trust_remote_code=False)
        except ImportError:
            raise InputError(f"encoder {name}: pip install sentence-transformers") from None
        except Exception as error:  # the reader of a broken file may raise anything
            reason = shown(str(error))
            raise InputError(
                f"encoder {name}: cannot be loaded ({reason}): give a directory or a hub name"
            ) from None
        self.model = model if model.device.type == "cpu" else model.half()  # more precise than bf16
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
    """Returns the prefixes of a query and of a document, chosen by the last part of the name or
    path; None means the model's own prefix.
    """
    hub = re.search(
        r"models--([^/]+)/snapshots", name
    )  # the hub's cache: the last folder is a hash
    family = (hub[1] if hub else Path(name).name).lower()
    return next((PREFIXES[part] for part in PREFIXES if part in family), (None, None))


def fingerprint(model, prefix: str | None) -> str:
    """Returns a hash of the content: a directory keeps its name when its files change."""
    vocabulary = sorted(model.tokenizer.get_vocab().items())
    digest = hashlib.sha256(f"{model} {prefix} {vocabulary}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if ".pooler." not in name:  # random if the file has none, and not used
            digest.update(tensor.float().cpu().contiguous().numpy())
    return digest.hexdigest()


def passage_text(document: Document) -> str:
    return f"{document.title} {document.text}".strip()


class DenseRetriever:
    """Searches with an `Encoder`, or with the encoder of that name. `index_file` is a flat FAISS
    index whose row i is document i; without it the vectors are stored in the folder `runs`.
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
            self.shards = [x.to(self.device) for x in self.shards]  # the models still fit

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        if not queries:
            return []
        rows = nearest(self.shards, self.encoder(queries, "query"), k, self.device)  # [B, k]
        return [[self.documents[row] for row in best] for best in rows.tolist()]


@torch.inference_mode()
def nearest(shards: list[torch.Tensor], queries: np.ndarray, k: int, device="cpu") -> np.ndarray:
    """Returns the rows [B, k] of the shards [n, d] with the k largest inner products with each
    query.

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> nearest([rows[:3], rows[3:]], np.array([[1.0, 0.0]]), k=3).tolist()
    [[1, 3, 2]]
    """
    queries = torch.as_tensor(queries, dtype=torch.float32, device=device)  # [B, d]
    scores, rows, first = [], [], 0
    for shard in shards:
        best = (queries @ shard.to(device).float().T).topk(min(k, len(shard)))
        scores.append(best.values.cpu().numpy())
        rows.append(best.indices.cpu().numpy() + first)
        first += len(shard)
    scores, rows = np.concatenate(scores, axis=1), np.concatenate(rows, axis=1)
    order = np.lexsort((rows, -scores))[:, :k]  # by score, then by row
    return np.take_along_axis(rows, order, axis=1)


def passage_vectors(documents: list[Document], encoder, runs="runs") -> list[torch.Tensor]:
    """Returns the vectors [n, d] fp16 of each shard, mapped from files; missing files are made."""
    digest = hashlib.sha256(encoder.version.encode())
    for document in documents:
        digest.update(
            repr(passage_text(document)).encode()
        )  # repr, so that "ab", "c" and "a", "bc" differ
    folder = Path(runs, "vectors", f"{Path(encoder.name).name}-{digest.hexdigest()[:20]}")
    paths = [folder / f"{i:05}.npy" for i in range(-(-len(documents) // SHARD))]
    # Each process of a run begins at another shard, and skips shards that others have written.
    first = len(paths) * rank_of("RANK") // rank_of("WORLD_SIZE", 1)
    order = [*range(first, len(paths)), *range(first)]
    vectors = {}
    for i in tqdm(order, "vectors", unit=" shards", disable=len(paths) < 2):
        vectors[i] = read_shard(paths[i])
        if vectors[i] is None:
            texts = [passage_text(document) for document in documents[i * SHARD :][:SHARD]]
            save(paths[i], encoder(texts, "passage").astype(np.float16))
            vectors[i] = read_shard(paths[i])
    return [vectors[i] for i in range(len(paths))]


def read_shard(path: Path) -> torch.Tensor | None:
    """Returns the vectors [n, d] fp16, mapped from the file; None if it is missing or damaged."""
    if path.is_dir():
        raise InputError(f"{path} is a folder, but the file of vectors has this name: remove it")
    data = path.read_bytes() if path.exists() else None
    if data is not None and data[-4:] == checksum(data[:-4]):
        # Mode "c": torch wants memory that it could write to, and the file is never written.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    if data is not None:
        message = f"{path}: damaged, or of an earlier version: its documents are encoded again"
        tqdm.write(message, file=sys.stderr)
    return None


def checksum(data: bytes) -> bytes:
    """Returns the last bytes of a shard's file; numpy reads only the rows before them."""
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
        reason = error.strerror or error
        raise InputError(f"{path}: vectors cannot be written ({reason}): make room") from None


def read_index(path: str, n: int, d: int) -> list[torch.Tensor]:
    """Returns [rows, d] fp16 of each shard. The file has a header of 45 bytes (kind, d, n, ...),
    then rows in fp32.
    """
    try:
        with open(path, "rb") as file:
            if file.read(16) != struct.pack("<4siq", b"IxFI", d, n):
                raise ValueError
        vectors = np.memmap(path, np.float32, "r", 45, (n, d))
    except (OSError, ValueError):
        wanted = f"a flat FAISS index (IndexFlatIP) of {n:,} documents with {d} numbers each"
        raise InputError(
            f"--index_file {path} is not {wanted}: build it from this corpus"
        ) from None
    rows = range(0, n, SHARD)
    return [torch.from_numpy(vectors[i : i + SHARD].astype(np.float16)) for i in rows]
