"""Processes that outlive their starter, are never mistaken for others, and a dead-man's switch."""

import os
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.waiting import eventually
from vmckpt.fleet.guard.ending import end
from vmckpt.fleet.guard.worker import WORKER
from vmckpt.hosts.processes import process, promises
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import ProcessId


@contextmanager
def spawned(tmp_path: Path, *argv: str) -> Iterator[ProcessId]:
    """A process for the block."""
    started = process.spawn(list(argv), tmp_path / "log")
    try:
        yield started
    finally:
        process.kill(started)


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-I", "-S", "-c", code)


def test_a_process_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    with spawned(tmp_path, "sleep", "60") as sleeper:
        assert process.is_alive(sleeper)
        assert process.identify(sleeper.pid) == sleeper
        assert process.kill(sleeper)
        assert not process.is_alive(sleeper)
        assert process.kill(sleeper)


# 60 is exit(2), of this thread alone.
FIRST_THREAD_ENDS = """\
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
print("goes", flush=True)
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="its system call has another number")
def test_a_process_whose_first_thread_has_ended_is_alive_until_it_is_killed(tmp_path: Path) -> None:
    with spawned(tmp_path, *python(FIRST_THREAD_ENDS)) as started:
        stat = Path(f"/proc/{started.pid}/stat")
        eventually(lambda: ") Z " in stat.read_text())
        assert process.is_alive(started)
        assert started in process.find_by_user(os.geteuid())
        assert process.kill(started)
        assert not process.is_alive(started)


def test_a_process_that_ends_by_itself_is_not_alive(tmp_path: Path) -> None:
    with spawned(tmp_path, "true") as short:
        eventually(lambda: not process.is_alive(short))
        # Reaped, not only ended.
        eventually(lambda: not Path(f"/proc/{short.pid}").exists())


def test_a_process_has_a_session_of_its_own_and_no_terminal(tmp_path: Path) -> None:
    with spawned(tmp_path, "sleep", "60") as sleeper:
        assert os.getsid(sleeper.pid) == sleeper.pid != os.getsid(0)
        assert Path(f"/proc/{sleeper.pid}/fd/0").readlink() == Path(os.devnull)


def test_a_process_gets_no_descriptor_of_its_starter(tmp_path: Path) -> None:
    # One that a shell passed on (`flock 9`), and one of ours.
    with (tmp_path / "a").open("w") as passed_on, (tmp_path / "b").open("w"):
        os.set_inheritable(passed_on.fileno(), True)
        with spawned(tmp_path, "sleep", "60") as sleeper:
            fds = f"/proc/{sleeper.pid}/fd"
            # While it is starting, the loader has its libraries open.
            eventually(lambda: sorted(os.listdir(fds)) == ["0", "1", "2"])


def test_output_is_appended_to_a_private_file(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    code = "import os; os.write(1, b'out;'); os.write(2, b'err;')"
    for text in ("out;err;", "out;err;out;err;"):
        process.spawn(list(python(code)), log)
        eventually(lambda text=text: log.read_text() == text)
    assert log.stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_started_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        process.spawn(["/gone/qemu"], tmp_path / "log")
    (tmp_path / "script").touch(mode=0o600)
    with pytest.raises(PermissionError):
        process.spawn([str(tmp_path / "script")], tmp_path / "log")


def test_a_reused_pid_is_another_process(tmp_path: Path) -> None:
    with spawned(tmp_path, "sleep", "60") as sleeper:
        before = ProcessId(sleeper.pid, sleeper.start_ticks - 1)
        assert not process.is_alive(before)
        # It is gone, which is what was wanted; and the new one is left alone.
        assert process.kill(before)
        assert process.is_alive(sleeper)


def test_a_zombie_has_ended() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        running = process.identify(child.pid)
        assert running is not None
        child.kill()
        eventually(lambda: process.identify(child.pid) is None)
        # No one has reaped it: the pid is still there.
        assert Path(f"/proc/{child.pid}").exists()
        assert not process.is_alive(running)
        assert process.kill(running)
    finally:
        child.kill()
        child.wait()


def test_a_name_with_brackets_and_spaces_does_not_confuse(tmp_path: Path) -> None:
    odd = tmp_path / "a) Z 1 (b"
    odd.symlink_to("/bin/sleep")
    with spawned(tmp_path, str(odd), "60") as sleeper:
        ours = process.identify(os.getpid())
        assert ours is not None
        assert process.is_alive(sleeper)
        assert sleeper.start_ticks >= ours.start_ticks > 0


def test_no_such_process() -> None:
    assert process.identify(0) is None
    assert process.identify(1 << 30) is None
    assert process.kill(ProcessId(1 << 30, 5))


def test_a_process_that_does_not_end_is_said_not_to(tmp_path: Path) -> None:
    code = "import signal, sys; signal.signal(15, 1); print(flush=True); signal.pause()"
    with spawned(tmp_path, *python(code)) as stubborn:
        eventually((tmp_path / "log").read_text)
        assert not process.kill(stubborn, signal.SIGTERM, wait_s=0.05)
        assert process.is_alive(stubborn)


def test_processes_are_found_by_what_only_they_were_given(tmp_path: Path) -> None:
    mark = f"-pidfile\0{tmp_path}/pid"
    with spawned(tmp_path, *python("input = 1; import signal; signal.pause()"), *mark.split("\0")):
        # The kernel shows a new program's arguments a moment after it has begun.
        eventually(lambda: process.find_by_argument(mark))
        assert process.find_by_argument(f"-pidfile\0{tmp_path}/pidx") == []
        (found,) = process.find_by_argument(mark)
        assert process.kill(found)
        assert process.find_by_argument(mark) == []


STARTER = """
import sys, time
from pathlib import Path
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import spawn
log, done = Path(sys.argv[1]), sys.argv[2]
with armed([sys.executable, "-I", "-S", "-c", f"open({done!r}, 'x'); print('rescued')"], log):
    # What it starts outlives it, and must not hold the switch open.
    print(spawn(["sleep", "60"], log.with_name("sleeper")).pid, flush=True)
    time.sleep(float(sys.argv[3]))
