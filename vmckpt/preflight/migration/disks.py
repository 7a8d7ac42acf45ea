"""Which disks of a VM have to be copied, and which are on storage that both hosts share."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import HostDownError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.options.migration import Disks
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.qemu.block import DiskImage
from vmckpt.sequence.steps import both
from vmckpt.units import format_size
from vmckpt.vm.disks.shared_storage import is_device, is_shared
from vmckpt.vm.paths import PROOF_SUFFIX
from vmckpt.vm.spec.spec import Disk

EXPLICIT = "say which it is: --disks shared, or --disks copy"
NODELESS = "if both hosts reach the same: --disks shared; else stop the VM, and copy it yourself"


class DiskObstacle(NamedTuple):
    """Why the disks cannot be migrated."""

    code: str
    reason: str
    remedy: str


class DiskCopy(NamedTuple):
    """A disk to copy: from a node of the source's QEMU to a new file at the destination (`node`).

    The source's file is removed after the migration, unless `keep`: others may read it too.
    `replaces`: the existing file is a leftover of this VM, and is removed first.
    """

    number: int
    format: str
    read_only: bool
    size_bytes: int
    allocated_bytes: int
    source: Path
    target: Path
    source_node: str
    node: str
    keep: bool = False
    replaces: bool = False


class DiskPlan(NamedTuple):
    """What happens to every disk. Nothing may be started while there is an obstacle.

    `shared` includes the backing files of shared disks.
    """

    shared: tuple[Path, ...]
    copies: tuple[DiskCopy, ...]
    obstacles: tuple[DiskObstacle, ...]


class DiskPaths(NamedTuple):
    """A disk's paths on both hosts. `shared` is None if that could not be determined: see `why`.

    `device`: the disk is a device on one of the hosts, and not declared shared. `destination_left`:
    the existing file is the VM's own, left by a replication.
    """

    number: int
    source: Path
    destination: Path
    shared: bool | None
    why: str = ""
    destination_taken: bool = False
    destination_left: bool = False
    destination_has_directory: bool = True
    keep: bool = False
    device: Path | None = None


class Owned(NamedTuple):
    """The disks of one VM on its host, and their nodes in `images`.

    `elsewhere`: other paths at the destination, by the disks' nodes.
    """

    host: Host
    vm_name: str
    disks: tuple[Disk, ...]
    nodes: tuple[str, ...]
    elsewhere: Mapping[str, Path] = {}


async def plan_disks(
    owned: Owned, destination: Host, how: Disks, images: Mapping[str, DiskImage]
) -> DiskPlan:
    """Check every disk on both hosts; a marker file, removed afterwards, shows what they share.

    `images` has the nodes of the running QEMU.
    """
    all_paths = await asyncio.gather(
        *(_paths(owned, destination, number, disk, how) for number, disk in enumerate(owned.disks))
    )
    plan = decide_disks(owned.disks, owned.nodes, all_paths, images)
    full = tuple(await _room(plan.copies, destination))
    return DiskPlan(plan.shared, plan.copies, plan.obstacles + full)


def decide_disks(
    disks: Iterable[Disk],
    nodes: Iterable[str],
    all_paths: Iterable[DiskPaths],
    images: Mapping[str, DiskImage],
) -> DiskPlan:
    """Decide what happens to every disk. Pure; `images` has the nodes of the running QEMU.

    `nodes` says which of them belong to the disks.
    """
    shared: list[Path] = []
    copies: list[DiskCopy] = []
    obstacles: list[DiskObstacle] = []
    for disk, node, paths in zip(disks, nodes, all_paths, strict=True):
        image = images.get(node)
        if paths.shared:
            # QEMU names a backing file by its path, or by JSON if it is not a file.
            backing = image.backing if image else ()
            shared += [paths.destination, *(Path(name) for name in backing if name.startswith("/"))]
        elif obstacle := _obstacle(paths, image):
            obstacles.append(obstacle)
        elif image is None and images:
            reason = f"its QEMU has no block node '{node}', which {paths.source} was known by"
            obstacles.append(DiskObstacle("disk-node", reason, NODELESS))
        elif image:
            copies.append(
                DiskCopy(
                    paths.number,
                    disk.format,
                    disk.read_only,
                    image.virtual_size_bytes,
                    image.allocated_bytes,
                    paths.source,
                    paths.destination,
                    node,
                    disk.node,
                    paths.keep,
                    paths.destination_left,
                )
            )
    return DiskPlan(tuple(shared), tuple(copies), tuple(obstacles))


def _obstacle(paths: DiskPaths, image: DiskImage | None) -> DiskObstacle | None:
    if paths.device is not None:
        reason = f"{paths.device} is a device, and only image files are copied"
        return DiskObstacle("disk-device", reason, "if both hosts reach the same: --disks shared")
    if paths.shared is None:
        reason = f"it is unknown whether {paths.source} is shared: {paths.why}"
        return DiskObstacle("disk-shared", reason, EXPLICIT)
    if paths.destination_taken and not paths.destination_left:
        return DiskObstacle(
            "disk-target",
            f"{paths.destination} exists on the destination already, and is never written over",
            "see what uses it (vmckpt host images), remove or rename it there; for shared storage: "
            "--disks shared",
        )
    if not paths.destination_has_directory:
        reason = f"the destination has no directory {paths.destination.parent}"
        return DiskObstacle("disk-target", reason, "create it there")
    if image and image.snapshots:
        return DiskObstacle(
            "disk-snapshots",
            f"{paths.source} holds snapshots, which a copy loses: {', '.join(image.snapshots)}",
            "remove them (vmckpt checkpoint rm NAME --kind internal --vm VM), or put the disk on "
            "shared storage",
        )
    return None


async def _paths(owned: Owned, destination: Host, number: int, disk: Disk, how: Disks) -> DiskPaths:
    source = owned.host
    here = disk.on(source.state_dir)
    there = owned.elsewhere.get(disk.node) or disk.on(destination.state_dir)
    if how is Disks.SHARED:
        return DiskPaths(number, here, there, shared=True)
    devices, (taken, has_directory) = await both(
        both(is_device(source, here), is_device(destination, there)),
        both(destination.exists(there), destination.exists(there.parent)),
    )
    from vmckpt.vm.disks.superseded import is_superseded

    if any(devices):
        return DiskPaths(number, here, there, None, device=here if devices[0] else there)
    shared, why = await _find_shared(how, source, destination, (here, there))
    if not shared and taken and disk.read_only:
        # An ISO that both hosts have need not be copied; but a running copy may still be undone.
        names = await destination.list_dir(there.parent)
        being_copied = any(name.startswith(f"{there.name}{PROOF_SUFFIX}") for name in names)
        ours = await source.fingerprint(here)
        shared = not being_copied and ours == await destination.fingerprint(there)
    left = shared is False and taken and await is_superseded(destination, owned.vm_name, there)
    return DiskPaths(
        number,
        here,
        there,
        shared,
        why,
        destination_taken=taken,
        destination_left=left,
        # An images directory is created when needed.
        destination_has_directory=not disk.path.is_absolute() or has_directory,
        keep=(disk.read_only and disk.path.is_absolute())
        or (shared is False and await _is_others(owned, here, destination)),
    )


async def _find_shared(
    how: Disks, source: Host, destination: Host, paths: tuple[Path, Path]
) -> tuple[bool | None, str]:
    if how is not Disks.AUTO:
        return False, ""
    shared, why = await is_shared(source, destination, *paths)
    if shared:
        here, there = await both(source.resolve(paths[0]), destination.resolve(paths[1]))
        # In a shared directory, a different name is a different image.
        shared = here.name == there.name
    return shared, why


async def _is_others(owned: Owned, path: Path, destination: Host) -> bool:
    """Whether another VM uses this image, or an image based on it: on its host, or on another one
    that reaches the same file. One that does not answer is not waited for.
    """
    from vmckpt.vm.disks.images import used_besides, used_elsewhere

    own = [f"{what} {owned.vm_name}" for what in ("VM", "domain", "replication of")]
    try:
        if await used_besides(owned.host, path, own):
            return True
    except (HostDownError, RefusedError):
        return True  # libvirtd does not answer, or a VM's files are damaged: unknown
    return bool(await used_elsewhere(owned.host, path, own, but=destination.name))


async def _room(copies: Iterable[DiskCopy], destination: Host) -> list[DiskObstacle]:
    needed: dict[Path, int] = {}
    for copy in copies:
        directory = copy.target.parent
        while not await destination.exists(directory):
            directory = directory.parent
        needed[directory] = needed.get(directory, 0) + copy.allocated_bytes
    found = []
    for directory, need in needed.items():
        free = await destination.free_bytes(directory)
        if free < need:
            text = f"the copies need {format_size(need)} in {directory}, {format_size(free)} free"
            remedy = "free space on the destination, or choose another host"
            found.append(DiskObstacle("disk-room", text, remedy))
    return found


def disk_checks(plan: DiskPlan) -> Iterator[Finding]:
    """Report what happens to its disks."""
    for obstacle in plan.obstacles:
        yield Finding(obstacle.code, REFUSE, obstacle.reason, obstacle.remedy)
    if plan.copies and not plan.obstacles:
        size = format_size(sum(copy.allocated_bytes for copy in plan.copies))
        text = f"{len(plan.copies)} to copy ({size}), {len(plan.shared)} shared"
        yield Finding("disks", OK, text)
    elif plan.shared and not plan.obstacles:
        yield Finding("disks", OK, f"{len(plan.shared)} shared")
