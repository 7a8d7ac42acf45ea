"""A connection to `vmckpt serve` on a host, over SSH."""

import asyncio
import logging
import shlex
import socket
import threading
from contextlib import suppress
from functools import partial

import paramiko

from vmckpt.errors import HostDownError
from vmckpt.hosts.remote.session import ServeConnection
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.failures import no_descriptor, runs_nothing
from vmckpt.hosts.ssh.login import Login, log_in
from vmckpt.hosts.ssh.settings import CONNECT_TIMEOUT_S
from vmckpt.sequence.in_thread import in_thread

_CHUNK_BYTES = 64 << 10
# A shell's exit status for an unknown command (POSIX).
_NOT_FOUND = 127
# paramiko's status of a channel whose connection is gone.
_NO_STATUS = -1
_LAST_LINES_S, _LAST_WORDS_S = 1.0, 10.0
_START_TIMEOUT_S = 20.0
# Our errors contain what it logs, without the tracebacks.
logging.getLogger("paramiko").setLevel(logging.CRITICAL)


async def open_wire(name: str, address: Address, command: str) -> ServeConnection:
    """A connection to `vmckpt serve`, started as `command` on the host `name`.

    Raises HostDownError for each kind of failure, with a remedy; UsageError for a malformed
    configuration.
    """
    connecting = asyncio.create_task(in_thread(partial(log_in, name, address)))
    try:
        login = await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_late)
        raise
    try:
        async with asyncio.timeout(_START_TIMEOUT_S):
            channel = await in_thread(partial(_start, name, login, [command, "serve"]))
    except TimeoutError as exc:
        login.close()
        raise runs_nothing(name, TimeoutError(f"no answer in {_START_TIMEOUT_S:g} s")) from exc
    except BaseException:
        login.close()
        raise
    try:
        near, far = socket.socketpair()
    except OSError as exc:
        login.close()
        raise no_descriptor(name, exc) from exc
    for carry in (_carry_in, _carry_out):
        threading.Thread(target=carry, args=(login, channel, far), daemon=True).start()
    reader, writer = await asyncio.open_connection(sock=near)
    return ServeConnection(reader, writer, partial(_why_silent, name, command, channel))


def _close_late(connecting: asyncio.Task[Login]) -> None:
    """Close a connection that is no longer needed when it was made."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()


def _carry_in(login: Login, channel: paramiko.Channel, sock: socket.socket) -> None:
    """Forward the host's output to `sock`; at its end the connection is over."""
    with suppress(OSError):  # the near side has closed, or the transport is gone: over either way
        while data := channel.recv(_CHUNK_BYTES):
            sock.sendall(data)
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    # The reason for its end may still be in flight.
    channel.status_event.wait(_LAST_LINES_S)
    login.close()


def _carry_out(login: Login, channel: paramiko.Channel, sock: socket.socket) -> None:
    """Forward data from `sock` to the host; closing it ends the connection."""
    with sock:
        # EOFError, SSHException: a transport that broke meanwhile.
        with suppress(OSError, EOFError, paramiko.SSHException):
            while data := sock.recv(_CHUNK_BYTES):
                channel.sendall(data)
            channel.shutdown_write()
            # The far side ends by itself, unless it hangs: its connection would stay for good.
            channel.status_event.wait(_LAST_WORDS_S)
        login.close()


async def _why_silent(name: str, command: str, channel: paramiko.Channel) -> HostDownError:
    return await in_thread(partial(_explain_silence, name, command, channel))


def _explain_silence(name: str, command: str, channel: paramiko.Channel) -> HostDownError:
    channel.status_event.wait(_LAST_LINES_S)
    status = channel.exit_status if channel.exit_status_ready() else None
    if status == _NO_STATUS:
        return HostDownError(
            f"the connection to {name} broke",
            why="before vmckpt there had answered",
            remedy="check the network, then try again",
        )
    words = channel.recv_stderr(_CHUNK_BYTES) if channel.recv_stderr_ready() else b""
    last = (words.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
    if status == _NOT_FOUND:
        return HostDownError(
            f"there is no vmckpt on {name}",
            why=last,
            remedy="install it there; where it is not in PATH: "
            f"vmckpt host add {name} ... --vmckpt /PATH/OF/vmckpt",
        )
    ended = "it still runs" if status is None else f"it ended with {status}"
    return HostDownError(
        f"vmckpt on {name} does not answer",
        why=f"`{command} serve` there: {ended}; {last}",
        remedy=f"log in there and try: {command} --version",
    )


def _start(name: str, login: Login, argv: list[str]) -> paramiko.Channel:
    try:
        channel = login.client.get_transport().open_session(timeout=CONNECT_TIMEOUT_S)
        # SSH passes one line to the remote user's shell: each word is quoted for it.
        channel.exec_command(shlex.join(argv))
    # Whatever a malformed message causes in paramiko's thread is raised here.
    except Exception as exc:
        raise runs_nothing(name, exc) from exc
    return channel
