"""A migration whose target's host is silent: its source goes on, and what it left goes later."""

import asyncio
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faulty_host import FaultyHost, silence
from tests.scripted_qmp import Server
from tests.silent_ends import SPEC, Guest, Scripted, make_home, marked_as
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmLostError,
)
from vmckpt.hosts.every import Arrival
from vmckpt.hosts.inventory.drained import close
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate import run as running
from vmckpt.migrate.outcome import recover as recovering
from vmckpt.migrate.outcome import settle as settling
from vmckpt.migrate.outcome.ends import End, Pair
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.outcome.left import keep_at, undo_or_leave
from vmckpt.migrate.outcome.ownership import OwnershipMove
from vmckpt.migrate.outcome.recover import UNDONE, Recovery, recover
from vmckpt.migrate.outcome.settle import settle
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.migration.checks import Preflight
from vmckpt.qemu.abilities import Agreement
from vmckpt.vm.inventory import inspect_all, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import QemuDir, lock_path, vm_dir

pytestmark = pytest.mark.contract

JOURNAL = MigrationJournal(
    "r1", "web", "a", "b", "qa", "qb", "/nowhere", was_running=True, step="transfer"
)
STOPPED = replace(JOURNAL, stops=True)


class World:
    """Source a, and target b, which is there again or down."""

    def __init__(self, path: Path, guest: Guest) -> None:
        self.a = Scripted("a", path / "a", "127.0.0.1", guest=guest)
        self.b = LocalHost("b", path / "b", "127.0.0.1")
        self.down = FaultyHost("b", path / "b", "127.0.0.1", faults=silence())
        self.told: list[str] = []

    @property
    def kept(self) -> Path:
        return self.a.state_dir / "left/web.r1.json"

    def journal(self, host: LocalHost) -> Path:
        return vm_dir(host.state_dir, "web").journal

    async def cut_off(self, journal: MigrationJournal) -> None:
        await make_home(self.a, "qa")
        await journal.write((self.a, self.b))
        await self.b.make_dir(vm_dir(self.b.state_dir, "web").qemu("qb").path)
        await self.b.write_text(vm_dir(self.b.state_dir, "web").spec, SPEC)

    async def recover(self, target: LocalHost) -> Recovery | None:
        return await recover("web", self.told.append, (self.a, target))

    def pair(self, target: LocalHost, *, stopped: bool = False) -> Pair:
        source, there = (
            End(host, vm_dir(host.state_dir, "web").qemu(name))
            for host, name in ((self.a, "qa"), (target, "qb"))
        )
        return Pair(source, there, True, Path("/nowhere"), stopped)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))
    monkeypatch.setattr(settling, "ALONE_S", 0.3)
    monkeypatch.setattr(settling, "ALONE_POLL_S", 0.01)
    monkeypatch.setattr(settling, "SILENT_HOST_S", 0.3)
    monkeypatch.setattr(settling, "SILENT_POLL_S", 0.01)


