"""Which disks can go along with a replica: every refusal has its reason and its remedy."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.checkpoint.disks.qcow2 import write_overlay
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.finding import Finding
from vmckpt.preflight.replication.disks import disk_checks
from vmckpt.qemu.block import DiskImage
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec


def checked(
    tmp_path: Path, disk: str, *, allocated_bytes: int = 4096, snapshots: tuple[str, ...] = ()
) -> list[Finding]:
    primary, standby = (LocalHost(name, tmp_path / name, "192.0.2.1") for name in ("a", "b"))
    for host in (primary, standby):
        (host.state_dir / "images").mkdir(parents=True, exist_ok=True)
    text = f'name = "web"\nmemory = "64M"\n[[disks]]\n{disk}\n'
    directory = vm_dir(primary.state_dir, "web")
    spec = parse_spec(text, "spec", tmp_path)
    qemu = Qemu(directory.qemu("01234567"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    images = {"disk0": DiskImage("disk0", 1 << 20, allocated_bytes, snapshots)}

    async def run() -> list[Finding]:
        vm = Vm(spec, primary, directory, qemu)
        return [found async for found in disk_checks(vm, standby, images)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("disk", "code", "words"),
    [
        ('path = "web.raw"\nformat = "raw"', "disk-shared", "shared with b"),
        ('path = "/dev/null"\nformat = "raw"', "disk-device", "device"),
        ('path = "/proc/web.raw"\nformat = "raw"', "disk-shared", "it is unknown"),
    ],
)
def test_disks_that_cannot_go_along_are_refused(
    tmp_path: Path, disk: str, code: str, words: str
) -> None:
    (found,) = checked(tmp_path, disk)
    assert (found.verdict, found.code) == ("refuse", code)
    assert words in found.reason
    assert found.remedy


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_an_image_of_the_hosts_own_can_if_there_is_room(tmp_path: Path, kind: str) -> None:
    disk = f'image = "web.img"\nformat = "{kind}"'
    (found,) = checked(tmp_path / "one", disk)
    assert (found.verdict, found.code) == ("ok", "disk-room")
    (found,) = checked(tmp_path / "two", disk, allocated_bytes=1 << 60)
    assert (found.verdict, found.code) == ("refuse", "disk-room")


def test_snapshots_would_be_lost(tmp_path: Path) -> None:
    (found,) = checked(tmp_path, 'image = "web.qcow2"', snapshots=("before",))
    assert (found.verdict, found.code) == ("refuse", "disk-snapshots")


def test_a_read_only_disk_is_not_copied(tmp_path: Path) -> None:
    assert checked(tmp_path, 'image = "cd.raw"\nformat = "raw"\nread_only = true') == []


def vm_there(tmp_path: Path, name: str, image: str) -> None:
    """A VM of the standby's host, which is off."""
    directory = vm_dir(tmp_path / "b", name)
    directory.path.mkdir(parents=True)
    disk = f'[[disks]]\nimage = "{image}"\nformat = "raw"\n'
    directory.spec.write_text(f'name = "{name}"\nmemory = "64M"\n{disk}')


def test_no_copy_is_written_over_another_vms_disk_whether_that_runs_or_not(tmp_path: Path) -> None:
    """The image was the VM's own before a failover, and marked as such; another VM has it since."""
    disk = 'image = "web.raw"\nformat = "raw"'
    image = tmp_path / "b" / "images" / "web.raw"
    image.parent.mkdir(parents=True)
    image.write_bytes(bytes(4096))
    vm_there(tmp_path, "web", "web.raw")  # what is left of it there itself is no other
    assert checked(tmp_path, disk) == []
    vm_there(tmp_path, "saved", "web.raw")
    (found,) = checked(tmp_path, disk)
    assert (found.verdict, found.code) == ("refuse", "disk-in-use")
    assert "VM saved" in found.reason
    # An image of that name elsewhere is another one.
    saved = vm_dir(tmp_path / "b", "saved").spec
    text = saved.read_text()
    saved.write_text(text.replace('image = "web.raw"', 'path = "/srv/saved/web.raw"'))
    assert checked(tmp_path, disk) == []
    vm_dir(tmp_path / "b", "saved").spec.write_text("name =")  # damaged: it may name any image
    (found,) = checked(tmp_path, disk)
    assert (found.verdict, found.code) == ("refuse", "disk-in-use")
    assert "unknown" in found.reason


def test_no_copy_is_written_over_an_image_that_others_are_based_on(tmp_path: Path) -> None:
    below = tmp_path / "b" / "images" / "web.raw"
    below.parent.mkdir(parents=True)
    below.write_bytes(bytes(1 << 16))
    write_overlay(below.with_name("fork.qcow2"), 1 << 16, below, "raw")
    (found,) = checked(tmp_path, 'image = "web.raw"\nformat = "raw"')
    assert (found.verdict, found.code) == ("refuse", "disk-in-use")
    assert "image fork.qcow2" in found.reason
