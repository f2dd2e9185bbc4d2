"""A retriever on another machine: queries go out over HTTP, passages come back; both ends, so that
a 21M-passage index can run where the memory is.

    POST /retrieve  {"queries": [text, ...], "topk": k, "return_scores": true}
                 -> {"result": [[{"document": {"id", "contents": "\\"Title\\"\\ntext"}, "score"},
                 ...], ...]}
    POST /queries   {"queries": [text, ...], "k": k}   ->   {"answers": [[text, ...], ...]}
    GET  /health -> {"status": "ok", "passages": N, "retriever": name}

`HttpRetriever` speaks whichever of the two a server understands: one query at construction finds
out. `RetrievalServer` serves any retriever of ours in both. What goes wrong ends in one of these,
and nothing waits for ever:
    the client   InputError at construction if nobody is there; later None for a query whose search
                 failed, and a `fetch.Fault` if there is nothing for any query of the call
    the server   {"error": {"message": ...}} with 400, 404, 405, 408, 411, 413 or 500; it lives on

One query that a server cannot take fails the whole batch. So a batch that failed in every try is
halved, and the half that fails again, until the bad query is alone: with n queries, 2 log2(n)
requests more for one bad query.

Traps. A common server fails where "return_scores" is false, so it is always asked for. And a server
may drop or double a list: paired with the queries by position, all that follow would get another
query's passages. Hence the count is checked. Left out: encryption and passwords (put a proxy in
front), several processes, connections that the client keeps open.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import Document, from_abstract, from_contents, from_title_text
from errors import FlagParser, InputError, run_main
from formats.records import id_field, short
from retrievers.net import (
    LRU,
    MAX_BACKOFF,
    Fault,
    Timed,
    fetch_json,
    host_of,
    left,
    retrying,
    shown,
)

REPLY_FIELD = {
    "/retrieve": "result",
    "/queries": "answers",
}  # path -> where its reply has the lists
NUMBER_FIELD = {"/retrieve": "topk", "/queries": "k"}
PROBE = "Is anybody there?"

Scored = list[tuple[Document, float | None]]  # best first; None where the retriever gives no scores


# --------------------------------------------------------------------------------------- the client


class HttpRetriever:
    """The retriever behind `url`: http://host:port, or that with /retrieve or /queries.

    timeout      seconds per try, for one batch; and for all of its halves together
    batch_size   queries per request; cache_size: results (query, k) that are remembered, the latest
                 used; 0 remembers none

    A call with Q queries that are not remembered ends, whatever the server does, within (the
    look-up of its name aside)

        ⌈Q / batch_size⌉ · ((retries + 2) · timeout + Σ backoffs)

    Raises InputError at construction if nobody is there who speaks either protocol.
    """

    needs_questions = False

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        retries: int = 2,
        batch_size: int = 256,
        cache_size: int = 10_000,
        backoff: float = 0.5,
    ):
        host_of(url, "http://host:port")
        self.timeout, self.retries, self.batch_size, self.backoff = (
            timeout,
            retries,
            batch_size,
            backoff,
        )
        self.cache = LRU(cache_size)
        self.base, self.path = self.find_protocol(url.rstrip("/"))

    def find_protocol(self, url: str) -> tuple[str, str]:
        """(base, path) of the first protocol that the server answers in. Each is tried once."""
        named = [path for path in REPLY_FIELD if url.endswith(path)]
        base, tried = url.removesuffix(named[0]) if named else url, []
        for path in named or REPLY_FIELD:
            try:
                self.ask(base, path, [PROBE], 1, self.timeout)
                return base, path
            except Fault as fault:
                tried.append(f"POST {base}{path}: {fault}")
        raise InputError(
            f"no retriever answers: {'; '.join(tried)}: start the server, or correct its address"
        )

    def seconds(self, queries: int, k: int) -> float:
        """How long a call with so many queries may take: the bound above."""
        waits = sum(min(self.backoff * 2**attempt, MAX_BACKOFF) for attempt in range(self.retries))
        return math.ceil(queries / self.batch_size) * ((self.retries + 2) * self.timeout + waits)

    def search(self, queries: list[str], k: int) -> list[list[Document] | None]:
        """At most k documents for each query, as the server ranks them; None for one that failed in
        a batch and alone too, or was not reached before the bound. Raises Fault if there is nothing
        for any query. What came is remembered: another call need not ask for it again.
        """
        if k < 1:
            return [[] for _ in queries]
        found = {query: self.cache.get((query, k)) for query in queries}  # each distinct one once
        missing = [query for query, documents in found.items() if documents is None]
        fault = None
        for start in range(0, len(missing), self.batch_size):
            try:
                found |= self.ask_batch(missing[start : start + self.batch_size], k)
            except Fault as error:
                fault = fault or error
                if not error.reached:  # nor would the next batch be
                    break
        if fault and all(documents is None for documents in found.values()):
            raise fault
        return [None if found[query] is None else list(found[query]) for query in queries]

    def ask_batch(self, batch: list[str], k: int) -> dict[str, list[Document]]:
        """The answers of a batch, or of what of it can be answered. Raises Fault if that is
        nothing.
        """
        try:
            return retrying(
                lambda: self.answers(batch, k, self.timeout), self.retries, self.backoff
            )
        except Fault as fault:
            # Nobody there, or HTTP 404: each half would hear the same.
            found = (
                self.ask_halves(batch, k)
                if fault.reached and (fault.retry or not fault.down)
                else {}
            )
            if not found:
                raise
            return found

    def ask_halves(self, batch: list[str], k: int) -> dict[str, list[Document]]:
        """Halve what failed until the bad queries are alone, the larger parts first: they hold most
        answers. `timeout` seconds for all of it; what one request may have of them is so much that
        one query that hangs, asked in log2(n) parts, takes half. And an end after so many failures
        that the server, and no query, is what is wrong (four bad queries are always told apart).
        """
        levels, deadline = math.ceil(math.log2(len(batch))), time.monotonic() + self.timeout
        found, failures, todo = {}, 0, halves(batch)
        while todo and failures < 4 * levels:
            part = todo.pop(0)
            try:
                found |= self.answers(part, k, min(self.timeout / (2 * levels), left(deadline)))
            except TimeoutError:
                break
            except Fault as fault:
                if not fault.reached:
                    break
                failures += 1
                todo += halves(part)
        return found

    def answers(self, queries: list[str], k: int, timeout: float) -> dict[str, list[Document]]:
        """One try of one batch, remembered."""
        found = dict(zip(queries, self.ask(self.base, self.path, queries, k, timeout), strict=True))
        for query, documents in found.items():
            self.cache.put((query, k), documents)
        return found

    def ask(
        self, base: str, path: str, queries: list[str], k: int, timeout: float
    ) -> list[list[Document]]:
        scores = {"return_scores": True} if path == "/retrieve" else {}
        reply = fetch_json(
            base + path, {"queries": queries, NUMBER_FIELD[path]: k, **scores}, timeout=timeout
        )
        return read_reply(reply, REPLY_FIELD[path], len(queries), k)


def halves(batch: list[str]) -> list[list[str]]:
    """
    >>> halves(["a", "b", "c"]), halves(["a"])
    ([['a'], ['b', 'c']], [])
    """
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]] if middle else []


def read_reply(reply: object, field: str, count: int, k: int) -> list[list[Document]]:
    """The lists of a reply, one per query. Any other shape is a Fault that may be tried again."""
    lists = reply.get(field) if isinstance(reply, dict) else None
    if not isinstance(lists, list) or not all(isinstance(items, list) for items in lists):
        raise wrong_shape(f"no list of lists under {field!r}: {shown(json.dumps(reply))}")
    if len(lists) != count:
        raise wrong_shape(f"{len(lists)} lists for {count} queries")
    documents = [[read_document(item) for item in items] for items in lists]
    return [[document for document in found if document is not None][:k] for found in documents]


def read_document(item: object) -> Document | None:
    """One passage in any of the forms that servers have for it; None for an empty slot.

    >>> read_document({"document": {"id": 7, "contents": '"Kelmouth"\\nA harbour city.'}, "score": 1.5})
    Document(id='7', title='Kelmouth', text='A harbour city.')
    """
    item = item["document"] if isinstance(item, dict) and "document" in item else item
    record = {"contents": item} if isinstance(item, str) else item
    if record is None:
        return None
    if not isinstance(record, dict):
        raise wrong_shape(f"no passage: {short(item)}")
    said = [record[name] for name in ("contents", "title", "text") if name in record]
    if said and not any(text.strip() if isinstance(text, str) else text for text in said):
        return None
    try:
        return read_record(record)
    except InputError as error:
        raise wrong_shape(f"no passage: {error}") from None


def read_record(record: dict) -> Document:
    """A passage as corpus files have it. Its own id if that is a string or a number, else one that
    its text decides: the same passage has the same id in every search.
    """
    contents = record.get("contents")
    if isinstance(contents, str) and contents.startswith("Title:") and " Text:" in contents:
        found = from_abstract({"id": "-", "passage": contents}, 0)
    else:
        found = (from_contents if contents else from_title_text)({**record, "id": "-"}, 0)
    # A lone surrogate is legal in JSON, and no tokenizer takes it.
    title, text = (part.encode("utf-8", "replace").decode() for part in (found.title, found.text))
    own = record.get(id_field(record))
    if isinstance(own, bool) or not isinstance(own, str | int | float) or own == "":
        own = hashlib.sha256(f"{title}\n{text}".encode()).hexdigest()[:16]
    return Document(str(own), title, text)


def wrong_shape(what: str) -> Fault:
    return Fault(f"wrong shape: {what}", retry=True)


# --------------------------------------------------------------------------------------- the server

MAX_BODY = 16 * 2**20  # bytes of one request
MAX_QUERIES, MAX_K, DEFAULT_K = 10_000, 1000, 5
# seconds in which a request must be there, whole: else a byte a second would keep a thread for ever
PATIENCE = 30.0
LINGER = 1.0  # seconds
HERE = "POST /retrieve, POST /queries or GET /health"


class Refused(Exception):
    """Why a request is not served, with its HTTP status."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


