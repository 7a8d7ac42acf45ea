"""Check the owner of a state directory: no other user may write there."""

import os
import stat
from pathlib import Path

from vmckpt.errors import RefusedError

_UID_MAP, _OVERFLOW_UID = Path("/proc/self/uid_map"), Path("/proc/sys/kernel/overflowuid")
_ALL_UIDS = 2**32 - 1


def require_own(directory: Path) -> None:
    """Raises RefusedError if another user owns `directory`, or could replace it.

    Like sshd's StrictModes: it, each parent directory and each symbolic link on the path must
    belong to this user or to root, and others may write only where the sticky bit keeps them from
    renaming files of others. A missing directory will be created by this user.
    """
    trusted = trusted_users()
    real = directory.resolve()
    for path in dict.fromkeys((*directory.parents, directory, *real.parents, real)):
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        why = ""
        is_open = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in trusted:
            why = f"{path} belongs to uid {found.st_uid}, who may put anything there"
        elif stat.S_ISDIR(found.st_mode) and is_open:
            why = f"every user may rename what is in {path} (mode {found.st_mode & 0o7777:o})"
        elif path == real and found.st_mode & stat.S_IWOTH:
            why = f"every user may write to it (mode {found.st_mode & 0o7777:o})"
        if why:
            raise RefusedError(
                f"the state directory {directory} is not private to this user",
                why=why,
                remedy="name another one (VMCKPT_STATE_DIR), or correct its owner and mode after "
                "making sure of what is in it",
            )


def trusted_users() -> set[int]:
    """The users who may write to this user's state, and so may have started its processes."""
    trusted = {0, os.geteuid()}
    if os.geteuid() == 0 and (sudo_uid := os.environ.get("SUDO_UID", "")).isdecimal():
        trusted.add(int(sudo_uid))
    # In a user namespace all unmapped users, root among them, appear as the same uid.
    lengths = (int(line.split()[2]) for line in _UID_MAP.read_text().splitlines())
    if sum(lengths) < _ALL_UIDS:
        trusted.add(int(_OVERFLOW_UID.read_text()))
    return trusted
