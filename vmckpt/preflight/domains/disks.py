"""Which of a domain's disks libvirt has to copy, and which both hosts share."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from vmckpt.hosts.host import Host
from vmckpt.options.migration import Disks
from vmckpt.preflight.migration.disks import DiskObstacle, DiskPlan, Owned, plan_disks
from vmckpt.qemu.block import DiskImage
from vmckpt.vm.domains.definition.description import DomainDisk
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.spec.spec import Disk

# With other cache modes a host may keep reading its own cache (libvirt's rule).
COHERENT = frozenset({"none", "directsync"})
_ON_FILES = frozenset({"file", "block"})
_ON_NETWORK = frozenset({"network", "vhostuser"})
_IN_POOLS = "volume"


class DomainDisks(NamedTuple):
    """`plan` covers the disks that are files; `copied` names those to copy, as the domain does.

    `proved_shared`: there are shared files, each was verified, and libvirt need not check.
    """

    plan: DiskPlan
    copied: tuple[str, ...]
    proved_shared: bool


async def plan_domain_disks(
    domain: Domain, session: Libvirtd, destination: Host, how: Disks, elsewhere: Mapping[str, Path]
) -> DomainDisks:
    """Check every disk on both hosts, as for a VM that vmckpt runs.

    `elsewhere`: the paths of disks at the destination, by their names in the domain.
    """
    disks = [disk for disk in domain.description.disks if disk.kind != "empty"]
    local = [disk for disk in disks if disk.path is not None and disk.kind in _ON_FILES]
    owned = tuple(
        Disk(disk.path, disk.format, None, disk.read_only, disk.cache, disk.target)
        for disk in local
        if disk.path is not None
    )
    images = {}
    for disk in local:
        size = await session.disk_size(domain.uuid, disk.target)
        images[disk.target] = DiskImage(disk.target, size.virtual_bytes, size.allocated_bytes, ())
    nodes = tuple(disk.target for disk in local)
    ours = Owned(domain.host, domain.name, owned, nodes, elsewhere)
    plan = await plan_disks(ours, destination, how, images)
    copied = [local[copy.number] for copy in plan.copies]
    shared = [disk for disk in local if disk not in copied]
    wrong = (*strange(disks), *_incoherent(shared), *_uncopiable(copied))
    return DomainDisks(
        plan._replace(obstacles=plan.obstacles + wrong),
        tuple(disk.target for disk in copied),
        proved_shared=bool(shared) and may_vouch(disks),
    )


def may_vouch(disks: Iterable[DomainDisk]) -> bool:
    """Whether vmckpt's result may replace libvirt's own check of the storage. Pure.

    Not if vmckpt cannot tell: a pool's volume may be on the network, or a file of which another
    host has a different one. libvirt assumes that everything on the network is safe.
    """
    return all(disk.kind != _IN_POOLS for disk in disks)


def strange(disks: Iterable[DomainDisk]) -> Iterator[DiskObstacle]:
    """Disks that are not supported at the destination. Pure."""
    for disk in disks:
        if disk.kind == "nvme":
            reason = f"disk {disk.target} is an NVMe device of the host's own"
            yield DiskObstacle("disk-kind", reason, "detach it (virsh detach-disk)")
        elif disk.kind not in _ON_FILES | _ON_NETWORK | {_IN_POOLS}:
            reason = f"vmckpt does not know what becomes of disk {disk.target} ({disk.kind})"
            yield DiskObstacle("disk-kind", reason, "migrate it by virsh, or detach the disk")


def _incoherent(shared: list[DomainDisk]) -> Iterator[DiskObstacle]:
    for disk in shared:
        if not (disk.read_only or disk.shareable or disk.cache in COHERENT):
            reason = (
                f"disk {disk.target} is shared with cache='{disk.cache}': "
                "the destination could read what is outdated"
            )
            yield DiskObstacle("disk-cache", reason, "set cache='none' for it, and restart it")


def _uncopiable(copied: list[DomainDisk]) -> Iterator[DiskObstacle]:
    for disk in copied:
        if disk.read_only or disk.shareable:
            reason = f"libvirt copies no disk that is read-only or shareable: {disk.target}"
            yield DiskObstacle(
                "disk-read-only", reason, f"put {disk.path} on the destination beforehand"
            )
