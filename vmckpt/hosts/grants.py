"""Root grants a VM's own user access to files of a host, as far as its QEMU needs them.

Of symbolic links only root's are followed, where no other user may have led the path. A file of a
regular user is refused: vmckpt changes the owner only of files of root and of VMs' users.
"""

import errno
import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.ownership import trusted_users
from vmckpt.hosts.uids import Uids

_HOLD = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# As many as the kernel follows (path_resolution(7)).
_MOST_LINKS = 40
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
    """One file; `number` is the user for own and directory, otherwise the group."""

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
    """The file at the path, held so that it stays the same one for the block."""
    fd = _opened(path)
    try:
        yield f"/proc/self/fd/{fd}", os.fstat(fd)
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    """The file at an absolute path. Raises OSError, RefusedError.

    A link of another user, or in a directory that another user may change, could lead to any file.
    """
    trusted, is_ours, links = trusted_users(), True, 0
    fd, rest = os.open("/", _HOLD), list(reversed(path.parts[1:]))
    try:
        while rest:
            name = rest.pop()
            is_ours = is_ours and _is_closed(os.fstat(fd), trusted)
            found = os.open(name, _HOLD, dir_fd=fd)
            status = os.fstat(found)
            if not stat.S_ISLNK(status.st_mode):
                os.close(fd)
                fd = found
                continue
            target = Path(os.readlink("", dir_fd=found))
            os.close(found)
            if not is_ours or status.st_uid not in trusted:
                raise _led_astray(path, name)
            if (links := links + 1) > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            if target.is_absolute():
                os.close(fd)
                fd = os.open("/", _HOLD)
            rest += reversed(target.parts[1:] if target.is_absolute() else target.parts)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _is_closed(directory: os.stat_result, trusted: Collection[int]) -> bool:
    """Whether others than trusted users cannot replace what these put there."""
    mode = directory.st_mode
    by_group = mode & stat.S_IWGRP and directory.st_gid != 0
    is_open = (by_group or mode & stat.S_IWOTH) and not mode & stat.S_ISVTX
    return directory.st_uid in trusted and not is_open


def _led_astray(path: Path, link: str) -> RefusedError:
    return RefusedError(
        f"{path} cannot be given to a VM's own user",
        why=f"another user can change the link '{link}' in its path",
        remedy="name the file itself, or keep it in directories that only root may change",
    )


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
