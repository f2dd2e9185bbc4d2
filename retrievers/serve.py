"""Offer a retriever to other machines, in the first protocol of remote.py.

    python retriever.py serve --corpus FILE [--retriever dense --encoder NAME]
    python retriever.py serve --retriever web --retriever_url 'http://host/search?q={query}'

A request that cannot be served gets {"error": {"message": ...}} with 400, 404, 413 or 500, and the
server lives on. Left out: encryption and passwords (put a proxy in front), several processes.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import Document, load_corpus
from errors import FlagParser, InputError, check_value
from retrievers.net import shown

MAX_BODY = 16 * 2**20  # bytes of one request
MAX_QUERIES, MAX_K, DEFAULT_K = 10_000, 1000, 5


class Refused(Exception):
    """(HTTP status, why a request is not served)"""


class RetrievalServer(ThreadingHTTPServer):
    """A retriever behind `host`:`port`; port 0 takes a free one, which `server_port` names."""

    daemon_threads = True  # Ctrl-C must not wait for a slow client
    request_queue_size = 512  # Trap: with the library's 5, clients that come together are lost

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000):
        self.retriever = retriever
        self.lock = threading.Lock()  # one search at a time: not every retriever is thread-safe
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            why = f"cannot listen there ({getattr(error, 'strerror', None) or error})"
            raise InputError(f"{host}:{port}: {why}: give another --port or --host") from None

    def answer(self, body: bytes) -> dict:
        queries, k = read_request(body)
        try:
            with self.lock:
                lists = self.search_scored(queries, k)
        except Exception as error:  # whatever a retriever raises: the next request may go well
            line = f"the retriever failed: {type(error).__name__}: {shown(str(error))}"
            print(line, file=sys.stderr, flush=True)
            raise Refused(500, line) from None
        return {"result": [[written(*pair) for pair in found] for found in lists]}

    def search_scored(self, queries: list[str], k: int) -> list[list[tuple[Document, object]]]:
        """With scores if the retriever has them, else None and not 0, which would be a score."""
        if hasattr(self.retriever, "search_scored"):
            return self.retriever.search_scored(queries, k)
        return [[(one, None) for one in found] for found in self.retriever.search(queries, k)]

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # a client that went away is no error
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds that a client may be silent
    # Trap: head and body go in two pieces, and the second would wait up to 40 ms for an ACK.
    disable_nagle_algorithm = True

    def do_POST(self):
        try:
            if self.path.rstrip("/") != "/retrieve":
                raise Refused(404, f"no POST {shown(self.path)} here, but POST /retrieve")
            status, reply = 200, self.server.answer(self.read_body())
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
        if not re.fullmatch("[0-9]{1,15}", length) or int(length) > MAX_BODY:
            raise Refused(413, f"send at most {MAX_BODY:,} bytes, and their Content-Length")
        return self.rfile.read(int(length))

    def log_message(self, *_):
        pass  # a line per request would be all that a terminal shows


def read_request(body: bytes) -> tuple[list[str], int]:
    """(queries, k) of a request; Refused if it is not in order. An empty query is in order: it must
    not cost the others their passages.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON ({shown(str(error))})") from None
    queries = request.get("queries") if isinstance(request, dict) else None
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise Refused(400, "'queries' must be a list of strings")
    if len(queries) > MAX_QUERIES:
        raise Refused(400, f"{len(queries):,} queries: send at most {MAX_QUERIES:,} at once")
    k = request.get("topk", DEFAULT_K)
    if type(k) is not int or not 1 <= k <= MAX_K:  # type(): True is an int
        raise Refused(400, f"'topk' must be a whole number from 1 to {MAX_K}")
    return queries, k


def written(document: Document, score: float | None) -> dict:
    """One passage of a reply. A title of two lines would be cut at the first."""
    contents = f'"{" ".join(document.title.split())}"\n{document.text}'
    return {"document": {"id": document.id, "contents": contents}, "score": score}


def serve_command(arguments: list[str], record: type, make_retriever: Callable) -> None:
    """`record` is retriever.RetrieverSettings: its fields are the flags."""
    parser = FlagParser("retriever.py serve", description="Offer a corpus to other machines.")
    parser.add_argument("--corpus", default="", help="a corpus file; the web needs none")
    add_settings(parser, record, ["bm25", "dense", "web"])
    parser.add_argument("--retriever_url", default="", help="web: the search API")
    parser.add_argument("--index_file", default="", help="dense: FAISS, row i is passage i")
    parser.add_argument("--page", choices=["whole", "window"], default="window", help="web")
    parser.add_argument("--allow_private", action="store_true", help="web: read this network too")
    parser.add_argument("--web_rate", type=float, default=5.0, help="web: API calls a second")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0 lets everybody in")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args(arguments)
    retriever = served_retriever(args, record, make_retriever)
    with RetrievalServer(retriever, args.host, args.port) as server:
        where = f"http://{args.host}:{server.server_port}"
        print(f"{args.retriever} {args.corpus or 'search'} at {where}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        print("\nended", flush=True)


def served_retriever(args, record: type, make_retriever: Callable):
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
    return make_retriever(documents, read_settings(args, record), device=args.device)


def add_settings(parser: FlagParser, record: type, retrievers: list[str]) -> None:
    """Flags that `serve` and `check` share: the fields of the settings record, and two more."""
    parser.add_argument("--retriever", choices=retrievers, default=retrievers[0])
    for f in fields(record):
        if f.name not in ("retriever", "retriever_url", "documents_per_search"):
            kind, help = type(f.default), f.metadata["help"]
            parser.add_argument(f"--{f.name}", type=kind, default=f.default, help=help)
    parser.add_argument("--device", default="", help="dense: cpu, cuda:0, ...; default: a free GPU")
    parser.add_argument("--skip_bad", action="store_true", help="leave out malformed records")


def read_settings(args, record: type):
    given = {f.name: getattr(args, f.name, f.default) for f in fields(record)}
    for f in fields(record):
        check_value(f.name, given[f.name], f.metadata)
    return record(**given)
