"""Serves a retriever to other machines, in the protocol of remote.py.

    python retriever.py serve --corpus FILE, or --retriever web --retriever_url URL

A request that cannot be read, or that the retriever fails on, gets {"error": message} with status
500, one that a search API rejects 400, and the server goes on.
Left out: encryption, passwords, and protection from hostile clients (use a reverse proxy).
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from data import Document
from retrievers.net import Fault, RejectedRequest, shown


class RetrievalServer(ThreadingHTTPServer):
    """Serves a retriever at `host`:`port`. Port 0 takes a free port: see `server_port`."""

    daemon_threads = True  # so that Ctrl-C does not wait for a slow client
    request_queue_size = 512  # Trap: the default, 5, is too small for many clients at once

    def __init__(self, retriever, host: str = "127.0.0.1", port: int = 8000):
        self.retriever = retriever
        self.lock = threading.Lock()  # not every retriever is thread-safe: one search at a time
        super().__init__((host, port), Handler)

    def handle_error(self, request, client_address):
        pass  # a client disconnected; `Handler` reports all other errors


class Handler(BaseHTTPRequestHandler):
    timeout = 30.0  # seconds that a client may send nothing
    # Trap: headers and body are sent separately, and the body would wait up to 40 ms for an ACK.
    disable_nagle_algorithm = True

    def do_POST(self):
        try:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            queries, k = [*map(str, request["queries"])], int(request.get("topk", 5))
            with self.server.lock:
                lists = self.server.retriever.search(queries, k)
            if False in lists:
                raise RejectedRequest("a query was rejected")
            if None in lists:
                raise Fault("a search failed")
            status, reply = 200, {"result": [[*map(to_json, one)] for one in lists]}
        except Exception as error:  # a retriever may raise anything, but the server must go on
            status = 400 if isinstance(error, RejectedRequest) else 500
            reply = {"error": f"{type(error).__name__}: {shown(str(error))}"}
            print(reply["error"], file=sys.stderr, flush=True)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()  # the body ends with the connection
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass  # a line per request would fill the terminal


def to_json(document: Document) -> dict:
    """Returns one document of a reply. The title is put on one line, because the first line of
    `contents` is the title.
    """
    contents = f'"{" ".join(document.title.split())}"\n{document.text}'
    return {"document": {"id": document.id, "contents": contents}, "score": None}
