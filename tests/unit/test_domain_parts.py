"""What of a domain can be captured while it runs, and how its XML becomes another's."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from vmckpt.errors import RefusedError, UsageError
from vmckpt.preflight.domains.capture import described
from vmckpt.preflight.finding import Verdict
from vmckpt.vm.domains.definition.description import ImageFile
from vmckpt.vm.domains.definition.parts import DomainPart, parts_of
from vmckpt.vm.domains.definition.rewritten import DomainIdentity, as_copy, with_images

pytestmark = pytest.mark.unit
DOMAIN = """\
<domain type='kvm' id='3' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
<name>web</name><uuid>11111111-1111-1111-1111-111111111111</uuid>
<metadata><vmckpt:heartbeats xmlns:vmckpt='urn:vmckpt' id='4'/></metadata>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os>
<devices>
<disk type='file' device='disk'><driver name='qemu' type='qcow2' cache='none'/>
<source file='/i/web.qcow2' index='1'/><backingStore type='file'><source file='/i/base.qcow2'/>
</backingStore><target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>
<disk type='file' device='cdrom'><driver name='qemu' type='raw'/><source file='/i/cd.iso'/>
<target dev='sda' bus='sata'/><readonly/><alias name='sata0-0-0'/></disk>
<disk type='file' device='cdrom'><target dev='sdb'/><readonly/><alias name='sata0-0-1'/></disk>
<disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/data'/>
<target dev='vdb' bus='virtio'/><alias name='virtio-disk1'/></disk>
<interface type='bridge'><mac address='52:54:00:AA:00:01'/><source bridge='br0'/>
<target dev='vnet3'/><model type='virtio'/><driver name='vhost' queues='2'/>
<bandwidth><inbound average='1'/></bandwidth><alias name='net0'/></interface>
<serial type='pty'><source path='/dev/pts/4'/><target port='0'/><alias name='serial0'/></serial>
<channel type='unix'><source mode='bind' path='/run/libvirt/qemu/channel/3-web/org.qemu'/>
<target type='virtio' name='org.qemu.guest_agent.0'/><alias name='channel0'/></channel>
<graphics type='vnc' port='5907' autoport='no' listen='127.0.0.1' passwd='secret'/>
<video><model type='virtio'/><alias name='video0'/></video>
</devices><seclabel type='dynamic' model='apparmor'/></domain>"""


def changed(old: str, new: str) -> str:
    assert DOMAIN.count(old) == 1
    return DOMAIN.replace(old, new)


def test_the_parts_of_a_domain_are_found() -> None:
    found = parts_of(DOMAIN)
    assert found.disks == (
        DomainPart("vda", "virtio-disk0", Path("/i/web.qcow2"), "qcow2", False),
        DomainPart("sda", "sata0-0-0", Path("/i/cd.iso"), "raw", True),
        DomainPart("vdb", "virtio-disk1", Path("/dev/vg/data"), "raw", False),
    )
    assert found.macs == ("52:54:00:aa:00:01",)
    assert {"net0", "video0", "sata0-0-1"} < set(found.aliases)
    assert found.obstacles == ()
    assert [one.verdict for one in described("web", 512 << 20, found)] == [Verdict.OK]


def test_nodes_memory_modules_and_huge_pages_are_in_qemu_alone() -> None:
    numa = (
        "<memoryBacking><hugepages/></memoryBacking>"
        "<cpu><numa><cell id='0'/><cell id='1'/></numa></cpu><devices>"
    )
    xml = changed("<devices>", numa).replace("</devices>", "<memory model='dimm'/></devices>")
    assert parts_of(xml).obstacles == ()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("</devices>", "<tpm><backend type='passthrough'/></tpm></devices>", "TPM of type passthr"),
        (
            "</os>",
            "<nvram type='network'><source name='n'/></nvram></os>",
            "UEFI variables are not",
        ),
        ("<devices>", "<launchSecurity type='sev'/><devices>", "encrypted memory"),
        ("</devices>", "<hostdev mode='subsystem' type='pci'/></devices>", "passed through"),
        ("</devices>", "<filesystem type='mount'/></devices>", "file system"),
        (
            "</devices>",
            "<memory model='virtio-mem'/></devices>",
            "of model virtio-mem",
        ),
        ("</devices>", "<memory model='nvdimm'/></devices>", "of model nvdimm"),
        ("<interface type='bridge'>", "<interface type='vhostuser'>", "vhostuser"),
        ("<model type='virtio'/><alias name='video0'/>", "<model type='qxl'/>", "qxl"),
        (
            "<model type='virtio'/><alias name='video0'/>",
            "<model type='virtio'><acceleration accel3d='yes'/></model>",
            "accelerated",
        ),
        (
            "<target dev='vdb' bus='virtio'/>",
            "<target dev='vdb'/><shareable/>",
            "disk vdb is shared",
        ),
        (
            "<target dev='vdb' bus='virtio'/>",
            "<target dev='vdb'/><transient/>",
            "disk vdb is trans",
        ),
        (
            "<source dev='/dev/vg/data'/>",
            "<source dev='/dev/vg/data'><encryption format='luks'/></source>",
            "plain text",
        ),
        ("<source dev='/dev/vg/data'/>", "<source protocol='rbd' name='p/i'/>", "neither a file"),
        (
            "<disk type='block' device='disk'><driver name='qemu' type='raw'/>",
            "<disk type='block' device='disk'><driver name='qemu' type='vmdk'/>",
            "format vmdk",
        ),
        ("<disk type='block' device='disk'>", "<disk type='block' device='lun'>", "lun"),
    ],
)
def test_what_is_not_in_qemu_alone_is_named(old: str, new: str, why: str) -> None:
    (obstacle,) = parts_of(changed(old, new)).obstacles
    assert why in obstacle
    (finding,) = described("web", 512 << 20, parts_of(changed(old, new)))
    assert (finding.verdict, finding.reason) == (Verdict.REFUSE, obstacle)
    assert "--kind internal" in finding.remedy


@pytest.mark.parametrize(
    ("name", "memory"), [("Windows 10", 512 << 20), ("web", (512 << 20) + 4096)]
)
def test_a_name_or_size_that_no_checkpoint_records_is_refused(name: str, memory: int) -> None:
    found = list(described(name, memory, parts_of(DOMAIN)))
    assert [one.code for one in found if one.verdict == Verdict.REFUSE] == ["domain-name"]


def test_disks_get_other_images_and_nothing_else_changes() -> None:
    images = {
        "vda": ImageFile(Path("/new/a.qcow2"), "qcow2"),
        "vdb": ImageFile(Path("/new/b.raw"), "raw"),
    }
    root = ElementTree.fromstring(with_images(DOMAIN, images))
    found = {
        str(disk.find("target").get("dev")): disk  # type: ignore[union-attr]
        for disk in root.iterfind("devices/disk")
    }
    for name, image in images.items():
        (source,) = found[name].findall("source")
        assert (source.attrib, found[name].get("type")) == ({"file": str(image.path)}, "file")
        assert found[name].find("driver").get("type") == image.format  # type: ignore[union-attr]
    assert found["vda"].find("backingStore") is None
    assert found["vda"].find("driver").get("cache") == "none"  # type: ignore[union-attr]
    assert found["sda"].find("source").get("file") == "/i/cd.iso"  # type: ignore[union-attr]
    assert root.find("devices/graphics").get("passwd") == "secret"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "inside",
    [
        "<slices><slice type='storage' offset='65536' size='1048576'/></slices>",
        "<dataStore type='file'><format type='raw'/><source file='/i/web.raw'/></dataStore>",
    ],
)
def test_a_new_image_of_that_path_has_all_of_its_content(inside: str) -> None:
    """In place its guest read the restored image from the slice's offset on: other content."""
    source = "<source dev='/dev/vg/data'/>"
    text = changed(source, f"<source file='/i/b.raw'>{inside}</source>")
    made = with_images(text, {"vdb": ImageFile(Path("/i/b.raw"), "raw")})
    assert inside in text
    assert [one.tag for one in ElementTree.fromstring(made).iterfind(".//source/*")] == []
    assert "/i/b.raw" in made


