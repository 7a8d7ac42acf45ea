"""A domain's dirty rate, as libvirt has its QEMU sample it."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.fake_libvirtd import FakeLibvirtd, in_turn
from vmckpt.errors import BusyError, RefusedError, VmckptError
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.measure.domains import SOURCE, measure_domain
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.units import MIB
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
XML = """<domain type='qemu'><name>web</name><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os><devices/></domain>"""
UUID = "00000000-0000-0000-0000-000000000001"


def measured(
    tmp_path: Path, patch: pytest.MonkeyPatch, state: DomainState, *jobs: DomainJob
) -> tuple[FakeLibvirtd, DirtyRate | VmckptError]:
    """By a libvirtd whose QEMU tells 5 MiB/s, the second time that it is asked."""
    host = LocalHost("a", tmp_path, "::1", libvirt=tmp_path / "none")
    seen = DomainInfo(UUID, "web", state, 1, persistent=True, xml=XML)
    session = FakeLibvirtd(
        host,
        find=seen,
        job=in_turn(*jobs, DomainJob(active=False)),
        begin_dirty_rate=None,
        dirty_rate=in_turn(None, 5.0 * MIB),
    )

    async def opened(_: Host) -> sessions._OpenSession:
        return sessions._OpenSession(session, AsyncExitStack())

    patch.setattr(sessions, "_open", opened)
    try:
        return session, asyncio.run(measure_domain(as_domain(host, seen), 1.0))
    except VmckptError as exc:
        return session, exc


def test_it_is_sampled_for_whole_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    session, found = measured(tmp_path, monkeypatch, DomainState.RUNNING)
    assert isinstance(found, DirtyRate)
    assert session.told == [("begin_dirty_rate", 1)]
    assert (found.source, found.ram_bytes, found.working_set_bytes) == (SOURCE, 64 * MIB, 5 * MIB)


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
    jobs = [DomainJob(active=False), DomainJob(active=False), DomainJob(active=True)]
    sampling, given_up = measured(tmp_path, monkeypatch, DomainState.RUNNING, *jobs)
    assert isinstance(given_up, BusyError)
    assert sampling.told == [("begin_dirty_rate", 1)]
    assert "dirty_rate" not in sampling.calls
