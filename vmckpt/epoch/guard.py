"""A program that stands beside the one that takes epochs. Standard library only: it starts quickly.

    python -I -S guard.py RESCUE_MONITOR QEMU_PID [HOLD ...]

On its standard input it is told, a line each time, until when the guest may run, in seconds of
CLOCK_BOOTTIME, or `inf`; or `free` and such a time: by then its teller is to be out of its way. It
acts in three cases, by a monitor of its own that it holds open:

- The input ends: whoever took epochs has died. A guest that stands still for an epoch (`paused`,
  `finish-migrate`, `postmigrate`) is let run on, if it still may. What it sends stays held, but by
  the objects HOLD, which are removed.
- The time of `free` is past: the same, the teller is stuck.
- The time is past, the teller dead or stuck: the guest is stopped, and QEMU killed should it not
  answer. The teller, if it goes on, lets it run again when it may.
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
ANSWER_S, POLL_S = 1.0, 0.005
# How often the events are taken that QEMU tells everybody, and how much at once.
PASS_OVER_S, READ_BYTES = 0.5, 1 << 16
# How often it is seen to that a guest that may not run does not.
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
        self._sock.connect(path)
        self._told = b""
        self._line()  # the greeting
        self._ask("qmp_capabilities")
        self._until_s = self._free_by_s = float("inf")

    def watch(self) -> None:
        """Until the teller has died and all that was to be done is done, or QEMU has ended."""
        _take_turns()
        told, teller_lives, stopped = b"", True, False
        while teller_lives or not stopped:
            if self._ended():
                return
            if stopped and _now_s() < self._until_s:
                stopped = False
            left_s = self._until_s - _now_s()
            # Whoever was in the middle of an epoch may have let it run again.
            if left_s <= 0 and (not stopped or self._runs()):
                self._stop()
                stopped = True
            if self._free_by_s <= _now_s():
                self._free_by_s = float("inf")
                self._free()
            watched = [self._pidfd, 0] if teller_lives else [self._pidfd]
            patience_s = min(AGAIN_S if stopped else left_s, PASS_OVER_S)
            patience_s = min(patience_s, self._free_by_s - _now_s())
            ready, _, _ = select.select(watched, [], [], max(patience_s, 0.0))
            self._pass_over()
            if 0 not in ready:
                continue
            said = os.read(0, 4096)
            told += said
            *whole, told = told.split(b"\n")
            for line in whole:
                word, _, time_s = line.partition(b" ")
                if time_s:
                    self._free_by_s = float(time_s)
                else:
                    self._until_s = float(word)
            if not said:
                teller_lives = False
                self._free()
                if self._until_s == float("inf"):
                    return  # or its monitor would be nobody else's as long as QEMU lives

    def _ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def _stop(self) -> None:
        self._sock.settimeout(ANSWER_S)
        try:
            self._ask("stop")
            self._say("the guest was stopped: it may not run now")
        except OSError as exc:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            self._say(f"QEMU was killed: it may not run, and does not answer ({exc})")

    def _runs(self) -> bool:
        """Whether the guest runs; of a QEMU that does not answer nobody knows, so it may."""
        try:
            return bool(self._ask("query-status")["return"]["running"])
        except OSError:
            return True

    def _free(self) -> None:
        self._share_processors()
        self._resume()
        for name in self._holds:
            self._ask("object-del", id=name)

    def _share_processors(self) -> None:
        """QEMU had real-time threads for the epoch (vmckpt.hosts.scheduling): no longer."""
        for thread in map(int, os.listdir(f"/proc/{self._pid}/task")):
            with suppress(OSError):  # it has ended, or is not ours to change
                if os.sched_getscheduler(thread) == REAL_TIME:
                    os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    def _resume(self) -> None:
        """Let it run on, whose epoch was cut off; one that stands for another reason is left."""
        self._sock.settimeout(RESUME_S)
        given_up_s = time.monotonic() + RESUME_S
        while _now_s() < self._until_s and time.monotonic() < given_up_s:
            status = self._ask("query-status")["return"]
            if status["running"] or status["status"] not in STOPPED_FOR_AN_EPOCH:
                self._say(f"its keeper has died or is stuck; the guest is {status['status']}")
                return
            self._ask("cont")
            time.sleep(POLL_S)

    def _ask(self, command: str, **arguments: str) -> dict[str, Any]:
        """The answer to a command; events are passed over. Raises OSError."""
        words = {"execute": command, "arguments": arguments}
        self._sock.sendall(json.dumps(words).encode() + b"\n")
        while True:
            said: dict[str, Any] = json.loads(self._line())
            if "return" in said or "error" in said:
                return said

    def _line(self) -> bytes:
        """The next line that QEMU tells. Raises OSError."""
        while b"\n" not in self._told:
            data = self._sock.recv(READ_BYTES)
            if not data:
                raise ConnectionError("the monitor was closed")
            self._told += data
        line, _, self._told = self._told.partition(b"\n")
        return line

    def _pass_over(self) -> None:
        """Take the events that wait: QEMU would keep them, and they would stand before an answer.

        In an hour of epochs that is hundreds of megabytes.
        """
        while select.select([self._sock], [], [], 0)[0]:
            try:
                data = self._sock.recv(READ_BYTES)
            except OSError:
                return  # the next question says so
            if not data:
                return
            self._told = (self._told + data).rpartition(b"\n")[2]

    def _say(self, text: str) -> None:
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


def _take_turns() -> None:
    """Its teller may come last on a busy processor, and so it was begun; but guests wait for it."""
    if os.sched_getscheduler(0) == os.SCHED_IDLE:
        with suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


if __name__ == "__main__":
    Guard(sys.argv[1], int(sys.argv[2]), sys.argv[3:]).watch()
