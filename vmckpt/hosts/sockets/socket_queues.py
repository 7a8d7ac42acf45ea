"""The queues of a process's TCP connections.

The kernel's tables of sockets (/proc/net/tcp) have no index: reading one takes 10 ms, however short
it is. Duplicates of the process's own descriptors give the same answer at once.
"""

import array
import ctypes
import errno
import fcntl
import os
import socket
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from vmckpt.hosts.host import Queues
from vmckpt.hosts.sockets.tcp_table import table_queues

_PIDFD_GETFD = 438  # the same on every architecture; Linux 5.6
_TCP_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def queues(pid: int, port: int) -> Queues:
    """The queues of all connections of a process with local or remote `port`; zero if it has ended.

    The kernel duplicates descriptors only for a process that may trace the other (ptrace(2));
    without that right the tables are read.
    """
    try:
        return _borrowed_queues(pid, port)
    except PermissionError:
        return _queues_by_table(pid, port)
    except (FileNotFoundError, ProcessLookupError):
        return Queues(0, 0)


def _borrowed_queues(pid: int, port: int) -> Queues:
    unsent = unread = 0
    pidfd = os.pidfd_open(pid)
    try:
        for fd in _sockets(pid):
            with _borrowed(pidfd, fd) as sock:
                if sock is not None and port in _ports(sock):
                    unsent += _waiting(sock, termios.TIOCOUTQ)
                    unread += _waiting(sock, termios.FIONREAD)
    finally:
        os.close(pidfd)
    return Queues(unsent, unread)


def _sockets(pid: int) -> Iterator[int]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(fd.readlink()).startswith("socket:"):
                yield int(fd.name)
        except FileNotFoundError:
            continue  # closed since


@contextmanager
def _borrowed(pidfd: int, fd: int) -> Iterator[socket.socket | None]:
    """A process's socket, for the block; None if it was closed since, or is not TCP."""
    own = lent(pidfd, fd)
    if own is None:
        yield None
        return
    with closing(socket.socket(fileno=own)) as sock:
        is_tcp = sock.family in _TCP_FAMILIES and sock.type == socket.SOCK_STREAM
        yield sock if is_tcp else None


def lent(pidfd: int, fd: int) -> int | None:
    """A duplicate of a process's descriptor, which the caller closes; None if it was closed
    since.
    """
    own = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, fd, 0)
    if own >= 0:
        return int(own)
    number = ctypes.get_errno()
    if number == errno.EPERM:
        raise PermissionError(number, os.strerror(number))
    return None


def _ports(sock: socket.socket) -> tuple[int, ...]:
    try:
        return sock.getsockname()[1], sock.getpeername()[1]
    except OSError:
        return ()  # it listens, or its connection has ended


def _waiting(sock: socket.socket, which: int) -> int:
    answer = array.array("i", [0])
    fcntl.ioctl(sock, which, answer)
    return answer[0]


def _queues_by_table(pid: int, port: int) -> Queues:
    tables = (Path(f"/proc/{pid}/net/{name}") for name in ("tcp", "tcp6"))
    try:
        return table_queues("".join(table.read_text() for table in tables), port)
    except (FileNotFoundError, ProcessLookupError):
        return Queues(0, 0)
