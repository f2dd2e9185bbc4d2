"""Offer a retriever to other machines, in the two protocols of remote.py.

    python retriever.py serve --corpus FILE [--retriever dense --encoder NAME]
    python retriever.py serve --retriever web --retriever_url 'http://host/search?q={query}'

A request that cannot be served gets {"error": {"message": ...}} with 400, 404, 411, 413 or 500, and
the server lives on. GET /health says what is served. Left out: encryption and passwords (put a
proxy in front), several processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import Document, load_corpus
from errors import FlagParser, InputError, check_value
from retrievers.net import shown
from retrievers.remote import NUMBER_FIELD, REPLY_FIELD

MAX_BODY = 16 * 2**20  # bytes of one request
MAX_QUERIES, MAX_K, DEFAULT_K = 10_000, 1000, 5
HERE = "POST /retrieve, POST /queries or GET /health"


class Refused(Exception):
    """(HTTP status, why a request is not served)"""


class RetrievalServer(ThreadingHTTPServer):
    """A retriever behind `host`:`port`; port 0 takes a free one, which `server_port` names. One
    search at a time, each of a whole batch: not every retriever is thread-safe.
    """

    daemon_threads = True  # Ctrl-C must not wait for a slow client
    request_queue_size = 512  # Trap: with the library's 5, clients that come together are lost
    allow_reuse_port = False

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000, name: str = ""):
        if retriever.needs_questions:
            raise InputError("this retriever needs the question, which no request holds")
        self.retriever, self.name = retriever, name or type(retriever).__name__
        self.lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = f"cannot listen there ({getattr(error, 'strerror', None) or error})"
            raise InputError(f"{host}:{port}: {why}: give another --port or --host") from None

    def respond(self, path: str, body: bytes) -> dict:
        queries, k, scores = read_request(path, body)
        try:
            with self.lock:
                found = search_scored(self.retriever, queries, k) if queries else []
        except Exception as error:  # whatever a retriever raises: the next request may go well
            line = f"the retriever failed: {type(error).__name__}: {shown(str(error))}"
            print(line, file=sys.stderr, flush=True)
            raise Refused(500, line) from None
        return {REPLY_FIELD[path]: [[written(path, *pair, scores) for pair in f] for f in found]}

    def health(self) -> dict:
        documents = getattr(self.retriever, "documents", None)
        count = None if documents is None else len(documents)
        said = {"status": "ok", "passages": count, "retriever": self.name}
        return said | getattr(self.retriever, "counts", {})  # of the web: what was read, or not

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # a client that went away is no error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds that a client may be silent
    # Trap: head and body go in two pieces, and the second would wait up to 40 ms for an ACK.
    disable_nagle_algorithm = True

    def do_GET(self):
        self.reply(lambda path: self.server.health(), ["/health"])

    def do_POST(self):
        self.reply(lambda path: self.server.respond(path, self.read_body()), REPLY_FIELD)

    def reply(self, work: Callable[[str], dict], paths) -> None:
        status, path = 200, self.path.partition("?")[0].rstrip("/")
        try:
            if path not in paths:
                raise Refused(404, f"no {self.command} {shown(path)} here, but {HERE}")
            reply = work(path)
        except Refused as refused:
            status, reply = refused.args[0], {"error": {"message": refused.args[1]}}
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def read_body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            raise Refused(411, "no Content-Length: send the body in one piece, not in chunks")
        # Its own length first: int() refuses thousands of digits.
        if len(length) > 15 or int(length) > MAX_BODY:
            raise Refused(413, f"the body is too large: at most {MAX_BODY:,} bytes")
        return self.rfile.read(int(length))

    def log_message(self, *_):
        pass  # a line per request would be all that a terminal shows


def read_request(path: str, body: bytes) -> tuple[list[str], int, bool]:
    """(queries, k, with scores?) of a request; Refused with 400 if it is not in order. No query at
    all is in order, and so is an empty one: it must not cost the others their passages.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON ({shown(str(error))})") from None
    if not isinstance(request, dict):
        raise Refused(400, 'the body is no object: send {"queries": ["..."]}')
    queries, number = request.get("queries"), NUMBER_FIELD[path]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise Refused(400, "'queries' must be a list of strings")
    if len(queries) > MAX_QUERIES:
        raise Refused(400, f"{len(queries):,} queries: send at most {MAX_QUERIES:,} at once")
    k = DEFAULT_K if request.get(number) is None else request[number]
    if type(k) is not int or not 1 <= k <= MAX_K:  # type(): True is an int
        raise Refused(400, f"{number!r} must be a whole number from 1 to {MAX_K}")
    return queries, k, bool(request.get("return_scores"))


