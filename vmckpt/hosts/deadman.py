"""A dead-man's switch: a process that runs a command when its starter dies, kill -9 included.

This file is also the program of that process, run by path without site-packages: it must import
nothing of vmckpt and little of anything.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def armed(command: Sequence[str], log: Path) -> Iterator[None]:
    """Have `command` run, its output in `log`, if this process dies within the block.

    The watcher holds one end of a pipe; the kernel closes the other however this process ends.
    """
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(log), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        bufsize=0,
    )
    try:
        yield
    finally:
        if watcher.stdin is not None:
            with suppress(BrokenPipeError):  # somebody ended the watcher
                watcher.stdin.write(b"released")
            watcher.stdin.close()
        watcher.wait()


def _watch(log: str, command: list[str]) -> None:
    if sys.stdin.buffer.read():
        return
    log_fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.execv(command[0], command)


if __name__ == "__main__":
    _watch(sys.argv[1], sys.argv[2:])
