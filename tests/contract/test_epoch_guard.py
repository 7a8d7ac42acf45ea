"""The guard that stands beside who takes epochs, against a QMP server that follows a script."""

import json
import math
import os
import resource
import select
import signal
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
    """A QEMU's rescue monitor whose guest is paused until it is told to go on."""

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
        self.say(GREETING)
        assert self.answer()["execute"] == "qmp_capabilities"

    def answer(self) -> dict[str, Any]:
        """Do and answer the next command, which this gives; {} when the guard has gone."""
        line = self._lines.readline()
        if not line:
            return {}
        command: dict[str, Any] = json.loads(line)
        if command["execute"] in ("cont", "stop"):
            self.runs = command["execute"] == "cont"
        status = {"running": self.runs, "status": "running" if self.runs else "paused"}
        answer: dict[str, Any] = {"return": status if command["execute"] == "query-status" else {}}
        if command["execute"] == "object-del" and command["arguments"]["id"] == "gone":
            answer = {"error": {"class": "GenericError", "desc": "no such object"}}
        self.say(answer | ({"id": command["id"]} if "id" in command else {}))
        return command

    def waits(self, s: float) -> bool:
        """Whether the guard asks nothing for so long."""
        return not select.select([self._sock], [], [], s)[0]

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

    def say(self, words: object) -> None:
        """Tell the guard that."""
        self._sock.sendall(json.dumps(words).encode() + b"\n")


@contextmanager
def guarded(
    folder: Path, *holds: str, pid: int | None = None
) -> Iterator[tuple[Qemu, "subprocess.Popen[bytes]"]]:
    qemu = Qemu(folder / "rescue.sock")
    command = [sys.executable, "-I", "-S", str(guard.__file__), str(folder / "rescue.sock")]
    process = subprocess.Popen([*command, str(pid or os.getpid()), *holds], stdin=subprocess.PIPE)
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


@contextmanager
def silent(folder: Path) -> Iterator[tuple[Qemu, "subprocess.Popen[bytes]", int]]:
    """A QEMU that says nothing more, its guard, and the pid of what stands for its process."""
    with subprocess.Popen(["sleep", "100"]) as itself:
        try:
            with guarded(folder, pid=itself.pid) as (qemu, process):
                qemu.runs = True
                yield qemu, process, itself.pid
        finally:
            itself.kill()


def tell(process: "subprocess.Popen[bytes]", until_s: float) -> None:
    assert process.stdin
    process.stdin.write(b"%f\n" % until_s)
    process.stdin.flush()


def becomes(pid: int, states: str) -> bool:
    """Whether the process is soon in one of these states (proc(5))."""
    given_up_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < given_up_s:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in states:
            return True
        time.sleep(0.002)
    return False


def test_a_guest_whose_time_is_over_is_stopped_as_often_as_it_is_let_run(tmp_path: Path) -> None:
    with guarded(tmp_path) as (qemu, process):
        for _ in range(2):
            qemu.runs = True
            tell(process, _boottime_s())
            while qemu.answer()["execute"] != "stop":
                pass
        tell(process, math.inf)
        while not qemu.waits(1.0):
            qemu.answer()
        assert process.poll() is None


def test_a_qemu_that_does_not_answer_is_held_until_its_guest_may_run(tmp_path: Path) -> None:
    with silent(tmp_path) as (qemu, process, pid):
        began_s = time.monotonic()
        tell(process, _boottime_s())
        assert becomes(pid, "T")
        assert time.monotonic() - began_s >= guard.ANSWER_S
        tell(process, math.inf)
        assert becomes(pid, "S")
        # What was asked of it before is answered now: it is not taken for an answer to this.
        qemu.runs = False
        qemu.answer()
        tell(process, _boottime_s())
        qemu.runs = True
        while qemu.answer()["execute"] != "stop":
            pass
        assert becomes(pid, "S")


@pytest.mark.parametrize(
    "said",
    [b"[]\n", b"{\n", b"\xff\n", b"[" * 100_000 + b"\n", b'{"id": %d}\n',
     b'{"id": %d, "return": 3}\n',
     b'{"id": %d, "return": {"running": 0, "status": "paused"}}\n',
     b'{"id": %d, "error": {"desc": "no"}}\n'],
)  # fmt: skip
def test_a_qemu_that_says_what_is_no_answer_is_held_too(tmp_path: Path, said: bytes) -> None:
    """Its guest may run: that a guard dies of it would let two run."""
    with silent(tmp_path) as (qemu, process, pid):
        tell(process, _boottime_s())
        assert not qemu.waits(PATIENCE_S)
        number = json.loads(qemu._lines.readline())["id"]
        qemu._sock.sendall(said % number if b"%d" in said else said)
        assert becomes(pid, "T")
        assert process.poll() is None


@pytest.mark.parametrize("is_asked_first", [True, False])
def test_a_qemu_that_says_more_and_more_is_held_too(
    tmp_path: Path, *, is_asked_first: bool
) -> None:
    """The guard read its events without end, and heard neither its sender nor its time."""
    with silent(tmp_path) as (qemu, process, pid):
        if is_asked_first:
            tell(process, _boottime_s())
            assert not qemu.waits(PATIENCE_S)
        qemu._sock.settimeout(None)
        says = f"import os\nwhile os.write({qemu._sock.fileno()}, b'{{}}\\n' * 100_000): pass"
        command = [sys.executable, "-I", "-S", "-c", says]
        with subprocess.Popen(command, pass_fds=[qemu._sock.fileno()]) as flood:
            try:
                time.sleep(0.1)
                tell(process, _boottime_s())
                assert becomes(pid, "T")
                assert process.poll() is None
            finally:
                flood.kill()


def test_a_guard_without_a_free_descriptor_lets_the_guest_run(tmp_path: Path) -> None:
    """It died of that, and the guest of a dead service stayed paused."""
    with guarded(tmp_path, "vmckpt-brief-net0") as (qemu, process):
        tell(process, math.inf)
        time.sleep(0.2)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, 3))
        assert process.stdin
        process.stdin.close()
        assert qemu.removed(1) == ["vmckpt-brief-net0"]
        assert process.wait(PATIENCE_S) == 0


def test_a_qemu_that_is_held_and_that_nobody_can_let_go_is_killed(tmp_path: Path) -> None:
    with silent(tmp_path) as (_, process, pid):
        tell(process, _boottime_s())
        assert becomes(pid, "T")
        assert process.stdin
        process.stdin.close()
        assert becomes(pid, "Z")
        assert process.wait(PATIENCE_S) == 0


def test_a_qemu_that_stopped_its_guest_and_writes_out_what_it_left_is_not_held(
    tmp_path: Path,
) -> None:
    with silent(tmp_path) as (qemu, process, pid):
        for event in ("STOP", "RESUME", "STOP"):
            qemu.say({"timestamp": {}, "event": event})
        tell(process, _boottime_s())
        assert not qemu.waits(PATIENCE_S)
        time.sleep(3 * guard.ANSWER_S)
        assert becomes(pid, "S")
        assert process.poll() is None


def test_what_was_told_in_time_counts_though_it_is_heard_late(tmp_path: Path) -> None:
    with guarded(tmp_path) as (qemu, process):
        qemu.runs = True
        tell(process, _boottime_s() + 0.5)
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.5)
        tell(process, math.inf)
        process.send_signal(signal.SIGCONT)
        assert qemu.waits(0.5)


def _boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
