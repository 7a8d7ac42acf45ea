"""Metrics over HTTP, for Prometheus to come and get: GET /metrics, and nothing else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from vmckpt.errors import VmckptError
from vmckpt.metrics.exposition import CONTENT_TYPE

REQUEST_TIMEOUT_S = 10.0
MOST_LINES = 100


@asynccontextmanager
async def serving(
    address: str, port: int, collect: Callable[[], Awaitable[str]]
) -> AsyncIterator[int]:
    """Serve what `collect` gives, anew for each request, for the block; gives the port.

    Hosts are asked for one request at a time. Raises OSError when the address cannot be had.
    """
    one_at_a_time = asyncio.Lock()

    async def text() -> str:
        async with one_at_a_time:
            return await collect()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Whoever hangs up, is silent or sends no HTTP gets no answer.
        with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                method, path = await _request(reader)
            writer.write(await _answer(method, path, text))
            await writer.drain()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, address, port)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _request(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Method and path. Raises ValueError when it is no request."""
    method, path, _ = (await reader.readuntil(b"\n")).decode("ascii").split()
    for _ in range(MOST_LINES):
        if not (await reader.readuntil(b"\n")).strip():
            return method, path.partition("?")[0]
    raise ValueError("too many headers")


async def _answer(method: str, path: str, text: Callable[[], Awaitable[str]]) -> bytes:
    if method not in ("GET", "HEAD"):
        return _response("405 Method Not Allowed", "only GET\n", method)
    if path != "/metrics":
        return _response("404 Not Found", "see /metrics\n", method)
    try:
        return _response("200 OK", await text(), method)
    except VmckptError as exc:
        return _response("500 Internal Server Error", f"{exc.what}: {exc.why}\n", method)


def _response(status: str, body: str, method: str) -> bytes:
    content = body.encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {CONTENT_TYPE}\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if method == "HEAD" else content)
