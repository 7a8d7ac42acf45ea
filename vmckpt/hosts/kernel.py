"""What this machine's kernel offers, found by asking it, not by its version."""

import errno
import fcntl
import os
import struct

# _IOWR('f', 16, struct pm_scan_arg) of linux/fs.h; its first field is its size.
_PAGEMAP_SCAN = 0xC0606610
_PM_SCAN_ARG_BYTES = 96


def scans_pagemaps() -> bool:
    """Whether PAGEMAP_SCAN is there, which finds the pages that a process has written."""
    # Of an empty range: a kernel that knows the call finds nothing in it.
    argument = struct.pack("@Q", _PM_SCAN_ARG_BYTES).ljust(_PM_SCAN_ARG_BYTES, b"\0")
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
    except OSError as exc:
        return exc.errno != errno.ENOTTY
    finally:
        os.close(fd)
    return True
