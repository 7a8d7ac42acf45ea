"""What a domain's migration left on a host that was silent, and who has the domain by then."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from tests.faulty_host import Fault, FaultyHost, silence
from vmckpt.drivers import find
from vmckpt.errors import BusyError, HostDownError, OutcomeUnknownError, RefusedError
from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import close
from vmckpt.hosts.inventory.inventory import all_hosts, change_host, find_host, remove_host
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains import offline, settle, tidy
from vmckpt.migrate.domains.journal import DomainJournal, make_room
from vmckpt.migrate.domains.migration import migrate
from vmckpt.migrate.domains.offline import move_off
from vmckpt.migrate.domains.recover import _tidy, recover
from vmckpt.migrate.domains.tidy import leave_on_destination
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.options.migration import MigrationOptions
from vmckpt.vm.domains import inventory
from vmckpt.vm.domains.definition.description import parse_domain
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState, PausedReason
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import Condition, DomainInfo

pytestmark = [pytest.mark.contract, pytest.mark.timeout(20)]
UUID = "00000000-0000-0000-0000-000000000001"
XML = f"<domain type='kvm'><name>web</name><uuid>{UUID}</uuid><os><type>hvm</type></os></domain>"
RUNS, OFF = Condition(DomainState.RUNNING, 1), Condition(DomainState.SHUTOFF, 1)
SENT = Condition(DomainState.PAUSED, PausedReason.MIGRATION)
SILENT, ABSENT = "silent", None
Says = Condition | str | None


class World:
    """What each host's libvirtd says of the domain. Images of it are on both hosts."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.says: dict[str, Says] = {}
        self.told: list[str] = []
        self.noted: list[str] = []
        self.refused: LibvirtRefusedError | None = None
        patch.setenv("VMCKPT_STATE_DIR", str(root / "state"))
        for name in ("a", "b", "c"):
            (root / name).mkdir()
            # Only its name is asked: `played` answers.
            host = LocalHost(name, root / name, "127.0.0.1", libvirt=Path("/libvirt"))
            change_host(host)
        for module in (settle, tidy, inventory):
            patch.setattr(module, "libvirtd", self.libvirtd)
        patch.setattr(offline, "libvirtds", self.libvirtds)
        self.old, self.copy = root / "a/web.raw", root / "b/web.raw"
        self.proof = root / "b/web.raw.vmckpt-r1"
        self.old.write_text("older")
        self.proof.write_text("newer")
        self.copy.hardlink_to(self.proof)
        disks = (MovedDisk(str(self.old), str(self.copy)),)
        self.journal = DomainJournal("r1", "web", UUID, "a", "b", persistent=True, disks=disks)

    @asynccontextmanager
    async def libvirtd(self, host: Host) -> AsyncIterator[Libvirtd]:
        if self.says.get(host.name) == SILENT:
            raise HostDownError(f"{host.name} is silent", why="for 10 s", remedy="look")
        yield played(host, self)

    @asynccontextmanager
    async def libvirtds(self, *hosts: Host) -> AsyncIterator[list[Libvirtd]]:
        yield [played(host, self) for host in hosts]

    def recover(self) -> None:
        """As the next command on the domain does."""
        asyncio.run(recover("web", self.noted.append))

    def images(self) -> str:
        """Which images there are, and whether an undo would still remove the copy."""
        paths = {"old": self.old, "copy": self.copy, "proof": self.proof}
        return " ".join(name for name, path in paths.items() if path.exists())


