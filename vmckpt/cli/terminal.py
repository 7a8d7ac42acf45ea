"""A terminal joined to a VM's serial console."""

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.hosts.host import Host

LEAVE = b"\x1d"  # Ctrl-]


async def attach(host: Host, console: Path) -> None:
    """Join this terminal to the console until Ctrl-] or the VM's end.

    Raises UsageError without a terminal.
    """
    if not sys.stdin.isatty():
        raise UsageError(
            "stdin is not a terminal",
            why="a console needs one",
            remedy="read the console's log instead: see `console_log` in `vmckpt vm show`",
        )
    reader, writer = await asyncio.open_unix_connection(sock=await host.connect(console))
    print("connected; Ctrl-] leaves", file=sys.stderr)
    with _raw_terminal(sys.stdin.fileno()):
        typing = asyncio.ensure_future(_type(writer))
        try:
            while not typing.done():
                reading = asyncio.ensure_future(reader.read(4096))
                await asyncio.wait({typing, reading}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    break
                if not (data := reading.result()):
                    break
                os.write(sys.stdout.fileno(), data)
        finally:
            typing.cancel()
            writer.close()
    print("\r\nleft the console", file=sys.stderr)


async def _type(writer: asyncio.StreamWriter) -> None:
    keys: asyncio.Queue[bytes] = asyncio.Queue()
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    loop.add_reader(fd, lambda: keys.put_nowait(os.read(fd, 1024)))
    try:
        while LEAVE not in (data := await keys.get()) and data:
            writer.write(data)
            await writer.drain()
    finally:
        loop.remove_reader(fd)


@contextmanager
def _raw_terminal(fd: int) -> Iterator[None]:
    before = termios.tcgetattr(fd)
    tty.setraw(fd)
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
