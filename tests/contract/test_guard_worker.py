"""The process that runs a guard's command: how that ended, and that nothing of it goes on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vmckpt.fleet.guard.command import end_worker
from vmckpt.fleet.guard.record import Worker
from vmckpt.hosts.local import LocalHost

pytestmark = pytest.mark.contract


def begin(result: Path, *command: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "vmckpt.fleet.guard.worker", str(result), *command]
    return subprocess.Popen(words)


def told(result: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads(result.read_text())
    return found


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["true"], {"returncode": 0}),
        (["sh", "-c", "exit 3"], {"returncode": 3}),
        (["sh", "-c", "kill -9 $$"], {"returncode": -9}),
        (["no-such-program"], {"error": "no-such-program: No such file or directory"}),
    ],
)
def test_it_tells_how_the_command_ended(
    tmp_path: Path, command: list[str], expected: dict[str, object]
) -> None:
    assert begin(tmp_path / "result", *command).wait(30) == 0
    assert told(tmp_path / "result") == expected


def test_told_to_end_it_ends_all_that_was_begun(tmp_path: Path) -> None:
    """Children that nobody waits for and that ignore being asked, in sessions of their own, too."""
    deaf = "trap '' TERM INT; echo $$ >>pids; while :; do sleep 1; done"
    script = f'cd {tmp_path}; (setsid sh -c "{deaf}" &) ; sh -c "{deaf}"'
    worker = begin(tmp_path / "result", "sh", "-c", script.replace("$$", "\\$\\$"))
    pids = tmp_path / "pids"
    given_up_s = time.monotonic() + 30
    while not pids.exists() or len(pids.read_text().split()) < 2:
        assert time.monotonic() < given_up_s
        time.sleep(0.01)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert told(tmp_path / "result") == {"error": "it was ended"}
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_it_is_ended_by_who_knows_no_more_than_its_directory(tmp_path: Path) -> None:
    host, directory = LocalHost("a", tmp_path, "127.0.0.1"), tmp_path / "guarded" / "1"
    directory.mkdir(parents=True)
    asyncio.run(end_worker(host, Worker("a", str(directory))))  # it was never begun
    assert not directory.exists()
    directory.mkdir()
    other = begin(tmp_path / "result", "sleep", "60")
    begun = begin(directory / "result", "sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert begun.poll() is None
        time.sleep(0.01)
    with ThreadPoolExecutor(1) as waiting:
        ended = waiting.submit(begun.wait, 30)  # its parent takes note, as init would
        asyncio.run(end_worker(host, Worker("a", str(directory))))
        assert ended.result() == 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert not directory.exists()
    assert other.poll() is None
    other.terminate()
    assert other.wait(30) == 0


def begin_in_a_terminal(
    result: Path, *command: str, hang_up: signal.Handlers = signal.SIG_DFL
) -> "subprocess.Popen[bytes]":
    """In a process group of its own; `hang_up` is what it takes SIGHUP for from its beginning."""

    def as_a_terminal() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, hang_up)

    words = [sys.executable, "-m", "vmckpt.fleet.guard.worker", str(result), *command]
    return subprocess.Popen(words, start_new_session=True, preexec_fn=as_a_terminal)  # noqa: PLW1509 - no threads


def until_there_is(path: Path, worker: "subprocess.Popen[bytes]") -> None:
    while not path.exists() or not path.read_text():
        assert worker.poll() is None
        time.sleep(0.01)


def test_a_ctrl_c_is_the_commands_own_affair(tmp_path: Path) -> None:
    script = f"trap 'exit 5' INT; echo 1 >{tmp_path}/ready; while :; do sleep 0.05; done"
    worker = begin_in_a_terminal(tmp_path / "result", "sh", "-c", script)
    until_there_is(tmp_path / "ready", worker)
    os.killpg(worker.pid, signal.SIGINT)
    assert worker.wait(30) == 0
    assert told(tmp_path / "result") == {"returncode": 5}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGQUIT])
def test_a_command_that_outlives_its_terminal_is_ended_all_the_same(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = f"trap '' HUP QUIT; echo $$ >{tmp_path}/pid; exec sleep 60"
    worker = begin_in_a_terminal(tmp_path / "result", "sh", "-c", script)
    until_there_is(tmp_path / "pid", worker)
    os.killpg(worker.pid, number)
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(30) == 0
    assert told(tmp_path / "result") == {"error": "it was ended"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("hang_up", "returncode"), [(signal.SIG_DFL, -signal.SIGHUP), (signal.SIG_IGN, 3)]
)
def test_the_command_takes_a_hang_up_as_it_would_without_its_worker(
    tmp_path: Path, hang_up: signal.Handlers, returncode: int
) -> None:
    worker = begin_in_a_terminal(
        tmp_path / "result", "sh", "-c", "kill -HUP $$; exit 3", hang_up=hang_up
    )
    assert worker.wait(30) == 0
    assert told(tmp_path / "result") == {"returncode": returncode}
