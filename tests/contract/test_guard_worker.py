"""The process that runs a guard's command: how that ended, and that nothing of it goes on."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.contract.test_store_full import small_disk
from vmckpt.errors import HostDownError
from vmckpt.fleet.guard import cgroup
from vmckpt.fleet.guard.command import end_worker, release_worker
from vmckpt.fleet.guard.ending import NEVER
from vmckpt.fleet.guard.record import GuardWorker
from vmckpt.fleet.guard.worker import Workers, claim
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify

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
    """Children that no one waits for and that ignore being asked, in sessions of their own, too."""
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


def until_gone(pid: int) -> bool:
    """Whether a process ends; a zombie has ended, whatever its parent makes of it."""
    given_up_s = time.monotonic() + 5
    while identify(pid) is not None:
        if time.monotonic() > given_up_s:
            return False
        time.sleep(0.01)
    return True


@pytest.fixture
def location(tmp_path: Path) -> Path:
    directory = tmp_path / "guarded" / "1"
    directory.mkdir(parents=True)
    return directory


def end(location: Path, *, is_confirmed: bool = False) -> None:
    host = LocalHost("a", location.parent.parent, "127.0.0.1")
    asyncio.run(end_worker(host, GuardWorker("a", str(location)), is_confirmed=is_confirmed))


def test_it_is_ended_by_who_knows_no_more_than_its_directory(
    tmp_path: Path, location: Path
) -> None:
    end(location)  # it was never begun
    assert not location.exists()
    location.mkdir()
    (tmp_path / "other").mkdir()
    other = begin(tmp_path / "other" / "result", "sleep", "60")
    begun = begin(location / "result", "sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 60")
    until_there_is(tmp_path / "pid", begun)
    end(location)
    assert begun.wait(30) == 0
    assert identify(int((tmp_path / "pid").read_text())) is None
    assert not location.exists()
    assert other.poll() is None
    other.terminate()
    assert other.wait(30) == 0


# The daemon is a child of nothing that lives, in a session of its own; it says when it is ready.
DAEMON = "(setsid sh -c 'trap \"\" TERM HUP; echo $$ >{0}/daemon; exec sleep 60' &)"
WITHOUT_GROUP = (
    "import sys; from pathlib import Path; from vmckpt.fleet.guard import cgroup, worker; "
    "cgroup.MOUNTS = (); worker.work(Path(sys.argv[1]), sys.argv[2:])"
)


def begin_daemon(
    location: Path, then: str, *, grouped: bool, said: Path | None = None
) -> "tuple[subprocess.Popen[bytes], int]":
    """A command that makes a daemon, which says who it is in the directory `said`, then does
    `then`; its workers, and the daemon.
    """
    said = said or location.parent
    script = DAEMON.format(said) + "; " + then
    how = ["-m", "vmckpt.fleet.guard.worker"] if grouped else ["-c", WITHOUT_GROUP]
    words = [sys.executable, *how, str(location / "result"), "sh", "-c", script]
    worker = subprocess.Popen(words)
    until_there_is(said / "daemon", worker)
    return worker, int((said / "daemon").read_text())


def runner_of(worker: "subprocess.Popen[bytes]") -> int:
    [pid] = Path(f"/proc/{worker.pid}/task/{worker.pid}/children").read_text().split()
    return int(pid)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("victims", ["keeper", "runner", "both"])
def test_a_killed_worker_leaves_nothing_beside_the_rollback(
    location: Path, victims: str, grouped: bool
) -> None:
    """Killed by SIGKILL, while the command and its daemon run."""
    worker, daemon = begin_daemon(location, "exec sleep 60", grouped=grouped)
    runner = runner_of(worker)
    if victims != "keeper":
        os.kill(runner, signal.SIGKILL)
    if victims != "runner":
        worker.kill()
    # Both at once, and no group: what it has started cannot be known, and that is not passed over.
    unsure = victims == "both" and not (grouped and there_are_groups())
    with pytest.raises(HostDownError, match="may still run") if unsure else nullcontext():
        end(location)
    assert until_gone(daemon)
    worker.wait(30)
    if unsure:
        end(location, is_confirmed=True)
    assert not location.exists()


def there_are_groups() -> bool:
    if (group := cgroup.make(f"vmckpt-test-{os.getpid()}")) is None:
        return False
    cgroup.dissolve(group)
    return True


def test_a_daemon_that_left_its_group_is_found_when_both_workers_were_killed(
    location: Path,
) -> None:
    """As with `systemd-run --scope`: root's processes can go to another control group."""
    if not there_are_groups():
        pytest.skip("no control group can be made here")
    [mount] = [one for one in cgroup.MOUNTS if (one / "cgroup.controllers").exists()]
    script = f"echo $$ >{mount}/cgroup.procs; " + DAEMON.format(location.parent) + "; exec sleep 60"
    words = [
        sys.executable,
        "-m",
        "vmckpt.fleet.guard.worker",
        str(location / "result"),
        "sh",
        "-c",
    ]
    worker = subprocess.Popen([*words, script])
    until_there_is(location.parent / "daemon", worker)
    daemon = int((location.parent / "daemon").read_text())
    assert identify(daemon)
    os.kill(runner_of(worker), signal.SIGKILL)
    worker.kill()
    end(location)
    assert until_gone(daemon)
    worker.wait(30)


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("status", [0, 3])
def test_a_daemon_of_a_command_that_is_over_is_ended_too(
    location: Path, status: int, grouped: bool
) -> None:
    worker, daemon = begin_daemon(location, f"exit {status}", grouped=grouped)
    until_there_is(location / "result", worker)
    assert told(location / "result") == {"returncode": status}
    assert identify(daemon) is not None
    end(location)
    assert until_gone(daemon)
    assert worker.wait(30) == 0


