"""Query -> the passages whose vectors are nearest: dense retrieval, exact.

    v_i = encoder(passage i)        score(q, i) = <encoder(q), v_i>        the k largest, ties in
    corpus order

    corpus -> vectors, once, block by block -> a file that all runs share          (embed.py has the
    encoder) queries -> one product per block of rows -> the k best so far -> the next block

Nothing of size B x N ever stands in memory (B queries, N passages). A score and its row become one
64-bit number, [score's bits, 2^32 - 1 - row]: the larger number is the better score, or on a tie
the earlier passage, so `topk` of the numbers is exact and the same on every device.

On disk are fp16 numbers: 21M passages x 768 x 2 bytes = 32 GB, where fp32 would take 65. A
component then is wrong by at most 2^-11 of itself, and a score by at most 2^-11 (Σ|q_j v_j| <= 1
for unit vectors); products are taken in fp32.

Traps. `torch.no_grad` holds for one thread: a search in a helper thread would keep graphs, if it
were not said here again. A product in fp16 would make ties of scores that differ. A full disk kills
whoever writes through a memory map (SIGBUS): the file is written as a file, and only read through a
map. A file that is there may be half a file: it has its name only once it is whole, and what a cut
has left behind is used up to the last whole block. Left out: approximate search (but a prebuilt
faiss index is read), corpora larger than memory, training an encoder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from data import Document, load_corpus
from errors import FlagParser, InputError, run_main
from retrievers.embed import POOLINGS, Encoder, check_device

BLOCK = 1024  # passages encoded between two writes: what an interruption can cost
CPU_ROWS, GPU_ROWS = 2048, 65536  # rows of one product: on a CPU they stay in its cache
SCORES = 2**24  # at most so many scores at a time, whatever the number of queries
LAST_ROW = 2**32 - 1
INDEXES = ("auto", "numpy", "faiss")


def passage_text(document: Document) -> str:
    """What the encoder reads: title, then text, as E5 was trained on passages."""
    return f"{document.title} {document.text}".strip()


class DenseRetriever:
    """Exact dense retrieval over these documents.

    encoder     a name for `Encoder`, or one that is there; anything with its `passages`, `queries`,
                `dimension`, `name` and `version` will do
    folder      where the passages' vectors are kept, for every later run with the same passages and
                weights; "" keeps none
    device      of the encoder (if it is given by name) and of the search. On a GPU the matrix stays
                there if it takes no more than half of the memory that is free; else its blocks move
                over for each search
    index       "numpy": blocks, from the file. "faiss": IndexFlatIP, which holds fp32 in memory,
                twice the file. "auto": faiss only for an `index_file`, as blocks are faster for a
                batch of queries
    index_file  a prebuilt faiss index whose row i is passage i, made with the same encoder: no
                passage is encoded

    InputError, before any passage is encoded: an empty corpus, an encoder, folder or index that
    cannot be used, a full disk.
    """

    needs_questions = False

    def __init__(
        self,
        documents: list[Document],
        encoder: str | Encoder,
        *,
        folder: str | Path = "",
        device: str = "cpu",
        batch_size: int = 64,
        pooling: str = "auto",
        index: str = "auto",
        index_file: str | Path = "",
    ):
        if not documents:
            raise InputError("the corpus is empty: dense retrieval needs at least one passage")
        check_index(index, index_file)
        check_device(device)
        self.documents, self.device = documents, device
        self.encoder = (
            Encoder(encoder, pooling, device, batch_size) if isinstance(encoder, str) else encoder
        )
        self.index = self.matrix = None
        if index_file:
            self.index = read_index(index_file, len(documents), self.encoder.dimension)
        elif index == "faiss":
            self.index = flat_index(passage_vectors(documents, self.encoder, folder))
        else:
            self.matrix = placed(passage_vectors(documents, self.encoder, folder), device)

    def search(self, queries: list[str], k: int) -> list[list[Document]]:
        """min(k, N) documents each, best first."""
        return [[document for document, _ in found] for found in self.search_scored(queries, k)]

    def search_scored(self, queries: list[str], k: int) -> list[list[tuple[Document, float]]]:
        """The same with each document's inner product, between -1 and 1."""
        k = min(k, len(self.documents))
        if not queries or k <= 0:
            return [[] for _ in queries]
        vectors = self.encoder.queries(queries)  # [B, d]
        scores, rows = (
            self.index.search(vectors, k)
            if self.index
            else nearest(self.matrix, vectors, k, self.device)
        )
        return [
            # faiss fills up with row -1 where it finds too few
            [
                (self.documents[row], score)
                for row, score in zip(rows, scores, strict=True)
                if row >= 0
            ]
            for rows, scores in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


# ------------------------------------------------------------------------------------------ nearest


@torch.inference_mode()
def nearest(
    matrix: torch.Tensor, queries: np.ndarray, k: int, device: str = "cpu"
) -> tuple[np.ndarray, np.ndarray]:
    """(scores [B, k] fp32, rows [B, k]) of the k largest inner products of each query with the rows
    of matrix [N, d].

    >>> rows = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.6, 0.8], [1.0, 0.0]])
    >>> scores, found = nearest(rows, np.array([[1.0, 0.0]]), k=3)      # rows 1 and 3 tie: the earlier first
    >>> found.tolist(), scores.astype(float).round(4).tolist()
    ([[1, 3, 2]], [[1.0, 1.0, 0.6]])
    """
    asked = torch.as_tensor(queries, dtype=torch.float32, device=device)  # [B, d]
    step = block_rows(len(asked), len(matrix), asked.device.type)
    best = torch.empty(len(asked), 0, dtype=torch.int64, device=device)  # [B, at most k]
    block = torch.zeros(
        step, matrix.shape[1], device=device
    )  # [step, d]: one for all, behind the last rows are older ones
    for start in range(0, len(matrix), step):
        rows = matrix[start : start + step].to(device)  # [n, d] fp16
        block[: len(rows)] = rows
        keys = as_keys((asked @ block.T)[:, : len(rows)], start)  # [B, n]
        best = torch.cat([best, keys.topk(min(k, keys.shape[1])).values], dim=1)
        best = best.topk(min(k, best.shape[1])).values
    return as_scores(best).cpu().numpy(), (LAST_ROW - (best & LAST_ROW)).cpu().numpy()


def block_rows(queries: int, n: int, device: str) -> int:
    """Rows of one product: a multiple of 16, the same for all blocks. Trap: the odd rows at the end
    of a product go through other instructions, so that equal rows get scores that differ in the
    last bit, and are no tie.
    """
    rows = min(n, CPU_ROWS if device == "cpu" else GPU_ROWS, max(1, SCORES // queries))
    return -(-rows // 16) * 16


def as_keys(scores: torch.Tensor, start: int) -> torch.Tensor:
    """One int64 per score, ordered by (score, then the earlier row).  # [B, n]"""
    rows = torch.arange(start, start + scores.shape[1], device=scores.device)
    return (ordered_bits(scores + 0.0).long() << 32) + (
        LAST_ROW - rows
    )  # + 0.0: -0.0 would come behind 0.0


def ordered_bits(scores: torch.Tensor) -> torch.Tensor:
    """fp32 -> int32 of the same order: a float's bits are ordered already, but the negative ones
    the wrong way round.
    """
    bits = scores.view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def as_scores(keys: torch.Tensor) -> torch.Tensor:
    return ordered_bits((keys >> 32).int().view(torch.float32)).view(
        torch.float32
    )  # its own inverse: the sign bit stays


def placed(vectors: np.ndarray, device: str) -> torch.Tensor:
    """[N, d] fp16, on the GPU if it fits with room for the models to come, else on the CPU (or in
    the file).
    """
    matrix = torch.from_numpy(vectors)
    if (
        torch.device(device).type != "cuda"
        or 2 * vectors.nbytes > torch.cuda.mem_get_info(torch.device(device))[0]
    ):
        return matrix
    return matrix.to(device)


# ------------------------------------------------------------------------------------- kept on disk


def passage_vectors(
    documents: list[Document], encoder: Encoder, folder: str | Path = ""
) -> np.ndarray:
    """[N, d] fp16: encoded now, or mapped from the file of `folder` that holds them already or up
    to where it was cut.
    """
    shape = (len(documents), encoder.dimension)
    if not folder:
        vectors = np.empty(shape, np.float16)
        for start, block in encoded_blocks(documents, encoder, 0):
            vectors[start : start + len(block)] = block
        return vectors
    path = Path(folder) / file_name(documents, encoder)
    try:
        if not path.exists():
            write_vectors(path, documents, encoder)
        vectors = map_vectors(path)
    except OSError as error:
        advice = (
            "make room and start again: it goes on where it was"
            if error.errno == errno.ENOSPC
            else "give another folder"
        )
        raise InputError(
            f"{path}: vectors cannot be kept there ({error.strerror or error}): {advice}"
        ) from None
    if vectors is None or vectors.shape != shape or vectors.dtype != np.float16:
        raise InputError(
            f"{path}: this file is damaged: delete it, and the passages are encoded again"
        )
    return vectors


def map_vectors(path: Path) -> np.ndarray | None:
    try:
        return np.load(
            path, mmap_mode="c"
        )  # "c": the file is never written to, and torch takes only what it could write to
    except (ValueError, EOFError):
        return None


def encoded_blocks(
    documents: list[Document], encoder: Encoder, done: int
) -> Iterator[tuple[int, np.ndarray]]:
    """(first row, [n, d] fp16) for all passages from row `done` on. The bar counts what the caller
    has dealt with.
    """
    bar = tqdm(
        desc="encoding", total=len(documents), initial=done, unit=" passages", dynamic_ncols=True
    )
    with bar:
        for start in range(done, len(documents), BLOCK):
            vectors = encoder.passages(
                [passage_text(document) for document in documents[start : start + BLOCK]]
            )
            yield start, vectors.astype(np.float16)
            bar.update(len(vectors))


def file_name(documents: list[Document], encoder: Encoder) -> str:
    """Another corpus, other weights, another pooling or prefix: another file."""
    digest = hashlib.sha256(f"{encoder.version} {encoder.dimension}".encode())
    for document in documents:
        text = passage_text(document).encode("utf-8", "surrogatepass")
        digest.update(len(text).to_bytes(8) + text)  # with its length: "ab", "c" are not "a", "bc"
    return f"{re.sub(r'[^A-Za-z0-9.]+', '-', Path(encoder.name).name)[-40:].strip('-.')}-{digest.hexdigest()[:20]}.npy"


def write_vectors(path: Path, documents: list[Document], encoder: Encoder) -> None:
    """Encode into PATH.part, from the last whole block on, and give it its name when it is whole
    and on the disk.
    """
    part, header = path.with_suffix(".part"), npy_header(len(documents), encoder.dimension)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(part, "ab+") as file:
        lock(file)
        if path.exists():  # the other process has done it
            part.unlink(missing_ok=True)
            return
        done = rows_done(file, header, len(documents), encoder.dimension)
        check_space(path.parent, (len(documents) - done) * encoder.dimension * 2, len(documents))
        file.truncate(len(header) + done * encoder.dimension * 2 if done else 0)
        file.write(b"" if done else header)
        try:
            for start, vectors in encoded_blocks(documents, encoder, done):
                file.write(vectors.tobytes())
                file.flush()
                os.fsync(file.fileno())
                done = start + len(vectors)
        except KeyboardInterrupt:
            kept = (
                f"{done:,} of {len(documents):,} passages are kept in {path.parent}: the same"
                " command goes on"
            )
            print(f"\n{kept}" if done else "\nno passage was encoded yet", file=sys.stderr)
            raise
        os.replace(
            part, path
        )  # while it is locked: who waits for it must find the file when it is let in


def npy_header(n: int, d: int) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f2", "fortran_order": False, "shape": (n, d)}
    )
    return header.getvalue()


def lock(file) -> None:
    """One process encodes, the others wait: each process of a training run makes its own retriever.
    The lock ends with the process, however that ends.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for the process that encodes into {file.name}", file=sys.stderr)
        fcntl.flock(file, fcntl.LOCK_EX)


def rows_done(file, header: bytes, n: int, d: int) -> int:
    """How many rows of a .part can be trusted: whole blocks, of which the last holds unit vectors.
    (It is written before it is forced to the disk: after a power cut it may be there as zeros.)
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    if size < len(header) or file.read(len(header)) != header:
        return 0
    rows = min(n, (size - len(header)) // (2 * d))
    done = rows if rows == n else rows - rows % BLOCK
    first = max(0, (done - 1) // BLOCK * BLOCK)
    file.seek(len(header) + first * d * 2)
    last = (
        np.frombuffer(file.read((done - first) * d * 2), np.float16)
        .reshape(-1, d)
        .astype(np.float32)
    )
    return done if np.allclose(np.linalg.norm(last, axis=1), 1, atol=0.01) else first


def check_space(folder: Path, needed: int, n: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise InputError(
            f"{folder}: {n:,} passages need {needed / 1e9:.2f} GB more there, and {free / 1e9:.2f}"
            " GB are free: make room, or give another folder"
        )


# ------------------------------------------------------------------------------------ faiss (extra)


def check_index(index: str, index_file: str | Path) -> None:
    if index not in INDEXES:
        raise InputError(f"--index {index}: one of {', '.join(INDEXES)}")
    if index_file and index == "numpy":
        raise InputError(
            f"--index_file {index_file}: this is read by faiss: leave --index numpy out"
        )
    if index_file or index == "faiss":
        flag = "--index_file" if index_file else "--index"
        try:
            import faiss
        except ImportError:
            raise InputError(
                f"{flag} {index_file or index}: faiss is not installed: pip install faiss-cpu, or"
                f" leave {flag} out"
            ) from None


def flat_index(vectors: np.ndarray):
    """Exact search by faiss, over all rows in fp32, added block by block."""
    import faiss

    index = faiss.IndexFlatIP(vectors.shape[1])
    for start in range(0, len(vectors), GPU_ROWS):
        index.add(vectors[start : start + GPU_ROWS].astype(np.float32))
    return index


def read_index(path: str | Path, n: int, d: int):
    import faiss

    try:
        index = faiss.read_index(str(path))
    except RuntimeError:
        reason = "not a faiss index, or half of one" if Path(path).is_file() else "no such file"
        raise InputError(
            f"--index_file {path}: {reason}: give a file that faiss.write_index wrote"
        ) from None
    if (index.ntotal, index.d) != (n, d):
        raise InputError(
            f"--index_file {path}: {index.ntotal:,} vectors of {index.d} numbers, where {n:,} of"
            f" {d} are needed, one for each passage: give the index of this corpus and this encoder"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise InputError(
            f"--index_file {path}: its metric is a distance: build it with METRIC_INNER_PRODUCT"
        )
    return index


# ------------------------------------------------------------------------------------ on one screen

INVENTED = [
    ("Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
    ("Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
    ("Norland", "Norland is a country of three islands. Its capital is Varen."),
    ("Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    ("Ivo Marr", "Ivo Marr founded Tidewerk in the year of the great storm."),
    ("Varen", "Varen lies on the river Ost and is known for its bells."),
]


def make_tiny_encoder(folder: str | Path, texts: list[str], seed: int = 0) -> str:
    """A directory with a BERT of random weights and a tokenizer of these texts' words; its name."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(models.WordLevel(unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = (
        normalizers.Lowercase(),
        pre_tokenizers.BertPreTokenizer(),
    )
    tokenizer.train_from_iterator(
        texts, trainers.WordLevelTrainer(special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
            initializer_range=0.1,
        )
        BertModel(config, add_pooling_layer=False).save_pretrained(folder)
    return str(folder)


def demonstrate() -> None:
    torch.set_num_threads(
        1
    )  # such small products only wait for a second thread, long if its core is busy
    documents = [Document(str(i), title, text) for i, (title, text) in enumerate(INVENTED, 1)]
    with tempfile.TemporaryDirectory() as folder:
        encoder = Encoder(
            make_tiny_encoder(Path(folder) / "tiny-bert", [passage_text(d) for d in documents])
        )
        passages, calls = encoder.passages, []
        encoder.passages = lambda texts: calls.append(len(texts)) or passages(texts)
        for run in ("first", "second"):
            retriever = DenseRetriever(documents, encoder, folder=Path(folder) / "vectors")
            print(
                f"{run + ' run':10} encoded {sum(calls)} passages, and found"
                f" {len(documents) - sum(calls)} on the disk"
            )
            calls.clear()
        query = "a harbour city in Norland"
        print(
            f"\n{query!r}, by an encoder of random weights (words that are shared are all it sees)"
        )
        show(retriever.search_scored([query], k=3)[0])
    compare_speed()


def compare_speed(n: int = 20_000, d: int = 256, queries: int = 64, k: int = 5) -> None:
    """Blocks against all scores at once and a full sort."""
    draw = np.random.default_rng(0)
    matrix, asked = (
        draw.standard_normal((n, d), np.float32).astype(np.float16),
        draw.standard_normal((queries, d), np.float32),
    )
    blocked, (_, rows) = best_time(lambda: nearest(torch.from_numpy(matrix), asked, k))
    whole, naive = best_time(
        lambda: np.argsort(-(asked @ matrix.astype(np.float32).T), axis=1, kind="stable")[:, :k]
    )
    print(
        f"\n{queries} queries, {n:,} x {d}: all scores and a sort {1000 * whole:.0f} ms, blocks"
        f" {1000 * blocked:.0f} ms ({whole / blocked:.1f} times as fast), same passages:"
        f" {bool((rows == naive).all())}"
    )


def best_time(call: Callable[[], object], tries: int = 3) -> tuple[float, object]:
    """(seconds of the fastest try, what it gave)."""
    seconds = []
    for _ in range(tries):
        begin = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds), result


def show(found: list[tuple[Document, float]]) -> None:
    for rank, (document, score) in enumerate(found, 1):
        print(f"{rank}. {score:7.3f}  [{document.id}] {document.title}: {document.text}")


def main() -> None:
    parser = FlagParser(
        description="Search a corpus with a HF encoder; without a query, a demonstration."
    )
    parser.add_argument("query", nargs="?")
    parser.add_argument("--corpus", help="a corpus file")
    parser.add_argument(
        "--encoder", help="an encoder's directory or hub name, such as intfloat/e5-base-v2"
    )
    parser.add_argument("--skip_bad", action="store_true", help="count malformed records and go on")
    parser.add_argument(
        "--vectors", default="", help="folder where the vectors are kept; by default nothing is"
    )
    parser.add_argument("--pooling", default="auto", choices=POOLINGS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--index", default="auto", choices=INDEXES)
    parser.add_argument(
        "--index_file", default="", help="a prebuilt faiss index; row i is passage i"
    )
    parser.add_argument("-k", type=int, default=3, help="how many passages")
    args = parser.parse_args()
    if args.query is None:
        return demonstrate()
    if not (args.corpus and args.encoder):
        raise InputError("a query needs --corpus FILE and --encoder NAME")
    if args.k < 1:
        raise InputError(f"-k {args.k}: ask for at least one passage")
    documents = load_corpus(args.corpus, args.skip_bad)
    retriever = DenseRetriever(
        documents,
        args.encoder,
        folder=args.vectors,
        device=args.device,
        pooling=args.pooling,
        index=args.index,
        index_file=args.index_file,
    )
    show(retriever.search_scored([args.query], args.k)[0])


if __name__ == "__main__":
    run_main(main)
