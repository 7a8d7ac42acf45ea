"""Run commands as another user: a VM's own, possibly controlled by a compromised guest.

Such a process gets no more of root than any other user of the host: not the environment, not the
working directory, which may be inside a directory closed to others, and not the keys of root's
session (keyrings(7)), which a change of user would leave accessible.
"""

import errno
import os
from collections.abc import Iterable, Sequence

# The part of root's environment that is kept: program search path, locale, and a lab's variables.
_KEPT = (
    *("PATH", "LANG", "LC_ALL", "LC_CTYPE", "LC_MESSAGES", "TZ", "TMPDIR"),
    *("LD_LIBRARY_PATH", "QEMU_MODULE_DIR", "VMCKPT_LAB"),
)
_KEPT_WORDS = " ".join(f'${{{name}+"{name}=${name}"}}' for name in _KEPT)
_BECOME = ("sh", "-c", f'cd / && exec env -i {_KEPT_WORDS} "$@"', "sh", "setpriv")
# Of x86-64; linux/keyctl.h.
_NR_KEYCTL, _JOIN_SESSION_KEYRING = 250, 1


def become(uid: int, groups: Iterable[int], argv: Iterable[str]) -> list[str]:
    """The command by which root permanently becomes a user and runs `argv`, with the same pid.
    Pure.
    """
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
    """If `argv` is to run as another user, give this thread a new, empty session keyring.

    Its child processes inherit it. Raises OSError.
    """
    if tuple(argv[: len(_BECOME)]) != _BECOME:
        return
    import ctypes  # milliseconds that other commands can save

    libc = ctypes.CDLL(None, use_errno=True)
    left = libc.syscall(_NR_KEYCTL, _JOIN_SESSION_KEYRING, None) >= 0
    # If a container forbids the call to all, no process can read a key.
    if not left and (number := ctypes.get_errno()) not in (errno.ENOSYS, errno.EPERM):
        raise OSError(number, f"keyctl: {os.strerror(number)}")
