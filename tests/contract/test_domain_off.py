"""A domain that is off, on its way: what two played libvirtds say, and what follows."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.errors import OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains import offline, settle, tidy
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.options.migration import AtTarget, MigrationOptions
from vmckpt.preflight.domains.checks import Contents, DomainPreflight, Route
from vmckpt.preflight.domains.left_behind import left_behind
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.vm.domains.definition.description import parse_domain
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.replies import Condition, DomainInfo

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]
UUID = "00000000-0000-0000-0000-000000000001"
XML = f"<domain type='kvm'><name>web</name><uuid>{UUID}</uuid><os><type>hvm</type></os></domain>"
REFUSED = LibvirtRefusedError("no", why="disk full", remedy="free some", code=1)
CUT = OutcomeUnknownError("no answer", why="the connection broke", remedy="try again")


class World:
    """Which of the hosts define the domain, and what libvirt's call does: how far it comes."""

    def __init__(self, does: VmckptError | None, *, comes_to: str) -> None:
        self.does, self.comes_to = does, comes_to
        self.defined = {"a"}

    starts_with = "a"

    def move(self) -> VmckptError | None:
        """Target first, then the source, as libvirt does."""
        if self.comes_to in ("both", "there"):
            self.defined.add("b")
        if self.comes_to == "there":
            self.defined.discard("a")
        return self.does


def played(host: LocalHost, world: World, *, has_saved: bool = False) -> FakeLibvirtd:
    """One of the two libvirtds."""

    def is_there() -> bool:
        return host.name in world.defined

    return FakeLibvirtd(
        host,
        has_saved_memory=has_saved,
        find=lambda: SEEN if is_there() else None,
        condition=lambda: Condition(DomainState.SHUTOFF, 1) if is_there() else None,
        job=REFUSED,
        starts_with_host=world.starts_with == host.name,
        start_with_host=lambda: setattr(world, "starts_with", host.name),
        undefine=lambda _: world.defined.discard(host.name),
        migrate=lambda *_: world.move(),
    )


SEEN = DomainInfo(UUID, "web", DomainState.SHUTOFF, 1, True, XML)


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LocalHost, LocalHost]:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(settle, "STEADY_S", 0.01)
    monkeypatch.setattr(settle, "POLL_S", 0.01)
    return LocalHost("a", tmp_path / "a", "::1"), LocalHost("b", tmp_path / "b", "::2")


@pytest.mark.parametrize(
    ("does", "comes_to", "raises", "where"),
    [
        (None, "there", None, "b"),
        (REFUSED, "nowhere", OperationFailedError, "a"),
        (CUT, "nowhere", OperationFailedError, "a"),
        # It came there, and the answer was lost: the rest is tidied up.
        (CUT, "both", None, "b"),
        (CUT, "there", None, "b"),
    ],
)
def test_it_is_defined_on_one_host_whatever_the_call_says(
    ends: tuple[LocalHost, LocalHost],
    monkeypatch: pytest.MonkeyPatch,
    *,
    does: VmckptError | None,
    comes_to: str,
    raises: type[VmckptError] | None,
    where: str,
) -> None:
    world = World(does, comes_to=comes_to)
    renamed = MigrationOptions(offline=True, at_target=AtTarget("web2"))

    @asynccontextmanager
    async def one(host: LocalHost) -> AsyncIterator[FakeLibvirtd]:
        yield played(host, world)

    @asynccontextmanager
    async def two(*hosts: LocalHost) -> AsyncIterator[tuple[FakeLibvirtd, ...]]:
        yield tuple(played(host, world) for host in hosts)

    async def passed(*_: object) -> DomainPreflight:
        way = Route("qemu://b", "b"), Contents(True, (), False, encrypted=False)
        return DomainPreflight((Finding("running", OK, "off"),), renamed, way)

    for module in (settle, tidy):
        monkeypatch.setattr(module, "libvirtd", one)
    monkeypatch.setattr(offline, "libvirtds", two)
    monkeypatch.setattr(offline, "preflight_off", passed)

    async def main() -> None:
        domain = Domain(ends[0], SEEN, parse_domain(XML))
        moving = offline.move_off(domain, ends[1], renamed, lambda _: None)
        if raises is None:
            report = await moving
            assert (report.method, report.target, report.vm) == ("offline", "b", "web2")
        else:
            with pytest.raises(raises):
                await moving
        assert await DomainJournal.read("web") is None

    asyncio.run(main())
    assert world.defined == {where}
    assert world.starts_with == where


def test_what_libvirt_would_leave_behind_keeps_it_here(ends: tuple[LocalHost, LocalHost]) -> None:
    here, there = (host.state_dir.with_suffix(".fd") for host in ends)
    firmware = f"<nvram>{here}</nvram></os><devices><tpm><backend type='emulator'/></tpm></devices>"

    def left(xml: str, *, has_saved: bool = False) -> set[str]:
        domain = Domain(ends[0], SEEN, parse_domain(xml))
        arrives = replace(domain, description=parse_domain(xml.replace(str(here), str(there))))
        source = played(ends[0], World(None, comes_to="nowhere"), has_saved=has_saved)
        found = asyncio.run(left_behind(domain, arrives, source, ends[1]))
        assert all(check.remedy for check in found if check.verdict == REFUSE)
        return {check.code for check in found if check.verdict == REFUSE}

    full = XML.replace("</os>", firmware)
    assert left(XML) == set()
    assert left(XML, has_saved=True) == {"saved-memory"}
    # Before its first start the firmware has written nothing.
    assert left(full) == {"tpm"}
    here.write_bytes(b"boot order")
    assert left(full) == {"tpm", "firmware-variables"}
    there.write_bytes(b"boot menu!")
    assert left(full) == {"tpm", "firmware-variables"}
    there.write_bytes(b"boot order")
    assert left(full) == {"tpm"}