def search_scored(retriever, queries: list[str], k: int) -> list[list[tuple[Document, object]]]:
    """With scores if the retriever has them, else None and not 0, which would be a score."""
    if hasattr(retriever, "search_scored"):
        return retriever.search_scored(queries, k)
    lists = retriever.search(queries, k)
    if None in lists:  # no reply has a place for that: by a 500 the client learns which query it is
        raise RuntimeError(f"the search failed for {lists.count(None)} of {len(queries)} queries")
    return [[(document, None) for document in found] for found in lists]


def written(path: str, document: Document, score: float | None, scores: bool) -> object:
    """One passage of a reply. A title of two lines would be cut at the first."""
    contents = f'"{" ".join(document.title.split())}"\n{document.text}'
    record = {"id": document.id, "contents": contents}
    if path == "/queries":
        return contents
    return {"document": record, "score": score} if scores else record


def serve_command(arguments: list[str], record: type, make_retriever: Callable) -> None:
    """`record` is retriever.RetrieverSettings: its fields are the flags."""
    parser = FlagParser("retriever.py serve", description="Offer a corpus to other machines.")
    parser.add_argument("--corpus", default="", help="a corpus file; the web needs none")
    add_settings(parser, record, ["bm25", "dense", "web"])
    parser.add_argument("--index_file", default="", help="dense: FAISS, row i is passage i")
    parser.add_argument("--page", choices=["whole", "window"], default="window", help="web")
    parser.add_argument("--allow_private", action="store_true", help="web: read this network too")
    parser.add_argument(
        "--web_rate", type=float, default=5.0, help="web: API calls a second; 0: any"
    )
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets everybody in")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    retriever = served_retriever(args, record, make_retriever)
    with RetrievalServer(retriever, args.host, args.port, args.retriever) as server:
        count = server.health()["passages"]
        what = server.name if count is None else f"{server.name} over {count:,} passages"
        where = f"[{args.host}]" if ":" in args.host else args.host
        print(f"{what} at http://{where}:{server.server_port} ({HERE}); Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        print("\nended", flush=True)


def served_retriever(args: argparse.Namespace, record: type, make_retriever: Callable):
    if args.retriever == "web":
        from retrievers.web import WebRetriever  # a door: only here is the web searched

        whole = args.page == "whole"
        return WebRetriever(args.retriever_url, args.allow_private, args.web_rate, whole)
    if not args.corpus:
        raise InputError("retriever.py serve: give a --corpus FILE")
    documents = load_corpus(args.corpus, args.skip_bad)
    if args.index_file:
        from retrievers.dense import DenseRetriever  # a door: BM25 loads no torch

        return DenseRetriever(documents, args.encoder, args.device, args.index_file)
    return make_retriever(documents, read_settings(args, record), args.seed, device=args.device)


def add_settings(parser: FlagParser, record: type, retrievers: list[str]) -> None:
    """Flags that `serve` and `check` share: the fields of the settings record, and some more."""
    parser.add_argument("--retriever", choices=retrievers, default=retrievers[0])
    for f in fields(record):
        if f.name not in ("retriever", "documents_per_search"):
            kind, help = type(f.default), f.metadata["help"]
            parser.add_argument(f"--{f.name}", type=kind, default=f.default, help=help)
    parser.add_argument("--device", default="", help="dense: cpu, cuda:0, ...; default: a free GPU")
    parser.add_argument("--seed", type=int, default=0, help="random")
    parser.add_argument("--skip_bad", action="store_true", help="leave out malformed records")


def read_settings(args: argparse.Namespace, record: type):
    names = [f.name for f in fields(record) if hasattr(args, f.name)]
    for f in fields(record):
        check_value(f.name, getattr(args, f.name, f.default), f.metadata)
    return record(**{name: getattr(args, name) for name in names})
