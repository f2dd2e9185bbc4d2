"""Query -> the passages whose vectors are nearest: dense retrieval, exact.

    v_i = encoder(passage i)      score(q, i) = <encoder(q), v_i>      the k largest

    passages -> vectors, once, shard by shard -> runs/vectors/<name-hash>/00000.npy, ...
    queries -> one product per shard -> torch.topk -> the k best of all shards

The encoder is sentence-transformers' (extra `dense`); before a text stands what its family was
trained with (PREFIXES), else what the model itself brings. On disk are fp16 numbers: 21M passages
x 768 x 2 bytes = 32 GB, and a score of unit vectors is wrong by at most 2^-11; products are taken
in fp32. A shard has its name only once it is whole, so an interrupted run goes on where it was.
Left out: approximate search (but `serve --index_file` reads a FAISS index), training an encoder.
"""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Document
from errors import InputError
from retrievers.net import shown

VECTORS = Path("runs/vectors")
SHARD = 16_384  # passages: what an interruption can cost, and the rows of one product
QUERIES = 256  # of one product
PREFIXES = (  # in the name, before a query, before a passage; the first row counts
    ("e5", "query: ", "passage: "),
    ("bge-m3", "", ""),
    ("bge", "Represent this sentence for searching relevant passages: ", ""),
)


class Encoder:
    """encode(texts, kind) -> [n, d] fp32, each of length 1.

    name      a hub name or a directory; device "" is a free GPU, or else the CPU
    version   names what a vector depends on: weights, tokenizer, layers, prefix
    """

    def __init__(self, name: str, device: str = ""):
        try:
            from sentence_transformers import SentenceTransformer  # optional extra

            model = SentenceTransformer(name, device=device or None)
        except ImportError:
            raise InputError(f"encoder {name}: pip install sentence-transformers") from None
        except Exception as error:  # a broken file raises whatever its format's reader does
            why = f"cannot be loaded ({shown(str(error))})"
            raise InputError(f"encoder {name}: {why}: give a directory or a hub name") from None
        # fp16 and not bf16, which has three bits less to tell vectors apart.
        self.model = model if model.device.type == "cpu" else model.half()
        self.name, self.prefix = name, dict(zip(("query", "passage"), prefixes(name), strict=True))
        self.version = fingerprint(model, self.prefix["passage"])

    def __call__(self, texts: list[str], kind: str = "query") -> np.ndarray:
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        # Half a surrogate pair stops a tokenizer. The prompt is None where the model has its own.
        texts = [text.encode(errors="replace").decode() for text in texts]
        options = {"normalize_embeddings": True, "show_progress_bar": False}
        vectors = encode(texts, prompt=self.prefix[kind], **options).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise InputError(f"encoder {self.name}: its vectors are not finite: damaged weights?")
        return vectors


def prefixes(name: str) -> tuple[str | None, str | None]:
    """(of a query, of a passage), by the last part of a name or path.

    >>> prefixes("intfloat/e5-base-v2"), prefixes("test_e5/some-bert")
    (['query: ', 'passage: '], (None, None))
    """
    hub = re.search(r"models--([^/]+)/snapshots", name)  # its folders end in a hash
    family = (hub[1] if hub else Path(name).name).lower()
    return next((both for part, *both in PREFIXES if part in family), (None, None))


