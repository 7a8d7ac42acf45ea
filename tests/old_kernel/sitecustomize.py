"""On PYTHONPATH: the kernel does not know PAGEMAP_SCAN, as those before 6.7."""

import errno
import fcntl
import os
from typing import Any

_PAGEMAP_SCAN = 0xC0606610
ioctl = fcntl.ioctl


def old_ioctl(fd: int, request: int, *rest: Any) -> Any:
    if request == _PAGEMAP_SCAN:
        raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
    return ioctl(fd, request, *rest)


fcntl.ioctl = old_ioctl  # type: ignore[assignment]
