"""Talks to the test guest: its control protocol, and its key-value service (images/README.md).

The caller brings connected sockets: the lab's network is in a separate namespace, and a guest
without network is reached over a virtio-serial port, a Unix socket on this side. Every error is
final for its connection: a late reply would be mistaken for the next one's.
"""

import asyncio
import contextlib
import socket
from typing import Self

from vmckpt.lab.guests.replies import (
    DiskCheck,
    DiskLoad,
    GuestSilentError,
    GuestStat,
    MemCheck,
    MemLoad,
    Reply,
    Talk,
    parse_fields,
    parse_numbered,
    parse_reply,
)

CONTROL_PORT = 7000
KEY_VALUE_PORT = 7001
CONTROL_SERIAL_PORT = "vk.control"


class GuestLines:
    """One line out, one line in, over a connected stream; requests of several tasks take turns."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._turn = asyncio.Lock()
        self._broken: GuestSilentError | None = None

    @classmethod
    async def over(cls, connected: socket.socket) -> Self:
        """Takes over a connected stream socket, TCP or Unix; close() closes it."""
        connected.setblocking(False)
        return cls(*await asyncio.open_connection(sock=connected))

    async def ask(self, request: str, *, timeout_s: float = 30.0) -> str:
        """Send `request`; return the guest's reply line.

        Raises GuestSilentError when there is none within `timeout_s`, and from then on: the stream
        would be out of step.
        """
        async with self._turn:
            return await self._ask(request, timeout_s)

    async def _ask(self, request: str, timeout_s: float) -> str:
        if self._broken:
            raise self._broken
        answered = False
        why = "the connection was closed"
        try:
            async with asyncio.timeout(timeout_s):
                self._writer.write(f"{request}\n".encode())
                await self._writer.drain()
                line = await self._reader.readline()
            answered = line.endswith(b"\n")
        except TimeoutError:
            why = f"nothing was received within {timeout_s:g} s"
        except OSError as error:
            why = error.strerror or str(error)
        finally:
            if not answered:  # also when cancelled: the reply may still arrive
                self._broken = GuestSilentError(
                    f"no reply to '{request}'", why=why, remedy="see the guest's console"
                )
        if self._broken:
            raise self._broken
        return line.decode(errors="replace").rstrip("\r\n")

    async def close(self) -> None:
        """Closes the connection; never raises."""
        self._writer.close()
        with contextlib.suppress(OSError):  # the other end may have disconnected first
            await self._writer.wait_closed()


class GuestControl(GuestLines):
    """The control protocol: what the guest does, and whether all its data is still correct."""

    async def ping(self, *, timeout_s: float = 5.0) -> None:
        """Returns when the guest has answered."""
        parse_fields("ping", await self.ask("ping", timeout_s=timeout_s))

    async def stat(self) -> GuestStat:
        """The guest's own report; does not wait for disk or memory checks of other connections."""
        return await self._typed(GuestStat, "stat")

    async def load_memory(self, words: str) -> MemLoad:
        """Sets the memory load, e.g. `rate=20M set=128M pattern=zipf content=text touch=line`.

        Settings not named stay as they were. Returns when a new working set is filled.
        """
        return await self._typed(MemLoad, f"mem {words}", timeout_s=120.0)

    async def stop_memory(self) -> None:
        """Stops dirtying memory; the working set stays and can be verified."""
        parse_fields("mem off", await self.ask("mem off"))

    async def verify_memory(self) -> MemCheck:
        """Checks every page now, about 200 MB/s under TCG; the load waits for it."""
        return await self._typed(MemCheck, "mem verify", timeout_s=300.0)

    async def load_disk(self, words: str) -> DiskLoad:
        """Sets the disk load, e.g. `rate=2M size=64M`; continues with the ring on the disk."""
        return await self._typed(DiskLoad, f"disk {words}", timeout_s=120.0)

    async def stop_disk(self) -> int:
        """Stops writing records and flushes; the number of the last acknowledged one."""
        return int(parse_fields("disk off", await self.ask("disk off")).get("seq", "0"))

    async def verify_disk(self) -> DiskCheck:
        """Reads the whole ring back from the disk and checks it; the load waits for it."""
        return await self._typed(DiskCheck, "disk verify", timeout_s=300.0)

    async def beat(self, destination: str | None, *, hz: int = 1000) -> None:
        """Sends heartbeats to `destination` (`IP:PORT`); None stops them."""
        request = f"heartbeat dest={destination} hz={hz}" if destination else "heartbeat off"
        parse_fields(request, await self.ask(request))

    async def talk(self, words: str = "") -> Talk:
        """Numbered messages to other guests, e.g. `to=10.77.0.12,10.77.0.13 rate=100` (each)."""
        return await self._typed(Talk, f"talk {words}".strip())

    async def _typed(self, kind: type[Reply], request: str, *, timeout_s: float = 30.0) -> Reply:
        return parse_reply(kind, request, await self.ask(request, timeout_s=timeout_s))


class KvClient(GuestLines):
    """The key-value service; every reply proves that nothing was lost or repeated."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self._requests = 0

    async def set(self, key: str, value: str) -> None:
        """Stores one line of text under a key without spaces."""
        await self._numbered(f"set {key} {value}")

    async def get(self, key: str) -> str:
        """The value; raises GuestRefusedError when there is none."""
        return await self._numbered(f"get {key}")

    async def incr(self, key: str) -> int:
        """Adds 1 to the number under `key`, 0 when there is none, and returns the sum."""
        return int(await self._numbered(f"incr {key}"))

    async def echo(self, words: str) -> str:
        """The same words."""
        return await self._numbered(f"echo {words}")

    async def _numbered(self, request: str, *, timeout_s: float = 30.0) -> str:
        async with self._turn:  # counted and sent in one turn, so that tasks do not swap numbers
            self._requests += 1
            line = await self._ask(request, timeout_s)
            return parse_numbered(request, line, expected=self._requests)
