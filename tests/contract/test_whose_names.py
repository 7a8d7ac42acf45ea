"""Operators who call two machines by one name, or one by two: a journal's ends are machines."""

import asyncio
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost, silence
from tests.silent_ends import PLATFORM, SPEC, Guest, Scripted, make_home, marked_as
from vmckpt.errors import OutcomeUnknownError, RefusedError, StorageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.identity import host_identity, read_host_identity
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.outcome.left import keep_at
from vmckpt.migrate.outcome.machines import ends
from vmckpt.migrate.outcome.recover import FINISHED, recover
from vmckpt.migrate.outcome.stale import without_stale
from vmckpt.vm.inventory import inspect_all
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))


class World:
    """An operator on machine x, whose `local` that is, was cut off; another one's is machine y."""

    def __init__(self, path: Path, guest: Guest, source: str, target: str) -> None:
        self.x = LocalHost("local", path / "x", "127.0.0.1")
        self.y = LocalHost("local", path / "y", "127.0.0.1")
        self.b = Scripted("b", path / "b", "127.0.0.1", guest=guest)
        self.told: list[str] = []
        self.journal = MigrationJournal(
            "r1", "web", source, target, "q1", "q2", "/nowhere", was_running=True,
            step="transfer", platform=PLATFORM,
        )  # fmt: skip

    async def cut_off(self) -> None:
        source, target = (self.x, self.b) if self.journal.source == "local" else (self.b, self.x)
        ids = await host_identity(source), await host_identity(target)
        await host_identity(self.y)
        await make_home(source, "q1")
        await replace(self.journal, source_id=ids[0], target_id=ids[1]).write((source, target))
        there = vm_dir(target.state_dir, "web")
        await target.make_dir(there.qemu("q2").path)
        await target.write_text(there.spec, SPEC)

    async def recover(self, *hosts: Host) -> object:
        return await recover("web", self.told.append, hosts)


@pytest.mark.parametrize(
    ("source", "target", "guest"),
    [
        ("local", "b", Guest("paused", "completed")),  # its source may have given up, and runs
        ("b", "local", Guest("postmigrate", "completed")),  # its target runs
        ("b", "local", Guest("finish-migrate", "postcopy-active")),  # has what the target needs
    ],
)
def test_another_machine_of_that_name_is_not_the_end_of_a_migration_that_is_dead(
    tmp_path: Path, source: str, target: str, guest: Guest
) -> None:
    """The guest ran twice, or its only memory was removed."""
    world = World(tmp_path, guest, source, target)
    files = vm_dir(world.b.state_dir, "web").qemu("q2" if target == "b" else "q1")

    async def play() -> None:
        await world.cut_off()
        with pytest.raises(OutcomeUnknownError, match="it is unknown whether 'web' is on"):
            await world.recover(world.y, world.b)

    with marked_as(files) as process:
        asyncio.run(play())
        assert process.poll() is None
    assert guest.told in ([], ["migrate_cancel"])
    assert vm_dir(world.b.state_dir, "web").journal.exists()


def test_a_recovery_leaves_nothing_of_the_turns_of_the_killed(tmp_path: Path) -> None:
    """A host to which nothing else went kept them; who holds one now keeps it."""
    world = World(tmp_path, Guest("running", "completed"), "local", "b")
    links = world.b.state_dir / "links"
    dead, held = [links / "turn/in", links / "in/r1.0"], links / "in/r2.0"

    async def play() -> None:
        await world.cut_off()
        for path in dead:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        async with world.b.lock(held, Owner("r2", "migrate", os.getpid(), 1.0)):
            await world.recover(replace(world.x, name="local"), world.b)
            assert held.exists()

    with marked_as(vm_dir(world.b.state_dir, "web").qemu("q2")):
        asyncio.run(play())
    assert not [path for path in dead if path.exists()]


def test_a_machine_is_found_by_whatever_name_it_has_here(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("running", "completed"), "local", "b")
    x1 = replace(world.x, name="x1")

    async def play() -> None:
        await world.cut_off()
        found = await world.recover(world.y, world.b, x1)
        assert getattr(found, "outcome", None) == FINISHED

    with marked_as(vm_dir(world.b.state_dir, "web").qemu("q2")):
        asyncio.run(play())
    assert not vm_dir(world.x.state_dir, "web").path.exists()


