"""The guard beside a process that takes epochs, with a QMP server that follows a script."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import eventually
from vmckpt.epoch import guard
from vmckpt.hosts.processes.deadman import attended
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.hosts.processes.scheduling import in_real_time
from vmckpt.lease.clock import boottime_s


class Monitor:
    """A rescue monitor: what it was told, and the state that it gives."""

    def __init__(self, path: Path, state: str) -> None:
        self.state, self.told = state, list[str]()
        self.refuses_cont, self.answers = 0, True
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self.greeted = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        peer, _ = self._server.accept()
        # The test ends the guard when it has seen enough, in the middle of a word too.
        with suppress(ConnectionError), peer, peer.makefile("rw") as lines:
            self._lines = lines
            lines.write(json.dumps({"QMP": {}}) + "\n")
            lines.flush()
            while line := lines.readline():
                asked = json.loads(line)
                command = asked["execute"]
                self.told.append(command)
                if not self.answers and command == "stop":
                    continue
                lines.write(json.dumps({"event": "RESUME"}) + "\n")
                lines.write(json.dumps(self._answer(command) | {"id": asked["id"]}) + "\n")
                lines.flush()
                if command == "qmp_capabilities":
                    self.greeted.set()

    def tell_events(self, count: int) -> None:
        """Tell so many; returns when they were taken."""
        self._lines.write((json.dumps({"event": "STOP"}) + "\n") * count)
        self._lines.flush()

    def close(self) -> None:
        self._server.close()

    def _answer(self, command: str) -> dict[str, object]:
        if command == "query-status":
            return {"return": {"status": self.state, "running": self.state == "running"}}
        if command == "cont" and self.refuses_cont:
            self.refuses_cont -= 1
            return {"error": {"class": "GenericError", "desc": "Migration is not finalized yet"}}
        if command in ("cont", "stop"):
            self.state = "running" if command == "cont" else "paused"
        return {"return": {}}


@pytest.fixture
def qemu() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


@contextmanager
def guarded(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]", state: str, log: Path = Path(os.devnull)
) -> Iterator[tuple["subprocess.Popen[bytes]", Monitor]]:
    """A guard whose teller is this test."""
    monitor = Monitor(tmp_path / "rescue.sock", state)
    command = [sys.executable, "-I", "-S", str(Path(guard.__file__))]
    words = [*command, str(tmp_path / "rescue.sock"), str(qemu.pid)]
    with (
        log.open("wb") as output,
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=output, bufsize=0) as child,
    ):
        assert monitor.greeted.wait(10)
        try:
            yield child, monitor
        finally:
            child.kill()
            monitor.close()


def tell(child: "subprocess.Popen[bytes]", line: str) -> None:
    assert child.stdin
    child.stdin.write(f"{line}\n".encode())


def die(child: "subprocess.Popen[bytes]") -> None:
    assert child.stdin
    child.stdin.close()


def until(monitor: Monitor, state: str) -> None:
    given_up_s = time.monotonic() + 5
    while monitor.state != state:
        assert time.monotonic() < given_up_s, monitor.told
        time.sleep(0.005)


@pytest.mark.parametrize("state", ["paused", "finish-migrate", "postmigrate"])
def test_a_guest_whose_epoch_was_cut_off_runs_on(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]", state: str
) -> None:
    with guarded(tmp_path, qemu, state) as (child, monitor):
        monitor.refuses_cont = 3
        tell(child, "inf")
        die(child)
        until(monitor, "running")
        assert monitor.told.count("cont") == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="takes root")
def test_a_qemu_that_waited_for_nobody_takes_its_turns_again(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    """Its vCPUs would let no one else work as soon as they run."""
    with in_real_time(qemu.pid), guarded(tmp_path, qemu, "paused") as (child, monitor):
        assert os.sched_getscheduler(qemu.pid) == guard.REAL_TIME
        die(child)
        until(monitor, "running")
        assert os.sched_getscheduler(qemu.pid) == os.SCHED_OTHER


def test_a_guest_that_stands_for_another_reason_is_left(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    with guarded(tmp_path, qemu, "io-error") as (child, monitor):
        die(child)
        time.sleep(0.2)
        assert monitor.state == "io-error"
        assert "cont" not in monitor.told


def test_a_guest_is_stopped_when_it_may_not_run_any_more(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    with guarded(tmp_path, qemu, "running") as (child, monitor):
        tell(child, f"{boottime_s() + 0.4}")
        time.sleep(0.15)
        assert monitor.state == "running"
        until(monitor, "paused")
        # Told in time again it stops it again; the teller is who lets it run.
        monitor.state = "running"
        tell(child, f"{boottime_s() + 0.2}")
        until(monitor, "paused")
        # Its teller dies while it may not run: it stays.
        die(child)
        time.sleep(0.1)
        assert monitor.state == "paused"
        assert child.wait(5) == 0


def test_a_guest_that_was_let_run_when_it_may_not_is_stopped_again(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    with guarded(tmp_path, qemu, "running") as (child, monitor):
        tell(child, f"{boottime_s() + 0.1}")
        until(monitor, "paused")
        monitor.state = "running"  # by an epoch that was in the middle of it
        until(monitor, "paused")


def test_a_guard_whose_log_is_on_a_full_disk_does_all_that_it_does(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    """It died after it had let the guest run on: no one stopped that at the end of the lease."""
    with guarded(tmp_path, qemu, "paused", Path("/dev/full")) as (child, monitor):
        tell(child, f"{boottime_s() + 2:.3f}")
        die(child)
        until(monitor, "running")
        until(monitor, "paused")
        assert child.wait(5) == 0
        assert monitor.told[-1] == "stop"


def test_what_qemu_tells_everybody_is_taken_and_never_stands_before_an_answer(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    with guarded(tmp_path, qemu, "running") as (child, monitor):
        # More than a socket holds; QEMU would have to keep the rest.
        telling = threading.Thread(target=monitor.tell_events, args=(100_000,), daemon=True)
        telling.start()
        telling.join(10)
        assert not telling.is_alive()
        tell(child, f"{boottime_s() + 0.1}")
        until(monitor, "paused")


def test_a_qemu_that_does_not_stop_is_held_and_killed_when_its_keeper_dies(
    tmp_path: Path, qemu: "subprocess.Popen[bytes]"
) -> None:
    with guarded(tmp_path, qemu, "running") as (child, monitor):
        monitor.answers = False
        tell(child, f"{boottime_s() + 0.1}")
        _, status = os.waitpid(qemu.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        assert monitor.told[-1] == "stop"
        die(child)
        assert qemu.wait(5) == -9


def test_a_guard_ends_with_its_qemu(tmp_path: Path, qemu: "subprocess.Popen[bytes]") -> None:
    with guarded(tmp_path, qemu, "running") as (child, _):
        qemu.kill()
        qemu.wait()
        assert child.wait(5) == 0


def test_an_attendant_hears_what_it_is_told_and_ends_with_the_block(tmp_path: Path) -> None:
    log, program = tmp_path / "log", "import sys; [print(l, end='', flush=True) for l in sys.stdin]"
    with attended([sys.executable, "-c", program], log) as say:
        say("one")
        say("two")
        given_up_s = time.monotonic() + 10
        while log.read_text() != "one\ntwo\n":
            assert time.monotonic() < given_up_s
            time.sleep(0.01)


def test_an_attendant_that_is_frozen_is_found_out(tmp_path: Path) -> None:
    program = "import os\nwhile said := os.read(0, 4096): os.write(0, b'.' * said.count(b'\\n'))"
    with attended([sys.executable, "-c", program], tmp_path / "log", answer_s=3.0) as say:
        for _ in range(3):
            say("inf")
            time.sleep(0.3)
        # Not before: a process has no command line at the moment when it becomes its program.
        (child,) = find_by_argument(program)
        os.kill(child.pid, signal.SIGSTOP)
        given_up_s = time.monotonic() + 30
        with pytest.raises(TimeoutError):
            while time.monotonic() < given_up_s:
                say("inf")
                time.sleep(0.1)


@pytest.mark.parametrize("is_needed", [True, False])
def test_one_that_is_still_needed_acts_after_the_block(tmp_path: Path, *, is_needed: bool) -> None:
    done = tmp_path / "done"
    program = f"import sys, pathlib; sys.stdin.read(); pathlib.Path({str(done)!r}).touch()"
    with attended(
        [sys.executable, "-c", program], tmp_path / "log", is_needed=lambda: is_needed
    ) as say:
        say("x")
        assert not done.exists()
    if is_needed:
        eventually(done.exists, 30, "it to act")
    else:
        assert not done.exists()


def test_what_is_told_is_never_waited_for(tmp_path: Path) -> None:
    with attended(["sleep", "60"], tmp_path / "log") as say, pytest.raises(BlockingIOError):
        for _ in range(1 << 20):
            say("x" * 1000)
