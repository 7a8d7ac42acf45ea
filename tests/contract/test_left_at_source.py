"""A migration whose source's host is silent when the guest has gone: it goes on at the target."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faulty_host import FaultyHost, silence
from tests.silent_ends import PLATFORM, SPEC, Guest, Scripted, make_home, marked_as
from vmckpt.drivers.find import inspect_everywhere
from vmckpt.errors import HostDownError
from vmckpt.hosts.inventory import inventory
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.migration import Migration
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.outcome.recover import FINISHED, Recovery, recover
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract


class World:
    """Target b, and source a, which is there again or down; both have the journal."""

    def __init__(self, path: Path, guest: Guest) -> None:
        self.a = LocalHost("a", path / "a", "127.0.0.1")
        self.down = FaultyHost("a", path / "a", "127.0.0.1", faults=silence())
        self.b = Scripted("b", path / "b", "127.0.0.1", guest=guest)
        self.here, self.there = (vm_dir(host.state_dir, "web") for host in (self.a, self.b))
        self.old, self.new = path / "old.raw", path / "new.raw"
        self.proof = path / "new.raw.vmckpt-r1"
        self.journal = MigrationJournal(
            "r1",
            "web",
            "a",
            "b",
            "qa",
            "qb",
            "/nowhere",
            was_running=True,
            step="transfer",
            disks=(MovedDisk(str(self.old), str(self.new)),),
            platform=PLATFORM,
        )
        self.told: list[str] = []

    @property
    def kept(self) -> Path:
        return self.b.state_dir / "left/web.r1.json"

    async def cut_off(self) -> None:
        for image in (self.old, self.new):
            image.touch()
        self.proof.hardlink_to(self.new)
        await make_home(self.a, "qa")
        await self.journal.write((self.a, self.b))
        await self.b.make_dir(self.there.qemu("qb").path)
        await self.b.write_text(self.there.spec, SPEC)

    async def recover(self, source: LocalHost) -> Recovery | None:
        return await recover("web", self.told.append, (source, self.b))


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))


def test_a_guest_that_runs_on_the_target_is_at_home_there_and_its_source_is_cleared_later(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, Guest("running", "completed"))

    async def play() -> None:
        await world.cut_off()
        found = await world.recover(world.down)
        assert found == Recovery("r1", "web", "b", "transfer", FINISHED)
        home = await read_vm(world.b, "web")
        assert home is not None
        assert (home.qemu.files.qemu_id, home.qemu.platform) == ("qb", PLATFORM)
        assert not world.there.journal.exists()
        assert world.kept.exists()
        assert world.new.exists()
        assert not world.proof.exists()
        assert await world.recover(world.down) is None
        assert await world.recover(world.a) is None  # a answers again

    with marked_as(world.there.qemu("qb")) as process:
        asyncio.run(play())
        assert process.poll() is None
    assert not world.b.guest.told
    assert not world.here.path.exists()
    assert not world.kept.exists()
    assert not world.old.exists()
    assert world.there.current.exists()


@pytest.mark.parametrize(
    ("run", "status"),
    [("paused", "completed"), ("inmigrate", "active"), ("running", "postcopy-active")],
)
def test_a_target_that_does_not_run_all_of_the_guest_waits_for_its_source(
    tmp_path: Path, run: str, status: str
) -> None:
    world = World(tmp_path, Guest(run, status))

    async def play() -> None:
        await world.cut_off()
        with pytest.raises(HostDownError, match="a is down"):
            await world.recover(world.down)

    with marked_as(world.there.qemu("qb")):
        asyncio.run(play())
    assert not world.b.guest.told
    assert world.there.journal.exists()
    assert not world.there.current.exists()
    assert not world.kept.exists()


def test_a_vm_that_was_handed_over_is_at_home_there_whatever_runs(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("shutdown", "completed"))

    async def play() -> None:
        await world.cut_off()
        await make_home(world.b, "qb")
        found = await world.recover(world.down)
        assert found is not None
        assert found.outcome == FINISHED

    asyncio.run(play())
    assert not world.there.journal.exists()
    assert world.kept.exists()


def test_a_source_that_was_forgotten_keeps_no_running_guest_from_anything(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("running", "completed"))

    async def play() -> None:
        await world.cut_off()
        found = await recover("web", world.told.append, (world.b,))
        assert found is not None
        assert found.outcome == FINISHED

    with marked_as(world.there.qemu("qb")):
        asyncio.run(play())
    assert world.there.current.exists()


def test_what_was_left_is_not_removed_where_another_qemu_is_the_vm(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("running", "completed"))

    async def play() -> None:
        await world.cut_off()
        await world.recover(world.down)
        await make_home(world.a, "q3")
        await world.recover(world.a)

    with marked_as(world.there.qemu("qb")):
        asyncio.run(play())
    assert world.kept.exists()
    assert world.here.current.exists()
    assert world.old.exists()
    assert "a keeps what run r1 left there" in world.told[-1]


@pytest.mark.parametrize("step", ["prepare", "verify", "handover"])
def test_once_the_guest_may_be_on_the_target_that_has_its_journal_without_the_source(
    tmp_path: Path, step: str
) -> None:
    world = World(tmp_path, Guest("running", "completed"))
    moving: Any = Migration.__new__(Migration)
    moving._journal, moving._destination_host = world.journal, world.b
    moving._vm = SimpleNamespace(host=world.down)
    moving._note = lambda code, text: world.told.append(f"{code}: {text}")

    async def play() -> MigrationJournal | None:
        if step == "prepare":
            with pytest.raises(HostDownError, match="a is down"):
                await moving._write_journal(SimpleNamespace(name=step))
        else:
            await moving._write_journal(SimpleNamespace(name=step))
        return await MigrationJournal.read(world.b, "web")

    written = asyncio.run(play())
    if step == "prepare":
        assert (written, world.told) == (None, [])
    else:
        assert written is not None
        assert written.step == step
        assert world.told == ["journal: a is down: no way to it (wait)"]


@pytest.mark.parametrize("is_left", [True, False])
def test_a_source_that_comes_back_past_the_commit_is_not_listed_as_a_second_home(
    tmp_path: Path, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, Guest("running", "completed"))

    async def play() -> list[str]:
        await world.cut_off()
        if is_left:
            await world.recover(world.down)
        else:
            await make_home(world.b, "qb")  # the handover's own command died before the release
        monkeypatch.setattr(inventory, "all_hosts", lambda: [world.a, world.b])
        return [row.host for row in (await inspect_everywhere()).given]

    with marked_as(world.there.qemu("qb")):
        assert asyncio.run(play()) == ["b"]
    assert world.here.current.exists()  # the listing changed nothing


def test_a_home_of_which_no_record_tells_stays_in_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, Guest("running", "completed"))

    async def play() -> list[str]:
        await make_home(world.a, "qa")
        await make_home(world.b, "qb")
        monkeypatch.setattr(inventory, "all_hosts", lambda: [world.a, world.b])
        return [row.host for row in (await inspect_everywhere()).given]

    assert asyncio.run(play()) == ["a", "b"]
