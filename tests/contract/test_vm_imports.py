"""A stopped domain becomes a VM, and a domain that is started meanwhile stays one."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.errors import HostDownError, RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.domains.definition.description import parse_domain
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.imported import from_domain
from vmckpt.vm.imported.besides import limits, protections
from vmckpt.vm.imported.from_domain import Imported, import_domain, import_xml
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract
UUID = "11111111-1111-1111-1111-111111111111"
XML = "<domain type='qemu'><name>web</name><os><type machine='q35'>hvm</type></os></domain>"


def info(state: DomainState) -> DomainInfo:
    return DomainInfo(UUID, "web", state, 1, True, XML)


class Import:
    """The domain `web` of a host, and what importing it leaves."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
        self.host = LocalHost("a", root, "127.0.0.1")
        monkeypatch.setenv("VMCKPT_STATE_DIR", str(root / "operator"))
        usual = {
            "has_saved_memory": False, "snapshots": [], "definition": XML, "define": None,
            "starts_with_host": False, "undefine": None, "find": None,
        }  # fmt: skip
        self.session = FakeLibvirtd(self.host, **usual | answers)
        monkeypatch.setattr(from_domain, "held_domain", self._held)
        monkeypatch.setattr(from_domain, "_create", self._create)

    @asynccontextmanager
    async def _held(self, domain: Domain, _: str) -> AsyncIterator[tuple[Domain, Libvirtd]]:
        yield domain, self.session

    async def _create(self, host: LocalHost, name: str, *_: Any, **__: Any) -> Imported:
        directory = vm_dir(host.state_dir, name)
        directory.path.mkdir(parents=True)
        directory.spec.write_text(f'name = "{name}"\nmemory = "64M"\n')
        spec = parse_spec(directory.spec.read_text(), "spec", Path("/"))
        qemu = Qemu(directory.qemu("11111111"), ProcessId(0, 0), Platform("q", "tcg", "qemu64"))
        return Imported(Vm(spec, host, directory, qemu), ("a note",))

    def run(self, state: DomainState = DomainState.SHUTOFF) -> Imported:
        return asyncio.run(import_domain(as_domain(self.host, info(state)), "web"))

    @property
    def is_there(self) -> bool:
        return vm_dir(self.host.state_dir, "web").path.exists()


def test_libvirt_has_it_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Import(tmp_path, monkeypatch)
    assert work.run().notes == ("a note",)
    assert work.session.orders == ["undefine"]
    assert work.is_there


def test_one_that_is_started_meanwhile_stays_a_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libvirt undefines a running domain: it would be gone when it is off."""
    work = Import(tmp_path, monkeypatch, find=info(DomainState.RUNNING))
    with pytest.raises(RefusedError) as refused:
        work.run()
    assert refused.value.why == "it was started meanwhile"
    assert work.session.told[-1] == ("define", XML)
    assert not work.is_there


def test_one_that_stays_a_domain_starts_with_its_host_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = {"starts_with_host": True, "start_with_host": None}
    work = Import(tmp_path, monkeypatch, find=info(DomainState.RUNNING), **started)
    with pytest.raises(RefusedError):
        work.run()
    assert work.session.orders == ["undefine", "define", "start_with_host"]


def test_one_that_libvirt_does_not_give_up_stays_a_domain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = LibvirtRefusedError("no", why="checkpoints", remedy="remove them", code=55)
    work = Import(tmp_path, monkeypatch, undefine=error)
    with pytest.raises(LibvirtRefusedError):
        work.run()
    assert not work.is_there


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ({"has_saved_memory": True}, "saved its memory"),
        ({"snapshots": [object()]}, "forget its 1 snapshot"),
    ],
)
def test_what_would_be_lost_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], why: str
) -> None:
    work = Import(tmp_path, monkeypatch, **answers)
    with pytest.raises(RefusedError) as refused:
        work.run()
    assert why in refused.value.why
    assert work.session.orders == []


def test_one_that_runs_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = Import(tmp_path, monkeypatch)
    with pytest.raises(RefusedError) as refused:
        work.run(DomainState.RUNNING)
    assert refused.value.why == "it runs"
    assert work.session.orders == []


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("<disk><target dev='vda'/><transient/></disk>", "disk vda is transient"),
        ("<disk><target dev='vdb'/><shareable/></disk>", "disk vdb is shareable"),
        ("<interface><mac address='52:54:00:00:00:01'/><filterref filter='clean'/></interface>",
         "NIC 52:54:00:00:00:01 has a network filter"),
        ("<interface><vlan><tag id='7'/></vlan></interface>", "in a VLAN"),
        ("<interface><port isolated='yes'/></interface>", "isolated from others"),
        ("<interface><link state='down'/></interface>", "its link is down"),
        ("<lease><key>web</key></lease>", "it has leases"),
    ],
)  # fmt: skip
def test_what_libvirt_protects_it_from_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, words: str
) -> None:
    """A transient disk's image was written to from then on; a NIC was in another network."""
    real = from_domain._create
    xml = XML.replace("</domain>", f"<devices>{device}</devices></domain>")
    work = Import(tmp_path, monkeypatch, definition=xml)
    monkeypatch.setattr(from_domain, "_create", real)
    with pytest.raises(RefusedError) as refused:
        work.run()
    assert words in refused.value.why
    assert work.session.orders == []
    assert not work.is_there


