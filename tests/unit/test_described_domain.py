"""The XML of a VM that its spec describes says what its command line says."""

from pathlib import Path

import pytest

from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.domains.definition.description import (
    Description,
    DomainInterface,
    parse_domain,
    parse_xml,
)
from vmckpt.vm.imported.described import described_domain
from vmckpt.vm.imported.domain_xml import domain_of, with_holes
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import VmDir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Adopted, Spec, parse_spec

pytestmark = pytest.mark.unit

STATE, PLATFORM = Path("/var/lib/vmckpt"), Platform("pc-q35-10.0", "tcg", "qemu64,+ssse3,-sse4a")
TEXT = """
name = "web"
memory = "512M"
vcpus = 2
guest_agent = true
[firmware]
code = "/ovmf/code.fd"
vars = "/ovmf/vars.fd"
[[disks]]
path = "/srv/a & b.qcow2"
[[disks]]
image = "data.raw"
format = "raw"
read_only = true
cache = "writeback"
[[nics]]
network = "bridge"
mac = "52:54:00:00:00:01"
[[nics]]
network = "user"
"""


def spec(more: str = "") -> Spec:
    return parse_spec(TEXT + more, "spec", Path("/"))


def described(more: str = "", bridge: str | None = "br0") -> tuple[str, Description]:
    xml = described_domain(spec(more), PLATFORM, STATE, bridge)
    return xml, parse_domain(xml)


def test_it_has_what_the_spec_has() -> None:
    xml, found = described()
    assert (found.name, found.memory_bytes, found.vcpus) == ("web", 512 << 20, 2)
    assert (found.accel_word, found.machine, found.cpu) == ("tcg", "pc-q35-10.0", "qemu64")
    assert found.variables == Path("/ovmf/vars.fd")
    assert [(disk.target, disk.path, disk.format, disk.cache, disk.read_only)
            for disk in found.disks] == [
        ("vda", Path("/srv/a & b.qcow2"), "qcow2", "none", False),
        ("vdb", STATE / "images/data.raw", "raw", "writeback", True),
    ]  # fmt: skip
    bridged, user = found.interfaces
    assert bridged == DomainInterface("bridge", "br0", "52:54:00:00:00:01")
    assert user.kind == "user"
    features = parse_xml(xml, "it").findall("cpu/feature")
    assert [(one.get("policy"), one.get("name")) for one in features] == [
        ("require", "ssse3"),
        ("disable", "sse4a"),
    ]


def test_devices_are_where_the_command_line_puts_them() -> None:
    root = parse_xml(described()[0], "it")
    slots = [int(one.get("slot", ""), 16) for one in root.iterfind("devices/*/address")]
    files = VmDir(STATE / "vms/web").qemu("0123abcd")
    words = qemu_argv(spec(), PLATFORM, files, "qemu", incoming=False)
    assert slots == [3, 4, 5, 6, 7]
    for slot in slots:
        assert any(f'"addr":"{slot:#x}"' in word for word in words), slot


@pytest.mark.parametrize(
    ("more", "bridge", "why"),
    [
        ('[[devices]]\ndriver = "VGA"\n', "br0", "[[devices]] are QEMU's own words: VGA"),
        ("", None, "its host has none in the inventory"),
    ],
)
def test_what_the_xml_cannot_say_is_refused(more: str, bridge: str | None, why: str) -> None:
    with pytest.raises(RefusedError) as refused:
        described(more, bridge)
    assert why in refused.value.why


def test_an_isolated_nic_has_no_link() -> None:
    xml, _ = described('[[nics]]\nnetwork = "bridge"\nisolated = true\n')
    assert xml.count('<link state="down"') == 3


def test_an_image_of_the_hosts_own_folder_is_where_each_host_has_it() -> None:
    """An image of an imported domain, which libvirt's XML names by its whole path."""
    disks = spec().disks
    xml = (
        "<domain><devices><disk><source file='/srv/a &amp; b.qcow2'/></disk>"
        f"<disk><source file='{STATE}/images/data.raw'/></disk></devices></domain>"
    )
    text = with_holes(xml, disks, STATE)
    assert "data.raw" not in text
    adopted = Adopted((), (), (), domain=text)
    elsewhere = spec()._replace(adopted=adopted)
    directory = VmDir(Path("/opt/state/vms/web"))
    qemu = Qemu(directory.qemu("q1"), ProcessId(0, 0), PLATFORM)
    vm = Vm(elsewhere, LocalHost("b", Path("/opt/state"), "127.0.0.1"), directory, qemu)
    assert 'file="/opt/state/images/data.raw"' in domain_of(vm)
    assert 'file="/srv/a &amp; b.qcow2"' in domain_of(vm)
