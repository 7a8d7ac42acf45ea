"""A dead-man's switch: a command that runs when its starter dies, kill -9 included."""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def armed(command: Sequence[str], log: Path) -> Iterator[None]:
    """Have `command` run, its output in the new file `log`, if this process dies within the block.

    xargs reads a pipe to its end before it runs the command, once, since it was given nothing
    there. However this process ends, the kernel closes the pipe's only other end.
    """
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
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