@pytest.fixture
def waiting(tmp_path: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """The target's QEMU, as far as its process goes."""
    with marked_as(vm_dir(tmp_path / "b", "web").qemu("qb")) as process:
        yield process


def test_a_running_source_is_undone_beside_its_silent_target_which_is_cleared_later(
    tmp_path: Path, waiting: "subprocess.Popen[bytes]"
) -> None:
    world = World(tmp_path, Guest("running", "active"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        found = await world.recover(world.down)
        assert found == Recovery("r1", "web", "a", "transfer", UNDONE)
        assert world.a.guest.told == ["migrate_cancel"]
        assert not world.journal(world.a).exists()
        assert world.kept.exists()
        assert await world.recover(world.down) is None
        assert waiting.poll() is None
        assert await world.recover(world.b) is None  # b answers again

    asyncio.run(play())
    assert waiting.wait(10) < 0
    assert not vm_dir(world.b.state_dir, "web").path.exists()
    assert not world.kept.exists()
    assert vm_dir(world.a.state_dir, "web").current.exists()
    assert "what run r1 had left on b is removed" in world.told


def test_what_stands_of_the_vm_on_the_other_host_by_then_stays(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))
    there = vm_dir(world.b.state_dir, "web")

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await world.recover(world.down)
        await make_home(world.b, "q2")
        await world.recover(world.b)

    asyncio.run(play())
    assert sorted(path.name for path in there.path.iterdir()) == ["spec.toml", "vm.json"]


def test_what_was_left_is_never_removed_where_it_is_the_vm(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await world.recover(world.down)
        await make_home(world.b, "qb")
        await world.recover(world.b)

    asyncio.run(play())
    assert world.kept.exists()
    assert vm_dir(world.b.state_dir, "web").qemu("qb").path.exists()
    assert "b keeps what run r1 left there" in world.told[-1]


@pytest.mark.parametrize("journal", [JOURNAL, replace(JOURNAL, step="drain")])
@pytest.mark.parametrize(("run", "status"), [("postmigrate", "completed"), ("paused", "cancelled")])
def test_a_source_that_may_have_let_go_waits_for_its_target(
    tmp_path: Path, journal: MigrationJournal, run: str, status: str
) -> None:
    world = World(tmp_path, Guest(run, status))

    async def play() -> None:
        await world.cut_off(journal)
        with pytest.raises(HostDownError, match="b is down"):
            await world.recover(world.down)

    asyncio.run(play())
    assert not world.a.guest.told
    assert world.journal(world.a).exists()
    assert not world.kept.exists()


def test_a_source_that_was_stopped_for_the_way_runs_again_once_that_is_kept(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Guest("paused", "active"))
    was_kept: list[bool] = []
    world.a.guest.before_cont = lambda: was_kept.append(world.kept.exists())

    async def play() -> None:
        await world.cut_off(STOPPED)
        found = await world.recover(world.down)
        assert found is not None
        assert found.outcome == UNDONE

    asyncio.run(play())
    assert world.a.guest.told == ["migrate_cancel", "cont"]
    assert was_kept == [True]


def test_a_live_migration_too_lets_it_run_again(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("paused", "active"))
    was_kept: list[bool] = []
    world.a.guest.before_cont = lambda: was_kept.append(world.kept.exists())

    async def play() -> None:
        pair = world.pair(world.down, stopped=True)
        keep = lambda: keep_at(STOPPED, world.a)  # noqa: E731
        assert await settle(pair, world.told.append, keep) is OwnershipMove.SOURCE_OWNS
        await pair.close()

    asyncio.run(play())
    assert world.a.guest.told == ["migrate_cancel", "cont"]
    assert was_kept == [True]


def test_what_cannot_be_kept_lets_nothing_run(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("paused", "cancelled"))

    async def full() -> None:
        raise StorageError("a's disk is full", why="full", remedy="free space")

    async def play() -> None:
        pair = world.pair(world.down, stopped=True)
        assert await settle(pair, world.told.append, full) is OwnershipMove.UNKNOWN
        await pair.close()

    asyncio.run(play())
    assert not world.a.guest.told


def test_a_cut_off_undo_goes_on_as_it_was_decided(tmp_path: Path) -> None:
    """Kept, and then killed before the journal was removed; b is there again."""
    world = World(tmp_path, Guest("running", "cancelled"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await keep_at(JOURNAL, world.a)
        found = await world.recover(world.b)
        assert found is not None
        assert found.outcome == UNDONE

    asyncio.run(play())
    assert not world.kept.exists()
    assert not world.journal(world.a).exists()
    assert not vm_dir(world.b.state_dir, "web").path.exists()


def test_another_runs_journal_at_the_source_is_not_mixed_up_with_what_was_left(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))
    later = replace(JOURNAL, run="r2", step="begin", target_qemu="q2")

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await world.recover(world.down)
        await later.write((world.a,))
        found = await world.recover(world.b)
        assert found is not None
        assert (found.run, found.outcome) == ("r2", UNDONE)
        assert await world.recover(world.b) is None  # what r1 had left is for the next one

    asyncio.run(play())
    assert not world.kept.exists()
    assert not world.journal(world.a).exists()


def test_a_target_that_was_forgotten_keeps_no_running_source_from_anything(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        found = await recover("web", world.told.append, (world.a,))
        assert found is not None
        assert found.outcome == UNDONE

    asyncio.run(play())
    assert world.kept.exists()
    assert not world.journal(world.a).exists()


@pytest.mark.parametrize("forgotten", ["a", "b"])
def test_a_forgotten_end_that_alone_knows_is_named_with_what_can_be_done(
    tmp_path: Path, forgotten: str
) -> None:
    world = World(tmp_path, Guest("postmigrate", "completed"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        there = world.b if forgotten == "a" else world.a
        with pytest.raises(OutcomeUnknownError, match="it is unknown whether 'web'") as raised:
            await recover("web", world.told.append, (there,))
        assert f"vmckpt host add {forgotten}" in raised.value.remedy

    asyncio.run(play())
    assert world.journal(world.a).exists()


@pytest.mark.parametrize("may_leave", [True, False])
def test_an_undo_leaves_what_a_silent_target_has(tmp_path: Path, *, may_leave: bool) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))

    async def play() -> bool:
        await world.cut_off(JOURNAL)
        pair = world.pair(world.down)
        return await undo_or_leave(pair, JOURNAL, world.told.append, may_leave=may_leave)

    if may_leave:
        assert not asyncio.run(play())
    else:
        with pytest.raises(HostDownError):
            asyncio.run(play())
    assert world.journal(world.a).exists() is not may_leave
    assert world.kept.exists() is may_leave


def test_nothing_new_is_sent_to_where_something_was_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, Guest("running", "cancelled"))
    record: Any = SimpleNamespace(id="r2", begin=lambda *_: None, note=lambda *_: None)

    async def fine(*_: object) -> Preflight:
        return Preflight((), MigrationOptions(), Agreement({}, {}, {}))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await world.recover(world.down)
        vm = await read_vm(world.a, "web")
        assert vm is not None
        with pytest.raises(BusyError, match="b still has remains") as refused:
            await running._move(vm, world.b, MigrationOptions(), record, {}, spec=vm.spec)
        assert refused.value.remedy.endswith("vmckpt vm show web")

    monkeypatch.setattr(running, "preflight", fine)
    asyncio.run(play())
    assert world.journal(world.b).exists()
    assert vm_dir(world.b.state_dir, "web").qemu("qb").path.exists()


def test_a_target_that_is_drained_while_it_is_asked_gets_nothing_of_a_drain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing there was on its way yet, so its own drain had said that it is empty."""
    world = World(tmp_path, Guest("running", "none"))
    record: Any = SimpleNamespace(id="r2", begin=lambda *_: None, note=lambda *_: None)

    async def drained_meanwhile(*_: object) -> Preflight:
        await close(world.b, {"run": "another"})
        return Preflight((), MigrationOptions(in_turn=True), Agreement({}, {}, {}))

    async def play() -> None:
        await make_home(world.a, "qa")
        vm = await read_vm(world.a, "web")
        assert vm is not None
        with pytest.raises(RefusedError, match="b is drained"):
            await running._move(
                vm, world.b, MigrationOptions(in_turn=True), record, {}, spec=vm.spec
            )

    monkeypatch.setattr(running, "preflight", drained_meanwhile)
    asyncio.run(play())
    assert not vm_dir(world.b.state_dir, "web").path.exists()


def test_a_vm_that_another_operator_has_put_on_the_target_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its QEMU was ended as a leftover. The other operator does not know the source."""
    world = World(tmp_path, Guest("running", "none"))
    record: Any = SimpleNamespace(id="r2", begin=lambda *_: None, note=lambda *_: None)
    ended = list[str]()

    async def end(_host: object, _ram_dir: object, files: QemuDir) -> None:
        ended.append(files.qemu_id)

    async def run_meanwhile(*_: object) -> Preflight:
        await make_home(world.b, "qo")
        vm_dir(world.b.state_dir, "web").qemu("qo").path.mkdir(exist_ok=True)
        return Preflight((), MigrationOptions(), Agreement({}, {}, {}))

    async def play() -> None:
        await make_home(world.a, "qa")
        vm = await read_vm(world.a, "web")
        assert vm is not None
        with pytest.raises(BusyError, match="b has a VM 'web' by now"):
            await running._move(vm, world.b, MigrationOptions(), record, {}, spec=vm.spec)

    monkeypatch.setattr(running, "preflight", run_meanwhile)
    monkeypatch.setattr("vmckpt.vm.start.end_qemu", end)
    asyncio.run(play())
    assert ended == []


class HalfOpen(Guest):
    """A target's QEMU whose source's machine lost power: it waits on a connection for good."""

    def __init__(self, status: str, run: str, process: "subprocess.Popen[bytes]") -> None:
        super().__init__(run, status)
        self._process = process

    def connect(self) -> socket.socket:
        if self._process.poll() is not None:
            raise HostDownError("it has ended", why="-", remedy="-")
        return super().connect()

    async def _answer(self, server: Server, command: dict[str, Any]) -> None:
        if self._process.poll() is not None:
            raise EOFError
        match command.get("exec-oob"):
            case None:
                await super()._answer(server, command)
            case "query-yank":
                await server.answer(command, [])
            case "yank":
                self.told.append("yank")
                await server.answer(command, {})
                if self.run == "running":
                    self.status = "postcopy-paused"
                else:
                    self._process.kill()
                    self._process.wait()


@pytest.mark.parametrize(
    ("status", "run"), [("active", "inmigrate"), ("postcopy-active", "running")]
)
def test_a_target_does_not_wait_for_good_for_a_source_that_lost_power(
    tmp_path: Path,
    waiting: "subprocess.Popen[bytes]",
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    run: str,
) -> None:
    """Nothing had closed the connection: each recovery ended with "unknown", for good."""
    monkeypatch.setattr(recovering, "settle", partial(settle, timeout_s=0.2))
    guest = HalfOpen(status, run, waiting)
    a = LocalHost("a", tmp_path / "a", "127.0.0.1")
    b = Scripted("b", tmp_path / "b", "127.0.0.1", guest=guest)
    told = list[str]()

    async def play() -> None:
        await make_home(a, "qa")
        await JOURNAL.write((a, b))
        await b.make_dir(vm_dir(b.state_dir, "web").qemu("qb").path)
        await b.write_text(vm_dir(b.state_dir, "web").spec, SPEC)
        with pytest.raises(VmLostError, match="its memory is lost"):
            await recover("web", told.append, (a, b))

    asyncio.run(play())
    assert guest.told == ["yank"]
    assert (
        "the source has ended: closing the connection on which the destination still waits" in told
    )
    assert not vm_dir(a.state_dir, "web").journal.exists()
    homes = [host.name for host in (a, b) if vm_dir(host.state_dir, "web").current.exists()]
    assert len(homes) == 1


def test_what_may_have_arrived_on_a_host_is_said(tmp_path: Path) -> None:
    """Its source is silent: no list had the VM, whose guest runs there."""
    world = World(tmp_path, Guest("running", "active"))
    directory, lock = vm_dir(world.b.state_dir, "web"), lock_path(world.b.state_dir, "web")

    async def arrivals() -> list[Arrival]:
        return list((await inspect_all([world.b])).arrivals)

    async def play() -> None:
        await world.cut_off(JOURNAL)
        assert await arrivals() == [Arrival("b", "web")]
        async with world.b.lock(lock, owner("migrate to b")):
            assert await arrivals() == [Arrival("b", "web", "migrate to b")]  # it is on its way
        await make_home(world.b, "qb")
        assert await arrivals() == []
        await world.b.remove(directory.current)
        await JOURNAL.remove((world.b,))
        assert await arrivals() == []

    asyncio.run(play())


def test_a_vm_on_the_target_that_the_migration_did_not_bring_ends_no_source(
    tmp_path: Path,
) -> None:
    """It passed for one that had arrived, and the source's QEMU and files went for it."""
    world = World(tmp_path, Guest("running", "none"))

    async def play() -> None:
        await world.cut_off(JOURNAL)
        await make_home(world.b, "another")
        with pytest.raises(OutcomeUnknownError, match="run r1 did not bring it there"):
            await world.recover(world.b)

    asyncio.run(play())
    assert vm_dir(world.a.state_dir, "web").current.exists()
    assert world.journal(world.a).exists()
