"""A host that was broken into, or is broken: what it answers is a matter of its own.

The inventory has this machine, where the VM `web` is at home, and a host that says what it likes.
"""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost
from tests.silent_ends import PLATFORM, SPEC
from vmckpt.drivers import find
from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.forecast.measure.own import MeasuredVm
from vmckpt.forecast.measure.there import observe_there
from vmckpt.hosts.host import Completed
from vmckpt.hosts.inventory import inventory
from vmckpt.hosts.inventory.entries import entry_to_json
from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.remote import link, session, stream
from vmckpt.hosts.remote.frames import MAGIC, PROTOCOL, Frame, RpcFrameKind, read_frame, with_json
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import ServeConnection, Session
from vmckpt.hosts.sockets.heartbeats import silence
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.preflight.finding import WARN
from vmckpt.preflight.host import checks
from vmckpt.vm.inventory import Vm, find_vm, is_worked_on
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.users.users import owner_of

pytestmark = pytest.mark.contract

Reply = tuple[RpcFrameKind, object] | None
HELLO = {"protocol": PROTOCOL, "version": "1", "state_dir": "/state", "address": None}
WELL = {"exists": False, "list_dir": [], "is_alive": False, "find_processes": []}
QUESTIONS = ("exists", "list_dir", "lock_owner", "read_text")


class Evil:
    """Answers each question by `says`, else as a host that has nothing."""

    def __init__(self) -> None:
        self.says: Callable[[str], Reply] = lambda question: (
            RpcFrameKind.ANSWER,
            WELL.get(question),
        )
        self.asked: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def open(self) -> ServeConnection:
        ours, theirs = socket.socketpair()
        self.tasks.append(asyncio.create_task(self._serve(theirs)))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return ServeConnection(reader, writer, self._silent)

    async def _silent(self) -> HostDownError:
        return HostDownError("it is silent", why="no greeting", remedy="wait")

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        writer.write(MAGIC + with_json(RpcFrameKind.HELLO, 0, HELLO).encode())
        try:
            await read_frame(reader)
            while True:
                frame = await read_frame(reader)
                if frame.kind is RpcFrameKind.PING:
                    writer.write(Frame(RpcFrameKind.PONG).encode())
                if frame.kind is not RpcFrameKind.REQUEST:
                    continue
                question = frame.json["do"]
                self.asked.append(question)
                if reply := self.says(question):
                    writer.write(with_json(reply[0], frame.number, reply[1]).encode())
        except (EOFError, OSError):
            return  # it was left
        finally:
            writer.close()


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Evil:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    home = vm_dir(tmp_path, "web")
    home.path.mkdir(parents=True, mode=0o700)
    home.spec.write_text(SPEC)
    qemu = Qemu(home.qemu("0123abcd"), ProcessId(1, 1), PLATFORM)
    home.current.write_text(qemu.to_json())
    entry = SshEntry("evil", Path("/state"), "192.0.2.1", address=Address.parse("evil", None))
    (tmp_path / "hosts").mkdir(mode=0o700)
    (tmp_path / "hosts/evil.json").write_text(json.dumps(entry_to_json(entry)))
    far = Evil()
    talk = Session("evil", Path("/state"), far.open)
    host = RemoteHost("evil", Path("/state"), "192.0.2.1", session=talk)
    monkeypatch.setattr(inventory, "reach", lambda entry: host)
    return far


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        try:
            async with asyncio.timeout(20):
                await work()
        finally:
            await inventory.close_connections()

    asyncio.run(run())


async def all_is_well() -> None:
    """Commands on the VM of this machine do what they are to do."""
    assert (await find_vm("web")).host.name == "local"
    assert (await find.find("web", lambda _: None)).host.name == "local"
    assert not await is_worked_on("web")
    found = await find.inspect_everywhere()
    assert [row.name for row in found.given] == ["web"]


def an_error(kind: str) -> Reply:
    return RpcFrameKind.ERROR, [kind, "there is no VM 'web'", "no host has it", "forget it"]


@pytest.mark.parametrize(
    "reply",
    [
        (RpcFrameKind.ANSWER, {"of": "no type"}),
        (RpcFrameKind.ANSWER, 1 << 40),
        (RpcFrameKind.ERROR, ["too", "few"]),
        an_error("VmckptError"),  # what a host says that has a bug
        an_error("NotFoundError"),
        an_error("BusyError"),
        an_error("RefusedError"),  # and one whose state directory is another user's
        an_error("StorageError"),  # and one whose disk cannot be read
        an_error("OutcomeUnknownError"),
        an_error("VmLostError"),
        an_error("CancelledByUserError"),
    ],
    ids=str,
)
def test_what_a_host_answers_keeps_no_command_on_other_hosts_vms(evil: Evil, reply: Reply) -> None:
    """Nor has it one conclude that there is no such VM, or that it is lost."""
    evil.says = lambda question: reply
    play(all_is_well)
    assert set(evil.asked) >= set(QUESTIONS) - {"lock_owner"}


@pytest.mark.parametrize("kind", ["NotFoundError", "VmLostError", "CancelledByUserError"])
def test_an_error_that_no_question_raises_is_a_host_that_does_not_answer(
    evil: Evil, kind: str
) -> None:
    async def ask() -> None:
        with pytest.raises(HostDownError, match="there is no VM 'web'"):
            await inventory.find_host("evil").read_text(Path("/x"))

    evil.says = lambda question: an_error(kind)
    play(ask)


