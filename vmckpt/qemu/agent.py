"""The QEMU guest agent: JSON lines over a virtio serial port, answered by a daemon in the guest."""

import asyncio
import base64
import json
import random
import shlex
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any, NamedTuple, NotRequired, Protocol, Self, TypedDict, TypeVar

from vmckpt.codec import convert, require_within
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.foreign import MalformedError, parse

SYNC_TIMEOUT_S = 2.0
# It keeps 16 MiB of each of a program's streams (qga/commands.c), and reports both in one line,
# base64.
MOST_OUTPUT_BYTES = 48 << 20
MOST_ANSWER_BYTES = 1 << 20
# Exit statuses of Windows programs have 32 bits.
MOST_CODE = (1 << 32) - 1
_CHUNK_BYTES = 64 << 10
# Intervals at which to ask whether a program has ended, increasing: each request costs the guest
# time.
POLL_S, MOST_POLL_S = 0.02, 0.2
T = TypeVar("T")


class AgentSilentError(HostDownError):
    """No agent runs in the guest, or it does not answer now."""


class NoProgramError(OperationFailedError):
    """The guest does not run that program: it is missing, or the agent may not run programs."""


class GuestInterface(NamedTuple):
    """One of the guest's network interfaces. `mac` is in lower case, "" if it has none."""

    name: str
    mac: str
    addresses: tuple[IPv4Address | IPv6Address, ...]


class GuestExit(NamedTuple):
    """How a program in the guest ended: its exit status, or the negative number of a signal."""

    returncode: int
    out: bytes
    err: bytes


# The fields of the agent's answers (QEMU's qga/qapi-schema.json) that are read here.
class _Error(TypedDict, total=False):
    desc: str | None


_Reply = TypedDict("_Reply", {"return": Any, "error": _Error | None}, total=False)
_Number = TypedDict("_Number", {"return": int})
_Address = TypedDict("_Address", {"ip-address": str})
_Interface = TypedDict(
    "_Interface",
    {
        "name": str,
        "hardware-address": NotRequired[str | None],
        "ip-addresses": NotRequired[list[_Address] | None],
    },
)
_Status = TypedDict(
    "_Status",
    {
        "exited": bool,
        "exitcode": NotRequired[int | None],
        "signal": NotRequired[int | None],
        "out-data": NotRequired[str | None],
        "err-data": NotRequired[str | None],
    },
)


class _Nothing(TypedDict):
    """An answer that only confirms the command."""


@dataclass(frozen=True, slots=True)
class _Started:
    pid: int

    def __post_init__(self) -> None:
        require_within("pid", self.pid)


class AgentChannel(Protocol):
    """How the agent is reached."""

    async def answer(self, request: Mapping[str, Any], timeout_s: float, most_bytes: int) -> bytes:
        """The agent's answer, one JSON object.

        Raises AgentSilentError; OperationFailedError: the agent refused, as what passes on its
        answers reports.
        """

    async def close(self) -> None:
        """End the session."""


