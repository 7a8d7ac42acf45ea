"""The QEMU of a domain of this machine, and where its guest's RAM is in it, by /proc alone.

QEMU says it too, but only to libvirt: who asks by libvirt's monitor marks the domain as tainted.
"""

import errno
from collections.abc import Sequence
from pathlib import Path

from vmckpt.errors import OutcomeUnknownError
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import Span
from vmckpt.procfs import read_lines

# QEMU maps RAM readable and writable, but never executable, as it maps the code that TCG makes.
_READ_WRITE = ("rw-p", "rw-s")


def find_qemu(uuid: str) -> int:
    """The process that has the domain's UUID in its command line. Raises OSError.

    Any user can start such a process: with two of them, none is taken.
    """
    try:
        found = find_by_argument(f"\0-uuid\0{uuid}\0")
    except OutcomeUnknownError as exc:
        raise OSError(errno.EACCES, f"{exc.what}: {exc.why}") from exc
    if len(found) != 1:
        many = "several processes have" if found else "no process that this user sees has"
        raise OSError(errno.ESRCH, f"{many} the domain's UUID in their command line")
    return found[0].pid


def find_ram(pid: int, blocks: Sequence[int]) -> GuestRam:
    """The only mappings of a QEMU that are exactly as large as the blocks of its guest's RAM.

    QEMU maps a block of RAM with an inaccessible page behind it, so that the kernel joins it with
    no other mapping. Raises OSError: EPERM (another user's process), ENXIO (there are more or fewer
    mappings of these sizes).
    """
    found = list[Span]()
    for line in read_lines(Path(f"/proc/{pid}/maps")):
        where, mode, *_ = line.split(maxsplit=2)
        start, end = (int(part, 16) for part in where.split("-"))
        if mode in _READ_WRITE and end - start in blocks:
            found.append((start, end))
    if sorted(end - start for start, end in found) != sorted(blocks):
        raise OSError(errno.ENXIO, "its QEMU does not have its RAM in pieces of these sizes")
    return GuestRam(None, tuple(found))
