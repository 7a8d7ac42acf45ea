"""The guard that stands beside who takes epochs, against a QMP server that follows a script."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_qmp import GREETING
from vmckpt.epoch import guard

pytestmark = pytest.mark.contract

PATIENCE_S = 30.0


class Qemu:
    """A QEMU's rescue monitor whose guest stands still until it is told to go on."""

    def __init__(self, path: Path) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(PATIENCE_S)
        self.runs = False

    def accept(self) -> None:
        self._sock, _ = self._listener.accept()
        self._sock.settimeout(PATIENCE_S)
        self._lines = self._sock.makefile("rb")
        self._say(GREETING)
        assert self.answer()["execute"] == "qmp_capabilities"

    def answer(self) -> dict[str, Any]:
        """Do and answer the next command, which this gives; {} when the guard has gone."""
        line = self._lines.readline()
        if not line:
            return {}
        command: dict[str, Any] = json.loads(line)
        if command["execute"] == "cont":
            self.runs = True
        if command["execute"] == "object-del" and command["arguments"]["id"] == "gone":
            self._say({"error": {"class": "GenericError", "desc": "no such object"}})
            return command
        status = {"running": self.runs, "status": "running" if self.runs else "paused"}
        self._say({"return": status if command["execute"] == "query-status" else {}})
        return command

    def removed(self, count: int) -> list[str]:
        """The next objects that are removed; the guest runs by then."""
        found: list[str] = []
        while len(found) < count:
            command = self.answer()
            if command["execute"] == "object-del":
                assert self.runs
                found.append(command["arguments"]["id"])
        return found

    def close(self) -> None:
        self._listener.close()
        self._lines.close()
        self._sock.close()

    def _say(self, words: object) -> None:
        self._sock.sendall(json.dumps(words).encode() + b"\n")


@contextmanager
def guarded(folder: Path, *holds: str) -> Iterator[tuple[Qemu, "subprocess.Popen[bytes]"]]:
    qemu = Qemu(folder / "rescue.sock")
    command = [sys.executable, "-I", "-S", str(guard.__file__), str(folder / "rescue.sock")]
    process = subprocess.Popen([*command, str(os.getpid()), *holds], stdin=subprocess.PIPE)
    try:
        qemu.accept()
        yield qemu, process
    finally:
        process.kill()
        process.wait()
        if process.stdin:
            process.stdin.close()
        qemu.close()


def test_a_dead_tellers_guest_runs_and_is_heard_and_the_monitor_is_free(tmp_path: Path) -> None:
    with guarded(tmp_path, "gone", "held") as (qemu, process):
        assert process.stdin
        process.stdin.close()
        assert qemu.removed(2) == ["gone", "held"]
        assert qemu.answer() == {}
        assert process.wait(PATIENCE_S) == 0


def test_a_teller_that_is_stuck_holds_nobody(tmp_path: Path) -> None:
    with guarded(tmp_path, "held") as (qemu, process):
        assert process.stdin
        process.stdin.write(b"free %f\n" % (_boottime_s() + 0.05))
        process.stdin.flush()
        assert qemu.removed(1) == ["held"]
        assert process.poll() is None


def test_a_teller_that_is_done_in_time_is_left_alone(tmp_path: Path) -> None:
    with guarded(tmp_path, "held") as (qemu, process):
        assert process.stdin
        process.stdin.write(b"free %f\nfree inf\n" % (_boottime_s() + 0.05))
        process.stdin.flush()
        time.sleep(0.15)
        assert not qemu.runs
        process.stdin.close()
        assert qemu.removed(1) == ["held"]


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_whoever_begins_it_may_come_last_but_it_takes_its_turns(tmp_path: Path) -> None:
    started = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        with guarded(tmp_path) as (_, process):
            given_up_s = time.monotonic() + PATIENCE_S
            while os.sched_getscheduler(process.pid) != os.SCHED_OTHER:
                assert time.monotonic() < given_up_s
                time.sleep(0.005)
    finally:
        os.sched_setscheduler(0, started, os.sched_param(0))


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
