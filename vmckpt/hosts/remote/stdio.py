"""`vmckpt serve` on its standard input and output, as sshd gives them to it."""

import asyncio
import os
import socket
from pathlib import Path

from vmckpt.hosts.remote.serve import serve


async def serve_stdio(state_dir: Path) -> None:
    """Answer on what standard input and output are now.

    Nothing else comes to read or write there: output goes to standard error from now on.
    """
    asked, answered = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if os.path.sameopenfile(asked, answered):
        # Both are one socket: as a pipe to write to it would seem closed when something comes in.
        os.close(answered)
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=asked))
        await serve(reader, writer, state_dir)
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(asked, "rb")
    )
    writing, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(answered, "wb")
    )
    await serve(reader, asyncio.StreamWriter(writing, protocol, None, loop), state_dir)
