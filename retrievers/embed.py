"""How alike are two texts? Embedders: a list of texts -> one vector each, whose cosine is the
similarity.

    tfidf   w(t) = count of t in the text · idf(t),   idf(t) = ln((1 + N) / (1 + n_t)) + 1
            N documents in the corpus, n_t of them hold t; a word that none holds is no dimension.
            Without a corpus every word is one, with idf = ln(1) + 1 = 1
    Encoder a HF encoder; h_1 .. h_L are the last hidden states of [prefix; text]
            mean: v = Σ h_t / L        cls: v = h_1        then v / |v|, so that an inner product is
            a cosine

            family           before a query                before a passage    pooling
            name has e5      "query: "                     "passage: "         mean
            name has bge     one sentence (PREFIXES)       nothing             cls
            any other        nothing                       nothing             mean
            A directory with 1_Pooling/config.json says itself how it pools; `pooling` overrules
            both.

When to Search prices a second search by how alike it is to the first; this file says what "alike"
is. dense.py searches with the same Encoder. Traps. A word of no document must not count, or a query
could be repeated with another invented word each time. Two texts of such words alone are zero
vectors: they are alike (cosine 1), or a misspelled query could be repeated. A RoBERTa has 514 rows
of positions for 512 tokens: the first two are the padding's. `torch.no_grad` holds for one thread
only: the caller's does not reach a search in a helper thread, so the encoder turns gradients off
itself. Left out: training an encoder, last-token pooling (embedding models made of causal LMs), the
task instructions of "instruct" encoders, a dense layer behind the pooling, models that bring their
own code.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from data import Document
from errors import InputError, run_main
from metrics import tokenize

Embedder = Callable[[list[str]], np.ndarray]  # n texts -> [n, d]


def tfidf_embedder(documents: Sequence[Document] = ()) -> Embedder:
    """TF-IDF with the statistics of these documents.

    >>> embed = tfidf_embedder([Document("1", "Ana", "town"), Document("2", "Bo", "town")])
    >>> embed(["Ana town"]).round(4).tolist()       # idf(ana) = ln(3/2) + 1, idf(town) = ln(3/3) + 1
    [[1.4055, 1.0]]
    """
    holders = Counter(
        word for d in documents for word in set(tokenize(f"{d.title} {d.text}"))
    )  # n_t
    n = len(documents)

    def embed(texts: list[str]) -> np.ndarray:
        counts = [Counter(tokenize(text)) for text in texts]
        # These texts' words are all the columns that matter to their cosines.
        vocabulary = sorted(
            word for word in set().union(*counts) if word in holders or not documents
        )
        idf = np.array([np.log((1 + n) / (1 + holders[word])) + 1 for word in vocabulary])
        return np.array([[count[word] for word in vocabulary] for count in counts]) * idf  # [n, d]

    return embed


# ------------------------------------------------------------------------------------- a HF encoder

# what a name contains, before a query, before a passage: as published with the encoders; the first
# row counts
PREFIXES = (
    ("e5", "query: ", "passage: "),
    ("bge-m3", "", ""),
    ("bge", "Represent this sentence for searching relevant passages: ", ""),
)
POOLINGS = ("auto", "mean", "cls")
_STATED = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "mean": "mean",
    "cls": "cls",
}


class Encoder:
    """Texts -> unit vectors, frozen, from a directory or the hub. fp32 on CPUs, fp16 on a GPU; what
    comes out is fp32.

    pooling     "auto" (see above), "mean" or "cls"
    batch_size  texts per forward pass; texts of a call are sorted by length first, so little of a
                batch is padding
    max_length  tokens, prefix included; the model's own limit where that is lower. The text's end
                is cut off
    version     names what a passage's vector depends on: weights, tokenizer, pooling, prefix,
                length (and not the device, though fp16 is coarser than fp32)
    Several threads may share one.
    """

    def __init__(
        self,
        name: str,
        pooling: str = "auto",
        device: str = "cpu",
        batch_size: int = 64,
        max_length: int = 512,
    ):
        import torch  # here, so that rewards load no torch

        if pooling not in POOLINGS:
            raise InputError(f"--pooling {pooling}: one of {', '.join(POOLINGS)}")
        check_device(device)
        self.name, self.device, self.batch_size, self.lock = (
            name,
            device,
            batch_size,
            threading.Lock(),
        )
        self.tokenizer, model = _load_encoder(name)
        self.pooling = _pooling(name) if pooling == "auto" else pooling
        self.query_prefix, self.passage_prefix = _prefixes(name)
        self.dimension = model.config.hidden_size
        self.max_length = min(max_length, _positions(model), self.tokenizer.model_max_length)
        settings = [
            _fingerprint(model, self.tokenizer),
            self.pooling,
            self.passage_prefix,
            self.max_length,
        ]
        self.version = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        # fp16 and not bf16: the vectors are compared with each other, and bf16 has three bits less
        # to tell them apart.
        self.model = model.to(
            device, torch.float32 if torch.device(device).type == "cpu" else torch.float16
        )

    def passages(self, texts: Sequence[str]) -> np.ndarray:
        """[n, d] fp32, each of length 1."""
        return self._encode(texts, self.passage_prefix, InputError)

    def queries(self, texts: Sequence[str], error: type[Exception] = RuntimeError) -> np.ndarray:
        """[n, d] fp32, each of length 1. If they are not finite, `error`: an InputError would end a
        training that searches.
        """
        return self._encode(texts, self.query_prefix, error)

    def _encode(self, texts: Sequence[str], prefix: str, error: type[Exception]) -> np.ndarray:
        import torch

        vectors = np.zeros(
            (len(texts), self.dimension), np.float32
        )  # [n, d]; a text without a token keeps its zeros
        with self.lock, torch.inference_mode():
            ids = self._token_ids([prefix + text for text in texts])
            order = sorted((i for i in range(len(ids)) if ids[i]), key=lambda i: -len(ids[i]))
            for start in range(0, len(order), self.batch_size):
                rows = order[start : start + self.batch_size]
                vectors[rows] = self._pool([ids[i] for i in rows])
        if not np.isfinite(vectors).all():
            raise error(
                f"encoder {self.name}: its vectors are not finite: its weights are damaged, or fp16"
                " is too narrow"
            )
        return vectors

    def _token_ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        texts = [
            text.encode("utf-8", "replace").decode() for text in texts
        ]  # half a surrogate pair stops a tokenizer
        return self.tokenizer(texts, truncation=True, max_length=self.max_length)["input_ids"]

    def _pool(self, ids: list[list[int]]) -> np.ndarray:
        """The vectors of one batch, longest first. Padded here, on the right: a tokenizer may have
        no padding token, or pad on the left, where CLS pooling would take the padding.
        """
        import torch

        padding = self.tokenizer.pad_token_id or 0
        tokens = torch.tensor(
            [row + [padding] * (len(ids[0]) - len(row)) for row in ids], device=self.device
        )  # [n, L]
        lengths = torch.tensor([len(row) for row in ids], device=self.device)[:, None]  # [n, 1]
        mask = (torch.arange(len(ids[0]), device=self.device) < lengths).long()  # [n, L]
        states = self.model(
            input_ids=tokens, attention_mask=mask
        ).last_hidden_state.float()  # [n, L, d]
        # padding is no part of the mean
        pooled = (
            states[:, 0] if self.pooling == "cls" else (states * mask[:, :, None]).sum(1) / lengths
        )  # [n, d]
        return torch.nn.functional.normalize(pooled, dim=1).cpu().numpy()


def check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(
            f"--device {device}: not here ({str(error).splitlines()[0]}): give cpu, cuda or cuda:0"
        ) from None


def _load_encoder(name: str) -> tuple:
    """(tokenizer, model) in fp32, or an InputError of one line: a broken file raises whatever its
    format's reader does.
    """
    import torch
    from transformers import AutoConfig, AutoModel
    from transformers.utils import logging

    from policy import check_model_path, load_tokenizer

    _load(name, check_model_path)
    _check_encoder(
        name, _load(name, AutoConfig.from_pretrained)
    )  # before gigabytes of another kind of model are read
    tokenizer = _load(name, load_tokenizer)
    level = logging.get_verbosity()
    # else: a table that calls for training the pooler, which nobody uses here
    logging.set_verbosity_error()
    try:
        model, report = _load(
            name, AutoModel.from_pretrained, dtype=torch.float32, output_loading_info=True
        )
    finally:
        logging.set_verbosity(level)
    missing = sorted(key for key in report["missing_keys"] if not key.startswith("pooler."))
    if missing:  # they would be random numbers, another set at each start
        raise InputError(
            f"encoder {name}: its weight file lacks {len(missing)} tensors ({missing[0]}, ...):"
            " download it again"
        )
    rows = model.get_input_embeddings().num_embeddings
    if len(tokenizer) > rows:
        raise InputError(
            f"encoder {name}: {len(tokenizer)} tokens in the tokenizer, {rows} in the model: they"
            " do not fit"
        )
    return tokenizer, model.eval().requires_grad_(False)


def _load(name: str, load: Callable, **options):
    from policy import first_line

    try:
        return load(name, **options)
    except Exception as error:
        reason = first_line(error).removeprefix(f"--model {name}: ").partition("; give")[0]
        raise InputError(
            f"encoder {name}: cannot be loaded ({reason}): give a directory or a hub name"
        ) from None


def _check_encoder(name: str, config) -> None:
    """Models that read in both directions can also fill gaps: transformers' list of those tells
    them from causal LMs.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

    causal = (
        type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        and type(config) not in MODEL_FOR_MASKED_LM_MAPPING
    )
    if causal or getattr(config, "is_decoder", False) or config.is_encoder_decoder:
        kind = "an encoder-decoder" if config.is_encoder_decoder else "a causal LM"
        raise InputError(
            f"encoder {name}: this is {kind} ({config.model_type}): give an encoder, such as E5,"
            " BGE or a BERT"
        )
    layers = [
        module.get("type", "").rpartition(".")[2]
        for module in _sentence_file(name, "modules.json") or []
    ]
    if strange := [
        layer for layer in layers if layer not in ("Transformer", "Pooling", "Normalize")
    ]:
        raise InputError(
            f"encoder {name}: modules.json puts a {strange[0]} layer behind the encoder: give one"
            " without"
        )


