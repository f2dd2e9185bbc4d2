"""Serves a retriever to other machines, in the protocol of remote.py, and checks a retriever.

    python retriever.py serve --corpus FILE, or --retriever web --retriever_url URL
    python retriever.py check --corpus FILE, or --url URL       exit code 1 if something is wrong

A request that cannot be served gets {"error": {"message": ...}} with status 400, 404, 405, 413 or
500, and the server goes on. GET /health answers while the server runs. `check` finds faults that
training would not show: an index of another corpus, or lists in another order than the queries.
Left out: encryption, passwords, and limits on slow or many clients (use a reverse proxy).
"""

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import Document, load_corpus
from errors import FlagParser, InputError
from retrievers.net import RejectedRequest, shown
from retrievers.remote import HttpRetriever

MAX_BODY = 16 * 2**20  # bytes of one request
MAX_QUERIES, MAX_K, DEFAULT_K = 10_000, 1000, 5
MAX_QUERY = 10_000  # characters; a query of megabytes would delay all others
HERE = "this server has POST /retrieve and GET /health"
ODD_QUERIES = [
    "zxqvkj",
    "",
    "?!",
    "\n",
    "kelmouth " * 1000,
]  # an unknown word, no word, too many words
COMMON_WORDS = "history city film born river music science war company language".split()


class Refused(Exception):
    """A request that is not served; the arguments are the HTTP status and the message."""


class RetrievalServer(ThreadingHTTPServer):
    """Serves a retriever at `host`:`port`. Port 0 takes a free port, which `server_port` names."""

    daemon_threads = True  # so that Ctrl-C does not wait for a slow client
    request_queue_size = 512  # Trap: with the library's 5, simultaneous clients are lost

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000):
        self.retriever = retriever
        self.lock = (
            threading.Lock()
        )  # not every retriever is thread-safe, so searches run one at a time
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"{host}:{port}: cannot listen there ({reason}): give another --port or --host"
            ) from None

    def answer(self, body: bytes) -> dict:
        queries, k = read_request(body)
        try:
            with self.lock:
                lists = self.retriever.search(queries, k)
            return {"result": [[to_json(document) for document in one] for one in lists]}
        except Exception as error:  # a retriever may raise anything; the next request may succeed
            line = f"the retriever failed: {type(error).__name__}: {shown(str(error))}"
            print(line, file=sys.stderr, flush=True)
            # A search API that works may still reject one query.
            raise Refused(400 if isinstance(error, RejectedRequest) else 500, line) from None

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # a client that disconnected is not an error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds that a client may send nothing
    # Trap: headers and body are sent separately, and the body would wait up to 40 ms for an ACK.
    disable_nagle_algorithm = True

    def do_GET(self):
        code = {"/health": 200, "/retrieve": 405}.get(self.path.rstrip("/"), 404)
        self.send(code, {"status": "ok"} if code == 200 else HERE)

    def do_POST(self):
        try:
            if self.path.rstrip("/") != "/retrieve":
                raise Refused(404, HERE)
            length = self.headers.get("Content-Length", "")
            if not re.fullmatch("[0-9]{1,15}", length) or int(length) > MAX_BODY:
                raise Refused(413, f"send at most {MAX_BODY:,} bytes, and their Content-Length")
            self.send(200, self.server.answer(self.rfile.read(int(length))))
        except Refused as refused:
            self.send(*refused.args)

    def send(self, status: int, reply: dict | str):
        """Sends a reply as JSON; a plain text is sent as an error message."""
        reply = {"error": {"message": reply}} if isinstance(reply, str) else reply
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass  # a line per request would fill the terminal


