"""Taps created for a process of another user, who may create none: they go when it ends."""

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vmckpt.hosts.sockets.socket_queues import lent

DEVICE = "/dev/net/tun"
_TUNSETPERSIST = 0x400454CB  # linux/if_tun.h


def bind_to(pid: int) -> None:
    """Make the process's taps non-persistent. Raises OSError: it has ended, or is not ours."""
    pidfd = os.pidfd_open(pid)
    try:
        for fd in _taps(pid):
            if (own := lent(pidfd, fd)) is not None:
                try:
                    fcntl.ioctl(own, _TUNSETPERSIST, 0)
                finally:
                    os.close(own)
    finally:
        os.close(pidfd)


def _taps(pid: int) -> Iterator[int]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if str(fd.readlink()) == DEVICE:
                yield int(fd.name)
        except FileNotFoundError:
            continue  # closed since
