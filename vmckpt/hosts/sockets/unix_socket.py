"""Connecting to a Unix socket by a path on which links are followed only if this user made them.

A QEMU with a user of its own makes its sockets in a directory that it may write to. One that a
guest has broken out of could put a link there, to another VM's socket, and what is meant for it
would go to that one.
"""

import errno
import os
import socket
import stat
import struct
from pathlib import Path

_MOST_LINKS = 8
_CREDENTIALS = struct.Struct("iII")


def connected(path: Path) -> socket.socket:
    """A stream that does not block. Raises OSError; ELOOP: another user made a link."""
    # What is there now: a link in its place since would be refused, not followed.
    fd = os.open(followed(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _connected(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def followed(path: Path) -> Path:
    """Where the links at `path` lead, which this user or root made. Raises OSError."""
    for _ in range(_MOST_LINKS):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            return path
        if found.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "another user made a link there", str(path))
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def listens_as(sock: socket.socket) -> int:
    """The user at the other end: who had the socket that was connected to listen (unix(7))."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(said)[1])


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # Never waits: a Unix socket whose queue is full says so at once.
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