def played(host: Host, world: World) -> FakeLibvirtd:
    """One of the libvirtds."""

    def condition() -> Condition | None:
        says = world.says.get(host.name)
        return says if isinstance(says, Condition) else None

    def domains() -> list[DomainInfo]:
        says = condition()
        return [DomainInfo(UUID, "web", says.state, says.reason, True, XML)] if says else []

    def becomes(order: str, says: Says) -> Callable[..., None]:
        def obey(*_: object) -> None:
            world.told.append(f"{order} on {host.name}")
            world.says[host.name] = says

        return obey

    def start_with_host() -> LibvirtRefusedError | None:
        if world.refused is None:
            world.told.append(f"start with {host.name}")
        return world.refused

    return FakeLibvirtd(
        host,
        condition=condition,
        job=DomainJob(active=False),
        domains=domains,
        undefine=becomes("undefine", ABSENT),
        destroy=becomes("destroy", OFF),
        start_with_host=start_with_host,
    )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def kept() -> list[DomainJournal]:
    return asyncio.run(DomainJournal.all_of("web"))


@pytest.mark.parametrize("starts", [True, False])
def test_one_that_starts_with_its_host_does_so_where_it_is_then(
    world: World, *, starts: bool
) -> None:
    """After a drain and a boot of its host, and its undrain, it did not start with it any more."""
    begun = replace(world.journal, starts_with_host=starts)
    asyncio.run(begun.write())
    world.says = {"a": OFF, "b": RUNS}
    world.recover()
    expected = ["start with b"] if starts else []
    assert (world.told, kept()) == ([*expected, "undefine on a"], [])


def test_that_it_does_not_is_said(world: World) -> None:
    asyncio.run(replace(world.journal, starts_with_host=True).write())
    world.says = {"a": OFF, "b": RUNS}
    world.refused = LibvirtRefusedError("no", why="read-only", remedy="-", code=1)
    world.recover()
    assert world.told == ["undefine on a"]
    assert any("there: virsh autostart web" in text for text in world.noted)


@pytest.mark.parametrize(
    ("source", "target", "told", "images"),
    [
        (OFF, RUNS, ["undefine on a"], "copy"),
        (OFF, OFF, ["undefine on a"], "copy"),
        (SENT, OFF, ["destroy on a", "undefine on a"], "copy"),
        (ABSENT, RUNS, [], "copy"),
        # Someone has moved it back, or on.
        (OFF, ABSENT, [], "old copy"),
        (RUNS, ABSENT, [], "old copy"),
        (RUNS, OFF, [], "old copy"),
        (ABSENT, ABSENT, [], "old copy"),
    ],
)
def test_what_a_source_had_left_is_removed_unless_the_domain_has_come_back(
    world: World, source: Says, target: Says, told: list[str], images: str
) -> None:
    asyncio.run(replace(world.journal, moved=True).write())
    world.says = {"a": source, "b": target}
    world.recover()
    assert (world.told, world.images(), kept()) == (told, images, [])


@pytest.mark.parametrize(
    ("source", "target"), [(OFF, SILENT), (SILENT, RUNS), (SILENT, OFF), (RUNS, RUNS)]
)
def test_nothing_is_removed_as_long_as_an_end_is_silent_or_both_say_that_it_runs(
    world: World, source: Says, target: Says
) -> None:
    left = replace(world.journal, moved=True)
    asyncio.run(left.write())
    world.says = {"a": source, "b": target}
    world.recover()
    assert (world.told, world.images(), kept()) == ([], "old copy proof", [left])
    assert "removed later" in world.noted[0]


@pytest.mark.parametrize(
    ("source", "target", "told", "images"),
    [
        (RUNS, OFF, ["undefine on b"], "old"),
        (RUNS, ABSENT, [], "old"),
        (OFF, OFF, ["undefine on b"], "old"),
        (RUNS, RUNS, [], "old copy"),
        (OFF, RUNS, [], "old copy"),
        (ABSENT, OFF, [], "old copy"),
    ],
)
def test_what_a_target_had_left_is_removed_unless_the_domain_has_come_there(
    world: World, source: Says, target: Says, told: list[str], images: str
) -> None:
    asyncio.run(replace(world.journal, stayed=True).write())
    world.says = {"a": source, "b": target}
    world.recover()
    assert (world.told, world.images(), kept()) == (told, images, [])


