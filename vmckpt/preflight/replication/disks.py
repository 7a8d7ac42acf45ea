"""Whether a VM's disks can be replicated; reasons against it, with fixes."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from vmckpt.errors import HostDownError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.options.replication import COPY, SHARED
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.qemu.block import DiskImage
from vmckpt.qemu.disks.qcow2 import tables_bytes
from vmckpt.units import format_size
from vmckpt.vm.disks.images import disk_of_others, standby_users
from vmckpt.vm.disks.shared_storage import is_device, is_shared
from vmckpt.vm.inventory import Vm
from vmckpt.vm.spec.spec import Disk

OWN_STORAGE = 'put it on storage of each host\'s own, e.g. as image = "NAME" in the spec'


async def disk_checks(
    vm: Vm, standby: Host, images: Mapping[str, DiskImage], how: str = COPY
) -> AsyncIterator[Finding]:
    """What happens to every disk that the VM can write. Raises HostDownError."""
    needed: dict[Path, int] = {}
    for disk, node in zip(vm.spec.disks, vm.nodes, strict=True):
        if disk.read_only:
            continue
        refused = await _refused(disk, images[node], vm, standby, how)
        if refused is not None:
            yield refused
            continue
        if how == SHARED:
            yield Finding("disk-shared", OK, f"{disk.on(vm.host.state_dir)} is there on both")
            continue
        there = disk.on(standby.state_dir)
        if await standby.exists(there):
            if (in_use := await _in_use(vm.name, standby, there)) is not None:
                yield in_use
        else:
            directory = there.parent
            while not await standby.exists(directory):
                directory = directory.parent
            needed[directory] = needed.get(directory, 0) + _needed_bytes(disk, images[node])
    for directory, need_bytes in needed.items():
        free_bytes = await standby.free_bytes(directory)
        text = f"{format_size(need_bytes)} needed in {directory}, {format_size(free_bytes)} free"
        if free_bytes < need_bytes:
            yield Finding("disk-room", REFUSE, text, "free space there, or choose another host")
        else:
            yield Finding("disk-room", OK, text)


async def _in_use(name: str, standby: Host, there: Path) -> Finding | None:
    """Why the standby must not write its copy over the file that is there: whatever its mark, a VM
    may have it as a disk by now, or an image may be based on it.
    """
    try:
        users = await disk_of_others(standby, there, standby_users(name))
    except (HostDownError, RefusedError) as exc:
        reason = f"it is unknown what uses {there} on {standby.name}: {exc.what}: {exc.why}"
        return Finding("disk-in-use", REFUSE, reason, exc.remedy)
    if not users:
        return None
    reason = f"{there} on {standby.name}, where the copy would be, is a disk of {', '.join(users)}"
    remedy = "give one of the two disks another name, or choose another host"
    return Finding("disk-in-use", REFUSE, reason, remedy)


def _needed_bytes(disk: Disk, image: DiskImage) -> int:
    tables = 0 if disk.format == "raw" else tables_bytes(image.virtual_size_bytes)
    return image.allocated_bytes + tables


async def _refused(disk: Disk, image: DiskImage, vm: Vm, standby: Host, how: str) -> Finding | None:
    here, there = disk.on(vm.host.state_dir), disk.on(standby.state_dir)
    if image.snapshots:
        reason = f"its disk {here} holds snapshots: they would not be on the standby"
        return Finding(
            "disk-snapshots",
            REFUSE,
            reason,
            "remove them: vmckpt checkpoint rm NAME --kind internal --vm VM",
        )
    if await is_device(vm.host, here):
        reason = f"its disk {here} is a device, whose copies cannot be identified"
        return Finding("disk-device", REFUSE, reason, "use an image file")
    shared, why = await is_shared(vm.host, standby, here, there)
    if shared is None:
        reason = f"it is unknown whether {here} is shared with {standby.name}: {why}"
        return Finding("disk-shared", REFUSE, reason, OWN_STORAGE)
    if how == SHARED:
        return await _not_the_same(disk, vm, standby, is_shared_=shared)
    if shared:
        reason = f"its disk {here} is shared with {standby.name}: it cannot be copied there"
        return Finding("disk-shared", REFUSE, reason, "say --disks shared")
    if disk.path.is_absolute() and not await standby.exists(there.parent):
        reason = f"{standby.name} has no directory {there.parent}"
        return Finding("disk-directory", REFUSE, reason, "create it there")
    return None


async def _not_the_same(disk: Disk, vm: Vm, standby: Host, *, is_shared_: bool) -> Finding | None:
    """Why the standby could not write to the same file as the VM."""
    here, there = disk.on(vm.host.state_dir), disk.on(standby.state_dir)
    if not is_shared_:
        reason = f"its disk {here} is not shared with {standby.name}: what is written is not there"
        return Finding("disk-shared", REFUSE, reason, "leave out --disks shared: it is copied then")
    if (await vm.host.resolve(here)).name != (await standby.resolve(there)).name:
        reason = f"its disk {here} is another file on {standby.name}"
        return Finding("disk-shared", REFUSE, reason, "give both hosts the same links")
    if disk.format != "raw":
        reason = f"its disk {here} is {disk.format}: of shared ones only raw images are written"
        return Finding("disk-format", REFUSE, reason, "convert it: qemu-img convert -O raw")
    if not await standby.usable(there):
        reason = f"{standby.name} may not write to {there}"
        return Finding("disk-shared", REFUSE, reason, "give vmckpt's user the right to, there")
    return None