def read_request(path: str, body: bytes) -> tuple[list[str], int, bool]:
    """(queries, k, with scores?) of a request; Refused with 400 if it is not in order. No queries
    at all are in order, and so is a query that is empty: one row's odd query must not cost the
    others of its batch their passages.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no JSON ({error})") from None
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
    scores = request.get("return_scores") or False
    if not isinstance(scores, bool):
        raise Refused(400, "'return_scores' must be true or false")
    return queries, k, scores


def search_scored(retriever, queries: list[str], k: int) -> list[Scored]:
    """With scores, if the retriever has them; None and not 0 where it has none, which would be a
    score.
    """
    if hasattr(retriever, "search_scored"):
        return retriever.search_scored(queries, k)
    lists = retriever.search(queries, k)
    if (
        None in lists
    ):  # no reply has a place for that: with a 500 the client finds out which query it is
        raise RuntimeError(f"the search failed for {lists.count(None)} of {len(queries)} queries")
    return [[(document, None) for document in found] for found in lists]


def as_contents(document: Document) -> str:
    """What `from_contents` reads. A title of two lines would be cut at the first."""
    return f'"{" ".join(document.title.split())}"\n{document.text}'


def write_reply(path: str, found: list[Scored], scores: bool) -> dict:
    if path == "/queries":
        return {"answers": [[as_contents(document) for document, _ in one] for one in found]}
    listed = [
        [({"id": d.id, "contents": as_contents(d)}, score) for d, score in one] for one in found
    ]
    if not scores:
        return {"result": [[document for document, _ in one] for one in listed]}
    return {
        "result": [
            [{"document": document, "score": as_number(score)} for document, score in one]
            for one in listed
        ]
    }


def as_number(score) -> float | None:
    return None if score is None else float(score)  # numpy's numbers are none to JSON


class RetrievalServer(ThreadingHTTPServer):
    """A retriever behind `host`:`port`; port 0 takes a free one, which `server_port` names.

    One search at a time, each of a whole batch: not every retriever is thread-safe, and BM25 holds
    Python's own lock anyway.
    """

    daemon_threads = True  # Ctrl-C must not wait for a slow client
    request_queue_size = (
        512  # Trap: with the library's 5, clients that come together are made to wait, or lost
    )
    allow_reuse_port = False

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000, name: str = ""):
        if getattr(retriever, "needs_questions", False):
            raise InputError(
                "this retriever needs the question itself, which no request holds: serve"
                " another one"
            )
        self.retriever, self.name, self.lock = (
            retriever,
            name or type(retriever).__name__,
            threading.Lock(),
        )
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"{host}:{port}: cannot listen there ({why}): give another --port, or another"
                " --host"
            ) from None

    def respond(self, path: str, body: bytes) -> dict:
        queries, k, scores = read_request(path, body)
        try:
            with self.lock:
                found = search_scored(self.retriever, queries, k) if queries else []
            return write_reply(path, found, scores)
        except Exception as error:  # whatever a retriever raises: the next request may go well
            line = f"the retriever failed: {type(error).__name__}: {shown(str(error))}"
            print(line, file=sys.stderr, flush=True)
            raise Refused(500, line) from None

    def health(self) -> dict:
        documents = getattr(self.retriever, "documents", None)
        return {
            "status": "ok",
            "passages": None if documents is None else len(documents),
            "retriever": self.name,
        }

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), OSError):  # a client that went away is no error
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = PATIENCE
    # Trap: head and body go in two pieces, and the second would wait up to 40 ms for an ACK
    disable_nagle_algorithm = True

    def setup(self):
        super().setup()
        self.incoming = Timed(self.rfile.detach(), self.connection, 0.0)
        self.rfile = io.BufferedReader(self.incoming)

    def handle_one_request(self):
        self.incoming.deadline = time.monotonic() + self.timeout
        super().handle_one_request()

    def do_GET(self):
        path = self.plain_path()
        if path == "/health":
            self.answer(200, self.server.health())
        elif path in REPLY_FIELD:
            self.send_error(405, f"{path} is asked with POST")
        else:
            self.send_error(404, f"no {shown(path)} here, but {HERE}")

    def do_POST(self):
        path = self.plain_path()
        try:
            if path not in REPLY_FIELD:
                raise Refused(
                    405 if path == "/health" else 404, f"no POST {shown(path)} here, but {HERE}"
                )
            self.answer(200, self.server.respond(path, self.read_body()))
        except Refused as refused:
            self.send_error(refused.status, str(refused))

    def plain_path(self) -> str:
        return self.path.partition("?")[0].rstrip("/")

    def read_body(self) -> bytes:
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refused(411, "no Content-Length: send the body in one piece, not in chunks")
        if not (length.isascii() and length.isdigit()):
            raise Refused(400, f"Content-Length {shown(length)}: no number of bytes")
        if (
            len(length) > 15 or int(length) > MAX_BODY
        ):  # 15 first: int() refuses thousands of digits
            raise Refused(413, f"the body is too large: at most {MAX_BODY:,} bytes")
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise Refused(
                408, f"the request was not there, whole, within {self.timeout:g} s"
            ) from None
        if len(body) < int(length):
            raise Refused(400, f"half a body: {int(length) - len(body):,} bytes are missing")
        return body

    def send_error(self, code: int, message: str | None = None, explain: str | None = None):
        """Ours, and what the library itself finds wrong with a request. The connection ends: a body
        that was not read would be taken for the next request.
        """
        self.close_connection = True
        self.answer(
            code, {"error": {"message": message or self.responses.get(code, ("refused",))[0]}}
        )
        self.linger()

    def answer(self, status: int, reply: dict) -> None:
        body = json.dumps(reply).encode()
        try:
            self.connection.settimeout(
                self.timeout
            )  # reading has left it at what remained of its time
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client went away, which is its own choice
            self.close_connection = True

    def linger(self) -> None:
        """Trap: to close with unread bytes resets the connection, and a client that is still
        sending never reads why. So read on for a moment, and throw it away.
        """
        deadline = time.monotonic() + LINGER
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.incoming.deadline = deadline
            while time.monotonic() < deadline and self.rfile.read1(65536):
                pass

    def log_message(self, *_):
        pass  # a line per request would be all that a terminal shows


def serve(retriever, host: str = "127.0.0.1", port: int = 8000, name: str = "") -> None:
    """Serve until Ctrl-C. Raises InputError where the port is taken."""
    with RetrievalServer(retriever, host, port, name) as server:
        passages = server.health()["passages"]
        what = server.name if passages is None else f"{server.name} over {passages:,} passages"
        where = f"[{host}]" if ":" in host else host
        print(f"{what} at http://{where}:{server.server_port} ({HERE}); Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        print("\nended", flush=True)


# ------------------------------------------------------------------------------------ on one screen


class _SharedWords:
    """Most words in common first: enough for three passages."""

    documents = [
        Document("1", "Ana Bell", "Ana Bell was born in Kelmouth and draws maps of the coast."),
        Document("2", "Kelmouth", "Kelmouth is a harbour city in the north of Norland."),
        Document("3", "Tidewerk", "Tidewerk is a company in Kelmouth that builds lanterns."),
    ]

    def search_scored(self, queries: list[str], k: int) -> list[Scored]:
        return [
            sorted(((d, self.score(query, d)) for d in self.documents), key=lambda pair: -pair[1])[
                :k
            ]
            for query in queries
        ]

    def score(self, query: str, document: Document) -> int:
        return len({*query.lower().split()} & {*document.text.lower().split()})


def main() -> None:
    parser = FlagParser(
        description="Ask a retrieval server; without one, a small one of this file's own."
    )
    parser.add_argument("query", nargs="?", default="where was ana bell born")
    parser.add_argument("--url", default="", help="http://host:port")
    parser.add_argument("-k", type=int, default=2, help="how many passages")
    args = parser.parse_args()
    with RetrievalServer(_SharedWords(), port=0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}"
        for url in [args.url] if args.url else [here, f"{here}/queries"]:
            retriever = HttpRetriever(url)
            print(f"POST {retriever.base}{retriever.path}  {args.query!r}")
            for rank, document in enumerate(retriever.search([args.query], args.k)[0], 1):
                print(f"  {rank}. [{document.id}] {document.title}: {document.text}")
        for body in [] if args.url else [{"queries": "x"}, {"queries": ["x"], "topk": True}]:
            try:
                fetch_json(f"{here}/retrieve", body)
            except Fault as fault:
                print(f"{json.dumps(body):32} -> {fault}")
        server.shutdown()


if __name__ == "__main__":
    run_main(main)