def test_what_it_does_without_is_said() -> None:
    devices = (
        "<interface type='bridge'><source bridge='br5'/><bandwidth/></interface>"
        "<interface type='bridge'><source bridge='br0'/><link state='up'/></interface>"
        "<interface type='network'><source network='dmz'/><port isolated='no'/></interface>"
        "<disk><target dev='sda'/><readonly/><shareable/></disk>"
    )
    more = f"<vcpu cpuset='1'>1</vcpu><cputune/><devices>{devices}</devices></domain>"
    xml = XML.replace("</domain>", more)
    assert protections(xml) == []
    assert limits(xml) == ["cputune", "bandwidth", "cpuset"]
    assert from_domain._on_networks(parse_domain(xml), "br0") == [
        "a NIC on the bridge 'br5' is on the host's bridge now (br0)",
        "a NIC on libvirt's network 'dmz' is on the host's bridge now (br0)",
    ]


def test_xml_of_a_domain_that_another_host_has_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On storage whose locks other hosts do not see it could be started a second time."""
    socket = tmp_path / "socket"
    here = LocalHost("a", tmp_path / "a", "127.0.0.1", libvirt=socket)
    there = LocalHost("b", tmp_path / "b", "127.0.0.1", libvirt=socket)
    without = LocalHost("c", tmp_path / "c", "127.0.0.1")
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "operator"))
    monkeypatch.setattr(from_domain, "all_hosts", lambda: [here, there, without])
    found: dict[str, object] = {"a": None, "b": info(DomainState.RUNNING)}

    @asynccontextmanager
    async def session(host: LocalHost) -> AsyncIterator[FakeLibvirtd]:
        yield FakeLibvirtd(host, find=found[host.name])

    monkeypatch.setattr(from_domain, "libvirtd", session)
    xml = XML.replace("</name>", f"</name><uuid>{UUID}</uuid>")
    with pytest.raises(RefusedError) as refused:
        asyncio.run(import_xml(xml, here, None))
    assert refused.value.why == "libvirt on b has it"
    found["b"] = HostDownError("it is silent", why="-", remedy="-")
    with pytest.raises(HostDownError):
        asyncio.run(import_xml(xml, here, None))
    # Nor one that is off here, and may run where it is defined as well.
    work = Import(tmp_path / "a", monkeypatch)
    monkeypatch.setattr(from_domain, "libvirtd", session)
    with pytest.raises(HostDownError):
        work.run()
    found["b"] = info(DomainState.SHUTOFF)
    with pytest.raises(RefusedError) as refused:
        work.run()
    assert "virsh undefine web on b" in refused.value.remedy
    assert work.session.orders == []
    found["b"] = None
    work.run()
