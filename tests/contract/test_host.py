"""A host: commands run to their end, files are written whole, errors say which host and why."""

import asyncio
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest

from tests.faulty_host import Fault, FaultyHost
from tests.remote_hosts import PipedServes
from tests.sshd import Sshd, sshd
from vmckpt.errors import HostDownError, OperationFailedError, StorageError
from vmckpt.hosts.host import MOST_TEXT_BYTES, Completed, Host, Queues
from vmckpt.hosts.inventory.inventory import reach
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes import process
from vmckpt.hosts.sockets.heartbeats import Silence, silence
from vmckpt.hosts.sockets.tcp_table import table_queues
from vmckpt.vm.create import create_image

T = TypeVar("T")
PYTHON = (sys.executable, "-I", "-S", "-c")


class Ask(Protocol):
    """Runs coroutines of one test on one event loop."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


@pytest.fixture
def ask() -> Iterator[Ask]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


@pytest.fixture(params=["direct", "entered", "piped", "over SSH"])
def host(request: pytest.FixtureRequest, tmp_path: Path, ask: Ask) -> Iterator[Host]:
    """A host of each kind: here, here through a prefix that execs, and behind `vmckpt serve`."""
    match request.param:
        case "direct":
            yield LocalHost("a", tmp_path, "127.0.0.1")
        case "entered":
            yield LocalHost("a", tmp_path, "127.0.0.1", enter=("env", "ENTERED=yes"))
        case "piped":
            serves = PipedServes()
            piped = serves.host(tmp_path)
            yield piped
            ask(piped.close())
            serves.end()
        case _:
            made: Sshd = request.getfixturevalue("server")
            there = reach(made.entry("a", tmp_path))
            yield there
            ask(there.close())


def run(ask: Ask, host: Host, *argv: str, timeout_s: float = 30.0) -> Completed:
    return ask(host.run(argv, timeout_s))


def test_a_command_ends_with_its_status_and_words(host: Host, ask: Ask) -> None:
    code = "import os; os.write(1, b'out'); os.write(2, b'err \\xff'); os._exit(3)"
    assert run(ask, host, *PYTHON, code) == Completed(3, "out", "err \ufffd")


def test_arguments_arrive_as_they_are(host: Host, ask: Ask) -> None:
    odd = ("a b", "$HOME", "`id`", "; exit 1", "", "*", "ü\n")
    done = run(ask, host, *PYTHON, "import sys; print(ascii(sys.argv[1:]))", *odd)
    assert done.stdout.strip() == ascii(list(odd))


def test_a_command_reads_nothing_of_ours(host: Host, ask: Ask) -> None:
    assert run(ask, host, "cat") == Completed(0, "", "")


def test_a_command_that_outlasts_its_time_is_ended(host: Host, ask: Ask, tmp_path: Path) -> None:
    began_s = time.monotonic()
    mark = str(tmp_path / "mark")
    with pytest.raises(HostDownError, match=r"on a: no end within 0\.2 s"):
        run(ask, host, *PYTHON, "import signal; signal.pause()", mark, timeout_s=0.2)
    assert time.monotonic() - began_s < 5
    assert process.find_by_argument(mark) == []


@pytest.mark.parametrize("stream", [1, 2])
def test_a_command_that_prints_without_end_is_ended(
    host: Host, ask: Ask, tmp_path: Path, stream: int
) -> None:
    mark = str(tmp_path / "mark")
    flood = f"import os\nwhile True: os.write({stream}, b'a' * 65536)"
    with pytest.raises(HostDownError, match="printed more than 64"):
        run(ask, host, *PYTHON, flood, mark, timeout_s=60)
    assert process.find_by_argument(mark) == []


def test_a_command_whose_child_keeps_its_output_open_is_given_up_in_time(
    host: Host, ask: Ask, tmp_path: Path
) -> None:
    mark = str(tmp_path / "mark")
    code = "import os, time; os.fork(); time.sleep(60)"
    began_s = time.monotonic()
    try:
        with pytest.raises(HostDownError, match="no end within"):
            run(ask, host, *PYTHON, code, mark, timeout_s=0.3)
        assert time.monotonic() - began_s < 5
    finally:
        for left in process.find_by_argument(mark):
            process.kill(left)


def test_a_cancelled_command_is_ended(host: Host, ask: Ask, tmp_path: Path) -> None:
    mark = str(tmp_path / "mark")

    async def play() -> None:
        task = asyncio.create_task(host.run([*PYTHON, "import signal; signal.pause()", mark]))
        async with asyncio.timeout(10):
            while not process.find_by_argument(mark):  # noqa: ASYNC110 - no one tells of a process
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert process.find_by_argument(mark) == []

    ask(play())


def test_what_cannot_be_run_says_so(ask: Ask, tmp_path: Path) -> None:
    with pytest.raises(HostDownError, match="cannot run /gone/tool on a") as caught:
        run(ask, LocalHost("a", tmp_path, "127.0.0.1"), "/gone/tool")
    assert "vmckpt host check a" in caught.value.remedy


def test_a_prefix_that_is_not_there_is_a_host_that_is_down(ask: Ask, tmp_path: Path) -> None:
    gone = LocalHost("a", tmp_path, "127.0.0.1", enter=("/gone/nsenter",))
    with pytest.raises(HostDownError, match="on a"):
        run(ask, gone, "true")
    with pytest.raises(HostDownError, match="on a"):
        asyncio.run(gone.spawn(["true"], tmp_path / "log"))


def test_a_spawned_process_has_the_pid_that_is_said_and_can_be_found_and_killed(
    host: Host, ask: Ask, tmp_path: Path
) -> None:
    async def play() -> None:
        mark = str(tmp_path / "mark")
        log = tmp_path / "log"
        code = "import os, signal; print(os.environ.get('ENTERED'), flush=True); signal.pause()"
        spawned = await host.spawn([*PYTHON, code, mark], log)
        try:
            assert await host.is_alive(spawned)
            async with asyncio.timeout(10):
                while not log.read_text().endswith("\n"):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            entered = isinstance(host, LocalHost) and host.enter
            assert log.read_text() == ("yes\n" if entered else "None\n")
            assert await host.find_processes(mark) == [spawned]
        finally:
            assert await host.kill(spawned)
        assert not await host.is_alive(spawned)

    ask(play())


def test_a_file_is_written_whole_and_private(host: Host, ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "vm.json"
    for text in ("first, and longer", "second ü"):
        ask(host.write_text(path, text))
        assert ask(host.read_text(path)) == text
        assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["vm.json"]


WRITER = """
import asyncio, resource, sys
from pathlib import Path
from vmckpt.errors import StorageError
from vmckpt.hosts.local import LocalHost
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    asyncio.run(LocalHost("a", Path("/"), "x").write_text(Path(sys.argv[1]), "x" * 10_000))
except StorageError as exc:
    print(exc.what, exc.why, sep="; ")
