"""Finding a VM by its name, or all VMs, after ending operations that were cut off.

If an operation's process was killed, the operation is ended before anything else is done with its
VM; `tell` receives a sentence about it.
"""

from typing import TYPE_CHECKING

from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.direct import info as direct_info
from vmckpt.drivers.driver import Driver, VmInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
    from vmckpt.drivers.domain import LibvirtDomain, OwnOnly
    from vmckpt.errors import VmckptError
    from vmckpt.hosts.every import Answers
    from vmckpt.hosts.host import Host
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.vm.domains.inventory import Domain
    from vmckpt.vm.inventory import Vm

    Tell = Callable[[str], None]

UNDO_S = 30.0


async def find(name: str, tell: "Tell") -> Driver:
    """The VM of that name, after ending an interrupted operation on it.

    A VM that vmckpt runs has precedence over a domain. Raises UsageError: not a valid name;
    NotFoundError, HostDownError when only an unreachable host may have it.
    """
    from vmckpt.errors import HostDownError, NotFoundError
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.sequence.steps import both
    from vmckpt.vm.paths import file_name

    file_name(name, "VM")
    hosts = _with_libvirt(all_hosts())
    try:
        # In this order: libvirt's client is loaded while the hosts answer.
        vm, _ = await both(_settled(name, tell), _load_ahead(wanted=bool(hosts)))
        return DirectVm(vm)
    except (NotFoundError, HostDownError):
        if not hosts or (domain := await _domain(name, hosts, tell)) is None:
            await _require_not_replicated(name, hosts)
            raise
        return domain


async def _require_not_replicated(name: str, hosts: "list[Host]") -> None:
    """Raises NotFoundError for a domain whose replication has its definition."""
    from vmckpt.errors import NotFoundError
    from vmckpt.hosts.every import ask_every
    from vmckpt.vm.inventory import read_home

    answers = await ask_every(hosts, lambda host: read_home(host, name))
    for home in answers.given:
        if home is not None:
            raise NotFoundError(
                f"'{name}' is in no libvirt",
                why=f"it was protected from {home.host.name}, and its replication, which was "
                "interrupted, has its definition",
                remedy=f"see where its guest is: vmckpt replicate status {name}; if it runs "
                f"nowhere, this returns the definition: vmckpt replicate stop {name}",
            )


async def find_on(host: "Host", name: str) -> Driver:
    """The VM of that name on `host`, whichever other host has one too. Raises NotFoundError."""
    from vmckpt.vm.inventory import read_vm, require_at_home
    from vmckpt.vm.paths import file_name

    file_name(name, "VM")
    if (vm := await read_vm(host, name)) is not None:
        return DirectVm(vm)
    if host.libvirt is not None:
        from vmckpt.drivers.domain import LibvirtDomain
        from vmckpt.vm.domains.inventory import find_domain

        if (domain := await find_domain(name, [host])) is not None:
            return LibvirtDomain(domain)
    return DirectVm(await require_at_home(host, name))


async def find_own(name: str, tell: "Tell", use: "OwnOnly" = "other") -> "Vm":
    """As `find`, for a VM that vmckpt runs itself. Raises as `find`, RefusedError."""
    found = await find(name, tell)
    if isinstance(found, DirectVm):
        return found.vm
    from vmckpt.drivers.domain import not_for_domains

    raise not_for_domains(found, use)


async def find_domain(name: str, tell: "Tell") -> "Domain":
    """The libvirt domain of that name, after ending an interrupted operation on it.

    Raises UsageError, NotFoundError, HostDownError: a libvirtd that may have it does not answer.
    """
    from vmckpt.errors import NotFoundError
    from vmckpt.hosts.inventory.inventory import all_hosts

    hosts = _with_libvirt(all_hosts())
    found = await _domain(name, hosts, tell) if hosts else None
    if found is None:
        raise NotFoundError(
            f"there is no libvirt domain '{name}'",
            why="no libvirtd of the inventory has it",
            remedy="see them: vmckpt vm list; name a host's libvirtd: "
            "vmckpt host set HOST --libvirt SOCKET",
        )
    return found.domain


async def inspect_everywhere(hosts: "list[Host] | None" = None) -> "Answers[VmInfo]":
    """Every VM of `hosts` (without: of all), by name, and which hosts or libvirtds do not answer.

    The homes that a migration or a takeover left behind are recognized only among `hosts`.
    """
    from vmckpt.hosts.every import Answers
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.migrate.outcome.stale import without_stale
    from vmckpt.vm.inventory import inspect_all

    everywhere = all_hosts() if hosts is None else hosts
    inspected = await inspect_all(everywhere)
    given = [direct_info(inspect) for inspect in await without_stale(inspected.given, everywhere)]
    silent, unanswered, unread = inspected.silent, inspected.unanswered, inspected.unread
    if with_libvirt := _with_libvirt(everywhere):
        from vmckpt.drivers.domain import info as domain_info
        from vmckpt.vm.domains.inventory import all_domains

        found = await all_domains(with_libvirt)
        given += [await domain_info(domain) for domain in found.given if not await _awaits(domain)]
        silent, unanswered = silent + found.silent, unanswered + found.unanswered
        unread += found.unread
    ordered = sorted(given, key=lambda vm: (vm.name, vm.host))
    return Answers(ordered, silent, unanswered, unread, inspected.arrivals)