def copied(
    *, isolated: bool, macs: tuple[str, ...] | None = ("52:54:00:bb:00:01",)
) -> ElementTree.Element:
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", macs, isolated)
    return ElementTree.fromstring(as_copy(DOMAIN, new))


def test_a_copy_has_its_own_name_and_none_of_the_originals_ends() -> None:
    root = copied(isolated=True)
    assert (root.findtext("name"), root.findtext("uuid")) == (
        "web-2", "22222222-2222-2222-2222-222222222222",
    )  # fmt: skip
    assert "id" not in root.attrib
    assert len(root.findall("metadata/*")) == 0
    assert root.find("seclabel") is None
    nic = root.find("devices/interface")
    assert nic is not None
    assert (nic.get("type"), {child.tag for child in nic}) == (
        "ethernet", {"mac", "model", "driver", "alias"},
    )  # fmt: skip
    assert nic.find("mac").get("address") == "52:54:00:bb:00:01"  # type: ignore[union-attr]
    assert nic.find("driver").attrib == {"queues": "2"}  # type: ignore[union-attr]
    assert root.find("devices/serial/source") is None
    assert root.find("devices/channel/source") is None
    graphics = root.find("devices/graphics")
    assert graphics is not None
    assert (graphics.get("port"), graphics.get("autoport")) == (None, "yes")
    assert graphics.get("passwd") == "secret"