"""


def test_a_file_that_has_no_room_leaves_the_old_one_and_nothing_else(tmp_path: Path) -> None:
    # A limit on a file's size stops the write half-way, as a full disk does.
    path = tmp_path / "vm.json"
    path.write_text("old")
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"cannot write {path} on a; File too large\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["vm.json"]
    assert path.read_text() == "old"
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_what_cannot_be_written_says_where_and_why(host: Host, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*/gone/x on a: No such file"):
        ask(host.write_text(tmp_path / "gone/x", ""))
    with pytest.raises(StorageError, match=r"cannot write .*/file/x on a: Not a directory"):
        ask(host.make_dir(tmp_path / "file/x"))
    (tmp_path / "directory").mkdir()
    with pytest.raises(StorageError, match=r"cannot write .*/directory on a: Is a directory"):
        ask(host.write_text(tmp_path / "directory", ""))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["directory", "file"]


def test_a_private_directory_is_this_users_alone(host: Host, ask: Ask, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    path = shared / "vmckpt-web-0123abcd"
    for _ in range(2):
        ask(host.make_private_dir(path))
        assert path.stat().st_mode & 0o7777 == 0o700


@pytest.mark.parametrize("trap", ["open", "link", "file", "another's"])
def test_a_private_directory_that_another_made_is_refused(
    host: Host, ask: Ask, tmp_path: Path, trap: str
) -> None:
    path = tmp_path / "vmckpt-web-0123abcd"
    match trap:
        case "open":
            path.mkdir()
            path.chmod(0o777)
        case "link":
            (tmp_path / "elsewhere").mkdir(mode=0o700)
            path.symlink_to("elsewhere")
        case "file":
            path.touch(0o600)
        case _:
            path.mkdir(mode=0o700)
            if os.geteuid() != 0:
                pytest.skip("only root can give a directory away")
            os.chown(path, 65534, 65534)
    with pytest.raises(StorageError, match="is not private"):
        ask(host.make_private_dir(path))


def test_reading_what_is_not_there_gives_none(host: Host, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert ask(host.read_text(tmp_path / "gone")) is None
    assert ask(host.read_text(tmp_path / "file/below")) is None
    assert ask(host.read_text(tmp_path / "file")) == ""


def test_odd_bytes_in_a_log_do_not_hide_the_rest(host: Host, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "stderr.log").write_bytes(b"\xff\xfe broken\nvm_state_notify running 1\n")
    assert "vm_state_notify running 1" in (ask(host.read_text(tmp_path / "stderr.log")) or "")


def test_a_log_without_end_is_read_at_both_ends(host: Host, ask: Ask, tmp_path: Path) -> None:
    """As a QEMU makes its own that a guest has broken into: it costs no more memory than others."""
    with (tmp_path / "log").open("w") as log:
        log.write("first\n")
        log.truncate(1 << 40)
        log.seek((1 << 40) - 5)
        log.write("last\n")
    text = ask(host.read_text(tmp_path / "log")) or ""
    assert len(text) == MOST_TEXT_BYTES
    assert text.startswith("first\n\0")
    assert text.endswith("\0last\n")


def test_a_directory_is_removed_however_deep_it_is(ask: Ask, tmp_path: Path) -> None:
    """As a QEMU makes its own that a guest has broken into."""
    at = os.open(tmp_path, os.O_DIRECTORY)
    for name in ("top", *["d"] * 3000):
        os.mkdir(name, dir_fd=at)
        below = os.open(name, os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    try:
        ask(LocalHost("a", tmp_path, "127.0.0.1").remove(tmp_path / "top"))
        assert not (tmp_path / "top").exists()
    finally:  # pytest would not come to the end of it either
        subprocess.run(["rm", "-rf", str(tmp_path / "top")], check=True)


def test_a_directory_that_stays_is_not_said_to_be_removed(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A VM was forgotten that was there all the same, or at home on two hosts."""
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    (tmp_path / "web").mkdir()
    said = Completed(1, "", "rm: cannot remove 'it': Read-only file system")
    stuck = Fault("run", of=lambda argv: argv[0] == "rm", answers=said)
    with pytest.raises(StorageError, match="cannot remove") as caught:
        ask(FaultyHost("a", tmp_path, "127.0.0.1", faults=(stuck,)).remove(tmp_path / "web"))
    assert "Read-only file system" in caught.value.why


