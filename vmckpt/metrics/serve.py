"""Metrics over HTTP, for Prometheus to scrape: GET /metrics, and nothing else."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, suppress
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Metric, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from vmckpt.errors import VmckptError
from vmckpt.metrics.families import KnownMetrics

REQUEST_TIMEOUT_S = 10.0
# Limits of concurrent connections: without a request yet, and with an answer in progress.
MOST_SILENT, MOST_ASKING = 32, 32
_TEXT = [("Content-Type", "text/plain; charset=utf-8")]


@asynccontextmanager
async def serving(
    address: str, port: int, collect: Callable[[], Awaitable[Iterable[Metric]]]
) -> AsyncIterator[int]:
    """Serve the result of `collect`, called for each request, during the block; yields the port.

    Requests are answered in threads; hosts are asked on this event loop, for one request at a time.
    Raises OSError when the address is not available.
    """
    loop, one_at_a_time = asyncio.get_running_loop(), asyncio.Lock()

    async def collected() -> Iterable[Metric]:
        async with one_at_a_time:
            return await collect()

    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(
        KnownMetrics(lambda: asyncio.run_coroutine_threadsafe(collected(), loop).result())
    )
    found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    family, (host, *_) = found[0][0], found[0][4]

    class Server(_MetricsServer):
        address_family = family

    app = _metrics_only(make_wsgi_app(registry))
    with make_server(str(host), port, app, Server, _Handler) as server:
        # A client that disconnected before accept(2) must not block the event loop.
        server.socket.setblocking(False)
        loop.add_reader(server, server.handle_request)
        try:
            yield server.server_port
        finally:
            loop.remove_reader(server)


class _MetricsServer(ThreadingWSGIServer):
    """Any local user may connect: limit connections, so that they cannot use up the descriptors.

    Among connections without a request, the oldest is closed for the newest.
    """

    timeout = 0  # handle_request does not wait
    request_queue_size = 128

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        # Oldest first. Added on the event loop, removed by their threads.
        self._silent, self._asking = dict[Any, None](), dict[Any, None]()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a separate thread, or close it."""
        if len(self._asking) >= MOST_ASKING:
            self.shutdown_request(request)
            return
        if len(self._silent) >= MOST_SILENT:
            oldest = next(iter(self._silent))
            self._silent.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its thread sees the disconnect
        self._silent[request] = None
        super().process_request(request, client_address)

    def heard(self, request: Any) -> None:
        """The request is complete: its whole head has arrived."""
        self._silent.pop(request, None)
        self._asking[request] = None

    def shutdown_request(self, request: Any) -> None:
        """The connection is finished."""
        self._silent.pop(request, None)
        self._asking.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that disconnects or stays silent is not an error here."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_TIMEOUT_S
    error_message_format = ""
    server: _MetricsServer

    def parse_request(self) -> bool:
        """Whether the request is valid."""
        is_one = super().parse_request()
        if is_one:
            self.server.heard(self.connection)
        return is_one

    def log_message(self, *_: object) -> None:
        """Requests are not logged."""


def _metrics_only(app: WSGIApplication) -> WSGIApplication:
    """Serve `app` at /metrics only, also for HEAD; errors go to the client."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        status, headers, body = _respond(app, environ)
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return answer


def _respond(
    app: WSGIApplication, environ: WSGIEnvironment
) -> tuple[str, list[tuple[str, str]], bytes]:
    """Status, headers and body."""
    if environ["PATH_INFO"] != "/metrics":
        return "404 Not Found", _TEXT, b"see /metrics\n"
    is_head = environ["REQUEST_METHOD"] == "HEAD"
    started: list[Any] = []
    try:
        content = app(
            environ | {"REQUEST_METHOD": "GET"} if is_head else environ,
            lambda *given: started.extend(given),  # type: ignore[arg-type]
        )
    except VmckptError as exc:
        return "500 Internal Server Error", _TEXT, f"{exc.what}: {exc.why}\n".encode()
    except CancelledError:
        return "503 Service Unavailable", _TEXT, b"the service is ending\n"
    status, headers = started
    return status, headers, b"".join(content)
