"""Detect the features of this machine's kernel by trying them, not by its version."""

import errno
import fcntl
import os
import struct
from enum import StrEnum
from pathlib import Path

# Another one after each boot.
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# _IOWR('f', 16, struct pm_scan_arg) of linux/fs.h; its first field is its size.
_PAGEMAP_SCAN = 0xC0606610
_PM_SCAN_ARG_BYTES = 96
_PAGE_BYTES, _ENTRY_BYTES = 4096, 8
_SOFT_DIRTY_BIT = 55  # of an entry of a pagemap


class PageTracking(StrEnum):
    """How to find the pages that a process has written.

    PROTECTION: the kernel has PAGEMAP_SCAN (Linux 6.7). SOFT_DIRTY: older kernels mark pages, if
    CONFIG_MEM_SOFT_DIRTY is set and no memory is swapped out, which would lose the marks.
    COMPARISON: neither, so all memory is read.
    """

    PROTECTION = "page protection"
    SOFT_DIRTY = "soft-dirty bits"
    COMPARISON = "comparison"


def page_tracking() -> PageTracking:
    """The best method available."""
    if _scans_pagemaps():
        return PageTracking.PROTECTION
    if _marks_soft_dirty() and not _swaps():
        return PageTracking.SOFT_DIRTY
    return PageTracking.COMPARISON


def _scans_pagemaps() -> bool:
    # An empty range: a kernel that knows the call finds nothing in it.
    argument = struct.pack("@Q", _PM_SCAN_ARG_BYTES).ljust(_PM_SCAN_ARG_BYTES, b"\0")
    fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.ioctl(fd, _PAGEMAP_SCAN, argument)
    except OSError as exc:
        return exc.errno != errno.ENOTTY
    finally:
        os.close(fd)
    return True


def _marks_soft_dirty() -> bool:
    import ctypes  # some milliseconds, on older kernels only
    import mmap

    # A page that was just written is marked, if the kernel marks pages at all.
    with mmap.mmap(-1, _PAGE_BYTES) as page:
        page[0] = 1
        first = ctypes.c_char.from_buffer(page)
        at = ctypes.addressof(first) // _PAGE_BYTES * _ENTRY_BYTES
        del first  # otherwise the page could not be unmapped
        fd = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        try:
            (entry,) = struct.unpack("@Q", os.pread(fd, _ENTRY_BYTES, at))
        finally:
            os.close(fd)
    return bool(entry >> _SOFT_DIRTY_BIT & 1)


def _swaps() -> bool:
    # A header, and one line per swap area. A kernel without swap has no such file.
    path = Path("/proc/swaps")
    return path.exists() and len(path.read_text().splitlines()) > 1
