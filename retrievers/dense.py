"""Exact dense retrieval: query -> the documents whose vectors have the largest inner products.

    v_i = encoder(passage i)      score(q, i) = <encoder(q), v_i>      the k largest

    passages -> vectors, once, shard by shard -> RUNS/vectors/<hash of encoder and texts>.npy, ...
    queries -> one product per shard, its k best -> the k best of these

The encoder comes from sentence-transformers (extra `dense`), which pools a text's token vectors as
the model's files say. If they do not say how, the last token's vector is taken for a causal model
whose architecture is called ...ForCausalLM, and the mean of all vectors for any other model.
Each text gets the prefix among the model's own `prompts`, or else that of the model's family
(PREFIXES); a line on stderr says which.
Vectors are stored in fp16 (32 GB for 21M vectors of 768 numbers) and multiplied in fp32. Storing
them in fp16 changes the score of two unit vectors by at most 2^-11. After an interrupt the complete
shards are used again: a shard's file gets its name only when it is complete. Left out: approximate
search, the index files of other programs, and the division of the encoding among processes.
"""

import hashlib
import re
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from tqdm import tqdm

from data import Document, clean
from errors import InputError, say_once

SHARD = 16_384  # documents per file, and rows of one matrix product
# Names of a model's own prompts for a search
QUERY_PROMPTS = (
    "query web_search_query search_query s2p_query retrieval.query retrieval_query".split()
)
PASSAGE_PROMPTS = "document passage corpus search_document retrieval.passage".split()
PREFIXES = {  # words of the model's name -> prefixes of query and passage; the first match counts
    "e5 instruct": (
        "Instruct: Given a web search query, retrieve relevant passages that answer the query\n"
        "Query: ",
        "",
    ),
    "e5": ("query: ", "passage: "),
    "bge m3": ("", ""),
    "bge noinstruct": ("", ""),
    "bge gemma2": (
        "<instruct>Given a web search query, retrieve relevant passages that answer the query.\n"
        "<query>",
        "",
    ),
    "bge zh": ("为这个句子生成表示以用于检索相关文章：", ""),
    "bge": ("Represent this sentence for searching relevant passages: ", ""),
}


class Encoder:
    """Maps (texts, kind) to unit vectors [n, d] in fp32; kind is "query" or "passage". `version`
    identifies the model's layers and weights and the prefix for passages.
    """

    def __init__(self, name: str, device: str = ""):
        from sentence_transformers import SentenceTransformer  # the extra "dense"

        model = SentenceTransformer(name, device=device or None, trust_remote_code=False)
        # A GPU uses fp16, which is more precise than bf16.
        self.model = model if model.device.type == "cpu" else model.half()
        query, passage = prefixes(name, model.prompts)
        say_once(f"encoder {name}: prefix of a query {query!r}, of a passage {passage!r}")
        self.prefix = {"query": query, "passage": passage}
        self.version = version_of(model, passage)

    def __call__(self, texts: list[str], kind: str = "query") -> np.ndarray:
        encode = self.model.encode_query if kind == "query" else self.model.encode_document
        texts = [*map(clean, texts)]
        vectors = encode(texts, prompt=self.prefix[kind], normalize_embeddings=True).astype("f4")
        if not np.isfinite(vectors).all():
            raise InputError("the encoder's vectors are not finite: damaged weights?")
        return vectors


def prefixes(name: str, prompts=()) -> tuple[str | None, str | None]:
    """Returns the prefixes of a query and of a passage. They are the model's own `prompts`, if it
    has some for a search; else those of the first key of PREFIXES whose words are all in the last
    part of the model's name or path. If there is none, both are None.

    >>> prefixes("e5/bge-m3"), prefixes("e5-base"), prefixes("e5-base", {"query": "ask: "})
    (('', ''), ('query: ', 'passage: '), ('ask: ', ''))
    """
    own, kinds = dict(prompts), (QUERY_PROMPTS, PASSAGE_PROMPTS)
    query, passage = (next(filter(None, map(own.get, names)), "") for names in kinds)
    if query or passage:
        return query, passage
    words = {*re.findall("[a-z0-9]+", Path(name).absolute().name.lower())}
    return next((PREFIXES[key] for key in PREFIXES if {*key.split()} <= words), (None, None))


def version_of(model, prefix: str | None) -> bytes:
    """Returns a hash of the model's layers and weights and of `prefix`. The model's name is not
    enough, because a directory keeps its name when its files change.
    """
    digest = hashlib.sha256(f"{model} {prefix}".encode())
    for name, tensor in model.state_dict().items():
        if ".pooler." not in name:  # a pooler is not used, and is random if its weights are missing
            digest.update(tensor.float().cpu().contiguous().numpy())
    return digest.digest()


class DenseRetriever:
    """Searches with `encoder`, an `Encoder` or the name of one. The vectors are read from files in
    the folder `runs`; files that are missing are made first.
    """

    def __init__(self, documents: list[Document], encoder, device="", runs="runs"):
        if not encoder:
            raise InputError("--retriever dense needs an --encoder, such as intfloat/e5-base-v2")
        self.documents = documents
        self.encoder = Encoder(encoder, device) if isinstance(encoder, str) else encoder
        self.shards = passage_vectors(documents, self.encoder, runs)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")

    @torch.inference_mode()
    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        vectors = torch.from_numpy(self.encoder(queries)).to(self.device)  # [B, d]
        scores, rows = [], []  # of the best documents of each shard: all scores may need 20 GB
        for number, shard in enumerate(self.shards):
            best = (vectors @ shard.to(self.device).float().T).topk(min(k, len(shard)))
            scores.append(best.values)
            rows.append(best.indices + number * SHARD)
        best = torch.cat(scores, 1).topk(min(k, len(self.documents))).indices  # [B, k]
        best = torch.cat(rows, 1).gather(1, best)
        return [[self.documents[row] for row in found] for found in best.tolist()]


def passage_vectors(documents: list[Document], encoder, runs="runs") -> list[torch.Tensor]:
    """Returns the vectors [n, d] fp16 of each shard, mapped from files. Makes missing files."""
    folder, shards = Path(runs, "vectors"), []
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(documents), SHARD)
    for start in tqdm(starts, "vectors", unit=" shards", disable=len(starts) < 2):
        texts = [f"{d.title} {d.text}".strip() for d in documents[start : start + SHARD]]
        # The name is a hash, so other texts or other weights never get these vectors.
        path = folder / f"{hashlib.sha256(encoder.version + repr(texts).encode()).hexdigest()}.npy"
        if not path.exists():
            aside = folder / f"{uuid4()}.part.npy"  # several machines may write
            np.save(aside, encoder(texts, "passage").astype(np.float16))
            aside.rename(path)
        # Mode "c" (copy on write), because torch warns of read-only memory. Nothing is written.
        shards.append(torch.from_numpy(np.load(path, mmap_mode="c")))
    return shards