def test_while_a_host_is_silent_no_other_is_taken_for_it(tmp_path: Path) -> None:
    """It has taken part in a migration, and read there who the silent one is."""
    world = World(tmp_path, Guest("paused", "completed"), "local", "b")
    silent = FaultyHost("x1", tmp_path / "x", "127.0.0.1", faults=silence())
    liar = LocalHost("liar", tmp_path / "liar", "127.0.0.1")

    async def play() -> None:
        await world.cut_off()
        liar.state_dir.mkdir()
        (liar.state_dir / "host-id").write_text(await host_identity(world.x))
        with pytest.raises(OutcomeUnknownError):
            await world.recover(world.y, silent, liar, world.b)

    with marked_as(vm_dir(world.b.state_dir, "web").qemu("q2")):
        asyncio.run(play())
    assert not world.b.guest.told


def test_a_host_is_the_same_to_all_who_ask_first(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path / "a", "127.0.0.1")

    async def play() -> list[str]:
        assert await read_host_identity(host) is None
        return await asyncio.gather(*(host_identity(host) for _ in range(8)))

    assert len(set(asyncio.run(play()))) == 1
    assert [path.name for path in host.state_dir.iterdir()] == ["host-id"]


def test_a_host_whose_identity_is_lost_begins_no_migration(tmp_path: Path) -> None:
    """Its journal would name no machine, and nothing could recover it."""
    host = LocalHost("a", tmp_path / "a", "127.0.0.1")
    host.state_dir.mkdir()
    (host.state_dir / "host-id").write_text("\n")
    with pytest.raises(StorageError, match="a has no identity"):
        asyncio.run(host_identity(host))


def test_no_migration_begins_between_a_machine_and_its_copy(tmp_path: Path) -> None:
    """A machine that was made of another one's image: the stale home of a guest counted as its own
    once such a migration was cut off.
    """
    source, target = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    asyncio.run(host_identity(source))
    shutil.copytree(source.state_dir, target.state_dir)
    with pytest.raises(RefusedError, match="say that they are the same host"):
        asyncio.run(ends(source, target))
    (target.state_dir / "host-id").unlink()
    assert len(set(asyncio.run(ends(source, target)))) == 2


def test_a_home_that_was_left_is_known_whatever_the_hosts_are_called_here(tmp_path: Path) -> None:
    """`vm list` of another operator had the VM twice."""
    world = World(tmp_path, Guest("postmigrate", "completed"), "local", "b")
    x, b = replace(world.x, name="b"), replace(world.y, name="local", state_dir=tmp_path / "b")

    async def play() -> list[str]:
        ids = await host_identity(x), await host_identity(b)
        await make_home(x, "q1")
        await make_home(b, "q2")
        await keep_at(replace(world.journal, source_id=ids[0], target_id=ids[1]), b)
        looks = (await inspect_all([x, b])).given
        return [look.vm.host.name for look in await without_stale(looks, [x, b])]

    assert asyncio.run(play()) == ["local"]


def test_hosts_that_were_cloned_are_told_apart_by_their_names(tmp_path: Path) -> None:
    """The home that was left was shown, and that of the guest was not."""
    world = World(tmp_path, Guest("postmigrate", "completed"), "x", "b")
    x, b = replace(world.x, name="x"), replace(world.y, name="b", state_dir=tmp_path / "b")

    async def play() -> list[str]:
        one = await host_identity(x)
        await make_home(x, "q1")
        await make_home(b, "q2")
        (b.state_dir / "host-id").write_text(one)
        await keep_at(replace(world.journal, source_id=one, target_id=one), b)
        looks = (await inspect_all([x, b])).given
        return [look.vm.host.name for look in await without_stale(looks, [x, b])]

    assert asyncio.run(play()) == ["b"]


def test_a_damaged_record_of_another_vm_hides_no_stale_home(tmp_path: Path) -> None:
    world = World(tmp_path, Guest("postmigrate", "completed"), "x", "b")
    x, b = replace(world.x, name="x"), replace(world.y, name="b", state_dir=tmp_path / "b")

    async def play() -> list[str]:
        await make_home(x, "q1")
        await make_home(b, "q2")
        await keep_at(world.journal, b)
        for name in ("web.old.r0.json", "web.r0.json"):
            (b.state_dir / "left" / name).write_text("")
        looks = (await inspect_all([x, b])).given
        return [look.vm.host.name for look in await without_stale(looks, [x, b])]

    assert asyncio.run(play()) == ["b"]
