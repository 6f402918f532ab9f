"""An OpenAI-compatible endpoint, played by a local server whose replies the test sets."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY = "sk-secret-0123456789"


def reply(text):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]})


class Server:
    """An endpoint: `answer(request) -> (status, headers, body)`; `requests` holds (path, headers, JSON) of each."""

    def __init__(self, answer):
        self.requests, self.most, self._now, lock = [], 0, 0, threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    server.requests.append((self.path, dict(self.headers), body))
                    server._now += 1
                    server.most = max(server.most, server._now)
                    number = len(server.requests)
                status, headers, text = answer(number, body)
                with lock:
                    server._now -= 1
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_POST

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


def in_turn(*replies):
    """The n-th request gets the n-th reply, and all later ones the last."""
    return lambda number, body: replies[min(number, len(replies)) - 1]


RIGHT = (200, {}, reply('{"score": 1}'))
