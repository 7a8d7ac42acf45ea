"""Run a child process to its end, within limits: a guest or a host may control its output."""

import asyncio
import os
import signal
from contextlib import suppress

from vmckpt.hosts.host import MOST_SAID_BYTES
from vmckpt.units import format_size

KILL_TIMEOUT_S = 5.0
_PIECE_BYTES = 64 << 10


class TooMuchSaidError(Exception):
    """It printed more than MOST_SAID_BYTES, and was killed."""

    def __init__(self) -> None:
        super().__init__(f"it printed more than {format_size(MOST_SAID_BYTES)}, and was ended")


async def end_of(child: asyncio.subprocess.Process, timeout_s: float) -> tuple[bytes, bytes]:
    """The output of a child with its own session, on both streams, after its end.

    Raises TimeoutError, TooMuchSaidError: its session is killed, as on cancellation. A process that
    left the session may keep the child's output open, and is not waited for after that.
    """
    try:
        async with asyncio.timeout(timeout_s):
            stdout, stderr = await asyncio.gather(
                _output(child, child.stdout), _output(child, child.stderr)
            )
            await child.wait()
    except (TimeoutError, asyncio.CancelledError):
        end_session(child)
        # Otherwise this would also wait for other processes that hold the pipes.
        child._transport.close()  # type: ignore[attr-defined]
        with suppress(TimeoutError):
            await asyncio.wait_for(child.wait(), KILL_TIMEOUT_S)
        raise
    if max(len(stdout), len(stderr)) > MOST_SAID_BYTES:
        raise TooMuchSaidError
    return stdout, stderr


def end_session(child: asyncio.subprocess.Process) -> None:
    """SIGKILL to all processes of the session that a child leads."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


async def _output(child: asyncio.subprocess.Process, stream: asyncio.StreamReader | None) -> bytes:
    """All of its output, up to the limit; beyond it the session is killed."""
    output = bytearray()
    while stream and (piece := await stream.read(_PIECE_BYTES)):
        if len(output) <= MOST_SAID_BYTES:
            output += piece
        else:
            end_session(child)
    return bytes(output)
