"""Connect to a Unix socket; symbolic links on the path count only if this user made them.

A QEMU with its own user creates its sockets in a directory that it may write to. A compromised one
could put a link there, to another VM's socket, which would then receive its commands.
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
    """A non-blocking stream. Raises OSError; ELOOP: another user made a link."""
    # The present file: a link that replaces it is refused, not followed.
    fd = os.open(followed(path), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return _connected(f"/proc/self/fd/{fd}")
    finally:
        os.close(fd)


def followed(path: Path) -> Path:
    """The target of the links at `path`, if this user or root made them. Raises OSError."""
    for _ in range(_MOST_LINKS):
        found = path.lstat()
        if not stat.S_ISLNK(found.st_mode):
            return path
        if found.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "another user created a link there", str(path))
        path = path.parent / path.readlink()
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def listens_as(sock: socket.socket) -> int:
    """The user at the other end: the one who called listen(2) on that socket (unix(7))."""
    reply = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(reply)[1])


def _connected(path: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        # Never blocks: a Unix socket with a full queue fails at once.
        sock.connect(path)
    except OSError:
        sock.close()
        raise
    return sock
