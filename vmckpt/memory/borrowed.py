"""A descriptor that another process creates for us, and does not keep.

`process_call.py`, which runs in a child, creates it: if this process changed the other one's
registers and died at the wrong moment, the other would die as well.
"""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from vmckpt.memory import process_call


def descriptor_from(pid: int, number: int, *arguments: int) -> int:
    """Our copy of the descriptor that system call `number`, made by process `pid`, returned.

    Blocks for some 0.1 s. Raises OSError: not allowed (EPERM, EACCES), gone (ESRCH, ENOENT),
    stopped by a signal or impossible to stop (EBUSY), confined (EOPNOTSUPP), ECHILD when the child
    was killed, or the call's own error.
    """
    words = [str(word) for word in (pid, number, *arguments)]
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            child = subprocess.Popen(
                [sys.executable, "-I", "-S", str(Path(process_call.__file__)), *words],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        with child:
            answer, descriptors, *_ = socket.recv_fds(ours, 4096, 1)
    if not answer:
        raise ChildProcessError(
            errno.ECHILD, f"the child that traces it ended with {child.returncode}"
        )
    code, _, why = answer.decode().partition(" ")
    if int(code):
        raise OSError(int(code), why)
    (made,) = descriptors
    os.set_inheritable(made, False)
    return made
