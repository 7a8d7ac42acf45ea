"""`vmckpt serve` on its standard input and output, which sshd provides."""

import asyncio
import os
import socket
from pathlib import Path

from vmckpt.hosts.remote.serve import serve


async def serve_stdio(state_dir: Path) -> None:
    """Serve on the present standard input and output.

    Nothing else reads or writes there: output goes to standard error from now on.
    """
    requests, answered = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    if os.path.sameopenfile(requests, answered):
        # Both are one socket: a pipe for writing would seem closed when data arrives.
        os.close(answered)
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=requests))
        await serve(reader, writer, state_dir)
        return
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(requests, "rb")
    )
    writing, protocol = await loop.connect_write_pipe(
        lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(answered, "wb")
    )
    await serve(reader, asyncio.StreamWriter(writing, protocol, None, loop), state_dir)