class GuestAgent:
    """A session with the agent. Only one at a time: the port has one reader.

    All answers are untrusted: a malformed one is an AgentSilentError.
    """

    def __init__(self, channel: AgentChannel) -> None:
        self._channel = channel

    @classmethod
    async def connect(cls, sock: socket.socket, timeout_s: float = SYNC_TIMEOUT_S) -> Self:
        """Open a session on the agent's connected socket, which this takes over.

        Raises AgentSilentError if there is no answer within `timeout_s`.
        """
        channel = _AgentSocket(*await asyncio.open_unix_connection(sock=sock))
        try:
            await channel.sync(timeout_s)
        except BaseException:
            await channel.close()
            raise
        return cls(channel)

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Return if the agent answers. Raises AgentSilentError."""
        await self._ask(_Nothing, "guest-ping", {}, timeout_s)

    async def set_time(self, timeout_s: float = 5.0) -> None:
        """Set the guest's clock to this machine's.

        Raises AgentSilentError, OperationFailedError (the guest refused).
        """
        await self._ask(_Nothing, "guest-set-time", {"time": time.time_ns()}, timeout_s)

    async def interfaces(self, timeout_s: float = 5.0) -> list[GuestInterface]:
        """The guest's network interfaces.

        Raises AgentSilentError, OperationFailedError (the guest refused).
        """
        command = "guest-network-get-interfaces"
        interfaces = await self._ask(list[_Interface], command, {}, timeout_s)
        with _understood(command):
            return [_interface(one) for one in interfaces]

    async def addresses(self, timeout_s: float = 5.0) -> list[str]:
        """The guest's addresses, IPv4 first, without those that other hosts cannot reach.

        Raises as `interfaces` does.
        """
        found = [
            address
            for interface in await self.interfaces(timeout_s)
            for address in interface.addresses
            if not (address.is_loopback or address.is_link_local or address.is_unspecified)
            and not address.is_multicast
        ]
        return [str(address) for address in sorted(found, key=lambda one: one.version)]

    async def start(
        self, argv: Sequence[str], timeout_s: float = 5.0, *, given: bytes = b""
    ) -> int:
        """Start a program in the guest; the agent keeps its output. Returns its pid there.

        Its standard input is `given`. Raises AgentSilentError, NoProgramError.
        """
        words: dict[str, Any] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if given:
            words["input-data"] = base64.b64encode(given).decode()
        try:
            return (await self._ask(_Started, "guest-exec", words, timeout_s)).pid
        except OperationFailedError as exc:
            raise NoProgramError(exc.what, why=exc.why, remedy=exc.remedy) from exc

    async def ended(self, pid: int, timeout_s: float = 5.0) -> GuestExit | None:
        """How a program that `start` began has ended; None: it still runs. Reported once.

        Raises AgentSilentError, OperationFailedError (the agent knows no such program).
        """
        command = "guest-exec-status"
        status = await self._ask(_Status, command, {"pid": pid}, timeout_s, MOST_OUTPUT_BYTES)
        if not status["exited"]:
            return None
        with _understood(command):
            return _exit(status)

    async def run_first(
        self, paths: Sequence[str], words: Sequence[str], timeout_s: float = 5.0
    ) -> None:
        """Run the first of these programs that the guest has, until it ends.

        Raises AgentSilentError, OperationFailedError: the guest refuses or has none of them, or the
        program fails.
        """
        *others, last = paths
        for path in others:
            try:
                return await self._run(path, words, timeout_s)
            except NoProgramError:
                continue
        return await self._run(last, words, timeout_s)

    async def _run(self, path: str, words: Sequence[str], timeout_s: float) -> None:
        pid = await self.start([path, *words], timeout_s)
        deadline_s, poll_s = time.monotonic() + timeout_s, POLL_S
        while time.monotonic() < deadline_s:
            if done := await self.ended(pid, timeout_s):
                if done.returncode == 0:
                    return
                raise OperationFailedError(
                    f"{path} failed in the guest",
                    why=done.err.decode(errors="replace").strip()
                    or f"it ended with {done.returncode}",
                    remedy=f"try it there: {shlex.join([path, *words])}",
                )
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, MOST_POLL_S)
        raise AgentSilentError(
            f"{path} does not end in the guest",
            why=f"not within {timeout_s:g} s",
            remedy="check that process in the guest",
        )

    async def _ask(
        self,
        kind: type[T],
        command: str,
        arguments: Mapping[str, Any],
        timeout_s: float,
        most_bytes: int = MOST_ANSWER_BYTES,
    ) -> T:
        """The answer. Raises AgentSilentError, OperationFailedError."""
        request = {"execute": command, "arguments": arguments}
        line = await self._channel.answer(request, timeout_s, most_bytes)
        with _understood(command):
            reply = convert(_Reply, parse(line, most_bytes=most_bytes))
            if (error := reply.get("error")) is None:
                if "return" not in reply:
                    raise MalformedError("it is neither an answer nor an error")
                return convert(kind, reply["return"])
        raise OperationFailedError(
            f"the guest agent refused {command}",
            why=error.get("desc") or "it does not say why",
            remedy="see the guest agent's log in the guest",
        )

    async def close(self) -> None:
        """End the session."""
        await self._channel.close()


class _AgentSocket:
    """The agent's socket, of which this is the only reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._come = bytearray()

    async def sync(self, timeout_s: float) -> None:
        """Discard what earlier clients left unread, perhaps half a line, up to our number's answer.

        Ask only once: an agent that comes back answers all requests made meanwhile, in order.
        """
        number = random.getrandbits(31)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({"execute": "guest-sync", "arguments": {"id": number}})
                found: object = None
                while found != number:
                    # The rest of an answer to an earlier client may have any length.
                    found = _number_in(await self._line(MOST_OUTPUT_BYTES))
                    await asyncio.sleep(0)  # endless lines block only this task
        except (TimeoutError, OSError) as exc:
            raise _silent(exc, timeout_s) from exc

    async def answer(self, request: Mapping[str, Any], timeout_s: float, most_bytes: int) -> bytes:
        """See `AgentChannel`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(request)
                return await self._line(most_bytes)
        except (TimeoutError, OSError) as exc:
            raise _silent(exc, timeout_s) from exc

    async def _send(self, request: Mapping[str, Any]) -> None:
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()

    async def _line(self, most_bytes: int) -> bytes:
        """The next line. Raises OSError at the end, AgentSilentError if it is too long."""
        seen = 0
        while (end := self._come.find(b"\n", seen)) < 0:
            if (seen := len(self._come)) > most_bytes:
                raise _malformed("its answer", f"it has more than {most_bytes} bytes")
            if not (more := await self._reader.read(_CHUNK_BYTES)):
                raise OSError("it closed the connection")
            self._come += more
        line = bytes(self._come[:end])
        del self._come[: end + 1]
        return line

    async def close(self) -> None:
        """End the session."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # QEMU ended first


