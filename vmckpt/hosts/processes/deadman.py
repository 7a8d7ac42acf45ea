"""Dead-man's switches: commands that act when their starter dies, kill -9 included."""

import errno
import os
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from vmckpt.hosts.processes.process import APPENDED, wait_for_end
from vmckpt.state.durable import NEW_FILE

# In the environment of a command that acts when its starter dies: the starter's pid.
STARTER = "VMCKPT_STARTER"
# The kernel takes 0.3 s per GiB to free a dead process's memory.
_WAIT_S = 60.0
# Attendants that outlast their block.
_needed: list["subprocess.Popen[bytes]"] = []


@contextmanager
def armed(command: Sequence[str], log: Path) -> Iterator[None]:
    """If this process dies within the block, run `command`, with output to the new file `log`.

    xargs reads a pipe to its end before it runs the command, once, since it received nothing there.
    However this process ends, the kernel closes the pipe's only other end. It closes files one by
    one, so the command first waits (`outlive_starter`) until this process holds no lock.
    """
    with os.fdopen(os.open(log, NEW_FILE, 0o600), "wb") as output:
        watcher = subprocess.Popen(
            ["xargs", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env=os.environ | {STARTER: str(os.getpid())},
        )
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        if watcher.stdin:
            watcher.stdin.close()
        log.unlink(missing_ok=True)


def outlive_starter() -> None:
    """In a command that may act on its starter's death: wait until the starter has fully ended.

    For at most 60 s: then a lock that is still held refuses this command like any other.
    """
    if (pid := os.environ.pop(STARTER, "")).isdecimal():
        wait_for_end(int(pid), _WAIT_S)


class Attendant:
    """A program beside this one. Calling it with a line sends that line, without waiting.

    One that answers every line with a byte is detected when it hangs: `answer_s` is the limit.
    Raises OSError if it has ended, does not read, or has left a line unanswered for that long.
    """

    def __init__(self, ear: socket.socket, answer_s: float | None) -> None:
        self._ear, self._answer_s = ear, answer_s
        # The send times of unanswered lines.
        self._unanswered: deque[float] = deque()

    def __call__(self, line: str) -> None:
        """Send it a line."""
        if self._answer_s is not None:
            self._take_answers()
            now_s = time.monotonic()
            if self._unanswered and now_s - self._unanswered[0] > self._answer_s:
                raise TimeoutError(errno.ETIMEDOUT, f"no answer for {self._answer_s:g} s")
            self._unanswered.append(now_s)
        self._ear.send(f"{line}\n".encode())

    def _take_answers(self) -> None:
        with suppress(BlockingIOError):
            while output := self._ear.recv(4096):
                for _ in range(min(len(output), len(self._unanswered))):
                    self._unanswered.popleft()


@contextmanager
def attended(
    command: Sequence[str],
    log: Path,
    *,
    answer_s: float | None = None,
    is_needed: Callable[[], bool] = lambda: False,
) -> Iterator[Attendant]:
    """Run `command` beside this process for the block; it receives lines on standard input.

    Standard input, a stream socket, ends when this process ends in any way. Output goes to the file
    `log`. After the block the command is killed, unless it `is_needed`: it then acts as if this
    process had ended.
    """
    ours, theirs = socket.socketpair()
    with ours:
        with theirs, os.fdopen(os.open(log, APPENDED, 0o600), "wb") as output:
            attendant = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, start_new_session=True
            )
        ours.setblocking(False)
        try:
            yield Attendant(ours, answer_s)
        finally:
            if is_needed():
                _needed.append(attendant)
            else:
                attendant.kill()
                attendant.wait()