async def _awaits(domain: "Domain") -> bool:
    """Whether it is not there yet: its QEMU waits for the takeover from another host."""
    from vmckpt.vm.paths import vm_dir

    if not domain.is_arriving:
        return False
    return await domain.host.exists(vm_dir(domain.host.state_dir, domain.name).awaited_domain)


async def restores_on(entry: "CatalogueEntry", tell: "Tell", *, copy: bool) -> "Host":
    """The host for a restore: for a copy where it was taken, for the VM itself where it is now.

    Raises NotFoundError; OutcomeUnknownError: two hosts have it; HostDownError: an unreachable host
    may run it; RefusedError: that host is drained, and a new VM is put there only if it is named.
    """
    from vmckpt.errors import HostDownError
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory.drained import require_open
    from vmckpt.hosts.inventory.inventory import all_hosts, find_host
    from vmckpt.vm.inventory import read_vm

    if not copy and entry.facts is not None and (domain := entry.facts.domain) is not None:
        from vmckpt.checkpoint.domains.elsewhere import host_of_domain

        return await host_of_domain(domain.uuid, entry.facts.host)
    if not copy:
        name = entry.manifest.vm
        vms = await ask_every(all_hosts(), lambda host: read_vm(host, name))
        homes = [vm.host for vm in vms.given if vm is not None]
        if homes:
            return homes[0] if len(homes) == 1 else (await find_own(name, tell)).host
        if vms.silent:
            raise HostDownError(
                f"'{name}' is on none of the hosts that answer, and would run twice if another "
                "runs it",
                why="; ".join(f"{error.what}: {error.why}" for error in vms.silent),
                remedy="if it no longer runs there, name the host to restore it on: --host",
            )
    host = find_host(entry.facts.host if entry.facts else "local")
    await require_open(host)
    return host


async def require_own(name: str, host: "Host") -> None:
    """Before a checkpoint takes the place of a VM there, or of a domain that was replicated and is
    off: as `DirectVm.require_own`.
    """
    from vmckpt.vm.inventory import read_home

    home = await read_home(host, name)
    if home is not None and not home.qemu.domain:
        await DirectVm(home).require_own()
    elif home is not None and not await home.is_alive():
        from vmckpt.replicate.operator.operate import require_decided

        await require_decided(home)


async def recover(name: str, tell: "Tell") -> "Recovery | None":
    """End an interrupted migration of the VM; None if there is none."""
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.migrate.outcome.recover import recover as recover_vm

    found = await recover_vm(name, tell)
    if found is None and _with_libvirt(all_hosts()):
        from vmckpt.migrate.domains.recover import recover as recover_domain

        found = await recover_domain(name, tell)
    return found


async def _settled(name: str, tell: "Tell") -> "Vm":
    from vmckpt.errors import OutcomeUnknownError, VmckptError
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.migrate.locks import remove_dead_locks
    from vmckpt.migrate.outcome.journal import find_journal
    from vmckpt.sequence.steps import both
    from vmckpt.vm.inventory import find_vm, is_worked_on

    # Most VMs have no journal: their location is asked for in the same request.
    journal, (found, begun) = await both(
        find_journal(name, all_hosts()), both(_found_or_error(name), _begun_on(name))
    )
    if journal is None:
        await _end_elsewhere(name, found, begun, tell)
        await remove_dead_locks(name, all_hosts())
        try:
            if isinstance(found, VmckptError):
                raise found
            return await _restored(found, tell)
        except OutcomeUnknownError:  # two hosts have it: a standby may have taken over
            from vmckpt.replicate.operator.operate import home_besides_stale

            if (at_home := await home_besides_stale(name, all_hosts())) is None:
                raise
            vm, stays = at_home
            if stays:
                tell(stays)
            return vm
    if await is_worked_on(name):
        return await find_vm(name)
    from vmckpt.migrate.outcome.recover import recover

    _tell_of(await recover(name, tell), tell)
    return await find_vm(name)


async def _begun_on(name: str) -> "list[Host]":
    """The hosts, of those that answer, with a restore of the VM in progress, or interrupted."""
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.inventory.inventory import all_hosts
    from vmckpt.vm.paths import vm_dir

    async def has_one(host: "Host") -> "Host | None":
        return host if await host.exists(vm_dir(host.state_dir, name).restoring) else None

    return [host for host in (await ask_every(all_hosts(), has_one)).given if host]


