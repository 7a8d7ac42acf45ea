"""What libvirt would start for a stopped domain becomes a spec, or is refused by name."""

import json
import shlex
from pathlib import Path

import pytest

from vmckpt.errors import RefusedError, UsageError
from vmckpt.vm.adopted.rewrite import rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.imported.native import native_argv, native_machine
from vmckpt.vm.spec.spec import Spec, parse_spec

pytestmark = pytest.mark.unit

IMAGES = Path("/var/lib/vmckpt/images")
MEMORY = {"qom-type": "memory-backend-ram", "id": "pc.ram", "size": 268435456}
SECRET = {"qom-type": "secret", "id": "masterKey0", "format": "raw", "file": "/k.aes"}
STORAGE = {
    "driver": "file",
    "filename": "/srv/web, one.qcow2",
    "node-name": "libvirt-1-storage",
    "auto-read-only": True,
    "discard": "unmap",
}
FORMAT = {
    "node-name": "libvirt-1-format",
    "read-only": False,
    "driver": "qcow2",
    "file": "libvirt-1-storage",
}
DISK = {
    "driver": "virtio-blk-pci",
    "bus": "pci.3",
    "addr": "0x0",
    "drive": "libvirt-1-format",
    "id": "virtio-disk0",
    "bootindex": 1,
}
WEB = [
    "/usr/bin/qemu-system-x86_64", "-name", "guest=web,debug-threads=on", "-S",
    "-object", json.dumps(SECRET),
    "-machine", "pc-q35-10.0,usb=off,dump-guest-core=off,memory-backend=pc.ram,acpi=on",
    "-accel", "kvm", "-cpu", "host,migratable=on", "-m", "size=262144k",
    "-object", json.dumps(MEMORY), "-overcommit", "mem-lock=off",
    "-smp", "2,sockets=2,cores=1,threads=1", "-uuid", "c0ffee00-0000-4000-8000-000000000001",
    "-no-user-config", "-nodefaults",
    "-chardev", "socket,id=charmonitor,fd=22,server=on,wait=off",
    "-mon", "chardev=charmonitor,id=monitor,mode=control", "-rtc", "base=utc", "-no-shutdown",
    "-boot", "strict=on",
    "-device", json.dumps({"driver": "pcie-root-port", "id": "pci.3", "bus": "pcie.0",
                           "addr": "0x2.0x2"}),
    "-device", json.dumps({"driver": "qemu-xhci", "id": "usb", "bus": "pci.3", "addr": "0x1"}),
    "-blockdev", json.dumps(STORAGE), "-blockdev", json.dumps(FORMAT),
    "-device", json.dumps(DISK),
    "-netdev", json.dumps({"type": "tap", "id": "hostnet0"}),
    "-device", json.dumps({"driver": "virtio-net-pci", "netdev": "hostnet0", "id": "net0",
                           "mac": "52:54:00:11:22:33", "bus": "pci.3", "addr": "0x2"}),
    "-chardev", "pty,id=charserial0",
    "-device", json.dumps({"driver": "isa-serial", "chardev": "charserial0", "id": "serial0"}),
    "-device", json.dumps({"driver": "usb-tablet", "id": "input0", "bus": "usb.0"}),
    "-audiodev", json.dumps({"id": "audio1", "driver": "spice"}),
    "-spice", "port=5901,addr=127.0.0.1,disable-ticketing=on",
    "-device", json.dumps({"driver": "virtio-vga", "id": "video0", "max_outputs": 1}),
    "-chardev", "spicevmc,id=charredir0,name=usbredir",
    "-device", json.dumps({"driver": "usb-redir", "chardev": "charredir0", "id": "redir0"}),
    "-sandbox", "on,obsolete=deny", "-msg", "timestamp=on",
]  # fmt: skip


def native(*more: str, without: str = "") -> Spec:
    argv = [word for word in WEB if word != without] + list(more)
    machine = native_machine("web", argv, IMAGES)
    text = spec_text("web", machine.facts, rewrite("web", machine.facts))
    return parse_spec(text, "spec", Path("/"))


def test_the_command_line_follows_the_environment() -> None:
    text = "LC_ALL=C \\\nPATH=/bin \\\n" + " \\\n".join(shlex.quote(word) for word in WEB)
    assert native_argv(text) == tuple(WEB)


@pytest.mark.parametrize("text", ["", "LC_ALL=C", "/bin/qemu 'unfinished"])
def test_what_is_no_command_line_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        native_argv(text)


def test_the_guest_sees_the_same_machine() -> None:
    spec = native()
    assert (spec.memory_bytes, spec.vcpus, spec.machine) == (256 << 20, 2, "pc-q35-10.0")
    assert (spec.accel, spec.cpu) == ("kvm", "host,migratable=on")
    [disk] = spec.disks
    assert (disk.path, disk.format, disk.node) == (
        Path("/srv/web, one.qcow2"),
        "qcow2",
        "libvirt-1-format",
    )
    assert [nic.network for nic in spec.nics] == ["bridge"]
    words = spec.adopted.arguments if spec.adopted else ()
    for device in ("pcie-root-port", "virtio-vga", "usb-tablet", "52:54:00:11:22:33"):
        assert any(device in word for word in words), device
    assert "c0ffee00-0000-4000-8000-000000000001" in words


def test_its_memory_is_one_file_of_vmckpts() -> None:
    words = native().adopted.arguments  # type: ignore[union-attr]
    [memory] = [word for word in words if "memory-backend" in word and word.startswith("{")]
    assert json.loads(memory) == {
        "qom-type": "memory-backend-file",
        "id": "pc.ram",
        "size": 256 << 20,
        "mem-path": "<vmckpt:ram>",
        "share": True,
    }


@pytest.mark.parametrize("gone", ["masterKey0", "charmonitor", "redir", "-no-shutdown", "-spice"])
def test_what_belongs_to_libvirt_or_a_screen_is_left_out(gone: str) -> None:
    words = native().adopted.arguments  # type: ignore[union-attr]
    assert not [word for word in words if gone in word]


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("-numa", "node,nodeid=0,memdev=ram-node0"), "NUMA nodes"),
        (("-object", json.dumps(MEMORY | {"id": "memdimm0"})), "'memdimm0' is memory besides"),
        (("-object", json.dumps(SECRET | {"id": "disk-key"})), "'disk-key' is a secret"),
        (("-device", json.dumps({"driver": "qxl-vga", "id": "video1"})), "'qxl-vga' needs SPICE"),
    ],
)
def test_what_a_vm_cannot_have_is_refused_by_name(more: tuple[str, ...], why: str) -> None:
    with pytest.raises(RefusedError) as refused:
        native(*more)
    assert why in refused.value.why


@pytest.mark.parametrize(
    "more",
    [
        ("-device", json.dumps({"driver": "vfio-pci", "host": "0000:01:00.0"})),
        ("-tpmdev", "emulator,id=tpm0,chardev=chrtpm"),
        ("-blockdev", json.dumps({"driver": "nbd", "node-name": "n"}),
         "-device", json.dumps({"driver": "virtio-blk-pci", "drive": "n", "id": "d"})),
    ],
)  # fmt: skip
def test_what_adoption_refuses_is_refused_here_too(more: tuple[str, ...]) -> None:
    with pytest.raises(RefusedError):
        native(*more)


@pytest.mark.parametrize("without", ["size=262144k", "2,sockets=2,cores=1,threads=1"])
def test_a_line_that_is_not_understood_is_not_guessed_at(without: str) -> None:
    with pytest.raises((UsageError, RefusedError)):
        native(without=without)
