"""A plan for a libvirt domain: the same as for other VMs, from what two libvirtds and /proc say."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from tests.ram_writer import PAGES, Writer, writing
from tests.unit.test_domain_forecast import domain_move
from tests.unit.test_learned import MOVES
from vmckpt.drivers.domain import LibvirtDomain
from vmckpt.errors import RefusedError
from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import UNKNOWN_LIBVIRT_S, UNKNOWN_LIBVIRT_SWITCH_S
from vmckpt.forecast.measure.dirty_rate import TRACKING
from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import TransferMode
from vmckpt.forecast.planner import MigrationPlan
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.hosts.local import LocalHost
from vmckpt.options.migration import Method, MigrationOptions, Tls
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.preflight.domains.link import TCP_PORT
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]
UUID = "5a1c0000-7e57-4000-8000-00000000d1e8"
XML = f"""<domain type='qemu'><name>web</name><uuid>{UUID}</uuid><memory unit='MiB'>4</memory>
<vcpu>1</vcpu><os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os><devices/></domain>"""


CAPABILITIES = """<capabilities><host><uuid>{}</uuid><secmodel><model>dac</model>
<baselabel>+0:+0</baselabel></secmodel></host></capabilities>"""


class OpenHost(LocalHost):
    """A host whose libvirtd listens for others."""

    async def listening_ports(self, _: str) -> frozenset[int]:
        return frozenset({TCP_PORT})


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Host, Host]:
    """Hosts a and b, with a libvirtd each; a has the domain, which runs."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))
    a, b = (OpenHost(n, tmp_path / n, "::1", libvirt=tmp_path / f"{n}.sock") for n in ("a", "b"))
    libvirtds = {host.name: played(host) for host in (a, b)}

    async def opened(host: Host) -> sessions._OpenSession:
        return sessions._OpenSession(libvirtds[host.name], AsyncExitStack())

    monkeypatch.setattr(sessions, "_open", opened)
    return a, b


SEEN = DomainInfo(UUID, "web", DomainState.RUNNING, 1, persistent=True, xml=XML)


def played(host: Host) -> FakeLibvirtd:
    used_s = iter(range(100))
    return FakeLibvirtd(
        host,
        find=SEEN if host.name == "a" else None,
        names=[],
        job=DomainJob(active=False),
        snapshots=[],
        version=(11, 3, 0),
        qemu_version=(10, 0, 2),
        capabilities=CAPABILITIES.format(host.name),
        domain_capabilities="<domainCapabilities/>",
        processor_s=lambda: float(next(used_s)),
    )


@pytest.fixture
def qemu() -> Iterator[Writer]:
    with writing(words=("-uuid", UUID)) as made:
        made.does("write", *range(100))
        yield made


def recorded(*moves: RunRecord) -> None:
    for number, move in enumerate(moves):
        replace(move, run=f"20260101-00000{number}-abcd").save(runs_dir())


def planned(
    hosts: tuple[Host, Host], options: MigrationOptions | None = None, intent: Intent | None = None
) -> MigrationPlan:
    source, destination = hosts
    vm = LibvirtDomain(as_domain(source, SEEN))
    chosen = options or MigrationOptions(tls=Tls.OFF)
    wanted, began_s = intent or Intent(), time.monotonic()
    return asyncio.run(vm.plan(destination, chosen, wanted, began_s=began_s, for_s=0.3))


def test_every_method_is_forecast_of_its_tracked_pages(
    hosts: tuple[Host, Host], qemu: Writer
) -> None:
    recorded(*MOVES, *(replace(one, request={**one.request, "channels": 2}) for one in MOVES))
    made = planned(hosts)
    assert (made.measured.source, made.measured.ram_bytes) == (TRACKING, PAGES * 4096)
    modes = {offer.forecast.mode for offer in made.offers}
    assert modes == set(TransferMode) - {TransferMode.ZSTD}
    assert [mode for mode, _ in made.unknown] == [TransferMode.ZSTD]
    assert made.closed == ()
    assert made.choice.mode is not None
    (note,) = made.notes
    assert note.startswith("no migration of a domain between a and b is recorded yet")
    assert made.record()["dirty_rate"]["source"] == TRACKING
    assert qemu.child.poll() is None


def test_once_domains_have_migrated_they_teach_what_libvirt_takes(
    hosts: tuple[Host, Host], qemu: Writer
) -> None:
    del qemu
    recorded(*MOVES)
    assumed = planned(hosts)
    recorded(*MOVES, domain_move(), domain_move())
    seen = planned(hosts)
    assert seen.notes == ()
    takes_s = [
        next(o.forecast.total_s.p50 for o in one.offers if o.forecast.mode is TransferMode.PRECOPY)
        for one in (assumed, seen)
    ]
    assert takes_s[1] == pytest.approx(0.9, abs=0.25)
    supposed_s = 0.3 + UNKNOWN_LIBVIRT_S + 0.025 + UNKNOWN_LIBVIRT_SWITCH_S
    assert takes_s[1] - takes_s[0] == pytest.approx(0.98 - supposed_s, abs=0.02)


def test_constraints_hold_for_domains_and_the_change_that_helps_is_named(
    hosts: tuple[Host, Host], qemu: Writer
) -> None:
    del qemu
    recorded(*MOVES)
    kept = planned(hosts, intent=Intent(finish_within_s=60.0, never_risk_postcopy=True))
    assert kept.require().finish_within_s is not None
    assert kept.spare_s > 0
    broken = planned(hosts, intent=Intent(finish_within_s=0.2))
    with pytest.raises(RefusedError, match="meets the constraints") as refused:
        broken.require()
    assert "--finish-within" in refused.value.remedy


def test_a_policy_that_throttles_closes_the_methods_that_it_steers_by_name(
    hosts: tuple[Host, Host], qemu: Writer
) -> None:
    del qemu
    recorded(*MOVES)
    throttle = Policy((PolicyRule(3, Act.THROTTLE, 10, most_percent=50),))
    options = MigrationOptions(Method.PRECOPY, tls=Tls.OFF, policy=throttle)
    with pytest.raises(RefusedError) as refused:
        planned(hosts, options)
    assert "libvirt throttles a guest by its own rule" in refused.value.why


def test_nothing_is_forecast_between_hosts_that_were_never_measured(
    hosts: tuple[Host, Host],
) -> None:
    with pytest.raises(RefusedError, match="has been measured") as refused:
        planned(hosts)
    assert refused.value.remedy.endswith("vmckpt host calibrate a b")
