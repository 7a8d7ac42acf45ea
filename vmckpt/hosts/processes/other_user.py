"""Commands that root runs as another user: a VM's own, which may be a guest's that has broken out.

Of root's such a process has no more than any other user of the host: neither the environment, nor
the working directory, which may lie behind a directory that is closed to others, nor the keys of
root's session (keyrings(7)), which a change of user leaves to it.
"""

import errno
import os
from collections.abc import Iterable, Sequence

# What of root's environment is left: how programs are found and speak, and what a lab knows its own
# by.
_KEPT = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "QEMU_MODULE_DIR", "VMCKPT_LAB"),
)
_KEPT_WORDS = " ".join(f'${{{name}+"{name}=${name}"}}' for name in _KEPT)
_BECOME = ("sh", "-c", f'cd / && exec env -i {_KEPT_WORDS} "$@"', "sh", "setpriv")
# Of x86-64; linux/keyctl.h.
_NR_KEYCTL, _JOIN_SESSION_KEYRING = 250, 1


def become(uid: int, groups: Iterable[int], argv: Iterable[str]) -> list[str]:
    """What root runs so that `argv` runs as a user, for good; it keeps its pid. Pure."""
    return [
        *_BECOME,
        f"--reuid={uid}",
        f"--regid={uid}",
        f"--groups={','.join(str(group) for group in dict.fromkeys(groups))}",
        "--inh-caps=-all",
        "--bounding-set=-all",
        "--no-new-privs",
        *argv,
    ]


def leave_session(argv: Sequence[str]) -> None:
    """If `argv` is to run as another user, this thread has new, empty keys from here on.

    What it starts has the same. Raises OSError.
    """
    if tuple(argv[: len(_BECOME)]) != _BECOME:
        return
    import ctypes  # milliseconds that other commands need not wait for

    libc = ctypes.CDLL(None, use_errno=True)
    left = libc.syscall(_NR_KEYCTL, _JOIN_SESSION_KEYRING, None) >= 0
    # Where a container forbids the call to all, no process can read a key.
    if not left and (number := ctypes.get_errno()) not in (errno.ENOSYS, errno.EPERM):
        raise OSError(number, f"keyctl: {os.strerror(number)}")