def test_directories_are_private_listed_and_removed(host: Host, ask: Ask, tmp_path: Path) -> None:
    directory = tmp_path / "vms/web/qemu-1"
    ask(host.make_dir(directory))
    ask(host.make_dir(directory))
    assert directory.stat().st_mode & 0o777 == 0o700
    for name in ("b", "a"):
        ask(host.write_text(directory / name, ""))
    assert ask(host.list_dir(directory)) == ["a", "b"]
    assert ask(host.list_dir(tmp_path / "gone")) == []
    ask(host.remove(tmp_path / "vms"))
    ask(host.remove(tmp_path / "vms"))
    assert not ask(host.exists(tmp_path / "vms"))


def test_a_path_is_awaited_no_longer_than_it_takes(host: Host, ask: Ask, tmp_path: Path) -> None:
    late = tmp_path / "late"

    async def come() -> bool:
        waiting = asyncio.ensure_future(host.await_path(late, 60.0))
        # Others are answered meanwhile.
        await host.write_text(tmp_path / "other", "")
        assert not waiting.done()
        late.touch()
        return await asyncio.wait_for(waiting, 30.0)

    assert ask(come())
    assert not ask(host.await_path(tmp_path / "never", 0.05))


def test_removing_a_link_leaves_what_it_points_to(host: Host, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/root.qcow2").touch()
    (tmp_path / "link").symlink_to(tmp_path / "images")
    ask(host.remove(tmp_path / "link"))
    assert not ask(host.exists(tmp_path / "link"))
    assert ask(host.exists(tmp_path / "images/root.qcow2"))


def test_a_connection_reaches_the_listener(host: Host, ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "qmp.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        async def play() -> bytes:
            sock = await host.connect(path)
            with sock, listener.accept()[0] as peer:
                peer.sendall(b"hello")
                return await asyncio.get_running_loop().sock_recv(sock, 10)

        assert ask(play()) == b"hello"


def test_a_connection_that_fails_says_where_and_why(host: Host, ask: Ask, tmp_path: Path) -> None:
    def connect(path: Path) -> None:
        ask(host.connect(path))

    with pytest.raises(HostDownError, match=r"gone\.sock on a: No such file"):
        connect(tmp_path / "gone.sock")
    (tmp_path / "file").touch()
    with pytest.raises(HostDownError, match="Connection refused"):
        connect(tmp_path / "file")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead.sock"))
    with pytest.raises(HostDownError, match="Connection refused"):
        connect(tmp_path / "dead.sock")
    with pytest.raises(HostDownError, match="too long"):
        connect(tmp_path / ("x" * 300))


def test_a_monitor_with_a_queue_of_clients_is_not_waited_for(
    host: Host, ask: Ask, tmp_path: Path
) -> None:
    path = tmp_path / "qmp.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)

        async def play() -> None:
            full = pytest.raises(HostDownError, match="temporarily unavailable")
            with full, ExitStack() as waiting:
                for _ in range(10):
                    waiting.enter_context(await host.connect(path))

        ask(asyncio.wait_for(play(), 5))


def test_a_host_locks_below_a_directory_that_it_makes(host: Host, ask: Ask, tmp_path: Path) -> None:
    path, owner = tmp_path / "locks/web", Owner("r", "vm run", os.getpid(), 1.0)
    assert ask(host.lock_owner(path)) is None

    async def play() -> None:
        async with host.lock(path, owner):
            assert await host.lock_owner(path) == owner

    ask(play())
    assert ask(host.lock_owner(path)) is None


def test_a_host_knows_its_room(host: Host, ask: Ask, tmp_path: Path) -> None:
    assert ask(host.free_bytes(tmp_path)) > 0
    assert 0 < ask(host.available_memory_bytes()) < 1 << 50
    assert ask(host.cpu_flags())
    assert not ask(host.is_block_device(tmp_path))
    assert not ask(host.is_block_device(Path("/dev/null")))
    assert not ask(host.is_block_device(tmp_path / "gone"))
    # Most machines have one.
    for device in [path for path in Path("/dev").iterdir() if path.is_block_device()][:1]:
        (tmp_path / "disk").symlink_to(device)
        assert ask(host.is_block_device(tmp_path / "disk"))
    assert ask(host.readable(tmp_path))
    assert not ask(host.readable(tmp_path / "gone"))


def test_a_host_is_up_when_its_prefix_works(host: Host, ask: Ask, tmp_path: Path) -> None:
    ask(host.require_up())
    down = LocalHost("a", tmp_path, "127.0.0.1", enter=("false",))
    with pytest.raises(HostDownError, match="host a is down"):
        ask(down.require_up())


def ask_observer(tmp_path: Path, reply: bytes) -> Silence | None:
    """What is made of an observer that answers `reply`."""
    path = tmp_path / "observer.sock"
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readline())
        writer.write(reply)
        writer.close()

    async def play() -> Silence | None:
        async with await asyncio.start_unix_server(serve, path):
            return await silence(LocalHost("a", tmp_path, "x", heartbeats=path), 7, 1000, 2000)

    found = asyncio.run(play())
    assert asked == [b'{"id": 7, "since_ns": 1000, "until_ns": 2000}\n']
    return found


def test_an_observers_answer_becomes_a_silence(tmp_path: Path) -> None:
    reply = (
        b'{"received": 900, "lost": 3, "longest_gap_ms": 61.5, "last_ns": 1990,'
        b' "gaps_over_20ms": [[1100, 61.5], [1500, 25.0]]}\n'
    )
    assert ask_observer(tmp_path, reply) == Silence(900, 3, 61.5, 86.5, 1990)


def test_an_observer_that_heard_nothing_measured_nothing(tmp_path: Path) -> None:
    assert ask_observer(tmp_path, b'{"received": 0}\n') is None


@pytest.mark.parametrize("reply", [b"", b"nonsense\n"])
def test_an_observer_that_answers_badly_is_said_to(tmp_path: Path, reply: bytes) -> None:
    with pytest.raises(HostDownError, match="the heartbeat observer of a does not answer"):
        ask_observer(tmp_path, reply)


def test_a_missing_observer_is_said_to_be(tmp_path: Path) -> None:
    assert asyncio.run(silence(LocalHost("a", tmp_path, "x"), 7, 0, 1)) is None
    with pytest.raises(HostDownError, match="heartbeat observer"):
        asyncio.run(silence(LocalHost("a", tmp_path, "x", heartbeats=tmp_path / "gone"), 7, 0, 1))


def test_what_listens_is_known(host: Host, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as anywhere:
        ports = {sock.getsockname()[1] for sock in (here, anywhere)}
        assert ports <= ask(host.listening_ports("127.0.0.1"))
        elsewhere = ask(host.listening_ports("127.0.0.2"))
        assert anywhere.getsockname()[1] in elsewhere
        assert here.getsockname()[1] not in elsewhere


def test_what_waits_in_a_process_s_connections(host: Host, ask: Ask) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = (
            "import socket, sys\n"
            f"sock = socket.create_connection(('127.0.0.1', {port}))\n"
            "unconnected, deaf = socket.socket(), socket.create_server(('127.0.0.1', 0))\n"
            "print(flush=True); sys.stdin.readline()"
        )
        with subprocess.Popen(
            [*PYTHON, code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdout.readline()
            ours, _ = server.accept()
            with ours:
                which = process.identify(child.pid)
                assert which is not None
                assert ask(host.socket_queues(which, port)) == Queues(0, 0)
                ours.sendall(b"x" * 1000)
                assert ask(host.socket_queues(which, port)) == Queues(0, 1000)
                # To whom the process may not be traced by, the kernel's table says the same.
                table = Path(f"/proc/{child.pid}/net/tcp").read_text()
                assert table_queues(table, port) == Queues(0, 1000)
                assert ask(host.socket_queues(which, port + 1)) == Queues(0, 0)
            child.stdin.close()
        assert ask(host.socket_queues(which, port)) == Queues(0, 0)


def test_what_a_file_was_given(host: Host, ask: Ask, tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.write(b"x" * 4096)
        file.flush()
        file.truncate(1 << 20)
    found = ask(host.allocation(tmp_path / "sparse"))
    assert found is not None
    assert found.size_bytes == 1 << 20
    assert 4096 <= found.allocated_bytes < 1 << 20
    assert ask(host.allocation(tmp_path / "gone")) is None


def test_files_are_told_apart(host: Host, ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two")
    found = [ask(host.fingerprint(tmp_path / name)) for name in ("a", "b")]
    assert all(one is not None and one.size_bytes == 3 for one in found)
    assert found[0] != found[1]
    assert ask(host.fingerprint(tmp_path / "gone")) is None


def test_what_may_be_written_to(host: Host, ask: Ask, tmp_path: Path) -> None:
    assert ask(host.may_write_below(tmp_path / "not" / "yet"))
    (tmp_path / "file").touch()
    assert not ask(host.may_write_below(tmp_path / "file" / "below"))


def test_no_image_is_made_through_a_link(host: Host, ask: Ask, tmp_path: Path) -> None:
    """One that leads to nothing would have qemu-img write where another user wants it."""
    image, target = tmp_path / "disk.raw", tmp_path / "target"
    image.symlink_to(target)
    with pytest.raises(OperationFailedError, match=f"cannot create disk image {image}"):
        ask(create_image(host, image, "raw", 1 << 20))
    assert not target.exists()


def test_what_cannot_be_read_is_the_hosts_own_error(host: Host, ask: Ask, tmp_path: Path) -> None:
    """On this machine it ended whatever asked, about all VMs of all hosts (`ask_every`)."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for question in (
        host.read_text(tmp_path),
        host.read_from(tmp_path, 0),
        host.list_dir(loop),
        host.lock_owner(tmp_path),
        host.allocation(loop),
        host.free_bytes(tmp_path / "gone"),
    ):
        with pytest.raises(StorageError):
            ask(question)
