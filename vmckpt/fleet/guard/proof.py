"""The copy that proves a guard's checkpoint: it runs briefly, isolated, and is removed."""

import asyncio
from collections.abc import Sequence
from functools import partial

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.operate import restore_to
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.deadlines import retry
from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.driver import Driver
from vmckpt.errors import BusyError, OperationFailedError, RefusedError
from vmckpt.fleet.guard.health import health_problems
from vmckpt.fleet.guard.record import GuardProof, GuardRecord
from vmckpt.fleet.guard.rollback import BUSY_POLL_S, BUSY_S
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.sequence.steps import finish
from vmckpt.vm.inventory import Vm, homes, read_vm

# A copy counts as proved when its vCPUs have run for this long without an error in QEMU.
PROOF_S = 1.0


async def require_provable(vm: Driver, proof: GuardProof) -> None:
    """Raises RefusedError if its checkpoint cannot be proved so."""
    from vmckpt.drivers.domain import LibvirtDomain

    if proof is GuardProof.RUN and isinstance(vm, LibvirtDomain):
        from vmckpt.checkpoint.domains.planned import why_no_copy
        from vmckpt.vm.domains.sessions import libvirtd

        seen, definition = vm.domain.seen, ""
        if seen.persistent:
            async with libvirtd(vm.host) as session:
                definition = await session.definition(seen.uuid)
        if why := why_no_copy(seen.xml, definition):
            raise RefusedError(
                f"no copy of '{vm.name}' can prove its checkpoint",
                why=why,
                remedy=f"have it read instead: vmckpt guard {vm.name} --proof read -- COMMAND",
            )


def copy_name(record: GuardRecord) -> str:
    """The name of the copy."""
    return f"proof-{record.run}"


async def run_copy(record: GuardRecord, entry: CatalogueEntry, host: Host) -> None:
    """Run a copy briefly, with all of its memory loaded; then remove it.

    Raises OperationFailedError: it does not run; and as a restore does.
    """
    options = RestoreOptions(
        name=copy_name(record), in_place=False, eager=True, plugged=False, keep_macs=False
    )
    try:
        await restore_to(host, entry, options, lambda _: None)
        await asyncio.sleep(PROOF_S)
        copies = await _copies(record, host)
        gone = [f"it is no longer on {host.name}"]
        if found := await health_problems(copies[0], ()) if copies else gone:
            raise OperationFailedError(
                "a copy of the checkpoint does not run",
                why="; ".join(found),
                remedy="nothing was run; see vmckpt checkpoint verify, and the host's memory",
            )
    finally:
        await finish(remove_copy(record, host))


async def remove_copy(record: GuardRecord, host: Host) -> None:
    """Remove the copy, if there is one. Raises BusyError, HostDownError."""
    for copy in await _copies(record, host):
        for work in (
            partial(copy.stop, force=True, timeout_s=0),
            partial(copy.remove, with_state=True),
        ):
            await retry(work, BusyError, every_s=BUSY_POLL_S, within_s=BUSY_S)
        for path in copy.own_images():
            await copy.host.remove(path)
        if record.is_domain and (uuid := (await copy.inspect()).uuid):
            from vmckpt.vm.domains.running import domain_dir

            await copy.host.remove(domain_dir(copy.host, uuid).path)


async def _copies(record: GuardRecord, host: Host) -> Sequence[Driver]:
    """The copy, on that host, or another: a drain may have moved it."""
    name = copy_name(record)
    if record.is_domain:
        from vmckpt.drivers.domain import LibvirtDomain
        from vmckpt.vm.domains.inventory import all_domains, find_domain

        here = await find_domain(name, [host])
        domains = [here] if here else (await all_domains(all_hosts())).given
        return [LibvirtDomain(one) for one in domains if one.name == name]
    found: list[Vm | None] = [*await homes(name, [host])]
    found = found or (await ask_every(all_hosts(), lambda one: read_vm(one, name))).given
    return [DirectVm(vm) for vm in found if vm is not None]
