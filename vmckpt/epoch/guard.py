"""The guard: a program beside the one that takes epochs. Standard library only: it starts quickly.

    python -I -S guard.py RESCUE_MONITOR QEMU_PID [HOLD ...]

On its standard input, a stream socket, it receives the time until which the guest may run, in
seconds of CLOCK_BOOTTIME, or `inf`; or `free` and such a time, by which the sender must be done. It
answers each line with a dot, so that a frozen guard is noticed. It acts in three cases, over its
own monitor, which it keeps open:

- The input ends: the process that took epochs has died. A guest paused for an epoch (`paused`,
  `finish-migrate`, `postmigrate`) is resumed, if it still may run. Its output stays held, except
  by the objects HOLD, which are removed.
- The time of `free` is past: the same, the sender is stuck.
- The time is past, the sender dead or stuck: the guest is stopped. A sender that continues resumes
  it when it may run. A QEMU that neither answers nor has reported that its guest is paused is
  itself held (SIGSTOP) until the guest may run, and killed when the sender is gone.
"""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

STOPPED_FOR_AN_EPOCH = ("paused", "finish-migrate", "postmigrate")
# The time in which QEMU has to pause its guest; the sender's margin is longer.
ANSWER_S, POLL_S = 0.2, 0.005
# How often QEMU's broadcast events are read, and how much at once.
PASS_OVER_S, READ_BYTES = 0.5, 1 << 16
MOST_LINE_BYTES = 4 << 20
# What may have arrived in time although it is read later.
MOST_LATE_BYTES = 4 * READ_BYTES
# How often a guest that may not run is stopped again.
AGAIN_S = 0.05
# `cont` is refused for a moment while QEMU ends what the epoch began.
RESUME_S = 10.0
REAL_TIME = os.SCHED_RR | os.SCHED_RESET_ON_FORK


