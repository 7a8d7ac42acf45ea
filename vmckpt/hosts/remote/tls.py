"""`vmckpt serve` over TLS between two hosts that do not otherwise trust each other.

The operator starts a listener on the destination, and gives the source its address, the fingerprint
of its one-time certificate, and a one-time token, all over SSH. The listener accepts any number of
connections with the token, and ends after minutes without one.
"""

import asyncio
import errno
import hmac
import json
import secrets
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Self, TypedDict

from vmckpt.codec import builtins, convert
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.one_time import make_one_time
from vmckpt.hosts.remote.link import SILENCE_S
from vmckpt.hosts.remote.serve import serve
from vmckpt.hosts.remote.session import ServeConnection
from vmckpt.state.durable import replace

CONNECT_TIMEOUT_S = 10.0
TOKEN_TIMEOUT_S = 10.0
# How long it listens without a connection: an interrupted job is recovered within it.
IDLE_S = 600.0
# Half of what is read ahead: each stop and restart of reading costs context switches.
READ_AHEAD_BYTES = 1 << 20
START_TIMEOUT_S = 30.0
# Connections that have not presented the token yet.
MOST_STRANGERS = 16
_ACCEPT_AGAIN_S, _BACKLOG = 0.1, 128
_LOOK_S = 0.5
_REQUEST, _LISTENS, _LOG = "link.json", "listens.json", "link.log"


Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class TlsEndpoint:
    """Where a destination listens, and the credentials of both sides."""

    address: str
    port: int
    fingerprint: str
    token: str


class _ListenRequest(TypedDict):
    """link.json: the address, the ports (0, 0: any), and the token for access."""

    address: str
    first: int
    last: int
    token: str


@dataclass(frozen=True, slots=True)
class _ListenAnswer:
    """listens.json: the port in use, and the certificate's fingerprint."""

    port: int
    fingerprint: str

    def __post_init__(self) -> None:
        if not 0 < self.port < 1 << 16:
            raise ValueError(f"{self.port} is not a port")


async def have_listen(host: Host, directory: Path, verb: Sequence[str] = ("link",)) -> TlsEndpoint:
    """Start a listener on the migration address of `host`; `directory` is removed after its end.

    `verb` are the words of vmckpt's command there that listens. Raises OperationFailedError with
    the destination's own words.
    """
    token = secrets.token_hex(32)
    first, last = host.migration_ports or (0, 0)
    address = host.migration_address
    request = _ListenRequest(address=address, first=first, last=last, token=token)
    await host.make_dir(directory)
    await host.write_text(directory / _REQUEST, json.dumps(request))
    command = [*await host.own_command(), *verb, str(directory)]
    listener = await host.spawn(command, directory / _LOG)
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while not await host.await_path(directory / _LISTENS, _LOOK_S):
        alive = await host.is_alive(listener)
        if not alive or asyncio.get_running_loop().time() > deadline:
            words = (await host.read_text(directory / _LOG) or "").strip().splitlines()
            await host.kill(listener)
            await host.remove(directory)
            raise OperationFailedError(
                f"{host.name} does not listen at {host.migration_address}",
                why="; ".join(words[-3:]) or f"not within {START_TIMEOUT_S:g} s",
                remedy=f"vmckpt host check {host.name}",
            )
    try:
        reply = convert(_ListenAnswer, parse(await host.read_text(directory / _LISTENS) or ""))
        return TlsEndpoint(host.migration_address, reply.port, reply.fingerprint, token)
    except MalformedError as exc:
        await host.kill(listener)
        await host.remove(directory)
        raise OperationFailedError(
            f"{host.name} does not say where it listens",
            why=str(exc),
            remedy=f"vmckpt host check {host.name}",
        ) from exc


