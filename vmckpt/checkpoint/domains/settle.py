"""Removes what a checkpoint has left in a domain's QEMU, and resumes its guest."""

from vmckpt.epoch.disks import forget_bitmaps, remove_leftovers
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.qemu import commands
from vmckpt.qemu.relayed import RelayedMonitor
from vmckpt.vm.domains.inventory import Domain, as_domain, held_domain
from vmckpt.vm.domains.monitor import domain_monitor
from vmckpt.vm.domains.running import domain_dir
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.paths import QEMU_PREFIX

# How long to wait for a restarted libvirtd, to finish or undo.
SETTLE_S, AGAIN_S = 60.0, 0.25


async def settle_held(host: Host, uuid: str) -> None:
    """As `settle`, for a process that does not hold the domain's lock.

    Raises BusyError, HostDownError, RefusedError.
    """
    domain = await find_there(host, uuid)
    if domain is None:
        await _forget(host, uuid)
        return
    async with held_domain(domain, "checkpoint create"):
        await settle(host, uuid)


async def find_there(host: Host, uuid: str) -> Domain | None:
    """The domain as libvirt on this machine describes it."""
    async with libvirtd(host) as session:
        seen = await session.find(uuid)
    return None if seen is None else as_domain(host, seen)


async def settle(host: Host, uuid: str) -> None:
    """Remove everything that checkpoints left in its QEMU; a guest that one paused is resumed.

    The caller holds the domain's lock. Does nothing if nothing is left. Raises HostDownError,
    OutcomeUnknownError: libvirtd does not answer, and the next call continues.
    """
    directory = domain_dir(host, uuid)
    is_paused = await host.exists(directory.saving)
    if not is_paused and not await _leftovers(host, uuid):
        return
    domain = await find_there(host, uuid)
    if domain is not None and domain.is_active:
        label = f"{domain.name} on {host.name}"
        async with domain_monitor(host, uuid, label, directory.saving) as monitor:
            if is_paused:
                await commands.cont(monitor)
            await clean(monitor)
    await _forget(host, uuid)


async def clean(monitor: RelayedMonitor) -> None:
    """Remove nodes, bitmaps and descriptors of checkpoints from a QEMU."""
    await remove_leftovers(monitor)
    await forget_bitmaps(monitor)
    await monitor.forget_fds()


async def _leftovers(host: Host, uuid: str) -> list[str]:
    names = await host.list_dir(domain_dir(host, uuid).path)
    return [name for name in names if name.startswith(QEMU_PREFIX)]


async def _forget(host: Host, uuid: str) -> None:
    """Remove the files that show that something is left."""
    directory = domain_dir(host, uuid)
    for name in await _leftovers(host, uuid):
        await host.remove(directory.path / name)
    await host.remove(directory.saving)


def require_running(domain: Domain) -> None:
    """Raises RefusedError unless its guest runs."""
    if domain.state != "running":
        raise RefusedError(
            f"'{domain.name}' is {domain.state}",
            why="a checkpoint is taken of a guest that runs",
            remedy="let it run: vmckpt vm start, or vmckpt vm resume",
        )
