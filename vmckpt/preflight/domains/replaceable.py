"""Whether a checkpoint can take a domain's place, with nothing lost."""

from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.preflight.checkpoint import require_replaceable as require_replaceable_disks
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd


class KeptByLibvirt(NamedTuple):
    """What libvirt has of a domain that would be lost, and how to be rid of it."""

    why: str
    remedy: str


async def loss_of(uuid: str, session: Libvirtd) -> KeptByLibvirt | None:
    """What libvirt has of the domain that would be lost with its present guest and images."""
    if await session.snapshots(uuid):
        return KeptByLibvirt(
            "libvirt has snapshots of it, which would be lost with its images",
            "remove them: vmckpt checkpoint rm NAME --kind internal --vm VM",
        )
    if await session.has_saved_memory(uuid):
        return KeptByLibvirt(
            "libvirt has saved memory of it, from which it would start the next time",
            "start it, or: virsh managedsave-remove",
        )
    return None


async def require_replaceable(domain: Domain, what: str) -> None:
    """Raises RefusedError with `what` if a restore must not take the domain's place."""
    disks = domain.description.disks
    written = [(disk.path, disk.format) for disk in disks if disk.path and not disk.read_only]
    await require_replaceable_disks(domain.host, domain.name, written, what)
    async with libvirtd(domain.host) as session:
        if (loss := await loss_of(domain.uuid, session)) is not None:
            raise RefusedError(what, why=loss.why, remedy=loss.remedy)
