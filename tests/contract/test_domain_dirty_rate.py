"""A domain's dirty rate: its pages tracked in its QEMU, or sampled by QEMU through libvirt."""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fake_libvirtd import FakeLibvirtd, in_turn
from tests.ram_writer import PAGES, Writer, writing
from vmckpt.errors import BusyError, RefusedError, VmckptError
from vmckpt.forecast.measure.dirty_rate import TRACKING, DirtyRate
from vmckpt.forecast.measure.domains import SAMPLING, measure_domain, track_domain
from vmckpt.forecast.measure.there import OBSERVE_DOMAIN, observe_there
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner, held
from vmckpt.units import MIB
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.process import find_qemu, find_ram
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
XML = """<domain type='qemu'><name>web</name><memory unit='MiB'>{mib}</memory><vcpu>1</vcpu>{more}
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os><devices/></domain>"""
UUID = "5a1c0000-7e57-4000-8000-00000000d1e7"


def measured(
    tmp_path: Path,
    patch: pytest.MonkeyPatch,
    state: DomainState,
    *jobs: DomainJob,
    mib: int = 64,
    more: str = "",
    for_s: float = 1.0,
) -> tuple[FakeLibvirtd, DirtyRate | VmckptError]:
    """By a libvirtd whose QEMU tells 5 MiB/s, the second time that it is asked."""
    host = LocalHost("a", tmp_path, "::1", libvirt=tmp_path / "none")
    xml = XML.format(mib=mib, more=more)
    seen = DomainInfo(UUID, "web", state, 1, persistent=True, xml=xml)
    session = FakeLibvirtd(
        host,
        find=seen,
        job=in_turn(*jobs, DomainJob(active=False)),
        begin_dirty_rate=None,
        dirty_rate=in_turn(None, 5.0 * MIB),
        processor_s=in_turn(10.0, 10.4),
    )

    async def opened(_: Host) -> sessions._OpenSession:
        return sessions._OpenSession(session, AsyncExitStack())

    patch.setattr(sessions, "_open", opened)
    try:
        return session, asyncio.run(measure_domain(as_domain(host, seen), for_s))
    except VmckptError as exc:
        return session, exc


def test_it_is_sampled_for_whole_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, found = measured(tmp_path, monkeypatch, DomainState.RUNNING)
    assert isinstance(found, DirtyRate)
    assert session.told == [("begin_dirty_rate", 1)]
    seen = (found.source, found.ram_bytes, found.working_set_bytes)
    assert seen == (SAMPLING, 64 * MIB, 5 * MIB)
    assert found.why.startswith("no process that this user sees has the domain's UUID")
    assert "512 pages" in found.why
    assert 0.1 < found.busy < 0.4


def test_what_stands_still_or_is_at_work_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, refused = measured(tmp_path, monkeypatch, DomainState.PAUSED)
    assert isinstance(refused, RefusedError)
    _, busy = measured(tmp_path, monkeypatch, DomainState.RUNNING, DomainJob(active=True))
    assert isinstance(busy, BusyError)
    _, begun = measured(
        tmp_path, monkeypatch, DomainState.RUNNING, DomainJob(active=False), DomainJob(active=True)
    )
    assert isinstance(begun, BusyError)
    assert session.told == []
    # One that begins while QEMU samples: what that comes to is not even asked for.
    jobs = [*[DomainJob(active=False)] * 3, DomainJob(active=True)]
    sampling, given_up = measured(tmp_path, monkeypatch, DomainState.RUNNING, *jobs)
    assert isinstance(given_up, BusyError)
    assert sampling.told == [("begin_dirty_rate", 1)]
    assert "dirty_rate" not in sampling.calls


@pytest.fixture
def qemu() -> Iterator[Writer]:
    """A process that is found as the domain's QEMU, with its RAM: 4 MiB."""
    with writing(words=("-uuid", UUID)) as made:
        yield made


def test_its_qemu_and_its_ram_are_found_without_its_monitor(qemu: Writer, tmp_path: Path) -> None:
    assert find_qemu(UUID) == qemu.pid
    ram = find_ram(qemu.pid, [PAGES * 4096])
    assert ram.file is None
    assert [end - start for start, end in ram.private] == [PAGES * 4096]
    with pytest.raises(OSError, match="in pieces"):
        find_ram(qemu.pid, [3 * PAGES * 4096])
    with pytest.raises(OSError, match="in pieces"):  # it has one of that size
        find_ram(qemu.pid, [PAGES * 4096] * 2)
    with writing(words=("-uuid", UUID)), pytest.raises(OSError, match="several processes have"):
        find_qemu(UUID)
    with pytest.raises(OSError, match="no process that this user sees has"):
        find_qemu(UUID.replace("5a1c", "5a1d"))

    async def look() -> None:
        host, lock = LocalHost("a", tmp_path, "127.0.0.1"), tmp_path / "lock"
        words = [UUID, str(PAGES * 4096), "0.3", str(lock)]
        told = await observe_there(host, words, 0.3, OBSERVE_DOMAIN)
        assert told
        found = DirtyRate.from_json(told)
        assert (found.source, found.ram_bytes) == (TRACKING, PAGES * 4096)
        with held(lock, Owner("r", "migrate to b", 1, 0.0)):
            assert await observe_there(host, words, 0.3, OBSERVE_DOMAIN) is None
        with pytest.raises(OSError, match="in pieces"):
            await observe_there(host, [UUID, "4096000", "0.3", str(lock)], 0.3, OBSERVE_DOMAIN)

    asyncio.run(look())


def test_its_pages_are_tracked_and_read_where_that_is_possible(
    qemu: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu.does("write", *range(512))

    async def writes() -> DirtyRate | None:
        async def go_on() -> bool:
            qemu.does("write", 3, 5, 700)
            return True

        return await track_domain(UUID, [PAGES * 4096], 0.4, go_on)

    seen = asyncio.run(writes())
    assert seen is not None
    assert seen.curve.working_set_pages == 3
    assert seen.ram is not None
    assert seen.ram.zero == pytest.approx(511 / 1024)
    # Nothing has to be allocated to read what was never touched.
    assert {piece.hole for piece in seen.layout} == {0.0}

    session, found = measured(tmp_path, monkeypatch, DomainState.RUNNING, mib=4, for_s=0.3)
    assert isinstance(found, DirtyRate), found
    assert (found.source, found.why) == (TRACKING, "")
    assert session.told == []
    assert found.ram is not None
    assert 0.5 < found.busy <= 1.0


def test_a_job_of_libvirts_ends_the_tracking(
    qemu: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of virsh migrate, say: it takes no lock of vmckpt's."""
    jobs = [DomainJob(active=False), DomainJob(active=False), DomainJob(active=True)]
    session, busy = measured(tmp_path, monkeypatch, DomainState.RUNNING, *jobs, mib=4, for_s=30.0)
    assert isinstance(busy, BusyError)
    assert "a job of libvirt's" in busy.why
    assert session.told == []
    assert all("userfaultfd" not in opened for opened in qemu.descriptors())


def test_huge_pages_are_sampled(
    qemu: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "<memoryBacking><hugepages/></memoryBacking>"
    _, found = measured(tmp_path, monkeypatch, DomainState.RUNNING, mib=4, more=more)
    assert isinstance(found, DirtyRate), found
    assert found.source == SAMPLING
    assert found.why.startswith("its memory is in huge pages")