def fingerprint(model, prefix: str | None) -> str:
    """By content: a directory keeps its name when its files change."""
    vocabulary = sorted(model.tokenizer.get_vocab().items())
    digest = hashlib.sha256(f"{model} {prefix} {vocabulary}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if ".pooler." not in name:  # random where the file has none, and not used
            digest.update(tensor.float().cpu().contiguous().numpy())
    return digest.hexdigest()


def passage_text(document: Document) -> str:
    """What the encoder reads: title, then text, as E5 was trained on passages."""
    return f"{document.title} {document.text}".strip()


class DenseRetriever:
    """Exact dense retrieval over these documents.

    encoder      a name for `Encoder`, or one that is there
    index_file   a FAISS index whose row i is passage i, by the same encoder: none is encoded
    """

    needs_questions = False

    def __init__(
        self, documents: list[Document], encoder, device="", index_file="", folder=VECTORS
    ):
        if not documents:
            raise InputError("the corpus is empty: dense retrieval needs at least one passage")
        if not encoder:
            raise InputError("retriever dense needs --encoder: give a directory or a hub name")
        self.documents = documents
        self.encoder = Encoder(encoder, device) if isinstance(encoder, str) else encoder
        self.index = read_index(index_file, len(documents), self.encoder) if index_file else None
        self.shards = [] if index_file else passage_vectors(documents, self.encoder, Path(folder))
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        size = sum(shard.nbytes for shard in self.shards)
        # On a GPU the matrix stays there if that leaves room for the models.
        if "cuda" in self.device and 2 * size < torch.cuda.mem_get_info(self.device)[0]:
            self.shards = [shard.to(self.device) for shard in self.shards]

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """min(k, N) documents each, best first."""
        return [[document for document, _ in found] for found in self.search_scored(queries, k)]

    def search_scored(self, queries: list[str], k: int) -> list[list[tuple[Document, float]]]:
        """The same with each document's inner product, between -1 and 1."""
        if not queries or k <= 0:
            return [[] for _ in queries]
        found = []
        for start in range(0, len(queries), QUERIES):
            vectors = self.encoder(queries[start : start + QUERIES], "query")  # [B, d]
            if self.index:
                scores, rows = self.index.search(vectors, min(k, len(self.documents)))
            else:
                scores, rows = nearest(self.shards, vectors, k, self.device)
            for pairs in np.stack([rows, scores], axis=2).tolist():
                # FAISS fills up with row -1 where it finds too few.
                found.append([(self.documents[int(row)], s) for row, s in pairs if row >= 0])
        return found


@torch.inference_mode()
def nearest(
    shards: list[torch.Tensor], queries: np.ndarray, k: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """(scores, rows), both [B, k], of the k largest inner products of each query with the rows of
    the shards [n, d]. Rows that tie come in order; which of them at the cut, is topk's choice.

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> scores, found = nearest([rows[:3], rows[3:]], np.array([[1.0, 0.0]]), k=3)
    >>> found.tolist(), scores.astype(float).round(4).tolist()
    ([[1, 3, 2]], [[1.0, 1.0, 0.6]])
    """
    asked = torch.as_tensor(queries, dtype=torch.float32, device=device)  # [B, d]
    values, rows, first = [], [], 0
    for shard in shards:
        scores = asked @ shard.to(device).float().T  # [B, n]
        best = scores.topk(min(k, len(shard)))
        values.append(best.values.cpu().numpy())
        rows.append(best.indices.cpu().numpy() + first)
        first += len(shard)
    values, rows = np.concatenate(values, axis=1), np.concatenate(rows, axis=1)
    order = np.lexsort((rows, -values))[:, :k]  # by score, then by row
    return np.take_along_axis(values, order, 1), np.take_along_axis(rows, order, 1)


def passage_vectors(documents: list[Document], encoder, folder: Path) -> list[torch.Tensor]:
    """[n, d] fp16 per shard, mapped from files; those that are not there yet are encoded now."""
    digest = hashlib.sha256(encoder.version.encode())
    for document in documents:
        digest.update(repr(passage_text(document)).encode())  # quotes: "ab", "c" is not "a", "bc"
    folder = folder / f"{Path(encoder.name).name}-{digest.hexdigest()[:20]}"
    paths = [folder / f"{i:05}.npy" for i in range(-(-len(documents) // SHARD))]
    # The processes of a run share the work: each begins elsewhere, and leaves out what is there.
    first = len(paths) * int(os.environ.get("RANK", 0)) // int(os.environ.get("WORLD_SIZE", 1))
    order, shards = [*range(first, len(paths)), *range(first)], []
    for i in tqdm(order, "vectors", unit=" shards", disable=len(paths) < 2):
        if not paths[i].exists():
            texts = [passage_text(document) for document in documents[i * SHARD :][:SHARD]]
            save(paths[i], encoder(texts, "passage").astype(np.float16))
    for path in paths:
        try:
            # "c": the file is never written to, and torch takes only what it could write to.
            shards.append(torch.from_numpy(np.load(path, mmap_mode="c")))
        except (OSError, ValueError, EOFError):
            raise InputError(f"{path}: this file is damaged: delete it") from None
    return shards


def save(path: Path, vectors: np.ndarray) -> None:
    aside = path.with_name(f"{os.getpid()}.part.npy")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(aside, vectors)
        os.replace(aside, path)
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"{path}: vectors cannot be kept there ({why}): make room") from None


def read_index(path: str, n: int, encoder):
    try:
        import faiss  # optional extra

        index = faiss.read_index(path)
    except ImportError:
        raise InputError("--index_file: faiss is not installed: pip install faiss-cpu") from None
    except RuntimeError:
        raise InputError(f"--index_file {path}: not a file that faiss.write_index wrote") from None
    have, need = (index.ntotal, index.d), (n, encoder([""]).shape[1])
    if have != need or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        why = f"it holds {have} numbers, not {need} of METRIC_INNER_PRODUCT"
        raise InputError(f"--index_file {path}: {why}: build it of this corpus and encoder")
    return index