print("released", flush=True)
"""


@contextmanager
def starter(tmp_path: Path, sleep_s: str) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """A process with an armed switch that makes the file `done`."""
    done = tmp_path / "done"
    child = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(tmp_path / "log"), str(done), sleep_s],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    sleeper = 0
    try:
        sleeper = int(child.stdout.readline())
        yield child, done
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        with suppress(ProcessLookupError):
            os.kill(sleeper or child.pid, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_switch_acts_when_its_starter_dies(tmp_path: Path, number: signal.Signals) -> None:
    with starter(tmp_path, "60") as (child, done):
        assert not done.exists()
        child.send_signal(number)
        eventually(done.exists)
        eventually(lambda: "rescued" in (tmp_path / "log").read_text())
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600


def test_the_switch_outlives_its_starters_process_group(tmp_path: Path) -> None:
    # Ctrl-\\ and a closed terminal reach the whole group.
    with starter(tmp_path, "60") as (child, done):
        os.killpg(child.pid, signal.SIGKILL)
        eventually(done.exists)


def test_a_released_switch_does_nothing(tmp_path: Path) -> None:
    with starter(tmp_path, "0") as (child, done):
        assert child.stdout is not None
        assert child.stdout.readline() == "released\n"
        assert child.wait() == 0
        # The watcher has been waited for: nothing can come any longer.
        assert not done.exists()


def test_a_switch_is_released_by_an_error_too(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with (
        pytest.raises(ZeroDivisionError),
        armed(["/usr/bin/touch", str(done)], tmp_path / "log"),
    ):
        raise ZeroDivisionError
    assert not done.exists()


def test_a_watcher_that_was_killed_does_no_harm(tmp_path: Path) -> None:
    done = tmp_path / "done"
    with armed(["/usr/bin/touch", str(done)], tmp_path / "log"):
        eventually(lambda: process.find_by_argument(str(done)))
        for watcher in process.find_by_argument(str(done)):
            process.kill(watcher)
    assert not done.exists()
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("free", [0, 1])
@pytest.mark.parametrize(
    "asked",
    [
        "process.is_alive(which)",
        "process.identify(which.pid)",
        "process.kill(which)",
        "process.stop_for_good(which)",
        "process.find_by_argument('vmckpt-no-such-argument')",
    ],
)
def test_a_process_is_not_taken_for_dead_when_no_descriptor_is_free(
    tmp_path: Path, asked: str, free: int
) -> None:
    """A standby that believed this "proved" its primary dead, and no signal was ever sent."""
    code = f"""
import os, resource, sys
from vmckpt.errors import OutcomeUnknownError
from vmckpt.fleet.guard.ending import end
from vmckpt.fleet.guard.worker import WORKER
from vmckpt.hosts.processes import process
from vmckpt.hosts.processes import promises
which = process.ProcessId({{pid}}, {{ticks}})
held = [os.open("/dev/null", os.O_RDONLY) for _ in range(8)]
resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1 + {free}, 4096))
try:
    print({asked})
except OutcomeUnknownError as exc:
    print("unknown", exc.why)