@pytest.mark.parametrize("known", [False, True])
def test_a_target_keeps_its_copies_until_its_libvirtd_answers(world: World, *, known: bool) -> None:
    left = replace(world.journal, stayed=True, known_to_target=known)
    asyncio.run(left.write())
    world.says = {"a": OFF, "b": SILENT}
    world.recover()
    assert (world.images(), kept()) == ("old copy proof", [left])


def test_a_source_that_dies_in_the_end_does_not_keep_the_domain_from_its_commands(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settle, "POLL_S", 0.01)
    dead = FaultyHost("a", tmp_path, "", faults=silence("resolve"))
    ends = dead, LocalHost("b", tmp_path, "")
    world.says = {"a": SILENT, "b": RUNS}
    (other_proof := tmp_path / "b/other.raw.vmckpt-r1").touch()
    other = MovedDisk("/no/such/image.raw", str(tmp_path / "b/other.raw"))
    journal = replace(world.journal, disks=(*world.journal.disks, other))

    async def end() -> None:
        await journal.write()
        await leave_on_destination(journal, ends, world.noted.append, patience_s=0.0)

    asyncio.run(end())
    assert dead.unused() == []
    assert kept() == [replace(journal, moved=True)]
    # No undo takes a copy now.
    assert (world.images(), other_proof.exists()) == ("old copy", False)
    world.says["a"] = OFF
    world.recover()
    assert (world.told, world.images(), kept()) == (["undefine on a"], "copy", [])


def test_images_are_handed_over_only_by_what_says_that_it_has_moved(
    world: World, tmp_path: Path
) -> None:
    """Else a command that dies as it hands them over leaves a migration that may be undone."""
    seen: list[list[DomainJournal]] = []

    async def watch(_: Path) -> None:
        seen.append(await DomainJournal.all_of("web"))

    watched = (Fault("remove", first=watch),)
    a, b = (FaultyHost(name, tmp_path, "", faults=watched) for name in "ab")
    world.says = {"b": RUNS}

    async def end() -> None:
        await world.journal.write()
        await leave_on_destination(world.journal, (a, b), world.noted.append)

    asyncio.run(end())
    assert seen == [[replace(world.journal, moved=True)]] * 2
    assert (world.images(), kept()) == ("copy", [])


def test_the_next_migration_writes_over_nothing(world: World) -> None:
    left, next_one = replace(world.journal, moved=True), replace(world.journal, run="r2")

    async def main() -> None:
        await left.write()
        await make_room("web")
        await next_one.write()
        assert await DomainJournal.all_of("web") == [next_one, left]
        with pytest.raises(BusyError) as busy:
            await make_room("web")
        assert "run r2" in busy.value.why
        await next_one.remove()
        assert await DomainJournal.all_of("web") == [left]
        await left.remove()

    asyncio.run(main())
    assert kept() == []


def test_what_an_earlier_vmckpt_kept_in_the_way_of_the_next_is_put_aside(
    world: World, tmp_path: Path
) -> None:
    left = replace(world.journal, moved=True)

    async def main() -> None:
        await left.write()
        left.path.rename(tmp_path / "state/domains/web.json")
        assert await DomainJournal.all_left("web") == [left]
        await make_room("web")
        assert await DomainJournal.read("web") is None
        assert await DomainJournal.all_left("web") == [left]

    asyncio.run(main())


def test_domains_whose_names_begin_alike_are_told_apart(world: World) -> None:
    left = replace(world.journal, moved=True)
    other = replace(left, vm="web.old")

    async def main() -> None:
        await left.write()
        await other.write()
        assert await DomainJournal.all_left("web") == [left]
        assert await DomainJournal.all_left("web.old") == [other]
        other.path.write_text("")  # damaged
        assert await DomainJournal.all_left("web") == [left]

    asyncio.run(main())


