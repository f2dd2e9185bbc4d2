"""Exact dense retrieval: query -> the documents whose vectors have the largest inner products.

    v_i = encoder(passage i)      score(q, i) = <encoder(q), v_i>      the k largest

    passages -> vectors, once, shard by shard -> RUNS/vectors/<encoder>-<hashes>/00000.npy, ...
    queries -> one product per shard -> torch.topk -> the k best of all shards

The encoder comes from sentence-transformers (extra `dense`), which pools a text's token vectors as
the model's files say. If they do not say how, the last token's vector is taken for a causal model
whose architecture is called ...ForCausalLM, and the mean of all vectors for any other model.
Each text gets the prefix that the model's family was trained with (PREFIXES), or the model's own.
Vectors are stored in fp16 (32 GB for 21M vectors of 768 numbers) and multiplied in fp32. Storing
them in fp16 changes the score of two unit vectors by at most 2^-11. After an interrupt the complete
shards are used again: a shard's file gets its name only when it is complete. Left out: approximate
search, and the index files of other programs.
"""

import hashlib
import os
import re
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Document, clean
from errors import InputError, rank_of
from retrievers.net import shown, without_hub

SHARD = 16_384  # documents per file, and rows of one matrix product
PREFIXES = {  # part of the model's name -> (query prefix, document prefix); the first match counts
    "e5": ("query: ", "passage: "),
    "bge-m3": ("", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}


class Encoder:
    """Maps (texts, kind) to unit vectors [n, d] in fp32; kind is "query" or "passage". `version`
    identifies the model's layers and weights and the prefix for passages, if PREFIXES has one.
    """

    def __init__(self, name: str, device: str = ""):
        try:
            from sentence_transformers import SentenceTransformer  # optional extra

            without_hub(name)
            model = SentenceTransformer(name, device=device or None, trust_remote_code=False)
        except Exception as error:  # a broken file may make the library raise anything
            raise InputError(
                f"encoder {name}: cannot be loaded ({shown(str(error))}): pip install "
                "sentence-transformers, and give a directory or a hub name"
            ) from None
        # A GPU uses fp16, which is more precise than bf16.
        self.model = model if model.device.type == "cpu" else model.half()
        self.name, (query, passage) = name, prefixes(name)
        self.prefix = {"query": query, "passage": passage}
        self.version = version_of(model, passage)

    def __call__(self, texts: list[str], kind: str = "query") -> np.ndarray:
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        texts = [*map(clean, texts)]
        vectors = encode(texts, prompt=self.prefix[kind], normalize_embeddings=True).astype("f4")
        if not np.isfinite(vectors).all():
            raise InputError(f"encoder {self.name}: its vectors are not finite: damaged weights?")
        return vectors


def prefixes(name: str) -> tuple[str | None, str | None]:
    """Returns the prefixes of a query and of a document: those of the first key of PREFIXES whose
    words occur in the model's name or path ("bge-m3" in "BAAI/bge-m3"). If no key does, both are
    None, which means the model's own prefix.
    """
    words = "-".join(["", *re.findall("[a-z0-9]+", name.lower()), ""])
    return next((PREFIXES[part] for part in PREFIXES if f"-{part}-" in words), (None, None))


def version_of(model, prefix: str | None) -> str:
    """Returns a hash of the model's layers and weights and of `prefix`. The model's name is not
    enough, because a directory keeps its name when its files change.
    """
    digest = hashlib.sha256(f"{model} {prefix}".encode())
    for name, tensor in sorted(model.state_dict().items()):
        if ".pooler." not in name:  # a pooler is not used, and is random if its weights are missing
            digest.update(tensor.float().cpu().contiguous().numpy())
    return digest.hexdigest()


def fingerprint(documents: list[Document]) -> str:
    """Returns a hash of all titles and texts in their order. The ids are left out, because the
    vectors do not depend on them.
    """
    digest = hashlib.sha256()
    for document in documents:  # repr, so that "ab", "c" and "a", "bc" differ
        digest.update(repr((document.title, document.text)).encode())
    return digest.hexdigest()[:20]


def passage_text(document: Document) -> str:
    return f"{document.title} {document.text}".strip()


class DenseRetriever:
    """Searches with `encoder`, an `Encoder` or the name of one. The vectors are read from files in
    the folder `runs`; files that are missing are made first.
    """

    def __init__(self, documents: list[Document], encoder, device="", runs="runs"):
        if not documents or not encoder:
            raise InputError("dense retrieval needs an --encoder, and a --corpus with a document")
        self.documents = documents
        self.encoder = Encoder(encoder, device) if isinstance(encoder, str) else encoder
        self.shards = passage_vectors(documents, self.encoder, runs)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        rows = nearest(self.shards, self.encoder(queries, "query"), k, self.device)  # [B, k]
        return [[self.documents[row] for row in best] for best in rows.tolist()]


@torch.inference_mode()
def nearest(shards: list[torch.Tensor], queries: np.ndarray, k: int, device="cpu") -> np.ndarray:
    """Returns the numbers [B, min(k, N)] of the rows with the largest inner products with each
    query, best first. The N rows of all shards [n, d] are numbered in one sequence.

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> nearest([rows[:3], rows[3:]], np.array([[1.0, 0.0]]), k=3).tolist()
    [[1, 3, 2]]
    """
    queries = torch.as_tensor(queries, dtype=torch.float32, device=device)  # [B, d]
    scores, rows, first = [], [], 0
    for shard in shards:
        best = (queries @ shard.to(device).float().T).topk(min(k, len(shard)))
        scores.append(best.values.cpu())
        rows.append(best.indices.cpu() + first)
        first += len(shard)
    scores, rows = torch.cat(scores, 1).numpy(), torch.cat(rows, 1).numpy()
    # Sorted by score; of equal scores the smaller row number comes first.
    return np.take_along_axis(rows, np.lexsort((rows, -scores))[:, :k], axis=1)


def passage_vectors(documents: list[Document], encoder, runs="runs") -> list[torch.Tensor]:
    """Returns the vectors [n, d] fp16 of each shard, mapped from files. Makes missing files."""
    name = f"{Path(encoder.name).name}-{encoder.version[:10]}-{fingerprint(documents)}"
    folder = Path(runs, "vectors", name)
    folder.mkdir(parents=True, exist_ok=True)
    shards = [(i, folder / f"{i:05}.npy") for i in range(-(-len(documents) // SHARD))]
    # The processes begin at different shards if there are enough, and skip shards already written.
    first = len(shards) * rank_of("RANK") // rank_of("WORLD_SIZE", 1)
    order = shards[first:] + shards[:first]
    for i, path in tqdm(order, "vectors", unit=" shards", disable=len(shards) < 2):
        if not path.exists():
            texts = [passage_text(document) for document in documents[i * SHARD :][:SHARD]]
            aside = folder / f"{os.getpid()}.part.npy"
            np.save(aside, encoder(texts, "passage").astype(np.float16))
            aside.rename(path)
    try:
        # Mode "c" (copy on write), because torch warns of read-only memory. Nothing is written.
        return [torch.from_numpy(np.load(path, mmap_mode="c")) for _, path in shards]
    except (ValueError, EOFError) as error:
        raise InputError(
            f"{folder}: a file in it is damaged ({error}): remove the folder to encode again"
        ) from None
