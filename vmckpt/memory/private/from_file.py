"""Give a process's memory the content of a file: of its own, a page is the file's until it is
written; or shared with it.

So processes that have the same content share its memory, and a process that writes the file writes
the other's memory. The process itself opens and maps the file; for that moment its user may read
it (write it, if it is shared), and pass through its directory. The file stays this user's: its
owner could also write it, and so the memory of all who have it.
"""

import errno
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.memory.process_call import be_undisturbed, map_there

if TYPE_CHECKING:
    from vmckpt.memory.missing_pages import AnonymousRam

# Of madvise(2), as QEMU has it for a guest's RAM: no copy in children, none in core dumps.
_DONTFORK, _DONTDUMP = 10, 16
# linux/posix_acl_xattr.h: its version, then entries of a tag, a permission and an id.
_ACL, _VERSION, _ENTRY = "system.posix_acl_access", struct.pack("<I", 2), struct.Struct("<HHI")
_OWNER, _USER, _GROUP, _MASK, _OTHERS, _NO_ID = 1, 2, 4, 16, 32, 0xFFFFFFFF
_READ, _READ_WRITE, _PASS = 4, 6, 1


def give_content(pid: int, ram: "AnonymousRam", path: Path, *, shared: bool = False) -> None:
    """The memory has the content of the file at `path` from now on; if `shared`, it is that file.
    Blocking.

    The file and its directory are this user's and private. Raises OSError: the memory is as it was,
    or the process has ended.
    """
    user = _user_of(pid)
    addresses = (str(address) for block in ram.blocks for address in block)
    words = [str(pid), str(path), str(int(shared)), *addresses]
    with _allowed(path, user, _READ_WRITE if shared else _READ), _allowed(path.parent, user, _PASS):
        child = subprocess.run(
            [sys.executable, "-I", "-m", "vmckpt.memory.private.from_file", *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            start_new_session=True,
            check=False,
        )
    code, _, why = child.stdout.strip().partition(" ")
    if not code:
        raise ChildProcessError(
            errno.ECHILD, f"the child that traces it ended with {child.returncode}"
        )
    if code != "0":
        raise OSError(int(code), why)


@contextmanager
def _allowed(path: Path, user: int, permission: int) -> Iterator[None]:
    """Give one more user a permission for a private file or directory, for the block."""
    mode = path.stat().st_mode & 0o700
    entries = (
        (_OWNER, mode >> 6, _NO_ID),
        (_USER, permission, user),
        (_GROUP, 0, _NO_ID),
        (_MASK, permission, _NO_ID),
        (_OTHERS, 0, _NO_ID),
    )
    try:
        os.setxattr(path, _ACL, _VERSION + b"".join(_ENTRY.pack(*entry) for entry in entries))
        yield
    finally:
        path.chmod(mode)  # at once: the mask is part of the mode
        os.removexattr(path, _ACL)
        path.chmod(mode)


def main() -> None:
    """Do what the arguments say, answer, end."""
    be_undisturbed()
    pid, path, shared, *addresses = sys.argv[1:]
    numbers = [int(one) for one in addresses]
    spans = list(zip(numbers[0::2], numbers[1::2], strict=True))
    try:
        map_there(int(pid), Path(path), spans, (_DONTFORK, _DONTDUMP), shared=shared == "1")
    except OSError as exc:
        answer = f"{exc.errno} {exc.strerror}"
    else:
        answer = "0"
    sys.stdout.write(answer)


def _user_of(pid: int) -> int:
    """The user by whom the process opens files. Raises OSError: it has ended."""
    # In its name, which may be any bytes, newlines are escaped.
    for line in Path(f"/proc/{pid}/status").read_bytes().splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[4])
    raise ProcessLookupError(errno.ESRCH, "the process has ended")


if __name__ == "__main__":
    main()
