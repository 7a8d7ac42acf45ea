"""Return to the old host after a failover: it protects the VM, and takes over once in sync."""

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.sockets.guest_silence import guest_silence
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.operator.begin import Begin, start
from vmckpt.replicate.operator.operate import failover
from vmckpt.replicate.operator.sides import sides
from vmckpt.replicate.request import REQUEST, ServiceFiles
from vmckpt.replicate.status import PROTECTED, ReplicationOutcome
from vmckpt.state.documents import load_from
from vmckpt.vm.inventory import Vm


async def failback(
    vm: Vm,
    destination: Host,
    options: ReplicationOptions,
    run: str,
    hosts: Iterable[Host],
    *,
    begin: Begin | None = None,
) -> ReplicationOutcome:
    """Have `destination` protect the VM, by `begin` if libvirt has it, and then take it over;
    returns the status of `destination`'s side.

    If `destination` already protects it, it only takes over. Raises as `start` and `failover` do:
    the VM runs where it was, or on `destination`, or a standby may take it over, as the error says.
    """
    if not options.arbiter:  # see `last_options`
        raise RefusedError(
            f"only {vm.host.name} has a record of the last replication's arbiter and agent",
            why=f"they are used on {destination.name} too, which has no such record",
            remedy="give them again: --lease, and --lease-credentials and --fence if there were "
            "any",
        )
    known, notes = tuple(hosts), list[str]()
    if not await _is_protected_by(destination, vm.name, known):
        begun = begin or partial(start, vm)
        notes += (await begun(destination, options, run)).warnings
    began_s = time.monotonic()
    outcome = await failover(vm.name, known)
    ended_s = time.monotonic()
    silence, guest = None, vm.spec.heartbeat_id
    if guest is not None:
        silence = await guest_silence(
            destination, guest, began_s, ended_s, lambda _, why: notes.append(why)
        )
    downtime_ms = round(silence.longest_gap_ms, 1) if silence else None
    notes += outcome.warnings
    return outcome._replace(guest_downtime_ms=downtime_ms, warnings=tuple(notes))


async def _is_protected_by(destination: Host, name: str, hosts: Iterable[Host]) -> bool:
    """Whether that host protects it. Raises RefusedError if another replication is under way."""
    statuses = [side.status for side in await sides(name, hosts) if side.answers]
    if not statuses:
        return False
    primaries = [status for status in statuses if status.is_primary]
    if any(s.standby == destination.name and s.state == PROTECTED for s in primaries):
        return True
    raise RefusedError(
        f"'{name}' is being replicated",
        why=f"{statuses[0].role} {statuses[0].state}: from {statuses[0].primary} to "
        f"{statuses[0].standby}",
        remedy=f"see `vmckpt replicate status {name}`, or end it: vmckpt replicate stop {name}",
    )


def came_from(vm: Vm) -> str:
    """The host from which it was taken over. Raises NotFoundError."""
    if vm.qemu.replaces is None:
        raise NotFoundError(
            f"'{vm.name}' was not taken over from another host",
            why=f"on {vm.host.name} it was started, or arrived by a migration",
            remedy=f"name the host: vmckpt replicate failback {vm.name} HOST",
        )
    return vm.qemu.replaces.host


async def last_options(vm: Vm, destination: Host) -> ReplicationOptions | None:
    """The options of the replication that brought it here, or ended here; None: unknown.

    Arbiter, credentials and fencing agent are used on `destination` too: they are omitted unless
    that host recorded the same, or is the same machine. Raises UsageError.
    """
    try:
        options = await _options_at(vm.host, vm.name)
    except StorageError as exc:
        raise UsageError(
            f"the options of the last replication of '{vm.name}' cannot be read",
            why=f"{exc.what}: {exc.why}",
            remedy=f"vmckpt replicate stop {vm.name}, and give the options again",
        ) from exc
    if options is None or (vm.host.is_this_machine and destination.is_this_machine):
        return options
    with suppress(StorageError):  # then it has no usable options
        known = await _options_at(destination, vm.name)
        if known is not None and _used_there(known) == _used_there(options):
            return options
    return replace(options, arbiter="", credentials="", fence=())


async def _options_at(host: Host, name: str) -> ReplicationOptions | None:
    request = await load_from(host, ServiceFiles.of(host, name).request, REQUEST)
    return None if request is None else request.options


def _used_there(options: ReplicationOptions) -> tuple[object, ...]:
    return options.arbiter, options.credentials, options.fence