async def _end_elsewhere(
    name: str, found: "Vm | VmckptError", begun: "list[Host]", tell: "Tell"
) -> None:
    """End interrupted restores on hosts where the VM is not at home, if it is known where it is.

    Such a host may be another's; it delays a command on the VM by UNDO_S at most.
    """
    from asyncio import timeout

    from vmckpt.errors import NotFoundError, VmckptError
    from vmckpt.vm.inventory import read_vm
    from vmckpt.vm.paths import lock_path

    home = None if isinstance(found, VmckptError) else found
    for host in begun if home or isinstance(found, NotFoundError) else ():
        from vmckpt.checkpoint.operate import undo_there

        try:
            if await read_vm(host, name) or await host.lock_owner(lock_path(host.state_dir, name)):
                continue
            async with timeout(UNDO_S):
                await undo_there(host, name, home)
        except (VmckptError, TimeoutError) as exc:  # the VM itself is elsewhere, or nowhere
            why = exc if isinstance(exc, VmckptError) else f"not removed within {UNDO_S:g} s"
            tell(f"{host.name} keeps what an interrupted restore of {name} left there: {why}")
        else:
            tell(f"a restore of {name} on {host.name} was interrupted: what it made is removed")


async def _found_or_error(name: str) -> "Vm | VmckptError":
    from vmckpt.errors import VmckptError
    from vmckpt.vm.inventory import find_vm

    try:
        return await find_vm(name)
    except VmckptError as exc:
        return exc


async def _restored(vm: "Vm", tell: "Tell") -> "Vm":
    """The VM, after cleaning up an interrupted restore of it."""
    from vmckpt.vm.inventory import find_vm
    from vmckpt.vm.lifecycle import restore_is_cut_off

    if not await restore_is_cut_off(vm):
        return vm
    from vmckpt.checkpoint.operate import recover_there

    await recover_there(vm.host, vm.name)
    tell(f"a checkpoint or restore of {vm.name} was interrupted: it was ended")
    return await find_vm(vm.name)


async def _end_domain_restores(hosts: "list[Host]", tell: "Tell") -> bool:
    """End interrupted restores of domains; whether there were any.

    Their libvirtds may wait for them, with the domains locked, and list none.
    """
    from vmckpt.checkpoint.domains.record import cut_off_on
    from vmckpt.checkpoint.operate import recover_there
    from vmckpt.errors import VmckptError

    has_ended = False
    for host in hosts:
        try:
            for uuid in await cut_off_on(host):
                await recover_there(host, uuid, uuid)
                tell(f"a restore of a domain on {host.name} was interrupted: it was ended")
                has_ended = True
        except VmckptError as exc:  # another host may have the domain
            tell(f"an interrupted restore on {host.name} was not ended: {exc}")
    return has_ended


async def _domain(name: str, hosts: "list[Host]", tell: "Tell") -> "LibvirtDomain | None":
    from vmckpt.drivers.domain import LibvirtDomain
    from vmckpt.errors import HostDownError
    from vmckpt.migrate.domains.journal import DomainJournal
    from vmckpt.vm.domains.inventory import find_domain
    from vmckpt.vm.inventory import is_worked_on

    if await DomainJournal.all_of(name) and not await is_worked_on(name):
        from vmckpt.migrate.domains.recover import recover

        _tell_of(await recover(name, tell), tell)
    # What could not yet be removed from its old host is not the domain.
    left = {journal.untidy for journal in await DomainJournal.all_left(name)}
    try:
        found = await find_domain(name, hosts, left=left)
    except HostDownError:
        if not await _end_domain_restores(hosts, tell):
            raise
        found = await find_domain(name, hosts, left=left)
    if found is not None and await _was_returned(found, tell):
        found = await find_domain(name, hosts, left=left)
    if found is None or not await LibvirtDomain(found).restore_is_cut_off():
        return None if found is None else LibvirtDomain(found)
    from vmckpt.checkpoint.operate import recover_there

    await recover_there(found.host, name, found.uuid)
    tell(f"a restore of {name} was interrupted: it was ended")
    found = await find_domain(name, hosts, left=left)
    return None if found is None else LibvirtDomain(found)


async def _was_returned(domain: "Domain", tell: "Tell") -> bool:
    """Whether libvirt has just got the definition back that it refused, or could not take, when the
    domain's replication ended here: the domain must not move on without it.
    """
    from vmckpt.errors import VmckptError
    from vmckpt.replicate.domains.guest import return_what_ended
    from vmckpt.vm.paths import vm_dir

    mark = vm_dir(domain.host.state_dir, domain.name).undefined
    if not await domain.host.exists(mark):
        return False
    try:
        await return_what_ended(domain.host, domain.name)
    except VmckptError as exc:
        tell(f"libvirt on {domain.host.name} has no definition of {domain.name} yet: {exc}")
    return not await domain.host.exists(mark)


def _tell_of(recovery: "Recovery | None", tell: "Tell") -> None:
    if recovery is not None:
        tell(f"migration {recovery.run} was interrupted; {recovery.outcome} ({recovery.host})")


async def _load_ahead(*, wanted: bool) -> None:
    if wanted:
        from vmckpt.vm.domains.connection import load_ahead

        load_ahead()


def _with_libvirt(hosts: "list[Host]") -> "list[Host]":
    return [host for host in hosts if host.libvirt is not None]