def _interface(interface: _Interface) -> GuestInterface:
    return GuestInterface(
        interface["name"],
        (interface.get("hardware-address") or "").lower(),
        tuple(ip_address(one["ip-address"]) for one in interface.get("ip-addresses") or ()),
    )


def _exit(status: _Status) -> GuestExit:
    code, ended_by = status.get("exitcode"), status.get("signal")
    require_within("exitcode", code, MOST_CODE, least=-MOST_CODE)
    require_within("signal", ended_by, MOST_CODE)
    return GuestExit(
        -(ended_by or 0) if code is None else code,
        base64.b64decode(status.get("out-data") or ""),
        base64.b64decode(status.get("err-data") or ""),
    )


def _number_in(line: bytes) -> object:
    """The number that a line answers; None if it is not a complete answer."""
    try:
        return convert(_Number, parse(line))["return"]
    except MalformedError:
        return None


@contextmanager
def _understood(command: str) -> Iterator[None]:
    """Check the answer against the agent's documentation. Raises AgentSilentError."""
    try:
        yield
    except ValueError as exc:  # also from addresses and base64
        raise _malformed(f"its answer to {command}", str(exc)) from exc


def _malformed(what: str, why: str) -> AgentSilentError:
    return AgentSilentError(
        "the guest agent violates its protocol",
        why=f"{what} is malformed: {why}",
        remedy="see what runs as qemu-guest-agent in the guest",
    )


def _silent(exc: Exception, timeout_s: float) -> AgentSilentError:
    return AgentSilentError(
        "the guest agent does not answer",
        why=str(exc) or f"nothing within {timeout_s:g} s",
        remedy="check that qemu-guest-agent runs in the guest",
    )
