"""Root grants a VM's own user access to files of a host, as far as its QEMU needs them.

Only directories' symbolic links are followed: a link instead of a file is refused. A file of a
regular user is refused too: vmckpt changes the owner only of files of root and of VMs' users.
"""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.uids import Uids

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
# Of a device that only root may use.
_GROUP_RW = stat.S_IRGRP | stat.S_IWGRP
_OTHERS_RW = stat.S_IROTH | stat.S_IWOTH


class GrantKind(StrEnum):
    """How access is granted.

    own: owned by the user alone (mode 0600); for a block device and a socket only the owner
    changes. made: the same, for a file that is created empty if it is missing. directory: owned by
    the user alone (0700), created if it is missing. entrance: a directory of root's that the group
    may only traverse (0710). read: a file of root's that the group may read, unless everyone may.
    device: one that the group may use, unless everyone or a group of its own may. link: root's
    symbolic link to the same name in the directory `own` beside it.
    """

    OWN = "own"
    MADE = "made"
    DIRECTORY = "directory"
    ENTRANCE = "entrance"
    READ = "read"
    DEVICE = "device"
    LINK = "link"


# Beside root's records of a QEMU: the only directory that the QEMU may write to.
OWN_DIRECTORY = "own"


class Grant(NamedTuple):
    """One file; `number` is the user for own and directory, else the group."""

    kind: str
    path: Path
    number: int


def grant(grants: Sequence[Grant], uids: Uids) -> list[int]:
    """Apply all grants in order; returns the groups that own devices among them. Blocking.

    Raises OSError, RefusedError (a regular user's file, a symbolic link, not a file).
    """
    groups = []
    for kind, path, number in grants:
        match GrantKind(kind):
            case GrantKind.OWN:
                _own(path, number, uids)
            case GrantKind.MADE:
                with suppress(FileExistsError):
                    os.close(os.open(path, _NEW, 0o600))
                _own(path, number, uids)
            case GrantKind.DIRECTORY:
                _directory(path, number)
            case GrantKind.ENTRANCE:
                _entrance(path, number)
            case GrantKind.READ:
                _read(path, number, uids)
            case GrantKind.DEVICE:
                groups += _device(path, number)
            case GrantKind.LINK:
                path.unlink(missing_ok=True)
                path.symlink_to(Path(OWN_DIRECTORY) / path.name)
    return groups


def _own(path: Path, user: int, uids: Uids) -> None:
    with _held(path) as (itself, found):
        _require_ours(path, found, uids)
        if stat.S_ISBLK(found.st_mode) or stat.S_ISSOCK(found.st_mode):
            os.chown(itself, user, -1)
            return
        _require_file(path, found)
        # The mode first: otherwise the group's rights would briefly admit two users.
        Path(itself).chmod(0o600)
        os.chown(itself, user, user)


def _directory(path: Path, user: int) -> None:
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    with _held(path) as (itself, _):
        os.chown(itself, user, user)


def _entrance(path: Path, group: int) -> None:
    with _held(path) as (itself, found):
        os.chown(itself, -1, group)
        Path(itself).chmod(stat.S_IMODE(found.st_mode) & ~stat.S_IRWXG | stat.S_IXGRP)


def _read(path: Path, group: int, uids: Uids) -> None:
    with _held(path) as (itself, found):
        _require_file(path, found)
        if found.st_mode & stat.S_IROTH:
            return
        _require_ours(path, found, uids)
        # A VM's file must not become root's: its first owner may have put anything into it.
        os.chown(itself, uids.first if found.st_uid in uids else 0, group)
        Path(itself).chmod(0o640)


def _device(path: Path, group: int) -> list[int]:
    try:
        with _held(path) as (itself, found):
            if found.st_mode & _OTHERS_RW == _OTHERS_RW:
                return []
            if found.st_gid and found.st_mode & _GROUP_RW == _GROUP_RW:
                return [found.st_gid]
            os.chown(itself, -1, group)
            Path(itself).chmod(stat.S_IMODE(found.st_mode) | _GROUP_RW)
            return []
    except FileNotFoundError:
        return []  # whatever needs it reports the error


@contextmanager
def _held(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The file at the path itself, held so that it stays the same one for the block."""
    fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}", os.fstat(fd)
    finally:
        os.close(fd)


def _require_file(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise RefusedError(
            f"{path} cannot be given to a VM's own user",
            why="it is not a file",
            remedy="put the file itself there",
        )


def _require_ours(path: Path, found: os.stat_result, uids: Uids) -> None:
    if found.st_uid != 0 and found.st_uid not in uids:
        raise RefusedError(
            f"{path} cannot be given to a VM's own user",
            why=f"it belongs to uid {found.st_uid}, who is neither root nor a VM's user",
            remedy=f"chown root {path}",
        )