def _sentence_file(name: str, file: str):
    """A JSON file in the layout of sentence-transformers, or None where the encoder has none."""
    from transformers.utils import cached_file

    try:
        return json.loads(Path(cached_file(name, file)).read_text("utf-8"))
    except OSError:
        return None
    except ValueError:
        raise InputError(
            f"encoder {name}: {file} is not valid JSON: correct it, or take it away"
        ) from None


def _family(name: str) -> str:
    """The part of a name or path that names the model; folders above it do not
    (".../test_e5/some-bert").
    """
    cached = re.search(r"models--([^/]+)/snapshots", name)  # the hub's own folders end in a hash
    return (cached[1] if cached else Path(name).name).lower()


def _prefixes(name: str) -> tuple[str, str]:
    return next(
        ((query, passage) for part, query, passage in PREFIXES if part in _family(name)), ("", "")
    )


def _pooling(name: str) -> str:
    stated = _sentence_file(name, "1_Pooling/config.json")
    if stated is None:
        return "cls" if "bge" in _family(name) else "mean"
    modes = [key for key, on in stated.items() if key.startswith("pooling_mode_") and on] or [
        str(stated.get("pooling_mode"))
    ]
    if len(modes) > 1 or modes[0] not in _STATED:
        raise InputError(
            f"encoder {name}: 1_Pooling/config.json asks for {' and '.join(modes)}, not mean or"
            " cls: give another encoder, or for dense retrieval --pooling mean or --pooling cls"
        )
    return _STATED[modes[0]]