@pytest.mark.parametrize("to", ["c", "a"])
def test_what_is_left_of_a_domain_that_moves_on_is_still_removed(
    world: World, tmp_path: Path, *, to: str
) -> None:
    """Unless it moves there: what that host has of it is the domain then."""
    on = LocalHost("b", tmp_path, ""), LocalHost(to, tmp_path, "")
    journal = DomainJournal("r2", "web", UUID, "b", to, persistent=True)

    async def move_on() -> None:
        await replace(world.journal, moved=True, disks=()).write()
        await journal.write()
        await leave_on_destination(journal, on, world.noted.append)

    world.says = {"a": OFF, "b": ABSENT, to: OFF}
    asyncio.run(move_on())
    world.recover()
    assert world.told == (["undefine on a"] if to == "c" else [])
    assert (world.says[to], kept()) == (OFF, [])


def test_what_has_moved_on_while_its_locks_were_waited_for_is_left_to_the_next_command(
    world: World,
) -> None:
    left = replace(world.journal, moved=True)
    asyncio.run(left.held_by("c").write())
    world.says = {"a": OFF, "b": ABSENT, "c": RUNS}
    asyncio.run(_tidy(left, world.noted.append))
    assert (world.told, kept()) == ([], [left.held_by("c")])


@pytest.mark.parametrize("move", [migrate, move_off])
def test_a_migration_that_was_cut_off_is_ended_before_the_next_begins(
    world: World,
    move: Callable[[Domain, Host, MigrationOptions, Emit], Coroutine[Any, Any, MigrationReport]],
) -> None:
    async def main() -> None:
        await world.journal.write()
        domain = Domain(find_host("a"), DomainInfo(UUID, "web", *OFF, True, XML), parse_domain(XML))
        await move(domain, find_host("c"), MigrationOptions(), lambda _: None)

    with pytest.raises(BusyError, match="r1, from a to b"):
        asyncio.run(main())
    assert (world.told, kept()) == ([], [world.journal])


def test_a_target_that_is_drained_meanwhile_gets_no_domain_of_a_drain(world: World) -> None:
    async def main() -> None:
        await close(find_host("c"), {"run": "another"})
        domain = Domain(find_host("a"), DomainInfo(UUID, "web", *OFF, True, XML), parse_domain(XML))
        await migrate(domain, find_host("c"), MigrationOptions(in_turn=True), lambda _: None)

    with pytest.raises(RefusedError, match="c is drained"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("how", "source", "target"),
    [("moved", OFF, SILENT), ("moved", SENT, SILENT), ("stayed", SILENT, OFF)],
)
def test_a_rest_is_not_taken_for_the_domain_while_its_host_is_silent(
    world: World, how: str, source: Says, target: Says
) -> None:
    left = replace(world.journal, moved=how == "moved", stayed=how == "stayed")
    asyncio.run(left.write())
    world.says = {"a": source, "b": target}
    with pytest.raises(HostDownError, match=f"{left.owner} is silent"):
        asyncio.run(_found())
    # One that runs is no rest, whoever has brought it there.
    world.says[left.untidy] = RUNS
    assert asyncio.run(_found()) == left.untidy


async def _found() -> str | None:
    hosts = [host for host in all_hosts() if host.libvirt is not None]
    found = await find._domain("web", hosts, lambda _: None)
    return None if found is None else found.host.name


def test_a_host_that_is_forgotten_does_not_keep_the_domain_from_its_commands(world: World) -> None:
    asyncio.run(replace(world.journal, moved=True).write())
    world.says = {"a": OFF, "b": RUNS}
    remove_host("a")
    assert asyncio.run(_found()) == "b"
    assert (world.told, kept()) == ([], [])


def test_a_migration_that_was_cut_off_is_ended_by_hand_where_a_host_is_forgotten(
    world: World,
) -> None:
    asyncio.run(world.journal.write())
    remove_host("a")
    with pytest.raises(OutcomeUnknownError) as unknown:
        world.recover()
    assert "there is no host 'a'" in unknown.value.what
    assert str(world.journal.path) in unknown.value.remedy
    assert kept() == [world.journal]
