"""The near side: requests over a connection that is opened on first use, and again if lost."""

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt import __version__
from vmckpt.codec import convert, require_within
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.foreign import MalformedError
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.remote.frames import (
    MAGIC,
    PROTOCOL,
    Frame,
    ProtocolError,
    RpcFrameKind,
    broken,
    read_frame,
    with_json,
)
from vmckpt.hosts.remote.link import SILENCE_S, FrameLink, LinkLostError
from vmckpt.hosts.remote.stream import ByteStream
from vmckpt.hosts.remote.values import pack, unpack_error
from vmckpt.sequence.steps import to_the_end

HELLO_TIMEOUT_S = 20.0
# An unreachable host is not retried at once: a command makes many requests.
DOWN_FOR_S = 2.0
CANCEL_TIMEOUT_S = 5.0
FREED_TIMEOUT_S = SILENCE_S + 10.0
# A host that sends heartbeats but answers no request counts as down, and gets no request for a
# while. Reading a whole file takes a time that depends on its length.
ANSWER_S, UNANSWERED_FOR_S = 120.0, 60.0
_WITHOUT_LIMIT = frozenset({"fingerprint"})
# Additional time limits, by the request's own arguments.
_LIMITS = ("timeout_s", "within_s", "wait_s")
# What a call of `Host` may raise on the host.
_OF_QUESTIONS = (HostDownError, StorageError, RefusedError, BusyError, OutcomeUnknownError)


class ServeConnection(NamedTuple):
    """A connection to a `vmckpt serve`, and a function that explains the far side's silence.

    `why_silent` is called after the connection ended without a greeting.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    why_silent: Callable[[], Awaitable[HostDownError]]


Open = Callable[[], Awaitable[ServeConnection]]


class UnansweredError(LinkLostError):
    """A connection that was closed because a request over it got no answer."""


class Greeting(NamedTuple):
    """The far side's greeting. `address` is its own, on which the connection came in."""

    version: str
    state_dir: Path
    address: str | None


@dataclass(frozen=True, slots=True)
class _Hello:
    """The first frame."""

    protocol: int
    version: str
    state_dir: Path
    address: str | None = None

    def __post_init__(self) -> None:
        require_within("protocol", self.protocol)

    @classmethod
    def of(cls, reply: object) -> "_Hello":
        """Raises ProtocolError."""
        try:
            return convert(cls, reply)
        except MalformedError as exc:
            raise broken(f"its greeting: {exc}") from exc


