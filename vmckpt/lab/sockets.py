"""Opens sockets that belong to one of the lab's namespaces, for a caller outside of it."""

import asyncio
import socket

from vmckpt.errors import OperationFailedError
from vmckpt.lab.handover import KINDS
from vmckpt.lab.processes import environment, python
from vmckpt.lab.state import Lab


async def connect_guest(
    lab: Lab, address: str, port: int, *, timeout_s: float = 5.0
) -> socket.socket:
    """A TCP connection from the outside client to a guest, as a non-blocking socket.

    Raises OSError as connect(2) does (TimeoutError after `timeout_s`), OperationFailedError.
    """
    made = await open_socket(lab, lab.client_enter, "tcp")
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.get_running_loop().sock_connect(made, (address, port))
    except BaseException:
        made.close()
        raise
    return made


async def bind_client(lab: Lab, address: str, port: int) -> socket.socket:
    """A UDP socket of the outside client, bound there (port 0: any), non-blocking.

    Raises OSError as bind(2) does, OperationFailedError.
    """
    made = await open_socket(lab, lab.client_enter, "udp")
    try:
        made.bind((address, port))
    except BaseException:
        made.close()
        raise
    return made


async def open_socket(lab: Lab, enter: tuple[str, ...], kind: str) -> socket.socket:
    """Open a non-blocking "tcp" or "udp" socket that belongs to the namespace behind `enter`.

    The caller owns the socket. Takes as long as starting a small Python. Raises
    OperationFailedError.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *enter,
                *python("vmckpt.lab.handover", kind),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment(lab.directory),
            )
        try:
            _, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        descriptors: list[int] = []
        if process.returncode == 0:
            _, descriptors, _, _ = socket.recv_fds(ours, 1, 1)
    if not descriptors:
        raise OperationFailedError(
            "no socket could be made in the lab",
            why=err.decode(errors="replace").strip() or "its process said nothing",
            remedy="see whether the lab is complete: 'vmckpt lab status'",
        )
    made = socket.socket(socket.AF_INET, KINDS[kind], fileno=descriptors[0])
    made.setblocking(False)
    return made
