"""The guest of a replication on its own host, whichever program has its QEMU: vmckpt, or libvirt.

A domain's record is a VM's, under another name (`VmDir.domain`). While it is replicated, libvirt
has no definition of it (it is transient), so that nothing but its replication starts it again on
this host: not libvirtd with its host, and no user. `give_back` returns the definition, once
(`VmDir.undefined`): what libvirt has of the domain afterwards is its user's.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from vmckpt.deadlines import retry
from vmckpt.epoch.disks import remove_leftovers
from vmckpt.epoch.guarding import guard_command
from vmckpt.errors import HostDownError, OutcomeUnknownError, RefusedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.domains.facts import ReplicatedDomain
from vmckpt.replicate.operator.sides import last_status
from vmckpt.replicate.request import REQUEST, ServiceFiles
from vmckpt.replicate.status import PROMOTED
from vmckpt.sequence.steps import finish
from vmckpt.state.documents import load_from
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.paths import IN_MEMORY, vm_dir

if TYPE_CHECKING:
    from vmckpt.qemu.relayed import RelayedMonitor

# How long a libvirtd that was restarted is waited for.
_ANSWER_S, _AGAIN_S = 60.0, 0.25


@asynccontextmanager
async def operator_monitor(vm: Vm) -> AsyncIterator[Monitor]:
    """The monitor for the operation that holds the VM's lock, for the block.

    A domain's is libvirt's, on its own host only. Raises HostDownError, RefusedError.
    """
    if not vm.qemu.domain:
        async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
            yield monitor
        return
    from vmckpt.vm.domains.monitor import domain_monitor
    from vmckpt.vm.domains.running import domain_dir

    directory = domain_dir(vm.host, vm.qemu.domain)
    await vm.host.make_dir(directory.path)
    label = f"{vm.name} on {vm.host.name}"
    async with domain_monitor(vm.host, vm.qemu.domain, label, directory.saving) as relayed:
        try:
            yield relayed
        finally:
            with suppress(VmckptError):  # its QEMU has ended, or libvirtd
                await finish(_cleaned(relayed))
            if not await vm.is_alive():
                await vm.host.remove(directory.saving)


async def _cleaned(monitor: "RelayedMonitor") -> None:
    await remove_leftovers(monitor)
    await monitor.forget_fds()


async def guard_of(vm: Vm) -> list[str]:
    """The command line of its guard; no other process has it."""
    if not vm.qemu.domain:
        return guard_command(vm.qemu)
    from vmckpt.vm.domains.guard import guard_words
    from vmckpt.vm.domains.running import domain_dir

    mark = domain_dir(vm.host, vm.qemu.domain).saving
    return [*await vm.host.own_command(), *guard_words(vm, vm.qemu.domain, mark)]


async def record_home(vm: Vm, domain: ReplicatedDomain | None) -> None:
    """Record that the domain is replicated from here. A VM of vmckpt's own is recorded already.

    Raises StorageError.
    """
    if domain is None:
        return
    await vm.host.make_dir(vm.qemu.files.path)
    await vm.host.write_text(vm.directory.spec, vm.spec.text)
    await vm.host.write_text(vm.directory.identity, f"{domain.uuid}\n")
    await vm.host.write_text(vm.directory.undefined, "")
    await vm.host.write_text(vm.directory.domain, vm.qemu.to_json())


async def take_charge(vm: Vm, domain: ReplicatedDomain | None) -> None:
    """From here on only its replication starts the guest on this host: libvirt forgets the
    domain's definition. The service's files have it.

    Raises RefusedError: it is another one than the service's files have; HostDownError,
    OutcomeUnknownError, LibvirtRefusedError.
    """
    from vmckpt.vm.domains.sessions import libvirtd

    if domain is None:
        return
    async with libvirtd(vm.host) as libvirt:
        seen = await libvirt.find(domain.uuid)
        if seen is None or not seen.persistent:
            return
        if await libvirt.definition(domain.uuid) != domain.definition:
            raise RefusedError(
                f"the definition of '{vm.name}' was changed",
                why="it was edited while the protection began",
                remedy="start again: vmckpt replicate start",
            )
        await libvirt.undefine(domain.uuid)


async def give_back(host: Host, name: str, domain: ReplicatedDomain | None) -> None:
    """The domain is no longer replicated, and is this host's: libvirt defines it again, running or
    not. Does nothing for a VM of vmckpt's own.

    What is recorded of it goes, unless it says which older home of it is stale, or another host may
    have it. Raises HostDownError, OutcomeUnknownError, LibvirtRefusedError, StorageError.
    """
    if domain is None:
        return
    await _defined(host, name, domain, domain.definition)
    home = await read_home(host, name)
    is_claimed = await host.exists(vm_dir(host.state_dir, name).claim)
    if home is not None and home.qemu.replaces is None and not is_claimed:
        await forget(host, name)


async def return_to_libvirt(host: Host, name: str, hosts: Iterable[Host]) -> None:
    """A replication is over, and a domain is at home on this host, by its record: libvirt has it
    from here on, with its definition. Does nothing for other VMs.

    The record goes, too, once no older home of it is left on the other `hosts`. Raises as
    `give_back`.
    """
    home = await read_home(host, name)
    if home is None or not home.qemu.domain:
        return
    request = await load_from(host, ServiceFiles.of(host, name).request, REQUEST)
    if request is not None and (domain := request.domain) is not None:
        if request.primary.name == host.name:
            await give_back(host, name, domain)
        else:
            await concluded(home, domain)
    old = home.qemu.replaces
    replaced = [one for one in hosts if old is not None and one.name == old.host]
    with suppress(HostDownError):
        if old is None or (replaced and await read_home(replaced[0], name) is None):
            await forget(host, name)


async def return_what_ended(host: Host, name: str) -> None:
    """Do what the service of a replication that has ended on this host could not do, as libvirtd
    was down: return the domain's definition. The service's files, which have it, may go then.

    Does nothing while its service runs, or was killed: another host may have the guest. Raises as
    `give_back`.
    """
    if not await host.exists(vm_dir(host.state_dir, name).undefined):
        return
    files = ServiceFiles.of(host, name)
    home, request = await read_home(host, name), await load_from(host, files.request, REQUEST)
    status = await last_status(host, files)
    if home is None or request is None or status is None or status.run != request.run:
        return
    if status.is_primary and status.is_settled:
        await give_back(host, name, request.domain)
    elif status.state == PROMOTED:
        await concluded(home, request.domain)


async def concluded(vm: Vm, domain: ReplicatedDomain | None) -> None:
    """The standby's guest runs on its host for good: libvirt keeps the domain.

    Raises as `give_back`.
    """
    if domain is None:
        return
    from vmckpt.replicate.domains.described import standalone

    definition = standalone(domain.definition) if domain.definition else ""
    await _defined(vm.host, vm.name, domain, definition)
    # The memory stays as long as the QEMU that has it.
    await vm.host.remove(vm.qemu.files.memory(vm.spec.ram_dir))


async def _defined(host: Host, name: str, domain: ReplicatedDomain, definition: str) -> None:
    """Have libvirt define it, unless that was done before; also if libvirtd has to start again
    first.
    """
    mark = vm_dir(host.state_dir, name).undefined
    if not await host.exists(mark):
        return
    await retry(
        lambda: _define(host, domain, definition),
        (HostDownError, OutcomeUnknownError),
        every_s=_AGAIN_S,
        within_s=_ANSWER_S,
    )
    await host.remove(mark)


async def _define(host: Host, domain: ReplicatedDomain, definition: str) -> None:
    """Unless libvirt has a definition of it, or it never had one."""
    from vmckpt.vm.domains.sessions import libvirtd

    if not definition:
        return
    async with libvirtd(host) as libvirt:
        seen = await libvirt.find(domain.uuid)
        if seen is None or not seen.persistent:
            await libvirt.define(definition)
        if domain.starts_with_host:
            await libvirt.start_with_host(domain.uuid)


async def forget(host: Host, name: str) -> None:
    """Remove what is recorded of a domain, but for what its next protection has to know. Does
    nothing for other VMs.
    """
    directory = vm_dir(host.state_dir, name)
    home = await read_home(host, name)
    if home is None or not home.qemu.domain:
        return
    await host.remove(directory.domain)
    await host.remove(home.qemu.files.memory(IN_MEMORY))
    await host.remove(home.qemu.files.path)
    kept = (directory.gone_replica, directory.listed_replica)
    if not [path for path in kept if await host.exists(path)]:
        await host.remove(directory.path)