"""
    with spawned(tmp_path, "sleep", "60") as sleeper:
        text = code.format(pid=sleeper.pid, ticks=sleeper.start_ticks)
        done = subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
        told = done.stdout.strip()
        if told == "True" or told.startswith("ProcessId"):
            # One descriptor was enough: then what it says is true.
            assert process.is_alive(sleeper) is ("kill" not in asked and "stop" not in asked)
        elif free and told == "[]":
            assert "find" in asked
        else:
            assert told.startswith("unknown"), done
            assert process.is_alive(sleeper)


def test_a_command_that_acts_at_a_death_waits_until_all_threads_have_ended(tmp_path: Path) -> None:
    # As while the kernel takes a killed process apart: its first thread has gone, its locks have
    # not.
    dying = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with spawned(tmp_path, *python(dying)) as starter:
        stat = Path(f"/proc/{starter.pid}/stat")
        eventually(lambda: ") Z " in stat.read_text())
        environment = {"VMCKPT_STATE_DIR": str(tmp_path), "VMCKPT_STARTER": str(starter.pid)}
        with subprocess.Popen(
            [sys.executable, "-m", "vmckpt.cli.entry", "host", "list", "--json"],
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as command:
            with pytest.raises(subprocess.TimeoutExpired):
                command.wait(2.0)
            os.kill(starter.pid, signal.SIGKILL)
            output, _ = command.communicate(timeout=30)
    assert command.returncode == 0, output


# What it claims to have been started with is memory that it never touched: PR_SET_MM_MAP.
MAKES_ITSELF_LONG = """import ctypes, struct, time
libc, size = ctypes.CDLL(None), 1 << 40
libc.mmap.restype = libc.sbrk.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
at = libc.mmap(None, size, 1, 0x4022, -1, 0)
with open("/proc/self/stat") as file:
    stat = [0] * 3 + file.read().rpartition(")")[2].split()
fields = [int(stat[number]) for number in (26, 27, 45, 46, 47)]
fields += [libc.sbrk(0), int(stat[28]), at, at + size, at, at + size, 0]
said = libc.prctl(35, 14, struct.pack("12QIi", *fields[:12], 0, -1), 104, 0)
print(said, flush=True)
time.sleep(600)
"""


def test_a_process_that_makes_its_command_line_long_keeps_nobody(tmp_path: Path) -> None:
    """Any user's does, and a VM's: what looks at all processes takes no memory for that."""
    code = [sys.executable, "-I", "-S", "-c", MAKES_ITSELF_LONG]
    child = subprocess.Popen(code, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        if child.stdout.readline() != b"0\n":
            pytest.skip("this kernel lets no process say what it was started with")
        tracemalloc.start()
        began_s = time.monotonic()
        assert process.find_by_argument(str(tmp_path)) == []
        assert process.find_by_argument(str(tmp_path), {12345}) == []
        (tmp_path / WORKER).write_text("{")  # then by the processes' environments
        assert end(tmp_path).left == ()
        promises.room(tmp_path, 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
        assert time.monotonic() - began_s < 20
    finally:
        tracemalloc.stop()
        child.kill()
        child.communicate()


# A name is a process's own choice, of 15 bytes; the kernel shows it as it is, but for newlines.
NAMES_ITSELF = """\
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]))
print(flush=True)
time.sleep(600)
"""


@contextmanager
def named(name: bytes, *argv: str, user: int | None = None) -> Iterator[int]:
    """A process that calls itself so; its pid."""
    code = ["/usr/bin/python3", "-I", "-S", "-c", NAMES_ITSELF, name.hex(), *argv]
    with subprocess.Popen(code, stdout=subprocess.PIPE, user=user) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"\n"
            yield child.pid
        finally:
            child.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_no_name_makes_a_process_another_users(tmp_path: Path) -> None:
    """It passed for root's, and none of its own user's was found."""
    mark, nobody = f"{tmp_path}/pid", 65534
    with named(b"\rUid:\t0\t0\t0\t0", mark, user=nobody) as pid:
        assert [one.pid for one in process.find_by_argument(mark)] == [pid]
        assert process.find_by_argument(mark, {0}) == []
        assert pid in [one.pid for one in process.find_by_user(nobody)]


def test_a_name_that_is_no_utf_8_hides_no_process(tmp_path: Path) -> None:
    mark = f"{tmp_path}/pid"
    with named(b"\xff)\n\xfe", mark) as pid:
        (found,) = process.find_by_argument(mark, {os.geteuid()})
        assert process.identify(pid) == found
        assert process.is_alive(found)
        assert found in process.find_by_user(os.geteuid())
        assert not process.is_exiting(pid)
