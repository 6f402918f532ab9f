"""Loading: what answers on a server's socket while its model is not there yet."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# Seconds that a request may take to come.
_SECONDS = 5


class _Loading(BaseHTTPRequestHandler):
    timeout = _SECONDS

    def do_GET(self) -> None:
        """Says 503, in the shape of all errors."""
        error = {"message": "the model is being loaded", "type": "server_error", "param": None, "code": "loading"}
        body = json.dumps({"error": error}).encode()
        self.send_response(503)
        for name, value in (("content-type", "application/json"), ("content-length", len(body)), ("retry-after", 1)):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_HEAD = do_GET

    def log_message(self, *arguments: object) -> None:
        """Nothing: who asks whether it is there asks often."""


@contextmanager
def loading(listener: socket.socket) -> Iterator[None]:
    """Inside, every request on a bound socket is refused with 503; the socket stays open."""
    server = ThreadingHTTPServer(listener.getsockname()[:2], _Loading, bind_and_activate=False)
    server.socket.close()
    server.socket, server.daemon_threads, server.block_on_close = listener, True, False
    server.server_activate()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