def test_a_plugged_copy_keeps_its_bridge_and_on_request_its_addresses() -> None:
    nic = copied(isolated=False, macs=None).find("devices/interface")
    assert nic is not None
    assert nic.get("type") == "bridge"
    assert nic.find("source") is not None
    assert nic.find("target") is None
    assert nic.find("mac").get("address") == "52:54:00:AA:00:01"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "device",
    [
        "<serial type='file'><source path='/var/log/web.log'/></serial>",
        "<serial type='tcp'><source mode='bind' host='::' service='4555'/></serial>",
        "<channel type='unix'><source mode='bind' path='/srv/agent.sock'/></channel>",
    ],
)
def test_a_copy_that_would_share_the_originals_files_is_refused(device: str) -> None:
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    with pytest.raises(RefusedError, match="web-2") as caught:
        as_copy(changed("</devices>", f"{device}</devices>"), new)
    assert "the copy would use too" in caught.value.why


@pytest.mark.parametrize(
    "device",
    [
        "<redirdev bus='usb' type='tcp'><source mode='connect' host='::1' service='4'/></redirdev>",
        "<rng model='virtio'><backend model='egd' type='udp'>"
        "<source mode='connect' host='::1' service='41'/></backend></rng>",
        "<filesystem type='mount'><source dir='/srv'/><target dir='srv'/></filesystem>",
        "<hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/></source></hostdev>",
        "<shmem name='both'><model type='ivshmem-plain'/></shmem>",
        "<vsock model='virtio'><cid auto='no' address='3'/></vsock>",
        "<input type='evdev'><source dev='/dev/input/event1'/></input>",
    ],
)
def test_a_copy_has_nothing_else_of_its_originals_host(device: str) -> None:
    """An isolated one was connected; from its next start on one had the original's directory."""
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    with pytest.raises(RefusedError, match="web-2") as caught:
        as_copy(changed("</devices>", f"{device}</devices>"), new)
    assert "the copy would use too" in caught.value.why
    harmless = "<redirdev bus='usb' type='spicevmc'/><rng model='virtio'>"
    harmless += "<backend model='random'>/dev/urandom</backend></rng><input type='tablet'/>"
    as_copy(changed("</devices>", f"{harmless}</devices>"), new)


def with_arguments(*words: str) -> str:
    values = "".join(f"<qemu:arg value='{word}'/>" for word in words)
    return changed("</devices>", f"</devices><qemu:commandline>{values}</qemu:commandline>")


@pytest.mark.parametrize(
    "words",
    [
        ("-netdev", "user,id=n", "-device", "virtio-net-pci,netdev=n"),
        ("-drive", "file=/i/nvme.img,if=none,id=d", "-device", "nvme,drive=d,serial=1"),
        ("--nic", "user"),
        ("usb-mtp,rootdir=/srv", "-device"),
    ],
)
def test_what_qemus_own_arguments_name_is_shared_by_no_copy(words: tuple[str, ...]) -> None:
    """A guard's copy was to be isolated, and was on the network."""
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    with pytest.raises(RefusedError, match="web-2") as caught:
        as_copy(with_arguments(*words), new)
    assert words[0] in caught.value.why
    harmless = with_arguments("-cpu", "host,-svm", "-global", "ICH9-LPC.disable_s3=1")
    environment = "<qemu:env name='PULSE_SERVER' value='/run/pulse'/></qemu:commandline>"
    as_copy(harmless.replace("</qemu:commandline>", environment), new)


def test_a_copys_firmware_tables_have_its_own_uuid() -> None:
    """Libvirt refuses XML in which they differ, as OpenStack and oVirt have them."""
    sysinfo = (
        "<sysinfo type='smbios'><system><entry name='product'>x</entry>"
        "<entry name='uuid'>11111111-1111-1111-1111-111111111111</entry></system></sysinfo>"
    )
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    root = ElementTree.fromstring(as_copy(changed("<devices>", f"{sysinfo}<devices>"), new))
    entries = [entry.text for entry in root.iterfind("sysinfo/system/entry")]
    assert entries == ["x", new.uuid]


def test_a_copy_does_not_write_into_the_originals_log() -> None:
    """Libvirt empties such a file when the copy starts (append='off')."""
    log = "<log file='/var/log/web.log' append='off'/><target port='0'/>"
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    root = ElementTree.fromstring(as_copy(changed("<target port='0'/>", log), new))
    assert root.find("devices/serial/target") is not None
    assert root.find("devices/serial/log") is None


def test_a_copy_has_a_tpm_of_its_own() -> None:
    """It wrote to the state of the original's TPM, where the XML says where that is."""
    source = "<source type='dir' path='/srv/tpm'/>"
    tpm = f"<tpm><backend type='emulator' version='2.0'>{source}</backend></tpm>"
    new = DomainIdentity("web-2", "22222222-2222-2222-2222-222222222222", None, isolated=True)
    root = ElementTree.fromstring(as_copy(changed("<video>", f"{tpm}<video>"), new))
    assert root.find("devices/tpm/backend[@version='2.0']") is not None
    assert root.find("devices/tpm/backend/source") is None


def test_xml_of_something_else_is_refused() -> None:
    with pytest.raises(UsageError):
        parts_of("<domain")
