"""The files that hold a standby's copies of disks, and those that were a VM's disks before.

An extended attribute of the file, which moves with it, records its owner:

    user.vmckpt.replica    copy RUN VM    made by a standby, and not complete yet
                           kept - VM      left by a lost standby: the next one reuses it
                           disk ID VM     was the own disk of the VM with this identity: its next
                                          standby reuses it too. "-" (an older vmckpt): of that name

All but `disk` are removed when the protection is ended. Reusing one is always safe: its content is
compared block by block.

Any other file at a copy's path is foreign, and is not touched.
"""

import errno
import fcntl
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError, StorageError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu.disks.qcow2 import UnfitError, read_clusters, size_of
from vmckpt.replicate.disks import preallocated
from vmckpt.state.durable import make_dir_durably, sync_directory

ATTRIBUTE = "user.vmckpt.replica"
_COPY, _KEPT, _DISK = "copy", "kept", "disk"
# struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")
_GET_LOCK = 36  # F_OFD_GETLK
# QEMU's locks on an image (block/file-posix.c) are bytes from here on, so many.
_QEMU_LOCKS = (100, 200)


@dataclass(frozen=True, slots=True)
class CopiedDisk:
    """A disk of a VM that is replicated: its index in the spec, and its length."""

    number: int
    size_bytes: int


class StandbyFile(NamedTuple):
    """A standby's file for one disk, with the disk's format and length."""

    path: Path
    size_bytes: int
    image_format: str


class Mark(NamedTuple):
    """The mark on a file: whether a standby of `run` made it, and to which VM it belongs.

    For a VM's own disk `run` is that VM's identity.
    """

    kind: str
    run: str
    vm: str


def read_mark(path: Path) -> Mark | None:
    """None: there is no such file, or it does not belong to vmckpt."""
    with suppress(OSError, UnicodeDecodeError):
        words = os.getxattr(path, ATTRIBUTE).decode().split(" ", 2)
        if len(words) == len(Mark._fields):
            return Mark(*words)
    return None


def prepare(copies: Iterable[StandbyFile], vm: str, run: str, identity: str = "") -> None:
    """Make an image of that size at each path: a new one, or what is left there of the VM's disk.

    `identity`: the VM's; "": its primary's vmckpt does not say.

    Raises RefusedError if another file is there, StorageError. After an error no new file is left.
    """
    made: list[Path] = []
    try:
        for copy in copies:
            if os.path.lexists(copy.path):
                _require_base(copy, vm, identity)
            else:
                _create(copy, Mark(_COPY, run, vm))
                made.append(copy.path)
    except BaseException:
        for path in made:
            path.unlink(missing_ok=True)
        raise


def discard(paths: Iterable[Path], vm: str, run: str | None = None) -> None:
    """Remove the copies that a standby of the VM made: those of one run, or of any and kept ones.

    One that a QEMU has open stays, whatever its mark: a guest may run on it.
    """
    for path in paths:
        mark = read_mark(path)
        if mark is None or mark.vm != vm or mark.kind == _DISK:
            continue
        if run in (None, mark.run) and not _is_open(path):
            path.unlink(missing_ok=True)


def keep(paths: Iterable[Path], vm: str) -> None:
    """Keep the copies of a lost standby for the next one."""
    for path in paths:
        mark = read_mark(path)
        if mark is not None and mark.vm == vm and mark.kind == _COPY:
            _set(path, Mark(_KEPT, "-", vm))


def mark_as_disks(paths: Sequence[Path], vm: str, identity: str = "") -> None:
    """Mark them as the VM's own disks: once they no longer are, a standby may reuse them.

    On a file system without extended attributes they must be removed by hand before that.
    """
    for path in paths:
        with suppress(OSError):
            _set(path, Mark(_DISK, identity or "-", vm))


def _set(file: Path | int, mark: Mark) -> None:
    os.setxattr(file, ATTRIBUTE, " ".join(mark).encode())


def _create(copy: StandbyFile, mark: Mark) -> None:
    """Create the file. On an error it is removed, unless another process created it."""
    path = copy.path
    with ExitStack() as undo:
        try:
            make_dir_durably(path.parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with open_fd(os.open(path, flags, 0o600)) as fd:
                undo.callback(path.unlink, missing_ok=True)
                _set(fd, mark)
                if copy.image_format == "raw":
                    os.ftruncate(fd, copy.size_bytes)
                else:
                    preallocated.create(fd, copy.size_bytes)
            sync_directory(path.parent)
        except OSError as exc:
            raise _no_copy(path, exc) from exc
        undo.pop_all()


def _no_copy(path: Path, exc: OSError) -> StorageError:
    why = exc.strerror or str(exc)
    if exc.errno in (errno.ENOTSUP, errno.EOPNOTSUPP):
        why = "its file system has no extended attributes, which mark copies"
    return StorageError(
        f"cannot make a copy of a disk at {path}",
        why=why,
        remedy="put the disk where the standby has room for it, on ext4, XFS or Btrfs",
    )


def _require_base(copy: StandbyFile, vm: str, identity: str) -> None:
    """Require that the file is an old disk of this VM, and not in use."""
    path, mark = copy.path, read_mark(copy.path)
    if mark is None or mark.vm != vm:
        raise RefusedError(
            f"{path} exists on the standby already",
            why=f"it is not marked as a copy of a disk of '{vm}'",
            remedy="remove or rename it there",
        )
    if mark.kind == _DISK and identity and mark.run not in ("-", identity):
        raise RefusedError(
            f"{path} exists on the standby already",
            why=f"it was the disk of an earlier '{vm}', which had only its name",
            remedy="remove or rename it there",
        )
    if _is_open(path):
        raise RefusedError(
            f"{path} on the standby is in use",
            why="a QEMU there has it open",
            remedy="stop what uses it: see `vmckpt vm list`",
        )
    try:
        why = _is_no_base(copy)
    except OSError as exc:
        raise _no_copy(path, exc) from exc
    if why:
        raise RefusedError(
            f"{path} on the standby is another disk", why=why, remedy="remove or rename it there"
        )


def _is_no_base(copy: StandbyFile) -> str:
    """Why a copy cannot reuse this file; "": it can, and the file is ready."""
    with open_fd(os.open(copy.path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        size_bytes, clusters = os.fstat(fd).st_size, None
        if copy.image_format != "raw":
            try:
                size_bytes = size_of(fd)
                if size_bytes == copy.size_bytes:
                    clusters = read_clusters(fd)
            except UnfitError as exc:
                return str(exc)
        if size_bytes != copy.size_bytes:
            return f"it has {size_bytes} bytes, the VM's has {copy.size_bytes}"
        if clusters is not None:
            preallocated.allocate_all(fd, clusters)
    return ""


def _is_open(path: Path) -> bool:
    """Whether a QEMU has the image open, as shown by the locks that it holds on it."""
    with open_fd(os.open(path, os.O_RDWR | os.O_CLOEXEC)) as fd:
        lock = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_QEMU_LOCKS, 0)
        kind, *_ = _FLOCK.unpack(fcntl.fcntl(fd, _GET_LOCK, lock))
        return bool(kind != fcntl.F_UNLCK)
