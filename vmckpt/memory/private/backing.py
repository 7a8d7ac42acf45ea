"""What files hold of another process's memory, also where that process never touched it.

Page tables do not say it: a page of a file is missing there until it is accessed, and again once
the kernel has merged pages into a huge one.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from vmckpt.memory.ram_file import Span, extents, open_fd
from vmckpt.procfs import read_lines

# Of a path in /proc: files of that name may be several.
_DELETED = " (deleted)"


class _Piece(NamedTuple):
    """A mapping of a file: addresses, the first one's offset in the file, and which file it is.

    `file`: its device and inode; on btrfs and overlayfs not those that stat(2) shows.
    """

    start: int
    end: int
    offset: int
    file: tuple[int, int]
    path: str


def held_by_files(pid: int, span: Span) -> list[Span]:
    """The addresses in `span` at which files hold something, ascending.

    Raises OSError: the process is gone or not ours; ENOENT: it has closed the file, and this
    process is not privileged.
    """
    found = list[Span]()
    for piece in _pieces(pid, span):
        shift = piece.start - piece.offset
        with open_fd(_opened(pid, piece)) as fd:
            for start, end in extents(fd, piece.offset + piece.end - piece.start):
                first, last = max(start + shift, piece.start), min(end + shift, piece.end)
                if first < last:
                    found.append((max(first, span[0]), min(last, span[1])))
    return [(start, end) for start, end in found if start < end]


def _pieces(pid: int, span: Span) -> Iterator[_Piece]:
    for line in read_lines(Path(f"/proc/{pid}/maps")):
        where, _, offset, device, inode, *path = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in where.split("-"))
        if int(inode) and start < span[1] and end > span[0]:
            major, minor = (int(part, 16) for part in device.split(":"))
            file = os.makedev(major, minor), int(inode)
            yield _Piece(start, end, int(offset, 16), file, "".join(path))


def _opened(pid: int, piece: _Piece) -> int:
    """A descriptor for its file, which may no longer have a name."""
    # Only a privileged process may use this way, and only an open file is found in the other one.
    with suppress(PermissionError, FileNotFoundError):
        mapped = f"/proc/{pid}/map_files/{piece.start:x}-{piece.end:x}"
        return os.open(mapped, os.O_RDONLY | os.O_CLOEXEC)
    by_name = ""
    for name in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{name}"
        with suppress(FileNotFoundError):  # it was closed meanwhile
            known = os.stat(path)
            if (known.st_dev, known.st_ino) == piece.file:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if str(Path(path).readlink()) == piece.path and not piece.path.endswith(_DELETED):
                by_name = path
    if by_name:
        return os.open(by_name, os.O_RDONLY | os.O_CLOEXEC)
    raise FileNotFoundError(
        errno.ENOENT, f"the file at {piece.start:#x} is no longer open in process {pid}"
    )