class Session:
    """Requests to one host, as `name`, all over one connection.

    `state_dir` is the host's; None: the far side chooses. Belongs to one event loop.
    """

    def __init__(self, name: str, state_dir: Path | None, open_wire: Open) -> None:
        self._name, self._state_dir, self._open = name, state_dir, open_wire
        self._opening = asyncio.Lock()
        self._connection: _Connection | None = None
        self._locks: dict[Path, Owner] = {}
        # Until when it is not retried, and why.
        self._down: tuple[float, HostDownError] | None = None

    async def greeting(self) -> Greeting:
        """The far side's greeting. Raises HostDownError."""
        return (await self._connected()).greeting

    async def ask(self, question: str, arguments: dict[str, Any], *, again: bool) -> Any:
        """The answer, as JSON. Raises what the host raises; HostDownError: no answer.

        With `again`, the request is repeated once over a new connection. Otherwise a lost
        connection leaves the outcome unknown: OutcomeUnknownError.
        """
        try:
            return await (await self._connected()).ask(question, arguments)
        except LinkLostError as exc:
            if not again:
                raise OutcomeUnknownError(
                    f"it is unknown whether {self._name} has done what was requested ({question})",
                    why=f"{exc.what}: {exc.why}",
                    remedy="try again when it answers: interrupted work is found and ended",
                ) from exc
            if isinstance(exc, UnansweredError):
                raise
        return await (await self._connected()).ask(question, arguments)

    async def connect(self, path: Path, *, of_anyone: bool) -> socket.socket:
        """A stream to a Unix socket on the host. Raises HostDownError, RefusedError."""
        try:
            return await (await self._connected()).connect(path, of_anyone=of_anyone)
        except LinkLostError:
            return await (await self._connected()).connect(path, of_anyone=of_anyone)

    @asynccontextmanager
    async def lock(self, path: Path, owner: Owner) -> AsyncIterator[None]:
        """Hold a lock on the host, reacquired on each new connection. Raises BusyError."""
        await (await self._connected()).lock(path, owner)
        self._locks[path] = owner
        try:
            yield
        finally:
            del self._locks[path]
            # A lost connection has freed it already.
            with suppress(HostDownError):
                await self.ask("unlock", {"path": str(path)}, again=True)

    async def close(self) -> None:
        """Close the connection; the host releases what this side held there."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.close()

    async def _connected(self) -> "_Connection":
        async with self._opening:
            if (before := self._connection) is not None:
                if not before.is_lost:
                    return before
                await self.close()
                if isinstance(before.lost, UnansweredError):
                    self._down = time.monotonic() + UNANSWERED_FOR_S, before.lost
            if self._down is not None and time.monotonic() < self._down[0]:
                error = self._down[1]
                raise HostDownError(error.what, why=error.why, remedy=error.remedy)
            try:
                connection = await self._greet(await self._open())
            except HostDownError as exc:
                self._down = time.monotonic() + DOWN_FOR_S, exc
                raise
            self._down = None
            try:
                await self._hold_again(connection)
            except BaseException:
                await connection.close()
                raise
            self._connection = connection
            return connection

    async def _hold_again(self, connection: "_Connection") -> None:
        """Reacquire this side's locks before any request over a new connection.

        Raises HostDownError.
        """
        for path, owner in list(self._locks.items()):
            try:
                await connection.lock(path, owner)
            except BusyError as exc:
                raise HostDownError(
                    f"the lock '{path.name}' on {self._name} was lost with the connection",
                    why=f"it is {exc.why} now",
                    remedy="wait for that to end, then see where the VM is: vmckpt vm list",
                ) from exc

    async def _greet(self, wire: ServeConnection) -> "_Connection":
        """Exchange greetings. Raises HostDownError."""
        reader, writer, why_silent = wire
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_S):
                await reader.readuntil(MAGIC)
                hello = _Hello.of((await read_frame(reader)).json)
        except (OSError, EOFError, asyncio.LimitOverrunError, ProtocolError, TimeoutError) as exc:
            error = await why_silent()
            writer.transport.abort()
            raise error from exc
        except BaseException:
            writer.transport.abort()
            raise
        if hello.protocol != PROTOCOL:
            writer.transport.abort()
            raise HostDownError(
                f"{self._name} has vmckpt {hello.version}, this machine {__version__}",
                why=f"it speaks protocol {hello.protocol}, this one {PROTOCOL}",
                remedy=f"install the same vmckpt on {self._name} and here",
            )
        state_dir = self._state_dir or hello.state_dir
        greeting = Greeting(hello.version, state_dir, _address_or_none(hello.address))
        connection = _Connection(self._name, reader, writer, greeting)
        mine = {"protocol": PROTOCOL, "name": self._name, "state_dir": str(state_dir)}
        try:
            await connection.begin(with_json(RpcFrameKind.HELLO, 0, mine))
        except BaseException:
            await connection.close()
            raise
        return connection


class _Connection:
    """One connection: matches answers to requests by number."""

    def __init__(
        self,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        greeting: Greeting,
    ) -> None:
        self._name, self.greeting = name, greeting
        self._link = FrameLink(reader, writer, name, self._handle)
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._running: asyncio.Task[None] | None = None
        self.lost: LinkLostError | None = None

    @property
    def is_lost(self) -> bool:
        """Whether it can carry no more requests."""
        return self.lost is not None or self._link.is_closing

    async def begin(self, hello: Frame) -> None:
        """Send hello and receive from now on."""
        self._running = asyncio.create_task(self._run())
        await self._send(hello)

    async def close(self) -> None:
        """Close it."""
        self._link.abort()
        if self._running is not None:
            await asyncio.wait({self._running})

    async def ask(self, question: str, arguments: dict[str, Any]) -> Any:
        """The answer. Raises what the host raises, LinkLostError."""
        return await self._ask(next(self._numbers), question, arguments)

    async def lock(self, path: Path, owner: Owner) -> None:
        """Acquire a lock. Raises BusyError.

        An earlier connection of this side may hold it until the host notices that it is lost.
        """
        deadline = time.monotonic() + FREED_TIMEOUT_S
        while True:
            try:
                await self.ask("lock", {"path": str(path), "owner": pack(owner)})
                return
            except asyncio.CancelledError:
                await to_the_end(self._give_back(path, owner))
                raise
            except BusyError:
                holder = await self.ask("lock_owner", {"path": str(path)})
                if holder not in (None, pack(owner)) or time.monotonic() > deadline:
                    raise
            await asyncio.sleep(0.2)

    async def _give_back(self, path: Path, owner: Owner) -> None:
        """Release a lock that was granted just as its request was cancelled."""
        with suppress(VmckptError, TimeoutError):  # then it goes with the connection
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                # Another connection of this side may hold it.
                if await self.ask("lock_owner", {"path": str(path)}) == pack(owner):
                    await self.ask("unlock", {"path": str(path)})

    async def connect(self, path: Path, *, of_anyone: bool) -> socket.socket:
        """A stream to a Unix socket on the host."""
        number = next(self._numbers)
        mine, theirs = socket.socketpair()
        stream: ByteStream | None = None
        try:
            stream = self._link.open_stream(theirs, number)
            await self._ask(number, "connect", {"path": str(path), "of_anyone": of_anyone})
            stream.start()
        except BaseException:
            mine.close()
            theirs.close()
            await self._link.drop_stream(number)
            # The far side may have connected before it received the cancellation.
            with suppress(HostDownError, TimeoutError):
                async with asyncio.timeout(CANCEL_TIMEOUT_S):
                    await self._send(Frame(RpcFrameKind.CLOSE, number))
            raise
        mine.setblocking(False)
        return mine

    def _handle(self, frame: Frame) -> None:
        """Dispatch an answer."""
        pending = self._pending.get(frame.number)
        if pending is None or pending.done():
            return
        try:
            if frame.kind is RpcFrameKind.ANSWER:
                pending.set_result(frame.json)
            elif frame.kind is RpcFrameKind.ERROR:
                pending.set_exception(_of_question(unpack_error(frame.json)))
        except ProtocolError as exc:
            # Only this answer's error: other requests over the connection are not affected.
            pending.set_exception(exc)

    async def _ask(self, number: int, question: str, arguments: dict[str, Any]) -> Any:
        if self.lost is not None:
            raise self._again(self.lost)
        answer = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            request = {"do": question, "with": arguments}
            async with asyncio.timeout(_limit_s(question, arguments)):
                await self._send(with_json(RpcFrameKind.REQUEST, number, request))
                await asyncio.wait({answer})
            return answer.result()
        except asyncio.CancelledError:
            await self._cancel(number, answer)
            raise
        except TimeoutError:
            raise self._given_up(question) from None
        finally:
            del self._pending[number]
            if answer.done() and not answer.cancelled():
                answer.exception()  # retrieved, although another error was raised

    async def _cancel(self, number: int, answer: asyncio.Future[Any]) -> None:
        """Have the host end a request, and wait until it has."""
        with suppress(HostDownError, TimeoutError):
            async with asyncio.timeout(CANCEL_TIMEOUT_S):
                await self._send(Frame(RpcFrameKind.CANCEL, number))
                await asyncio.wait({answer})

    def _given_up(self, question: str) -> LinkLostError:
        """The connection is unusable: the reason, for its last caller."""
        self.lost = self.lost or UnansweredError(
            f"{self._name} does not answer",
            why=f"its connection is alive, but it has not answered this request ({question})",
            remedy="check its storage and load, then try again",
        )
        self._link.abort()
        return self._again(self.lost)

    async def _send(self, frame: Frame) -> None:
        try:
            await self._link.send(frame)
        except OSError as exc:
            raise LinkLostError(
                f"the connection to {self._name} is lost",
                why=exc.strerror or str(exc),
                remedy="check the network and the host, then try again",
            ) from exc

    async def _run(self) -> None:
        try:
            lost = await self._link.run()
            self.lost = self.lost or lost
        except Exception as exc:  # noqa: BLE001 - no request may wait indefinitely
            self.lost = LinkLostError(
                f"the connection to {self._name} is lost",
                why=f"vmckpt has a bug: {type(exc).__name__}: {exc}",
                remedy="report it, then try again",
            )
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(self._again(self.lost))

    @staticmethod
    def _again(lost: LinkLostError) -> LinkLostError:
        """A separate error for each caller: a traceback belongs to one raise."""
        return type(lost)(lost.what, why=lost.why, remedy=lost.remedy)


def _address_or_none(text: str | None) -> str | None:
    """What is an IP address: sshd says UNKNOWN for a connection that did not come over a socket."""
    try:
        return None if text is None else str(ip_address(text))
    except ValueError:
        return None


def _of_question(error: VmckptError) -> VmckptError:
    """A host's error unchanged, or as HostDownError if no call can raise its class.

    Otherwise a host could make a command draw conclusions about VMs on other hosts.
    """
    if isinstance(error, _OF_QUESTIONS):
        return error
    return HostDownError(error.what, why=error.why, remedy=error.remedy)


def _limit_s(question: str, arguments: dict[str, Any]) -> float | None:
    if question in _WITHOUT_LIMIT:
        return None
    return ANSWER_S + sum(float(arguments.get(name, 0.0)) for name in _LIMITS)