@pytest.mark.parametrize("grouped", [True, False])
def test_what_is_kept_may_leave_a_daemon(location: Path, grouped: bool) -> None:
    worker, daemon = begin_daemon(location, "exit 0", grouped=grouped)
    until_there_is(location / "result", worker)
    host = LocalHost("a", location.parent.parent, "127.0.0.1")
    asyncio.run(release_worker(host, GuardWorker("a", str(location))))
    assert worker.wait(30) == 0
    assert identify(daemon) is not None
    assert not location.exists()
    os.kill(daemon, signal.SIGKILL)


def test_a_command_that_was_not_begun_yet_never_is(tmp_path: Path, location: Path) -> None:
    """The guard died before its worker ran: who ends it may come first."""
    assert claim(location, Workers(NEVER))
    worker = begin(location / "result", "touch", str(tmp_path / "ran"))
    assert worker.wait(30) == 0
    assert not (tmp_path / "ran").exists()
    end(location)


def test_after_a_reboot_nothing_of_it_can_run(location: Path) -> None:
    me = ProcessId(os.getpid(), 1)
    assert claim(location, Workers("another", (me,), Path("/sys/fs/cgroup")))
    end(location)
    assert not location.exists()


FILLS = "cat /dev/zero >{0}/fill 2>{0}/said; "


@pytest.mark.parametrize("grouped", [True, False])
def test_how_a_command_ended_that_has_filled_the_disk_is_known(
    tmp_path: Path, grouped: bool
) -> None:
    """With the disk of the guard's own files full, the VM could not be rolled back."""
    with small_disk(tmp_path / "disk", "1M") as disk:
        location = disk / "guarded" / "1"
        location.mkdir(parents=True)
        then = FILLS.format(disk) + "exit 3"
        worker, daemon = begin_daemon(location, then, grouped=grouped, said=tmp_path)
        until_there_is(location / "result", worker)
        assert told(location / "result") == {"returncode": 3}
        end(location)
        assert until_gone(daemon)
        assert worker.wait(30) == 0
        assert not location.exists()


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_a_command_is_ended_although_it_has_filled_the_disk(
    tmp_path: Path, grouped: bool, killed: bool
) -> None:
    """It did not end in time, or its worker was killed: by itself, or by the keeper's end."""
    with small_disk(tmp_path / "disk", "1M") as disk:
        location = disk / "guarded" / "1"
        location.mkdir(parents=True)
        then = FILLS.format(disk) + f"mkdir {tmp_path}/full; exec sleep 60"
        worker, daemon = begin_daemon(location, then, grouped=grouped, said=tmp_path)
        while not (tmp_path / "full").exists():
            assert worker.poll() is None
            time.sleep(0.01)
        if killed:
            worker.kill()
        end(location)
        assert until_gone(daemon)
        worker.wait(30)
        assert not location.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"boot": 1}', '{"boot": "x", "processes": 3}'])
def test_workers_that_are_not_readable_are_no_proof_of_an_end(location: Path, text: str) -> None:
    (location / "worker").write_text(text)
    with pytest.raises(HostDownError, match="may still run"):
        end(location)
    end(location, is_confirmed=True)


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
