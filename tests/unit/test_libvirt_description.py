"""A domain's XML, and which of several domains is meant."""

from pathlib import Path

import pytest

from vmckpt.errors import UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.definition.description import Description, DomainInterface, parse_domain
from vmckpt.vm.domains.flags import DomainState, PausedReason
from vmckpt.vm.domains.inventory import Domain, choose
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.unit
XML = """\
<domain type='qemu'><name>web</name><uuid>u-1</uuid><memory unit='KiB'>262144</memory>
<vcpu placement='static'>2</vcpu>
<metadata><vmckpt:heartbeats xmlns:vmckpt='urn:vmckpt' id='4'/></metadata>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type><kernel>/k</kernel><loader>/l</loader></os>
<cpu mode='custom'><model>qemu64</model>
<numa><cell id='0'/><cell id='1'/></numa></cpu>
<devices><emulator>/usr/bin/qemu-system-x86_64</emulator>
<disk type='file'><driver type='qcow2' cache='none'/><source file='/d.qcow2'/>
<target dev='vda'/></disk>
<disk type='file' device='cdrom'><target dev='sda'/><readonly/></disk>
<disk type='block'><source dev='/dev/x'/><target dev='vdb'/><shareable/></disk>
<interface type='bridge'><source bridge='br0'/><mac address='52:54:00:AA:00:01'/></interface>
<interface type='user'/>
<hostdev type='pci'><alias name='hostdev0'/></hostdev>
<tpm model='tpm-crb'><backend type='passthrough'><device path='/dev/tpm0'/></backend></tpm>
</devices></domain>"""


def test_what_vmckpt_has_to_know_is_read() -> None:
    found = parse_domain(XML)
    assert (found.name, found.uuid, found.vcpus) == ("web", "u-1", 2)
    assert (found.memory_bytes, found.memory_back_ends) == (256 << 20, 2)
    assert (found.accel, found.accel_word, found.machine) == ("qemu", "tcg", "pc-q35-10.0")
    assert (found.cpu, found.heartbeat_id) == ("qemu64", 4)
    assert found.files == (Path("/k"), Path("/l"))
    assert found.interfaces == (
        DomainInterface("bridge", "br0", "52:54:00:aa:00:01"),
        DomainInterface("user", ""),
    )
    assert found.passed_through == ("pci device hostdev0",)
    image, cdrom, block = found.disks
    assert (image.target, image.path, image.format, image.cache) == (
        "vda", Path("/d.qcow2"), "qcow2", "none",
    )  # fmt: skip
    assert (cdrom.kind, cdrom.path, cdrom.read_only) == ("empty", None, True)
    assert (block.path, block.shareable, block.format) == (Path("/dev/x"), True, "raw")


CELLS = (
    """<cpu><numa><cell id='0' memory='98304'/><cell id='1' memory='96' unit='MiB'/></numa></cpu>"""
)
MODULE = (
    "<memory model='dimm'{}><target><size unit='MiB'>128</size><node>1</node></target>{}</memory>"
)


def of_memory(xml: str, devices: str = "") -> Description:
    return parse_domain(
        f"<domain><os><type>hvm</type></os><memory unit='MiB'>320</memory>{xml}"
        f"<devices>{devices}</devices></domain>"
    )


@pytest.mark.parametrize(
    ("xml", "devices", "blocks"),
    [
        ("", "", (320,)),
        (CELLS, "", (96, 96)),
        ("", MODULE.format("", ""), (192, 128)),
        (CELLS, 2 * MODULE.format("", ""), (96, 96, 128, 128)),
    ],
)
def test_each_node_and_each_module_is_a_block(
    xml: str, devices: str, blocks: tuple[int, ...]
) -> None:
    found = of_memory(xml, devices)
    assert found.ram_blocks == tuple(mib << 20 for mib in blocks)
    assert (found.private_memory, found.binds_memory) == (True, False)


@pytest.mark.parametrize(
    ("xml", "devices", "private", "bound"),
    [
        ("<memoryBacking><source type='memfd'/></memoryBacking>", "", False, False),
        (CELLS.replace("id='1'", "id='1' memAccess='shared'"), "", False, False),
        (CELLS.replace("id='1'", "id='1' memAccess='private'"), "", True, False),
        ("", MODULE.format(" access='shared'", ""), False, False),
        ("", MODULE.format("", "<source><pagesize>2048</pagesize></source>"), False, False),
        ("", MODULE.format("", "<source><nodemask>0</nodemask></source>"), False, True),
        ("<numatune><memory mode='strict' nodeset='0'/></numatune>", "", True, True),
    ],
)
def test_where_its_memory_is(xml: str, devices: str, private: bool, bound: bool) -> None:
    found = of_memory(xml, devices)
    assert (found.private_memory, found.binds_memory) == (private, bound)


@pytest.mark.parametrize(
    ("nvram", "variables"),
    [
        ("", None),
        ("<nvram template='/t.fd'/>", None),
        ("<nvram template='/t.fd'>/n/web.fd</nvram>", Path("/n/web.fd")),
        ("<nvram type='file'><source file='/n/web.fd'/></nvram>", Path("/n/web.fd")),
        ("<nvram type='network'><source protocol='nbd' name='n'/></nvram>", None),
    ],
)
def test_what_its_host_keeps_for_its_firmware_is_read(nvram: str, variables: Path | None) -> None:
    found = parse_domain(XML.replace("</os>", f"{nvram}</os>"))
    assert (found.variables, found.has_tpm) == (variables, False)
    emulated = "<tpm><backend type='emulator' version='2.0'/></tpm></devices>"
    assert parse_domain(XML.replace("</devices>", emulated)).has_tpm


@pytest.mark.parametrize("xml", ["", "<network/>", "<domain/>", "<domain><os/></domain>"])
def test_what_is_no_domain_is_an_error(xml: str) -> None:
    with pytest.raises(UsageError):
        parse_domain(xml)


def domain(host: str, state: DomainState, reason: int = 1, uuid: str = "u-1") -> Domain:
    seen = DomainInfo(uuid, "web", state, reason, persistent=True, xml=XML)
    return Domain(LocalHost(host, Path("/s"), "::1"), seen, parse_domain(XML))


def test_of_one_domain_on_two_hosts_the_running_one_is_meant() -> None:
    off, runs = domain("a", DomainState.SHUTOFF), domain("b", DomainState.RUNNING)
    arriving = domain("c", DomainState.PAUSED, PausedReason.MIGRATION)
    assert choose([off, runs]) is runs
    assert choose([arriving, runs, off]) is runs
    assert choose([off, arriving]) is arriving
    assert choose([]) is None
    there = domain("b", DomainState.SHUTOFF)
    assert choose([off, there], left={"a"}) is there  # it was on a, which has not forgotten it yet
    assert choose([off], left={"a"}) is off
    assert choose([arriving, there], left={"c"}) is there  # nor is one that was sent from c
    assert (off.state, runs.state, arriving.state) == ("stopped", "running", "migrating")


def test_two_domains_of_one_name_cannot_be_told_apart() -> None:
    with pytest.raises(UsageError) as caught:
        choose([domain("a", DomainState.RUNNING), domain("b", DomainState.RUNNING, uuid="u-2")])
    assert "u-2 on b" in caught.value.why
