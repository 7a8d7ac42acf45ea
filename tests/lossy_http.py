"""An HTTP proxy that loses answers at random: the request was done, or was not, and none says."""

import http.client
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

CHANGING = ("PUT", "POST", "DELETE")


class Answer(NamedTuple):
    """What is said instead; with `cut` the connection ends so many bytes before the end of it."""

    status: int
    data: bytes
    cut: int = 0


# Of a request's method and path, and what carries it out: what is said instead, or None.
Twist = Callable[[str, str, Callable[[], bytes]], Answer | None]


class Losses:
    """How many answers to requests that change something were lost, done and not done.

    `twist` says something else instead, or None.
    """

    twist: Twist = staticmethod(lambda method, path, passed: None)

    def __init__(self, seed: int, ratio: float) -> None:
        self.done = self.undone = self.requests = 0
        self._rng, self._ratio, self._lock = random.Random(seed), ratio, threading.Lock()

    def draw(self, method: str) -> str:
        """What becomes of one request: "answered", "done" or "undone"."""
        with self._lock:
            self.requests += 1
            if method not in CHANGING or self._rng.random() >= self._ratio:
                return "answered"
            if self._rng.random() < 0.7:
                self.done += 1
                return "done"
            self.undone += 1
            return "undone"


@contextmanager
def lossy_proxy(port: int, losses: Losses) -> Iterator[str]:
    """Its URL, for the block; it passes requests on to `port` of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fate = losses.draw(self.command)
            if fate == "undone":
                self.close_connection = True
                return

            def passed() -> tuple[http.client.HTTPResponse, bytes]:
                upstream = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                try:
                    upstream.request(self.command, self.path, body, dict(self.headers.items()))
                    answer = upstream.getresponse()
                    return answer, answer.read()
                finally:
                    upstream.close()

            if said := losses.twist(self.command, self.path, lambda: passed()[1]):
                self.say(said)
                return
            answer, data = passed()
            if fate == "done":
                self.close_connection = True
                return
            self.send_response_only(answer.status, answer.reason)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                    self.send_header(name, value)
            length = answer.headers.get("Content-Length", "0") if self.command == "HEAD" else None
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def say(self, said: Answer) -> None:
            self.send_response_only(said.status)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(said.data)))
            self.end_headers()
            self.wfile.write(said.data[: len(said.data) - said.cut])
            self.close_connection = bool(said.cut)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = pass_on  # noqa: N815 - http.server's names

        def handle(self) -> None:
            with suppress(OSError):  # its client was killed
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
