"""What this machine's kernel offers this user, found by asking it, not by its version."""

import errno
import fcntl
import os
import struct

PAGEMAP_SCAN = "pagemap-scan"
USERFAULTFD = "userfaultfd"

# _IOWR('f', 16, struct pm_scan_arg) of linux/fs.h; its first field is its size.
_PAGEMAP_SCAN_IOCTL = 0xC0606610
_PM_SCAN_ARG_BYTES = 96
# _IO(0xAA, 0): a new userfaultfd from /dev/userfaultfd (linux/userfaultfd.h).
_USERFAULTFD_IOC_NEW = 0xAA00
_SYS_USERFAULTFD = {"x86_64": 323, "aarch64": 282}


def abilities() -> frozenset[str]:
    """Of PAGEMAP_SCAN (finding written pages), USERFAULTFD (post-copy): those that work here."""
    found = set()
    if _scans_pagemaps():
        found.add(PAGEMAP_SCAN)
    if _has_userfaultfd():
        found.add(USERFAULTFD)
    return frozenset(found)


def _scans_pagemaps() -> bool:
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # An empty range: a kernel that knows the call finds nothing in it.
        argument = struct.pack("@Q", _PM_SCAN_ARG_BYTES).ljust(_PM_SCAN_ARG_BYTES, b"\0")
        fcntl.ioctl(fd, _PAGEMAP_SCAN_IOCTL, argument)
    except OSError as exc:
        return exc.errno != errno.ENOTTY
    finally:
        os.close(fd)
    return True


def _has_userfaultfd() -> bool:
    import ctypes

    number = _SYS_USERFAULTFD.get(os.uname().machine)
    if number is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
        if fd >= 0:
            os.close(fd)
            return True
    try:
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.close(fcntl.ioctl(device, _USERFAULTFD_IOC_NEW, os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return False
    finally:
        os.close(device)
    return True
