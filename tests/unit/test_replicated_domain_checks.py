"""What of a libvirt domain a standby could not have: refused by name before anything is changed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask
from vmckpt.preflight.replication import domains
from vmckpt.vm.domains.definition.parts import parts_of
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.replies import DomainInfo, DomainSnapshot, Named

pytestmark = pytest.mark.unit
UUID = "00000000-0000-0000-0000-000000000001"
HOST = LocalHost("a", Path("/none"), "::1", libvirt=Path("/run/l"))
XML = f"""<domain type='kvm'><name>web</name><uuid>{UUID}</uuid><memory unit='MiB'>64</memory>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type>{{os}}</os>{{more}}<devices>{{devices}}
</devices></domain>"""


def unfit(os: str = "", more: str = "", devices: str = "") -> list[Finding]:
    xml = XML.format(os=os, more=more, devices=devices)
    seen = DomainInfo(UUID, "web", DomainState.RUNNING, 1, persistent=True, xml=xml)
    return list(domains._unfit(as_domain(HOST, seen), parts_of(xml)))


@pytest.mark.parametrize(
    ("parts", "code"),
    [
        ({}, None),
        ({"os": "<loader type='pflash'>/c</loader><nvram>/v</nvram>"}, "firmware-variables"),
        ({"devices": "<tpm model='tpm-crb'><backend type='emulator'/></tpm>"}, "tpm"),
        ({"more": "<memoryBacking><source type='memfd'/></memoryBacking>"}, "memory-backing"),
        ({"devices": "<memballoon model='virtio' freePageReporting='on'/>"}, "free-pages"),
    ],
)
def test_what_its_xml_says(parts: dict[str, str], code: str | None) -> None:
    found = unfit(**parts)
    assert [one.code for one in found] == ([] if code is None else [code])
    assert all(one.verdict == REFUSE and one.remedy for one in found)


def test_a_remedy_that_is_about_a_checkpoint_is_not_given() -> None:
    found = Finding("x", REFUSE, "no", "save it: vmckpt checkpoint create web --kind internal")
    assert "--kind internal" not in domains._otherwise(found, "web")
    assert domains._otherwise(found._replace(remedy="boot Linux 6.7"), "web") == "boot Linux 6.7"


def test_snapshots_that_libvirt_would_forget_with_its_definition() -> None:
    xml = XML.format(os="", more="", devices="")
    seen = DomainInfo(UUID, "web", DomainState.RUNNING, 1, persistent=True, xml=xml)
    session = FakeLibvirtd(HOST, snapshots=[DomainSnapshot("first", "<s/>")])
    (found,) = asyncio.run(ask(domains._snapshots(as_domain(HOST, seen), session)))
    assert (found.verdict, "first" in found.reason) == (REFUSE, True)


@pytest.mark.parametrize(
    ("opened", "holds_output", "verdict", "words"),
    [
        ("x", True, REFUSE, "<driver name='qemu'/>"),
        ("x", False, WARN, "leave out --unsafe-no-output-commit"),
        ("", True, OK, ""),
    ],
)
def test_the_output_of_nics_that_the_kernel_serves_cannot_be_held(
    monkeypatch: pytest.MonkeyPatch, opened: str, holds_output: bool, verdict: str, words: str
) -> None:
    async def run(_: list[str]) -> Any:
        return SimpleNamespace(stdout=opened)

    async def none(*_: object) -> list[str]:
        return []

    monkeypatch.setattr(domains, "senders", none)
    monkeypatch.setattr(domains, "require_holdable", none)
    vm: Any = SimpleNamespace(
        host=SimpleNamespace(run=run),
        qemu=SimpleNamespace(process=SimpleNamespace(pid=1)),
        spec=SimpleNamespace(nics=()),
    )
    monitor: Any = None
    (found,) = asyncio.run(ask(domains._output(vm, monitor, holds_output=holds_output)))
    assert (found.verdict, words in found.remedy) == (verdict, True)


def test_shared_disks_are_refused_as_libvirt_has_their_nodes() -> None:
    (found,) = domains._shared(ReplicationOptions("/l", disks=SHARED))
    assert found.verdict == REFUSE
    assert not list(domains._shared(ReplicationOptions("/l")))


@pytest.mark.parametrize("code", [0, 2])
def test_an_older_vmckpt_there_would_wait_with_another_qemu(code: int) -> None:
    async def run(words: list[str]) -> Any:
        assert words[:2] == ["vmckpt", "replica-domain"]
        return SimpleNamespace(returncode=code)

    async def own_command() -> list[str]:
        return ["vmckpt"]

    async def require_up() -> None:
        """It is."""

    standby: Any = SimpleNamespace(
        name="b", run=run, own_command=own_command, require_up=require_up
    )
    found = asyncio.run(ask(domains._knows_domains(standby)))
    assert [one.verdict for one in found] == ([REFUSE] if code else [])


@pytest.mark.parametrize(
    ("there", "verdict"),
    [
        ([], OK),
        ([Named("other", "other", True)], OK),
        ([Named("other", "web", True)], REFUSE),
        ([Named(UUID, "other", False)], REFUSE),
        (None, REFUSE),
    ],
)
def test_the_standbys_libvirt_has_no_domain_of_that_name(
    monkeypatch: pytest.MonkeyPatch, there: list[Named] | None, verdict: str
) -> None:
    @asynccontextmanager
    async def libvirtd(host: Host) -> AsyncIterator[FakeLibvirtd]:
        yield FakeLibvirtd(host, names=there)

    monkeypatch.setattr(domains, "libvirtd", libvirtd)
    socket = None if there is None else Path("/run/l")
    standby = LocalHost("b", Path("/none"), "::1", libvirt=socket)
    vm: Any = SimpleNamespace(name="web", qemu=SimpleNamespace(domain=UUID))
    (found,) = asyncio.run(ask(domains._libvirt(vm, standby)))
    assert found.verdict == verdict