async def open_link(name: str, endpoint: TlsEndpoint) -> ServeConnection:
    """A connection to the host `name`, which listens at `endpoint`. Raises HostDownError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Its fingerprint identifies it, not a name or a CA.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    where = f"{endpoint.address} port {endpoint.port}"
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                endpoint.address, endpoint.port, ssl=context, limit=READ_AHEAD_BYTES
            )
    except (OSError, TimeoutError) as exc:
        raise HostDownError(
            f"cannot reach {name} at {where}",
            why=str(exc) or f"no answer within {CONNECT_TIMEOUT_S:g} s",
            remedy="check the network between the hosts, and their firewalls",
        ) from exc
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    if not hmac.compare_digest(sha256(shown).hexdigest(), endpoint.fingerprint):
        writer.transport.abort()
        raise HostDownError(
            f"the process that listens at {where} is not {name}",
            why="it shows another certificate",
            remedy="find out who it is; nothing was sent there",
        )
    writer.write(f"{endpoint.token}\n".encode())
    return ServeConnection(reader, writer, partial(_refused, name, where))


async def _refused(name: str, where: str) -> HostDownError:
    return HostDownError(
        f"{name} does not respond at {where}",
        why="it accepted the connection and closed it",
        remedy="the link may have ended: start again",
    )


async def listen(directory: Path, state_dir: Path) -> None:
    """What `have_listen` starts: serve visitors with the token, until the directory is removed.

    Or until there was no connection for ten minutes. Open connections may then finish, for as long
    as a connection may be silent. Raises OperationFailedError.
    """
    visits = _Visits(state_dir)
    async with await listening(directory, visits.visit) as listener:
        await visits.until_over(directory)
        listener.close()
        await visits.end()
    import shutil  # costs 1 ms

    shutil.rmtree(directory, ignore_errors=True)


def token_of(directory: Path) -> str:
    """The token that visitors must present; read it before `listening`."""
    return _read_request(directory)["token"]


def _read_request(directory: Path) -> _ListenRequest:
    return convert(_ListenRequest, parse((directory / _REQUEST).read_text()))


class Listener:
    """Accepts TLS connections; `visit` is called for those that present the token.

    Connections that have not presented it are few and short-lived, so that no stranger exhausts
    this process's descriptors: at most MOST_STRANGERS at a time; the newest replaces the oldest.
    """

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, token: str, visit: Visit
    ) -> None:
        self._sock, self._context, self._token, self._visit = sock, context, token, visit
        # Oldest first.
        self._strangers: dict[asyncio.Task[None], None] = {}
        self._guests: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.ensure_future(self._accept())

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self._sock.getsockname()[1])

    def close(self) -> None:
        """Accept no more; those who presented the token stay until their visit ends."""
        self._accepting.cancel()
        for task in tuple(self._strangers):
            task.cancel()
        self._sock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        strangers = tuple(self._strangers)
        self.close()
        await asyncio.gather(self._accepting, *strangers, return_exceptions=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError:  # it has gone already, or no descriptor is free
                await asyncio.sleep(_ACCEPT_AGAIN_S)
                continue
            if len(self._strangers) >= MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.cancel()
            task = asyncio.ensure_future(self._admit(sock))
            self._strangers[task] = None
            task.add_done_callback(self._has_left)

    def _has_left(self, task: "asyncio.Task[None]") -> None:
        self._strangers.pop(task, None)
        self._guests.discard(task)
        if not task.cancelled() and (error := task.exception()):
            context = {"message": "a visit failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    async def _admit(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_AHEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(TOKEN_TIMEOUT_S):
                transport, _ = await loop.connect_accepted_socket(
                    lambda: protocol, sock, ssl=self._context
                )
                reply = await reader.readline()
            if not hmac.compare_digest(reply.strip(), self._token.encode()):
                return
            me = asyncio.current_task()
            if me is not None and me in self._strangers:
                del self._strangers[me]
                self._guests.add(me)
            if isinstance(transport, asyncio.WriteTransport):
                writer = asyncio.StreamWriter(transport, protocol, reader, loop)
                await self._visit(reader, writer)
        except (OSError, ValueError, TimeoutError):
            return  # it spoke an unknown protocol
        finally:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
            else:
                sock.close()


async def listening(directory: Path, visit: Visit) -> Listener:
    """The listener requested in `directory`, to which it writes its address.

    Raises OperationFailedError.
    """
    request = _read_request(directory)
    (directory / _REQUEST).unlink()
    one_time = make_one_time()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    pem = directory / "one-time.pem"
    replace(pem, one_time.key + one_time.certificate)
    context.load_cert_chain(pem)
    pem.unlink()
    sock = await _bind(request["address"], (request["first"], request["last"]))
    listener = Listener(sock, context, request["token"], visit)
    answer = _ListenAnswer(listener.port, one_time.fingerprint)
    replace(directory / _LISTENS, json.dumps(builtins(answer)))
    return listener


async def _bind(address: str, ports: tuple[int, int]) -> socket.socket:
    """Listen on the first free port of a range."""
    first, last = ports
    loop = asyncio.get_running_loop()
    for port in range(first, last + 1):
        try:
            found = await loop.getaddrinfo(address, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, where = found[0]
            return _bound(socket.socket(family, kind, protocol), where)
        except OSError as exc:
            if exc.errno != errno.EADDRINUSE or port == last:
                raise OperationFailedError(
                    f"cannot listen at {address}",
                    why=exc.strerror or str(exc),
                    remedy="give the host a migration address of its own and enough ports",
                ) from exc
    raise OperationFailedError(
        "cannot listen", why=f"the range {first}-{last} has no ports", remedy="fix the range"
    )


def _bound(sock: socket.socket, where: Any) -> socket.socket:
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


class _Visits:
    """The connections to a listener, and since when there are none."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._present: set[asyncio.StreamWriter] = set()

    async def visit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one visitor who presented the token."""
        self._present.add(writer)
        try:
            await serve(reader, writer, self._state_dir)
        finally:
            self._present.remove(writer)

    async def until_over(self, directory: Path) -> None:
        """Wait until the directory is removed, or no visitor came for IDLE_S."""
        loop = asyncio.get_running_loop()
        seen_s = loop.time()
        while directory.exists() and loop.time() - seen_s < IDLE_S:
            if self._present:
                seen_s = loop.time()
            await asyncio.sleep(_LOOK_S)

    async def end(self) -> None:
        """Let present visitors finish; then disconnect the rest, and release all they hold."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + SILENCE_S
        while self._present:
            if loop.time() > deadline:
                for writer in self._present:
                    writer.transport.abort()
            await asyncio.sleep(_LOOK_S)
