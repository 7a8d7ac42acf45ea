"""One etcd endpoint's JSON gateway: a question, its answer, or why there is none.

Each question has a connection of its own, so that what was sent is known, and sent once.
"""

import asyncio
import io
import json
import ssl
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vmckpt.errors import UsageError

DEFAULT_PORT = 2379
# No answer of ours comes near.
_MOST_BYTES = 1 << 20
# A member that has no leader says so at once instead of waiting for one.
_HEADERS = (
    "Content-Type: application/json\r\nGrpc-Metadata-hasleader: true\r\nConnection: close\r\n"
)


class NotTakenError(Exception):
    """It was not sent, or the member refused it: nothing was changed by it, nor will be."""


class UnansweredError(Exception):
    """It was sent, and nobody knows what became of it."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Files (PEM) for TLS: whose certificates are believed, and who we are."""

    authority: Path
    certificate: Path
    key: Path


class Gateway:
    """An endpoint of etcd >= 3.4, `url` being http://HOST:PORT or https://HOST:PORT.

    Raises UsageError: the URL is none, or the credentials cannot be used.
    """

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise _no_endpoint(url, str(exc)) from exc
        if host is None or parts.scheme not in ("http", "https") or parts.path.strip("/"):
            raise _no_endpoint(url, "an endpoint is a scheme, a host and a port")
        if (parts.scheme == "https") != (credentials is not None):
            raise _no_endpoint(url, "https takes credentials, and credentials take https")
        self._host, self._port = host, port
        self._tls = _context(credentials) if credentials else None

    async def ask(self, path: str, question: object) -> dict[str, Any]:
        """What the endpoint answers. Raises NotTakenError, UnansweredError. Has no time limit."""
        body = json.dumps(question).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{_HEADERS}"
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except OSError as exc:
            raise NotTakenError(str(exc)) from exc
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = bytearray()
            while some := await reader.read(_MOST_BYTES):
                answer += some
                if len(answer) > _MOST_BYTES:
                    raise UnansweredError("its answer has no end")
        except OSError as exc:
            raise UnansweredError(f"the connection broke: {exc}") from exc
        finally:
            writer.transport.abort()
        return _parsed(bytes(answer))


class _Replay:
    """What http.client takes for a socket: an answer that is there as a whole."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parsed(answer: bytes) -> dict[str, Any]:
    try:
        response = HTTPResponse(_Replay(answer))  # type: ignore[arg-type]
        response.begin()
        value = json.loads(response.read())
    except (HTTPException, ValueError) as exc:
        raise UnansweredError(f"its answer makes no sense: {type(exc).__name__}: {exc}") from exc
    if not isinstance(value, dict):
        raise UnansweredError("its answer makes no sense: it is no object")
    if response.status == 200:
        header = value.get("header")
        if not isinstance(header, dict) or not str(header.get("revision")).isdecimal():
            raise UnansweredError("its answer makes no sense: it is none of etcd's")
        return value
    why = str(value.get("error") or value.get("message") or f"status {response.status}")
    # 408 is gRPC's "cancelled", on its way.
    refused = 400 <= response.status < 500 and response.status != 408
    if refused or "no leader" in why:
        raise NotTakenError(why)
    raise UnansweredError(why)


def _context(credentials: Credentials) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=credentials.authority)
        context.load_cert_chain(credentials.certificate, credentials.key)
    except OSError as exc:  # ssl.SSLError is one
        raise UsageError(
            "the credentials for etcd cannot be used",
            why=str(exc),
            remedy="give files in PEM: the authority's certificate, a client's, and its key",
        ) from exc
    return context


def _no_endpoint(url: str, why: str) -> UsageError:
    return UsageError(
        f"'{url}' is no endpoint of etcd",
        why=why,
        remedy="write e.g. http://127.0.0.1:2379, or https://etcd-1:2379 with credentials",
    )
