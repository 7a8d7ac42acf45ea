"""Find blocks of a guest's RAM in a QEMU that cannot be asked: by what their first page holds."""

import errno
import os
from pathlib import Path

from vmckpt.memory.ram_file import Span, open_fd

# QEMU aligns a guest's RAM to huge pages (QEMU_VMALLOC_ALIGN).
_ALIGNED_BYTES = 2 << 20
_MOST_MAPS_BYTES = 64 << 20


def find_marked(pid: int, size_bytes: int, mark: bytes) -> Span | None:
    """Where a process has private memory of that size that begins with `mark`; None: nowhere.

    Raises ProcessLookupError: it has ended.
    """
    try:
        memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        lines = Path(f"/proc/{pid}/maps").read_bytes()[:_MOST_MAPS_BYTES].splitlines()
    except FileNotFoundError as exc:
        raise ProcessLookupError(errno.ESRCH, "the process has ended") from exc
    with open_fd(memory) as fd:
        for line in lines:
            span, rights, _, _, inode, *_ = line.split(maxsplit=5)
            if rights != b"rw-p" or inode != b"0":
                continue
            start, end = (int(part, 16) for part in span.split(b"-"))
            first = -(-start // _ALIGNED_BYTES) * _ALIGNED_BYTES
            for address in range(first, end - size_bytes + 1, _ALIGNED_BYTES):
                if _read(fd, address, len(mark)) == mark:
                    return address, address + size_bytes
    return None


def _read(memory: int, address: int, count: int) -> bytes:
    try:
        return os.pread(memory, count, address)
    except OSError:  # the memory has gone meanwhile
        return b""