def _positions(model) -> int:
    """How many tokens the model has positions for."""
    table = next(
        (part for key, part in model.named_modules() if key.endswith("position_embeddings")), None
    )
    padding = getattr(
        table, "padding_idx", None
    )  # RoBERTa: positions are counted from padding_idx + 1
    return (getattr(model.config, "max_position_embeddings", None) or 512) - (
        0 if padding is None else padding + 1
    )


def _fingerprint(model, tokenizer) -> str:
    """Which weights and which tokenizer these are, by content: a directory keeps its name when its
    files change.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest = hashlib.sha256(
        (backend.to_str() if backend else str(sorted(tokenizer.get_vocab().items()))).encode()
    )
    for key, tensor in sorted(model.state_dict().items()):
        if not key.startswith("pooler."):  # random where the file has none, and not used here
            digest.update(f"{key} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().view(-1).numpy())
    return digest.hexdigest()


# ------------------------------------------------------------------------------------------ by name


def encoder_embedder(name: str) -> Embedder:
    """The queries' vectors of an Encoder. It is loaded at the first call: a recipe may name one
    that no reward asks.
    """
    loaded: list[Encoder] = []

    def embed(texts: list[str]) -> np.ndarray:
        if not loaded:
            loaded.append(Encoder(name))
        return loaded[0].queries(texts, InputError)  # [n, d]

    return embed


def make_embedder(name: str = "tfidf", documents: Sequence[Document] = ()) -> Embedder:
    """ "tfidf" over these documents, or the HF encoder of that name."""
    return tfidf_embedder(documents) if name == "tfidf" else encoder_embedder(name)


def cosine(vectors: np.ndarray) -> np.ndarray:
    """All cosines, [n, d] -> [n, n]; a zero vector is like another zero vector (1) and like nothing
    else (0).

    >>> cosine(np.array([[3.0, 4.0], [3.0, 0.0], [0.0, 0.0]])).round(6).tolist()     # (3·3 + 4·0) / (5 · 3) = 0.6
    [[1.0, 0.6, 0.0], [0.6, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(norms > 0, norms, 1)
    return unit @ unit.T + (norms == 0) * (norms == 0).T


def main() -> None:
    texts = [
        "Ana Bell birthplace",
        "birthplace of Ana Bell",
        "Kelmouth country",
        "mayor of Kelmouth",
    ]
    documents = [
        Document("1", "Ana Bell", "birthplace Kelmouth"),
        Document("2", "Kelmouth", "country Norland"),
    ]
    similarity = cosine(tfidf_embedder(documents)(texts))
    print(f"{'cosine of TF-IDF vectors':26}" + "".join(f"{i:>8}" for i in range(1, len(texts) + 1)))
    for number, (text, row) in enumerate(zip(texts, similarity, strict=True), 1):
        print(f"{number}  {text:23}" + "".join(f"{value:>8.3f}" for value in row))


if __name__ == "__main__":
    run_main(main)
