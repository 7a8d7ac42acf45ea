"""One HTTP request, of which only the head of the answer is read: a guest may control the rest."""

import asyncio
import re
from http.client import parse_headers
from io import BytesIO
from typing import NamedTuple
from urllib.parse import quote, urlsplit

_PORTS = {"http": 80, "https": 443}
_WORDS = "User-Agent: vmckpt\r\nAccept: */*\r\nConnection: close\r\n"
_STATUS = re.compile(rb"HTTP/\d\.\d (\d{3})([^\n]*)\n")
_HEAD_END = re.compile(rb"\n\r?\n")
_MOST_HEAD_BYTES = 64 << 10


class HttpAnswer(NamedTuple):
    """The status, its reason, and the redirect, if any."""

    code: int
    reason: str
    location: str


async def request(url: str, json_body: bytes | None = None) -> HttpAnswer:
    """Send GET, or POST with a body; without a proxy or a time limit, following no redirect.

    Raises OSError, ValueError (no URL of a web server, or the answer is not one), HTTPException.
    """
    parts = urlsplit(url)
    if not parts.hostname or parts.scheme not in _PORTS:
        raise ValueError(f"'{url}' is not a URL of a web server")
    port = parts.port or _PORTS[parts.scheme]
    secure = True if parts.scheme == "https" else None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    what = quote(parts.path or "/", safe="/%:@!$&'()*+,;=~")
    what += f"?{quote(parts.query, safe='/?%:@!$&()*+,;=~')}" if parts.query else ""
    verb, words = "GET", _WORDS
    if json_body is not None:
        verb = "POST"
        words += f"Content-Type: application/json\r\nContent-Length: {len(json_body)}\r\n"
    head = f"{verb} {what} HTTP/1.1\r\nHost: {host}:{port}\r\n{words}\r\n".encode()
    reader, writer = await asyncio.open_connection(parts.hostname, port, ssl=secure)
    try:
        writer.write(head + (json_body or b""))
        return _answer(await _head(reader))
    finally:
        writer.transport.abort()


async def _head(reader: asyncio.StreamReader) -> bytes:
    head = bytearray()
    while not _HEAD_END.search(head) and (more := await reader.read(_MOST_HEAD_BYTES)):
        head += more
        if len(head) > _MOST_HEAD_BYTES:
            raise ValueError("the header of its answer is too long")
    return bytes(head)


def _answer(head: bytes) -> HttpAnswer:
    status = _STATUS.match(head)
    if status is None:
        raise ValueError("it does not answer as a web server does")
    headers = parse_headers(BytesIO(head[status.end() :]))
    reason = status[2].decode(errors="replace").strip()
    return HttpAnswer(int(status[1]), reason, headers["Location"] or "")
