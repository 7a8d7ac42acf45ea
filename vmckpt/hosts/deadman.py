"""Dead-man's switches: commands that act when their starter dies, kill -9 included."""

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vmckpt.events.durable import NEW_FILE
from vmckpt.hosts.process import APPENDED


@contextmanager
def armed(command: Sequence[str], log: Path) -> Iterator[None]:
    """Have `command` run, its output in the new file `log`, if this process dies within the block.

    xargs reads a pipe to its end before it runs the command, once, since it was given nothing
    there. However this process ends, the kernel closes the pipe's only other end.
    """
    with os.fdopen(os.open(log, NEW_FILE, 0o600), "wb") as output:
        watcher = subprocess.Popen(
            ["xargs", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        if watcher.stdin:
            watcher.stdin.close()
        log.unlink(missing_ok=True)


@contextmanager
def attended(command: Sequence[str], log: Path) -> Iterator[Callable[[str], None]]:
    """Have `command` run beside this process for the block; it hears the lines that are told to it.

    Its standard input ends when this process does, however it does. Output goes to the file `log`.
    What is told is never waited for: OSError when it has ended, or does not read.
    """
    with os.fdopen(os.open(log, APPENDED, 0o600), "wb") as output:
        attendant = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )
    with attendant:
        stdin = attendant.stdin
        if stdin is None:
            raise ChildProcessError(f"{command[0]} has no standard input")
        os.set_blocking(stdin.fileno(), False)
        try:
            yield lambda line: _tell(stdin.fileno(), line)
        finally:
            attendant.kill()


def _tell(fd: int, line: str) -> None:
    os.write(fd, f"{line}\n".encode())
