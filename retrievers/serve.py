"""Serves a retriever to other machines, in the protocol of remote.py, and checks a retriever.

    python retriever.py serve --corpus FILE, or --retriever web --retriever_url URL
    python retriever.py check --corpus FILE, --url URL, or both    exit code 1 if something is wrong

A GET or POST that cannot be served gets {"error": {"message": ...}} with status 400, 404, 413 or
500, and the server goes on. GET /health answers while the server runs. `check` finds faults that
training would not show: the lists of documents are in another order than the queries, or (with both
flags) the server has an index of another corpus.
Left out: encryption, passwords, and protection from hostile clients (use a reverse proxy).
"""

import json
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from operator import eq

from data import Document, load_corpus
from errors import FlagParser, InputError
from retrievers.net import RejectedRequest, shown

MAX_BODY = 16 * 2**20  # bytes of one request
HERE = "this server has POST /retrieve and GET /health"
# An unknown word, no words, and a thousand words.
ODD_QUERIES = ["zxqvkj", "", "?!", "\n", "kelmouth " * 1000]
COMMON_WORDS = "history city film born river music science war company language".split()


class RetrievalServer(ThreadingHTTPServer):
    """Serves a retriever at `host`:`port`. Port 0 takes a free port: see `server_port`."""

    daemon_threads = True  # so that Ctrl-C does not wait for a slow client
    request_queue_size = 512  # Trap: the default, 5, is too small for many clients at once

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000):
        self.retriever = retriever
        # Not every retriever is thread-safe, so searches run one at a time.
        self.lock = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"{host}:{port}: cannot listen there ({error}): give another --port or --host"
            ) from None

    def answer(self, body: bytes) -> tuple[int, dict | str]:
        """Returns (200, the reply) or (400 or 500, an error message)."""
        try:
            queries, k = read_request(body)
            with self.lock:
                lists = self.retriever.search(queries, k)
            return 200, {"result": [[to_json(document) for document in one] for one in lists]}
        except RejectedRequest as error:  # from `read_request`, or a search API rejected the query
            return 400, str(error)
        except Exception as error:  # a retriever may raise anything, but the server must go on
            line = f"the retriever failed: {type(error).__name__}: {shown(str(error))}"
            print(line, file=sys.stderr, flush=True)
            return 500, line

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # a client that disconnected is not an error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds that a client may send nothing
    # Trap: headers and body are sent separately, and the body would wait up to 40 ms for an ACK.
    disable_nagle_algorithm = True

    def do_GET(self):
        if self.path == "/health":
            self.send(200, {"status": "ok"})
        else:
            self.send(404, HERE)

    def do_POST(self):
        length = self.headers.get("Content-Length", "")
        if self.path.rstrip("/") != "/retrieve":
            self.send(404, HERE)
        elif not length.isdecimal() or int(length[:15]) > MAX_BODY:
            self.send(413, f"send at most {MAX_BODY:,} bytes, and their Content-Length")
        else:
            self.send(*self.server.answer(self.rfile.read(int(length))))

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
    """Reads {"queries": [text, ...], "topk": k}, where k is 5 by default, and returns (queries, k).
    Raises RejectedRequest for any other body. An empty query is accepted, so that the other queries
    of its batch still get their documents.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        raise RejectedRequest("the body is not JSON") from None
    queries = request.get("queries") if isinstance(request, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise RejectedRequest("'queries' must be a list of strings")
    k = request.get("topk", 5)
    if type(k) is not int or not 1 <= k <= 1000:  # isinstance would accept True
        raise RejectedRequest("'topk' must be a whole number from 1 to 1000")
    return queries, k


def to_json(document: Document) -> dict:
    """Returns one document of a reply. The title is put on one line, because the first line of
    `contents` is the title.
    """
    contents = f'"{" ".join(document.title.split())}"\n{document.text}'
    return {"document": {"id": document.id, "contents": contents}, "score": None}


def check(retriever, passages: list[Document], k: int = 5) -> list[tuple[bool, str]]:
    """Tests a retriever that should have these passages. Returns (passed, text) of each test, or
    one such pair if a search raises an error.
    """
    if not passages:
        raise InputError(
            "without --corpus the test uses the passages that searches for common words find, but"
            " they found none: give --corpus, or another address"
        )
    sample = passages[:: max(1, len(passages) // 20)]
    queries = list(dict.fromkeys(map(query_for, sample)))  # equal titles give one query
    try:
        alone = [retriever.search([query], k)[0] or [] for query in queries]
        together = retriever.search(queries, k)
        odd = retriever.search(ODD_QUERIES, k)
    except Exception as error:  # a retriever may raise anything, and this command reports it
        return [(False, f"it failed: {type(error).__name__}: {error}")]
    n = len(queries)
    hits = sum(q in map(query_for, documents) for q, documents in zip(queries, alone, strict=True))
    same = sum(map(eq, alone, together))
    return [
        (
            hits >= 0.9 * n,
            f"{hits} of {n} passages are among the {k} found by their title or first words",
        ),
        (same >= 0.9 * n, f"{same} of {n} queries find the same alone and in one batch"),
        (None not in odd, "queries of no words, an unknown word and 1000 words are answered"),
    ]


def query_for(passage: Document) -> str:
    """Returns the first 12 words of the title, or of the text if there is no title, as a query.
    `check` counts a passage as found if this function returns the same query for one of the found
    documents, so another passage with the same title is enough. Ids are not compared, because the
    server's may differ.
    """
    return " ".join((passage.title or passage.text).lower().split()[:12])


FLAGS = {  # name -> (default, help)
    "corpus": ("", "corpus file; not needed for the web or --url"),
    "retriever": ("bm25", "bm25, dense or web"),
    "title_boost": (1, "bm25: how often a title is counted"),
    "encoder": ("", "dense: hub name or directory of the encoder"),
    "output_dir": ("runs", "dense: folder whose subfolder vectors/ holds the vectors"),
    "retriever_url": ("", "web: address of the search API, with {query}"),
    "page_words": (150, "web: limit of words shown per page; give 2000 if a model summarises it"),
    "url": ("", "check: address of a server; --corpus is the corpus that it should have"),
    "host": ("127.0.0.1", "serve: address to listen on; 0.0.0.0 accepts every machine"),
    "port": (8000, "serve: port to listen on"),
}


def command(arguments: list[str], make: Callable) -> None:
    """Runs `serve` or `check` with their flags; `make` is retriever.make_retriever."""
    parser = FlagParser("retriever.py", description="Serves a retriever over HTTP, or checks one.")
    parser.add_argument("command", choices=["serve", "check"])
    for name, (default, text) in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--skip_bad", action="store_true", help="leave out malformed records")
    parser.add_argument(
        "--allow_private",
        action="store_true",
        help="web: also read addresses of the private network",
    )
    args = parser.parse_args(arguments)
    args.retriever = "http" if args.url else args.retriever
    for name, (default, text) in FLAGS.items():
        owner = text.partition(":")[0]
        foreign = owner in {"bm25", "dense", "web"} - {args.retriever}
        if foreign and getattr(args, name) != default:
            raise InputError(f"--{name}: only --retriever {owner} reads it: leave it out")
    args.retriever_url = args.url or args.retriever_url
    documents = load_corpus(args.corpus, args.skip_bad) if args.corpus else []
    if args.retriever == "web":
        from retrievers.web import WebRetriever  # imported only where the web is searched

        retriever = WebRetriever(args.retriever_url, args.allow_private, args.page_words)
    else:
        retriever = make(documents, args, runs=args.output_dir)
    if args.command == "serve":
        with RetrievalServer(retriever, args.host, args.port) as server:
            print(
                f"{args.retriever} {args.corpus or 'search'} at"
                f" http://{args.host}:{server.server_port}; Ctrl-C ends it",
                flush=True,
            )
            server.serve_forever()
    if not documents:  # without --corpus, the documents that common words find are used
        documents = [
            document for one in retriever.search(COMMON_WORDS, 5) for document in one or ()
        ]
    findings = check(retriever, documents)
    for passed, text in findings:
        print("ok   " if passed else "WRONG", text)
    sys.exit(not all(passed for passed, _ in findings))