def test_a_host_that_is_there_and_answers_nothing_is_a_silent_one(
    evil: Evil, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be waited for without end, by every command and every schedule."""
    monkeypatch.setattr(session, "ANSWER_S", 0.3)
    monkeypatch.setattr(link, "PING_S", 0.05)
    evil.says = lambda question: None

    async def ask() -> None:
        await all_is_well()
        host = inventory.find_host("evil")
        with pytest.raises(HostDownError, match="evil does not answer"):
            await host.exists(Path("/x"))
        assert len(evil.tasks) == 1  # and is not asked again and again

    play(ask)


def test_of_a_command_that_is_never_answered_nobody_knows_whether_it_was_done(
    evil: Evil, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "ANSWER_S", 0.2)
    evil.says = lambda question: None

    async def ask() -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(OutcomeUnknownError, match="does not answer"):
            await inventory.find_host("evil").run(["true"], timeout_s=0.5)
        assert loop.time() - began_s >= 0.7  # it was given its own time besides

    play(ask)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many answers to pings were begun."""
    begun: list[int] = []
    pong = link.FrameLink._pong

    async def counting(self: link.FrameLink) -> None:
        begun.append(1)
        await pong(self)

    monkeypatch.setattr(link.FrameLink, "_pong", counting)
    yield begun


def test_who_pings_and_reads_nothing_has_no_answers_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def run(begun: list[int]) -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        theirs.setblocking(False)
        one = link.FrameLink(reader, writer, "evil", lambda frame: None)
        running = asyncio.create_task(one.run())
        writer.write(b"x" * (4 << 20))  # what it does not read
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(theirs, Frame(RpcFrameKind.PING).encode() * 10_000)
        await asyncio.sleep(0.2)
        assert len(begun) == 1
        one.abort()
        await running
        theirs.close()

    with counted(monkeypatch) as begun:
        asyncio.run(run(begun))


@pytest.mark.parametrize("kind", [RpcFrameKind.DATA, RpcFrameKind.END, RpcFrameKind.CLOSE])
def test_frames_that_hold_nothing_take_no_room_without_end(kind: RpcFrameKind) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()

        async def send(frame: Frame) -> None:
            pass

        one = stream.ByteStream(theirs, 1, send, lambda number: None)
        with pytest.raises(HostDownError, match="exceeds the window"):
            for _ in range(stream.WINDOW_BYTES + 3):
                one.take(Frame(kind, 1))
        await one.close()
        ours.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "told", [b"[]", b'{"received": "3"}', b'{"received": 3, "gaps_over_20ms": 5}', b"{", b""]
)
def test_an_observer_of_heartbeats_that_says_something_else_is_one_that_does_not_answer(
    tmp_path: Path, told: bytes
) -> None:
    """It is asked when the guest runs on the target already: the migration ended as by a bug."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(told + b"\n")
        writer.close()

    async def ask() -> None:
        path = tmp_path / "heartbeats"
        async with await asyncio.start_unix_server(answer, path):
            host = LocalHost("a", tmp_path, "127.0.0.1", heartbeats=path)
            with pytest.raises(HostDownError, match="does not answer"):
                await silence(host, 1, 0, 1)

    asyncio.run(ask())


@pytest.mark.parametrize("said", ["", "CapEff:", "CapEff:\tall of them", f"CapEff:\t{'f' * 9000}"])
def test_a_host_that_makes_up_its_rights_ends_no_check(tmp_path: Path, said: str) -> None:
    """`host check --fixes` of all hosts ended with "vmckpt has a bug"."""
    says = Fault("run", answers=Completed(0, said, ""))
    host = FaultyHost("evil", tmp_path, "127.0.0.1", faults=(says,))
    found = asyncio.run(checks._taps(host, Paste(host, root=True)))
    assert (found.code, found.verdict) == ("taps", WARN)


@pytest.mark.parametrize(
    "stat", ["", "1 (qemu) S", f"1 (qemu) S {'9' * 5000} " * 9, "a) " + "x " * 20]
)
def test_a_host_that_makes_up_its_processes_is_one_that_shows_none(
    tmp_path: Path, stat: str
) -> None:
    """`plan`, `dirty-rate` and drains of it ended with "vmckpt has a bug"."""
    alive = Fault("is_alive", answers=True)
    host = FaultyHost("a", tmp_path, "127.0.0.1", faults=(Fault("read_text", answers=stat), alive))
    directory = vm_dir(tmp_path, "web")
    qemu = Qemu(directory.qemu("q1"), ProcessId(1, 1), PLATFORM)
    vm = Vm(parse_spec(SPEC, "spec", tmp_path), host, directory, qemu)
    with pytest.raises(HostDownError, match="cannot be inspected"):
        asyncio.run(MeasuredVm(vm).processor_s())


@pytest.mark.parametrize("owner", ["9" * 5000, "4294967295", "\u00b2", "root"])
def test_a_host_that_makes_up_who_owns_a_file_does_not_know(tmp_path: Path, owner: str) -> None:
    says = Fault("run", answers=Completed(0, f"{owner}\n", ""))
    host = FaultyHost("a", tmp_path, "127.0.0.1", faults=(says,))
    assert asyncio.run(owner_of(host, tmp_path)) is None


@pytest.mark.parametrize(
    "errno", [[1], {}, None, "9" * 5000], ids=["list", "object", "nothing", "digits"]
)
def test_a_host_that_makes_up_an_error_of_its_tracking_tracks_nothing(
    tmp_path: Path, errno: object
) -> None:
    says = Completed(0, json.dumps({"errno": errno, "why": ["x"]}), "")
    host = FaultyHost("a", tmp_path, "127.0.0.1", faults=(Fault("run", answers=says),))
    with pytest.raises(OSError, match="did not track pages"):
        asyncio.run(observe_there(host, ["1"], 0.1))