def read_request(body: bytes) -> tuple[list[str], int]:
    """Returns (queries, k). An empty query is accepted, so that the other queries of its batch
    still get their documents.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON ({shown(str(error))})") from None
    queries = request.get("queries") if isinstance(request, dict) else None
    short = isinstance(queries, list) and len(queries) <= MAX_QUERIES
    if not short or not all(
        isinstance(query, str) and len(query) <= MAX_QUERY for query in queries
    ):
        limits = f"at most {MAX_QUERIES:,} strings of at most {MAX_QUERY:,} characters"
        raise Refused(400, f"'queries' must be a list of {limits}")
    k = request.get("topk", DEFAULT_K)
    if type(k) is not int or not 1 <= k <= MAX_K:  # type(): True is an int
        raise Refused(400, f"'topk' must be a whole number from 1 to {MAX_K}")
    return queries, k


def to_json(document: Document) -> dict:
    """Returns one document of a reply. The title is put on one line, because the first line ends
    it.
    """
    contents = f'"{" ".join(document.title.split())}"\n{document.text}'
    return {"document": {"id": document.id, "contents": contents}, "score": None}


def check(retriever, passages: list[Document], k: int = 5) -> list[tuple[bool, str]]:
    """Returns pairs (passed, description) for a retriever that should have these documents."""
    if not passages:
        raise InputError("nothing is found for common words: give --corpus, or another address")
    sample = passages[:: max(1, len(passages) // 20)]
    queries = list(dict.fromkeys(map(query_for, sample)))  # equal titles give one query
    try:
        alone = [retriever.search([query], k)[0] or [] for query in queries]
        together = retriever.search(queries, k)
        odd = retriever.search(ODD_QUERIES, k)
    except Exception as error:  # a retriever may raise anything, and this command reports it
        return [(False, f"it failed: {type(error).__name__}: {error}")]
    n = len(queries)
    hits = sum(query in map(query_for, found) for query, found in zip(queries, alone, strict=True))
    same = sum(one == other for one, other in zip(alone, together, strict=False))
    return [
        (hits >= 0.9 * n, f"{hits} of {n} passages are among the {k} for their title or beginning"),
        (same >= 0.9 * n, f"{same} of {n} queries find the same when they are asked at once"),
        (None not in odd, "answers to queries of no word, of an unknown one, of a thousand"),
    ]


def query_for(passage: Document) -> str:
    """Returns the title as a query. Any document of that page is a hit; ids may differ."""
    return " ".join((passage.title or passage.text).lower().split()[:12])


FLAGS = {
    "corpus": "corpus file; not needed for the web or --url",
    "index": "bm25: folder that stores the index for the next start",
    "encoder": "dense: hub name or directory of the encoder",
    "index_file": "dense: flat FAISS index whose row i is document i",
    "output_dir": "dense: folder that stores the vectors in vectors/ (default: runs)",
    "device": "dense: cpu, cuda:0, ... (default: a GPU if there is one)",
    "retriever_url": "web: address of the search API",
    "url": "check: address of a server; --corpus is the corpus that it should have",
}


def command(arguments: list[str], make: Callable) -> None:
    """Runs `serve` or `check` with their flags; `make` is retriever.make_retriever."""
    parser = FlagParser("retriever.py", description="Serves a retriever over HTTP, or checks one.")
    flag = parser.add_argument
    flag("command", choices=["serve", "check"])
    for name, text in FLAGS.items():
        flag(f"--{name}", default="", help=text)
    flag("--skip_bad", action="store_true", help="leave out malformed records")
    flag("--retriever", choices=["bm25", "dense", "web"], default="bm25")
    flag(
        "--title_boost",
        type=int,
        choices=range(10),
        default=1,
        help="bm25: how often a title is counted",
    )
    flag(
        "--page",
        choices=["whole", "window"],
        default="window",
        help="web: read the whole page or a window around the query's words",
    )
    flag(
        "--allow_private",
        action="store_true",
        help="web: also read addresses of the private network",
    )
    flag(
        "--host",
        default="127.0.0.1",
        help="serve: address to listen on; 0.0.0.0 accepts every machine",
    )
    flag("--port", type=int, default=8000, help="serve: port to listen on")
    args = parser.parse_args(arguments)
    for name, owner in ("index", "bm25"), ("output_dir", "dense"):
        if getattr(args, name) and (args.url or args.retriever != owner):
            raise InputError(f"--{name}: only --retriever {owner} has this flag: leave it out")
    documents = load_corpus(args.corpus, args.skip_bad) if args.corpus else []
    retriever = retriever_of(args, documents, make)
    if args.command == "serve":
        with RetrievalServer(retriever, args.host, args.port) as server:
            where = f"at http://{args.host}:{server.server_port}; Ctrl-C ends it"
            print(args.retriever, args.corpus or "search", where, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
            return print("\nended", flush=True)
    if not documents:  # the corpus is on the server: take what it finds for common words
        lists = retriever.search(COMMON_WORDS, 5)
        documents = list(dict.fromkeys(document for one in lists for document in one or ()))
    findings = check(retriever, documents)
    for passed, text in findings:
        print("ok   " if passed else "WRONG", text)
    sys.exit(0 if all(passed for passed, _ in findings) else 1)


def retriever_of(args, documents: list[Document], make: Callable):
    if args.url:
        return HttpRetriever(args.url)
    if args.retriever != "web":
        return make(documents, args, device=args.device, runs=args.output_dir or "runs")
    from retrievers import web  # imported only where the web is searched

    words = web.WHOLE if args.page == "whole" else web.WINDOW
    return web.WebRetriever(args.retriever_url, args.allow_private, words)
