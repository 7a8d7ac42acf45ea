"""One etcd endpoint's JSON gateway: sends a request; returns the answer, or why there is none.

Each request has its own connection, so that what was sent is known, and sent once.
"""

import asyncio
import io
import json
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.parse import urlsplit

from vmckpt.errors import UsageError
from vmckpt.lease.credentials import EtcdCredentials

DEFAULT_PORT = 2379
# Far above any answer to us.
_MOST_BYTES = 1 << 20
# etcd's errors for a token that has expired, or was issued by a member that has restarted since.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old")
# Answers that do not tell the fate of a write. 408 is gRPC's "cancelled": the write is on its way.
# 429 is etcd's "database space exceeded": sent before a write is proposed, or after it was applied
# (etcdserver, `quotaApplierV3.Txn`).
_UNDECIDED = (408, 429)
# etcd's error when its quota is used up, until its alarm is disarmed.
NO_SPACE = "database space exceeded"
# With it a member without a leader reports that immediately instead of waiting for one.
_HEADERS = (
    "Content-Type: application/json\r\nGrpc-Metadata-hasleader: true\r\nConnection: close\r\n"
)


class NotTakenError(Exception):
    """It was not sent, or the member refused it: it changed nothing, and never will."""


class GatewayUnansweredError(Exception):
    """It was sent, and its outcome is unknown."""


class Gateway:
    """An endpoint of etcd >= 3.4; `url` is http://HOST:PORT or https://HOST:PORT.

    Passwords are sent only over https. Raises UsageError: an invalid URL, or unusable credentials.
    """

    def __init__(self, url: str, credentials: EtcdCredentials | None = None) -> None:
        self.url = url
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or DEFAULT_PORT
        except ValueError as exc:
            raise _no_endpoint(url, str(exc)) from exc
        if host is None or parts.scheme not in ("http", "https") or parts.path.strip("/"):
            raise _no_endpoint(url, "an endpoint is a scheme, a host and a port")
        if credentials is not None and parts.scheme != "https":
            raise _no_endpoint(url, "credentials take https: else everybody on the way reads them")
        self._host, self._port = host, port
        given = credentials or EtcdCredentials()
        self._tls = given.tls() if parts.scheme == "https" else None
        self._user, self._password = given.user, given.password()
        self._token: str | None = None

    async def ask(self, path: str, question: object) -> dict[str, Any]:
        """The answer; without a time limit. Raises NotTakenError, GatewayUnansweredError."""
        if self._user and self._token is None:
            who = {"name": self._user, "password": self._password}
            answer = await self._post("/v3/auth/authenticate", who)
            if not isinstance(token := answer.get("token"), str):
                raise NotTakenError("it gives no token for the user and the password")
            self._token = token
        try:
            return await self._post(path, question)
        except NotTakenError as exc:
            if any(words in str(exc) for words in _STALE_TOKEN):
                self._token = None  # the next request gets another
            raise

    async def _post(self, path: str, question: object) -> dict[str, Any]:
        body = json.dumps(question).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{_HEADERS}"
        if self._token is not None:
            head += f"Authorization: {self._token}\r\n"
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except (OSError, RuntimeError) as exc:  # for example, no thread for a name lookup
            raise NotTakenError(str(exc)) from exc
        try:
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answer = bytearray()
            while some := await reader.read(_MOST_BYTES):
                answer += some
                if len(answer) > _MOST_BYTES:
                    raise GatewayUnansweredError("its answer is too long")
        except OSError as exc:
            raise GatewayUnansweredError(f"the connection broke: {exc}") from exc
        finally:
            writer.transport.abort()
        return _parsed(bytes(answer))


class _Replay:
    """What http.client takes for a socket: an answer that is complete."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, _mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _parsed(answer: bytes) -> dict[str, Any]:
    try:
        response = HTTPResponse(_Replay(answer))  # type: ignore[arg-type]
        response.begin()
        body = response.read()
    except (HTTPException, ValueError) as exc:
        raise GatewayUnansweredError(
            f"its answer is malformed: {type(exc).__name__}: {exc}"
        ) from exc
    is_refused = 400 <= response.status < 500 and response.status not in _UNDECIDED
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as exc:
        if is_refused:
            raise NotTakenError(body.decode(errors="replace").strip()) from exc
        raise GatewayUnansweredError(
            f"its answer is malformed: {type(exc).__name__}: {exc}"
        ) from exc
    if not isinstance(value, dict):
        raise GatewayUnansweredError("its answer is malformed: it is not an object")
    if response.status == 200:
        header = value.get("header")
        if not isinstance(header, dict) or not str(header.get("revision")).isdecimal():
            raise GatewayUnansweredError("its answer is malformed: it is not etcd's")
        return value
    why = str(value.get("error") or value.get("message") or f"status {response.status}")
    if is_refused or "no leader" in why:
        raise NotTakenError(why)
    raise GatewayUnansweredError(why)


def _no_endpoint(url: str, why: str) -> UsageError:
    return UsageError(
        f"'{url}' is not an endpoint of etcd",
        why=why,
        remedy="write e.g. http://127.0.0.1:2379, or https://etcd-1:2379",
    )
