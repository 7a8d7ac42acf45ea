"""A host behind `vmckpt serve` whose connection breaks, and streams of many bytes over it."""

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
import termios
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.remote_hosts import SERVE, PipedServes
from vmckpt.errors import BusyError, HostDownError, OutcomeUnknownError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner, read_owner
from vmckpt.hosts.processes import process
from vmckpt.hosts.remote.frames import MAGIC, PROTOCOL, Frame, RpcFrameKind, read_frame, with_json
from vmckpt.hosts.remote.host import RemoteHost

Play = Callable[[RemoteHost, PipedServes], Awaitable[None]]
SLEEP = [sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"]


def play(work: Play, state_dir: Path) -> None:
    async def run() -> None:
        async with remote(state_dir) as (host, serves):
            await work(host, serves)

    asyncio.run(run())


@asynccontextmanager
async def remote(state_dir: Path) -> AsyncIterator[tuple[RemoteHost, PipedServes]]:
    serves = PipedServes()
    host = serves.host(state_dir)
    try:
        yield host, serves
    finally:
        await host.close()
        serves.end()


async def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def test_the_far_side_ends_in_peace_when_the_asker_has_gone(tmp_path: Path) -> None:
    """Over two pipes, as sshd has them, and both closed: its answer finds no one."""
    pipe = subprocess.PIPE
    far = subprocess.Popen(SERVE, stdin=pipe, stdout=pipe, stderr=pipe)
    assert far.stdin is not None
    assert far.stdout is not None
    assert far.stderr is not None
    hello = {"protocol": PROTOCOL, "state_dir": str(tmp_path), "name": "a"}
    with far, far.stdout:
        far.stdin.write(with_json(RpcFrameKind.HELLO, 0, hello).encode())
        far.stdin.flush()
        assert far.stdout.read(1)
        far.stdout.close()
        # The pipe that no one reads any longer is noticed first.
        time.sleep(0.2)
        far.stdin.close()
        assert far.stderr.read() == b""
        assert far.wait(20) == 0


def test_a_question_that_is_cancelled_at_once_is_answered_too(tmp_path: Path) -> None:
    hello = with_json(
        RpcFrameKind.HELLO, 0, {"protocol": PROTOCOL, "state_dir": str(tmp_path), "name": "a"}
    )
    question = with_json(RpcFrameKind.REQUEST, 1, {"do": "exists", "with": {"path": str(tmp_path)}})
    frames = (hello, question, Frame(RpcFrameKind.CANCEL, 1))

    async def run() -> None:
        pipe = asyncio.subprocess.PIPE
        far = await asyncio.create_subprocess_exec(*SERVE, stdin=pipe, stdout=pipe)
        assert far.stdin is not None
        assert far.stdout is not None
        far.stdin.write(b"".join(frame.encode() for frame in frames))
        try:
            async with asyncio.timeout(20):
                await far.stdout.readuntil(MAGIC)
                assert (await read_frame(far.stdout)).kind is RpcFrameKind.HELLO
                answer = await read_frame(far.stdout)
                while answer.kind is RpcFrameKind.PING:
                    answer = await read_frame(far.stdout)
                assert (answer.kind, answer.number) == (RpcFrameKind.ANSWER, 1)
        finally:
            far.stdin.close()
            await far.wait()

    asyncio.run(run())


def test_a_question_is_asked_again_over_a_new_connection(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        await host.require_up()
        serves.end()
        assert await host.exists(tmp_path)
        assert len(serves.children) == 2

    play(work, tmp_path)


def test_an_answer_that_is_too_long_for_a_message_ends_no_connection(tmp_path: Path) -> None:
    """Each of these bytes takes six of the message."""

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        with pytest.raises(HostDownError, match="too long"):
            await host.run(["head", "-c", str(12 << 20), "/dev/zero"])
        assert await host.exists(tmp_path)
        assert len(serves.children) == 1

    play(work, tmp_path)


def test_many_questions_share_one_connection(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        paths = [tmp_path / f"{number}" for number in range(50)]
        await asyncio.gather(*(host.write_text(path, path.name) for path in paths))
        assert await asyncio.gather(*(host.read_text(path) for path in paths)) == [
            path.name for path in paths
        ]
        assert len(serves.children) == 1

    play(work, tmp_path)


def test_of_a_command_that_was_cut_off_nobody_knows_whether_it_was_done(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        mark = str(tmp_path / "mark")
        running = asyncio.create_task(host.run([*SLEEP, mark]))
        try:
            await until(lambda: process.find_by_argument(mark), "the command runs")
            serves.end()
            with pytest.raises(OutcomeUnknownError, match=r"whether a has done .* \(run\)"):
                await running
        finally:
            for left in process.find_by_argument(mark):
                process.kill(left)

    play(work, tmp_path)


def test_when_the_asker_goes_its_commands_end_and_its_locks_are_free(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        mark, lock = str(tmp_path / "mark"), tmp_path / "locks/web"
        spawned = await host.spawn([*SLEEP, mark, "spawned"], tmp_path / "log")
        running = asyncio.create_task(host.run([*SLEEP, mark, "run"]))
        await until(lambda: process.find_by_argument(f"{mark}\0run"), "the command runs")
        holding = host.lock(lock, Owner("r", "vm run", 1, 1.0))
        await holding.__aenter__()
        running.cancel()
        await host.close()
        assert serves.children[0].wait(20) == 0
        try:
            assert process.find_by_argument(f"{mark}\0run") == []
            assert process.is_alive(spawned), "what was spawned outlives the connection"
            assert await LocalHost("a", tmp_path, "x").lock_owner(lock) is None
        finally:
            process.kill(spawned)
        await holding.__aexit__(None, None, None)

    play(work, tmp_path)


def test_a_lock_is_held_again_after_a_loss(tmp_path: Path) -> None:
    path, owner = tmp_path / "locks/web", Owner("r", "migrate to b", 1, 1.0)

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        here = LocalHost("a", tmp_path, "x")
        async with host.lock(path, owner):
            serves.end()
            assert await host.exists(tmp_path)
            assert await here.lock_owner(path) == owner
            with pytest.raises(BusyError, match=r"migrate to b \(run r"):
                async with here.lock(path, Owner("s", "vm rm", 2, 2.0)):
                    pass
        assert await here.lock_owner(path) is None

    play(work, tmp_path)


def test_a_lock_that_another_took_meanwhile_is_not_held(tmp_path: Path) -> None:
    path = tmp_path / "locks/web"

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        here = LocalHost("a", tmp_path, "x")
        async with host.lock(path, Owner("r", "migrate to b", 1, 1.0)):
            serves.end()
            async with here.lock(path, Owner("s", "vm rm", 2, 2.0)):
                with pytest.raises(HostDownError, match=r"'web' on a was lost .* held by vm rm"):
                    await host.exists(tmp_path)
                # Neither is a connection left over: `serve` ends when it is closed.
                assert serves.children[-1].wait(20) == 0

    play(work, tmp_path)


def test_a_far_side_that_says_nothing_is_not_asked_again_and_again(tmp_path: Path) -> None:
    async def run() -> None:
        serves = PipedServes(sys.executable, "-c", "print('Welcome to a host', flush=True)")
        host = serves.host(tmp_path)
        for _ in range(5):
            with pytest.raises(HostDownError, match="serve said nothing"):
                await host.exists(tmp_path)
        assert len(serves.children) == 1
        serves.end()

    asyncio.run(run())


def test_what_a_login_shell_prints_before_does_no_harm(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.write(1, b'Welcome\\n\\0vmckpt-\\n');"
        "os.execv(sys.executable, [sys.executable, '-m', 'vmckpt.cli.entry', 'serve'])"
    )

    async def run() -> None:
        serves = PipedServes(sys.executable, "-c", code)
        host = serves.host(tmp_path)
        assert await host.exists(tmp_path)
        await host.close()
        serves.end()

    asyncio.run(run())


def test_another_protocol_is_refused_by_name(tmp_path: Path) -> None:
    code = (
        "import os; from vmckpt.hosts.remote.frames import MAGIC, RpcFrameKind, with_json;"
        "hello = {'protocol': 99, 'version': '7.0', 'state_dir': '/', 'address': None};"
        "os.write(1, MAGIC + with_json(RpcFrameKind.HELLO, 0, hello).encode()); os.read(0, 1)"
    )

    async def run() -> None:
        serves = PipedServes(sys.executable, "-c", code)
        with pytest.raises(HostDownError, match=r"a has vmckpt 7\.0, this machine "):
            await serves.host(tmp_path).exists(tmp_path)
        serves.end()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("shown", "taken"), [("192.0.2.7", "192.0.2.7"), ("fe80::1%eth0",) * 2, ("UNKNOWN", None)]
)
def test_an_own_address_that_is_none_is_not_known(
    tmp_path: Path, shown: str, taken: str | None
) -> None:
    """`host add` took it for the host's migration address, or ended with a bug."""
    code = (
        "import os; from vmckpt.hosts.remote.frames import *;"
        f"hello = {{'protocol': PROTOCOL, 'version': '1', 'state_dir': '/', 'address': {shown!r}}};"
        "os.write(1, MAGIC + with_json(RpcFrameKind.HELLO, 0, hello).encode());"
        "[0 for _ in iter(lambda: os.read(0, 1), b'')]"
    )

    async def run() -> str | None:
        serves = PipedServes(sys.executable, "-c", code)
        host = serves.host(tmp_path)
        try:
            return (await host.session.greeting()).address
        finally:
            await host.close()
            serves.end()

    assert asyncio.run(run()) == taken


@pytest.mark.parametrize("hello", [{}, [], {"name": "a", "state_dir": "some/where"}, {"name": 1}])
def test_a_senseless_hello_ends_the_far_side_and_is_no_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hello: object
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    argv = [sys.executable, "-m", "vmckpt.cli.entry", "serve"]
    sent = with_json(RpcFrameKind.HELLO, 0, hello).encode()
    done = subprocess.run(argv, input=sent, capture_output=True, check=False, timeout=30)
    assert done.stdout.startswith(MAGIC)
    assert (done.returncode, done.stderr) == (0, b"")
    assert list(tmp_path.glob("vmckpt-bug-*")) == []


@asynccontextmanager
async def echo(path: Path) -> AsyncIterator[list[str]]:
    """A Unix server that sends back all it gets, and notes how each client left."""
    left: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            left.append("end of file")
            writer.write(b"bye")
            writer.close()
            with suppress(OSError):  # who left wholly reads no more
                await writer.wait_closed()
        except OSError:
            left.append("broken")
        finally:
            writer.transport.abort()

    async with await asyncio.start_unix_server(serve, path):
        yield left


def test_a_stream_carries_much_both_ways_and_ends_each_way_by_itself(tmp_path: Path) -> None:
    data = os.urandom(5 << 20)

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        async with echo(tmp_path / "echo") as left:
            sock = await host.connect(tmp_path / "echo")
            reader, writer = await asyncio.open_connection(sock=sock)

            async def send() -> None:
                writer.write(data)
                writer.write_eof()
                await writer.drain()

            sending = asyncio.create_task(send())
            assert await reader.read(-1) == data + b"bye"
            await sending
            assert left == ["end of file"]
            writer.close()

    play(work, tmp_path)


def test_a_stream_that_nobody_reads_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        async with echo(tmp_path / "echo") as left:
            full = await host.connect(tmp_path / "echo")
            loop = asyncio.get_running_loop()
            sending = asyncio.create_task(loop.sock_sendall(full, bytes(64 << 20)))
            await asyncio.sleep(0.2)
            assert not sending.done()
            with await host.connect(tmp_path / "echo") as other:
                await loop.sock_sendall(other, b"hello")
                assert await loop.sock_recv(other, 10) == b"hello"
            assert await host.exists(tmp_path)
            sending.cancel()
            await asyncio.wait({sending})
            full.close()
            await until(lambda: left == ["end of file", "broken"], "both are closed there")

    play(work, tmp_path)


def test_closing_a_stream_closes_it_on_the_host(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        async def work(host: RemoteHost, serves: PipedServes) -> None:
            sock = await host.connect(tmp_path / "s")
            with listener.accept()[0] as peer:
                peer.setblocking(False)
                sock.close()
                loop = asyncio.get_running_loop()
                assert await loop.sock_recv(peer, 1) == b""
                # Wholly: what is still sent there is refused, as by a local socket.
                await until(lambda: refused(peer), "the host's socket is closed")

        play(work, tmp_path)


def refused(peer: socket.socket) -> bool:
    try:
        peer.send(b"x")
    except BrokenPipeError:
        return True
    return False


def test_a_stream_that_is_no_longer_wanted_when_it_is_there_is_closed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        async def work(host: RemoteHost, serves: PipedServes) -> None:
            await host.require_up()
            connecting = asyncio.create_task(host.connect(tmp_path / "s"))
            await asyncio.sleep(0)  # it is asked for
            with listener.accept()[0] as peer:
                peer.send(b"x")
                stand_still_until(lambda: not unread_bytes(peer), "its other end is carried")
                connecting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await connecting
                peer.setblocking(False)
                async with asyncio.timeout(20):
                    assert await asyncio.get_running_loop().sock_recv(peer, 1) == b""
            assert await host.exists(tmp_path)
            assert len(serves.children) == 1

        play(work, tmp_path)


def stand_still_until(true: Callable[[], object], what: str) -> None:
    """No one here takes the answer before it is too late to cancel the question."""
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


def unread_bytes(sock: socket.socket) -> int:
    """How much of what was sent the other end has not read yet."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, sys.byteorder)


def test_a_lock_that_is_no_longer_wanted_when_it_is_granted_is_free(tmp_path: Path) -> None:
    path, owner = tmp_path / "locks/web", Owner("r", "migrate to b", 1, 1.0)

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        await host.require_up()
        taking = asyncio.ensure_future(host.lock(path, owner).__aenter__())
        await asyncio.sleep(0)  # it is asked for
        stand_still_until(lambda: read_owner(path) == owner, "it is granted")
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert read_owner(path) is None
        assert len(serves.children) == 1

    play(work, tmp_path)


def test_who_waits_no_longer_for_a_lock_leaves_it_to_its_holder(tmp_path: Path) -> None:
    path, owner = tmp_path / "locks/web", Owner("r", "migrate to b", 1, 1.0)

    async def work(host: RemoteHost, serves: PipedServes) -> None:
        async with host.lock(path, owner):
            other = host.lock(path, Owner("s", "migrate to b", 1, 2.0))
            taking = asyncio.ensure_future(other.__aenter__())
            await asyncio.sleep(0)  # it is asked for
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert read_owner(path) == owner

    play(work, tmp_path)


def test_streams_end_with_the_connection(tmp_path: Path) -> None:
    async def work(host: RemoteHost, serves: PipedServes) -> None:
        async with echo(tmp_path / "echo"):
            with await host.connect(tmp_path / "echo") as sock:
                serves.end()
                assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""

    play(work, tmp_path)


def test_a_long_answer_over_a_slow_network_is_no_silence() -> None:
    data = Frame(RpcFrameKind.ANSWER, 1, bytes(range(100))).encode()

    async def read(pieces: list[bytes]) -> Frame:
        reader = asyncio.StreamReader()

        async def feed() -> None:
            for piece in pieces:
                reader.feed_data(piece)
                await asyncio.sleep(0.1)

        _, frame = await asyncio.gather(feed(), read_frame(reader, 0.5))
        return frame

    slowly = [data[at : at + 10] for at in range(0, len(data), 10)]
    assert asyncio.run(read(slowly)).payload == bytes(range(100))
    with pytest.raises(TimeoutError):
        asyncio.run(read(slowly[:5]))