class Guard:
    """The guest's QEMU, and until when it may run."""

    def __init__(self, path: str, pid: int, holds: Sequence[str]) -> None:
        self._holds = tuple(holds)
        self._pid, self._pidfd = pid, os.pidfd_open(pid)
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(RESUME_S)
        # A link made by QEMU's own user may lead to another's monitor.
        fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        is_ours = os.fstat(fd).st_uid in (0, os.geteuid())
        self._sock.connect(path if is_ours else f"/proc/self/fd/{fd}")
        os.close(fd)
        self._received, self._asked = b"", 0
        self._line(time.monotonic() + RESUME_S)  # the greeting
        self._ask("qmp_capabilities", time.monotonic() + RESUME_S)
        self._heard, self._teller_lives = b"", True
        self._stands_still = self._is_held = False
        self._until_s = self._free_by_s = float("inf")

    def watch(self) -> None:
        """Run until the sender has died and everything due is done, or QEMU has ended."""
        _take_turns()
        stopped = False
        while True:
            # Before any decision: read what the sender, which may have died since, has sent.
            died = self._teller_lives and not self._hear()
            if self._ended():
                return
            may_run = _now_s() < self._until_s
            if may_run:
                self._release()
            else:  # repeatedly: a process in the middle of an epoch may resume it
                self._stop()
            stopped = not may_run
            if died or self._free_by_s <= _now_s():
                self._free_by_s = float("inf")
                self._free()
            if not self._teller_lives and stopped:
                self._end_held()
                return
            if not self._teller_lives and self._until_s == float("inf"):
                return  # otherwise it would occupy the monitor as long as QEMU lives
            self._wait(AGAIN_S if stopped else self._until_s - _now_s())

    def _wait(self, most_s: float) -> None:
        """Wait for an order, or until something is due."""
        watched = [self._pidfd, 0] if self._teller_lives else [self._pidfd]
        patience_s = min(most_s, PASS_OVER_S, self._free_by_s - _now_s())
        select.select(watched, [], [], max(patience_s, 0.0))
        self._pass_over()

    def _hear(self) -> bool:
        """Read what the sender has sent; False once it has died."""
        while select.select([0], [], [], 0)[0]:
            try:
                output = os.read(0, 4096)
            except ConnectionResetError:  # it died, with answers unread
                output = b""
            self._heard += output
            *whole, self._heard = self._heard.split(b"\n")
            with suppress(OSError):  # a sender that reads no answers may have closed that direction
                os.write(0, b"." * len(whole))
            for line in whole:
                word, _, time_s = line.partition(b" ")
                if time_s:
                    self._free_by_s = float(time_s)
                else:
                    self._until_s = float(word)
            if not output:
                self._teller_lives = False
                break
        return self._teller_lives

    def _ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def _stop(self) -> None:
        """Make sure that the guest does not run."""
        if self._is_held:
            return
        by_s = time.monotonic() + ANSWER_S
        try:
            if self._status(by_s)["running"]:
                self._ask("stop", by_s)
                self._say("the guest was stopped: it may not run now")
        except OSError as exc:
            if isinstance(exc, TimeoutError) and self._stands_still:
                return  # it is flushing what its guest has left
            self._is_held = True
            self._signal(signal.SIGSTOP)
            self._say(f"QEMU is held: its guest may not run, and it does not answer ({exc})")

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._signal(signal.SIGCONT)
            self._say("QEMU is no longer held: its guest may run")

    def _end_held(self) -> None:
        if self._is_held:
            self._signal(signal.SIGKILL)
            self._say(
                "QEMU was killed: it did not answer, and no process is left that could resume it"
            )

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, number)

    def _free(self) -> None:
        self._share_processors()
        try:
            self._resume()
            for name in self._holds:
                self._ask("object-del", time.monotonic() + RESUME_S, id=name)
        except OSError as exc:
            self._say(f"its keeper has died or is stuck; QEMU does not answer ({exc})")

    def _share_processors(self) -> None:
        """Reset the priority of QEMU's real-time threads (`hosts/processes/scheduling.py`)."""
        threads = list[str]()
        with suppress(OSError):  # it has ended, or no descriptor is free
            threads = os.listdir(f"/proc/{self._pid}/task")
        for thread in map(int, threads):
            with suppress(OSError):  # it has ended, or is not ours to change
                if os.sched_getscheduler(thread) == REAL_TIME:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    def _resume(self) -> None:
        """Resume a guest whose epoch was cut off, but not one stopped for another reason."""
        by_s = time.monotonic() + min(RESUME_S, self._until_s - _now_s())
        while time.monotonic() < by_s:
            status = self._status(by_s)
            if status["running"] or status["status"] not in STOPPED_FOR_AN_EPOCH:
                self._say(f"its keeper has died or is stuck; the guest is {status['status']}")
                return
            self._ask("cont", by_s)
            time.sleep(POLL_S)

    def _status(self, by_s: float) -> dict[str, Any]:
        """The guest's state. Raises OSError, also for an invalid answer: its guest may run then."""
        output: dict[str, Any] = self._ask("query-status", by_s)
        match output.get("return"):
            case {"running": bool(), "status": str()}:
                found: dict[str, Any] = output["return"]
                return found
        raise ConnectionError("its report of the guest is malformed")

    def _ask(self, command: str, by_s: float, **arguments: str) -> dict[str, Any]:
        """The answer to a command; skips events, and answers that came too late.

        Raises OSError, which TimeoutError is.
        """
        self._asked += 1
        words = {"execute": command, "arguments": arguments, "id": self._asked}
        self._be_patient(by_s)
        self._sock.sendall(json.dumps(words).encode() + b"\n")
        late_bytes = 0
        while late_bytes < MOST_LATE_BYTES:
            line = self._line(by_s)
            if time.monotonic() > by_s:
                late_bytes += len(line) + 1
            try:
                output: dict[str, Any] = json.loads(line)
                if output.get("id") == self._asked:
                    return output
            except (ValueError, RecursionError, AttributeError) as exc:
                raise ConnectionError(f"what it says is malformed: {exc}") from exc
        raise TimeoutError("it reports events without end")

    def _be_patient(self, by_s: float) -> None:
        self._sock.settimeout(max(by_s - time.monotonic(), 0.001))

    def _line(self, by_s: float) -> bytes:
        """The next line from QEMU. Raises OSError."""
        while b"\n" not in self._received:
            self._be_patient(by_s)
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the monitor was closed")
            self._received += data
            if len(self._received) > MOST_LINE_BYTES:
                raise ConnectionError("its reply is too long")
        line, _, self._received = self._received.partition(b"\n")
        self._note(line)
        return line

    def _note(self, lines: bytes) -> None:
        """Note whether the guest is paused, by the last event about it."""
        stops, goes_on = (lines.rfind(b'"event": "%s"' % name) for name in (b"STOP", b"RESUME"))
        if stops != goes_on:
            self._stands_still = stops > goes_on

    def _pass_over(self) -> None:
        """Read the pending events: QEMU would keep them, and they would precede an answer.

        In an hour of epochs that is hundreds of megabytes. More than MOST_LINE_BYTES at once wait:
        the sender comes first.
        """
        for _ in range(MOST_LINE_BYTES // READ_BYTES):
            if not select.select([self._sock], [], [], 0)[0]:
                return
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError:
                return  # the next command reports it
            if not data:
                return
            whole, _, self._received = (self._received + data).rpartition(b"\n")
            self._note(whole)
            if len(self._received) > MOST_LINE_BYTES:
                self._received = b""  # no line is this long; the next answer shows it

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the disk is full
            os.write(1, f"{text}\n".encode())


def _take_turns() -> None:
    """Restore normal scheduling: its sender may yield on a busy processor, and the guard was
    started with that setting; but guests wait for the guard.
    """
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    # A host that shuts down signals every process; the sender hands the guest over meanwhile.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Guard(sys.argv[1], int(sys.argv[2]), sys.argv[3:]).watch()
