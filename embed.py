"""How alike are two texts? Embedders: a list of texts -> one vector each, whose cosine is the similarity.

    tfidf   w(t) = count of t in the text · idf(t),   idf(t) = ln((1 + N) / (1 + n_t)) + 1
            N documents in the corpus, n_t of them hold t; a word that none holds is no dimension. Without a corpus
            every word is one, with idf = ln(1) + 1 = 1
    a HF encoder by name: the mean of its last hidden states over the text's tokens

When to Search prices a second search by how alike it is to the first; this file says what "alike" is.
Two traps. A word of no document must not count, or a query could be repeated with another invented word each time. And
two texts of such words alone are zero vectors: they are alike (cosine 1), or a misspelled query could be repeated.
Left out: training an encoder, instructions in front of a query, vectors on disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from data import Document, InputError, run_main

Embedder = Callable[[list[str]], np.ndarray]  # n texts -> [n, d]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def tfidf_embedder(documents: Sequence[Document] = ()) -> Embedder:
    """TF-IDF with the statistics of these documents.

    >>> embed = tfidf_embedder([Document("1", "Ana", "town"), Document("2", "Bo", "town")])
    >>> embed(["Ana town"]).round(4).tolist()       # idf(ana) = ln(3/2) + 1, idf(town) = ln(3/3) + 1
    [[1.4055, 1.0]]
    """
    holders = Counter(word for d in documents for word in set(words(f"{d.title} {d.text}")))  # n_t
    n = len(documents)

    def embed(texts: list[str]) -> np.ndarray:
        counts = [Counter(words(text)) for text in texts]
        # These texts' words are all the columns that matter to their cosines.
        vocabulary = sorted(word for word in set().union(*counts) if word in holders or not documents)
        idf = np.array([np.log((1 + n) / (1 + holders[word])) + 1 for word in vocabulary])
        return np.array([[count[word] for word in vocabulary] for count in counts]) * idf  # [n, d]

    return embed


def encoder_embedder(name: str, batch_size: int = 64) -> Embedder:
    """A frozen HF encoder, mean pooling. It is loaded at the first call: a recipe may name one that no reward asks."""
    loaded: list = []

    def embed(texts: list[str]) -> np.ndarray:
        if not loaded:
            loaded.extend(_load_encoder(name))
        pieces = [_mean_pool(*loaded, texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
        return np.concatenate(pieces)  # [n, d]

    return embed


def _load_encoder(name: str) -> tuple:
    from transformers import AutoModel, AutoTokenizer  # here, so that rewards load no torch

    try:
        return AutoTokenizer.from_pretrained(name), AutoModel.from_pretrained(name).eval().requires_grad_(False)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"--embedder {name}: cannot be loaded ({reason}): give tfidf, a directory or a hub name") from None


def _mean_pool(tokenizer, model, texts: list[str]) -> np.ndarray:
    import torch

    with torch.no_grad():
        encoded = tokenizer(texts, padding=True, truncation=True, max_length=512, return_tensors="pt")
        encoded = {key: value for key, value in encoded.items() if key in ("input_ids", "attention_mask")}
        states = model(**encoded).last_hidden_state.float()  # [n, L, d]
        mask = encoded["attention_mask"][:, :, None].float()  # padding is no part of the mean
        return ((states * mask).sum(1) / mask.sum(1).clamp(min=1)).numpy()  # [n, d]


def make_embedder(name: str = "tfidf", documents: Sequence[Document] = ()) -> Embedder:
    """ "tfidf" over these documents, or the HF encoder of that name."""
    return tfidf_embedder(documents) if name == "tfidf" else encoder_embedder(name)


def cosine(vectors: np.ndarray) -> np.ndarray:
    """All cosines, [n, d] -> [n, n]; a zero vector is like another zero vector (1) and like nothing else (0).

    >>> cosine(np.array([[3.0, 4.0], [3.0, 0.0], [0.0, 0.0]])).round(6).tolist()     # (3·3 + 4·0) / (5 · 3) = 0.6
    [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1)
    return unit @ unit.T + (norms == 0) * (norms == 0).T


def main() -> None:
    texts = ["Ana Bell birthplace", "birthplace of Ana Bell", "Kelmouth country", "mayor of Kelmouth"]
    documents = [Document("1", "Ana Bell", "birthplace Kelmouth"), Document("2", "Kelmouth", "country Norland")]
    similarity = cosine(tfidf_embedder(documents)(texts))
    print(f"{'cosine of TF-IDF vectors':26}" + "".join(f"{i:>8}" for i in range(1, len(texts) + 1)))
    for number, (text, row) in enumerate(zip(texts, similarity, strict=True), 1):
        print(f"{number}  {text:23}" + "".join(f"{value:>8.3f}" for value in row))


if __name__ == "__main__":
    run_main(main)
