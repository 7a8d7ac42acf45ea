"""A descriptor that another process makes for us, and does not keep.

How it is made is `process_call.py`'s, which runs in a child: were the other process's registers
changed from here, our death at the wrong moment would be its own.
"""

import errno
import os
import socket
import subprocess
import sys
from pathlib import Path

from vmckpt.memory import process_call


def descriptor_from(pid: int, number: int, *arguments: int) -> int:
    """What system call `number`, made by process `pid`, returned: a descriptor of ours.

    Blocks for some 0.1 s. Raises OSError: not allowed (EPERM, EACCES), gone (ESRCH, ENOENT),
    stopped by a signal or not to be stopped (EBUSY), confined (EOPNOTSUPP), ECHILD when the child
    was killed, or what the call came to.
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
