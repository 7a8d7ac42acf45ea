"""Recovery after the death of a service: the standby has the guest, or it continues here alone.

Run by the dead-man's switch. The guard has let the guest run, its output held. The standby learned
of the death first, and takes over at once if it can: so nothing is done here before the dead
service's lease has ended.
"""

import asyncio
import math
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from vmckpt.deadlines import retry
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.epoch.migrated import VCPU_TRACE
from vmckpt.epoch.output import HeldOutput, holds_output
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.processes.deadman import attended
from vmckpt.hosts.processes.process import kill
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.store import ArbiterDownError
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.replicate.arbiter import ARBITER_S, open_arbiter
from vmckpt.replicate.control import write_last_status
from vmckpt.replicate.disks.mirrors import drop_mirrors
from vmckpt.replicate.domains.guest import concluded, give_back, guard_of, operator_monitor
from vmckpt.replicate.narration import tell_event
from vmckpt.replicate.operator.leftovers import end_stale, end_waiting, remove_stale_home
from vmckpt.replicate.operator.sides import last_status
from vmckpt.replicate.primary.keeper import GIVEN_UP_S, MARGIN_S
from vmckpt.replicate.request import (
    REQUEST,
    ReplicationRequest,
    ServiceFiles,
    read_request,
    release_mark,
)
from vmckpt.replicate.status import PROMOTED, ReplicaStatus, Role
from vmckpt.sequence.steps import finish
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.record import Replaced

T = TypeVar("T")
POLL_S, CONT_POLLS = 0.1, 1000
# How long others may work on a VM whose QEMU does not answer, before that is tried again.
AGAIN_S = 5.0
# How often to check whether an operator's process waits to do this, or has done it.
CHECK_S = 0.5
# How long a libvirtd that ended is waited for.
LIBVIRTD_S = 60.0


async def recover(
    directory: Path, *, at_any_rate: bool = False, standby_is_dead: bool = False
) -> None:
    """Settle where the guest continues, after the death of the primary's service.

    A guest that is dead here belongs to the standby, however long its takeover takes: nothing is
    done about it unless `at_any_rate` (the operator says that there is no standby), which
    has precedence over a recovery without it that waits for the arbiter. A term that the standby
    took is taken from it only if `standby_is_dead`. Waits as long as others work on the VM, and,
    unless `at_any_rate`, tries again while QEMU does not answer. Raises whatever else prevents it.
    """
    request, files = read_request(directory), ServiceFiles(directory)
    host = request.primary
    lock = lock_path(host.state_dir, request.vm)

    async def settle() -> None:
        async with host.lock(lock, owner("replicate --recover", request.run)):
            if await _is_going_on(request, at_any_rate=at_any_rate):
                await _settle(request, files, at_any_rate=at_any_rate, is_dead=standby_is_dead)

    said = ""
    while True:
        try:
            await retry(settle, BusyError, every_s=POLL_S)
            return
        except (HostDownError, OutcomeUnknownError) as exc:
            if at_any_rate:
                raise  # the operator gets the error, and repeats the command
            # QEMU does not answer, or another client has its monitor: its output is still held.
            if said != (said := str(exc)):
                sys.stderr.write(f"{said}\n")
        await asyncio.sleep(AGAIN_S)


async def abandon(directory: Path) -> None:
    """After the death of the standby's service: end the QEMU that waits there.

    If the guest is at home there by then and its takeover was cut off, it is resumed if the term is
    still the standby's, which is first taken again; if not, it never ran here and is removed: it
    continues elsewhere. If it is not at home, a term that was taken is given up, and its primary
    may continue. Raises OperationFailedError when the arbiter does not say whose the term is.
    """
    request = read_request(directory)
    if request.domain is not None:
        from vmckpt.replicate.domains.waiting import release_pipes

        await release_pipes(request.standby, request.vm)
    await end_waiting(request.standby, request.vm)
    vm = await read_home(request.standby, request.vm)
    if vm is None:
        await give_up_term(request)
    elif await vm.is_alive():
        if await _if_libvirtd_starts_again(vm, partial(_goes_on_there, request, vm)):
            await _note_taken_over(request, vm)
            await concluded(vm, request.domain)
        else:
            await remove_stale_home(request.standby, vm.name, vm.qemu.files.qemu_id)


async def _goes_on_there(request: ReplicationRequest, vm: Vm) -> bool:
    """Have the guest run at the standby; False: another has its term. Raises as `_runs_again`."""
    async with operator_monitor(vm) as monitor:
        is_held = (await commands.query_status(monitor)).status in STOPPED_FOR_AN_EPOCH
        if is_held and not await _runs_again(request, monitor):
            return False
        if not monitor.is_lent:
            await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
    return True


async def _note_taken_over(request: ReplicationRequest, vm: Vm) -> None:
    """Record that the service took over, if it was killed before it could.

    Once the guest has moved on, nothing else distinguishes it from a standby that never had the
    guest, whose term is released: to the old primary, whose guest is older.
    """
    host, files = request.standby, ServiceFiles.of(request.standby, request.vm)
    if vm.qemu.replaces != Replaced(request.primary.name, request.qemu_id):
        return  # it was migrated or started here
    if await last_status(host, files) is not None:
        return
    about = ReplicaStatus(
        role=Role.STANDBY,
        state=PROMOTED,
        vm=request.vm,
        run=request.run,
        primary=request.primary.name,
        standby=host.name,
        why=f"took over from {request.primary.name}; its service was killed in it",
        qemu_id=vm.qemu.files.qemu_id,
        primary_qemu_id=request.qemu_id,
    )
    with suppress(StorageError):  # on a full disk the guest runs anyway
        await write_last_status(host, files, about)
    tell_event(host, about)


async def _runs_again(request: ReplicationRequest, monitor: Monitor) -> bool:
    """Resume the guest, which waits for that at the standby; False: another has its term.

    Raises OperationFailedError.
    """
    while True:
        lease = await _taken_again(request)
        if lease is None:
            break
        if boottime_s() + MARGIN_S < lease.held_until_s:
            await commands.cont(monitor)
            if not monitor.is_lent:
                await commands.announce_self(monitor)
            return True
    found = None
    with suppress(ArbiterDownError, StorageError):
        found = await open_arbiter(request.options).read(request.vm)
    if found is None or request.is_standbys(found.record.holder):
        raise OperationFailedError(
            f"'{request.vm}' is paused on {request.standby.name}",
            why="its standby's service died in the takeover, and the arbiter does not say whether "
            "the term is still its own",
            remedy="make sure that the VM runs on no other host, then: "
            f"vmckpt replicate stop {request.vm}; vmckpt vm start {request.vm}",
        )
    return False


async def give_up_term(request: ReplicationRequest) -> None:
    """Give up a term that the standby's service took and no longer uses.

    Tries as `_taken_again` does. Raises UsageError.
    """
    while (lease := await _taken_again(request)) is not None:
        with suppress(ArbiterDownError, OutcomeUnknownError, StorageError, RefusedError):
            await lease.give_up()
            return
        await asyncio.sleep(POLL_S)


async def _taken_again(request: ReplicationRequest) -> Lease | None:
    """The term that the standby's service took, held by this process; None: that service does not
    have it.

    Tries until the arbiter answers, or the replication was ended without it. An arbiter that knows
    of no term may not be mounted, or was never asked for one: it is asked for no longer than a
    primary waits. Raises UsageError.
    """
    store, ended = open_arbiter(request.options), request.replica
    span, unknown_until_s = LeaseSpan(request.options.lease_s), math.inf
    path = ServiceFiles.of(request.standby, request.vm).request
    while path.exists():
        with suppress(ArbiterDownError, OutcomeUnknownError, StorageError, RefusedError):
            found = await store.read(request.vm)
            if found is None:
                unknown_until_s = min(unknown_until_s, boottime_s() + GIVEN_UP_S)
                if boottime_s() > unknown_until_s:
                    return None
            # The service's, or ours: a request that got no answer may have been executed.
            elif found.record.released or not request.is_standbys(found.record.holder):
                return None
            else:
                term, holder = found.record.term, found.record.holder
                claimant = Claimant(f"{ended}/abandon/{term}", succeeds=holder)
                lease = Lease(store, request.vm, claimant, span)
                await lease.take(Holding(term, holder))
                return lease
        await asyncio.sleep(POLL_S)
    return None


async def _settle(
    request: ReplicationRequest, files: ServiceFiles, *, at_any_rate: bool, is_dead: bool
) -> None:
    vm = await read_home(request.primary, request.vm)
    if not (at_any_rate or (vm is not None and await vm.is_alive())):
        return  # the standby has taken over, or will
    if at_any_rate and vm is not None and await _had_no_term(request, vm):
        reason = "stopped: the primary's service died before it had a term"
    elif (
        goes_on := await _takes_term(request, at_any_rate=at_any_rate, standby_is_dead=is_dead)
    ) is None:
        return  # an operator's process handles it
    elif goes_on:
        reason = await _gone_on(vm, files)
        await give_back(request.primary, request.vm, request.domain)
    else:
        await _end_replaced(request, vm)
        reason = "replaced: the standby has taken over; this QEMU was ended"
    about = ReplicaStatus(
        role=Role.PRIMARY,
        state="ended",
        vm=request.vm,
        run=request.run,
        ending=reason.partition(":")[0],
        why=reason,
    )
    last = await last_status(request.primary, files)
    status = ReplicaStatus.from_json(last.to_json() | about.to_json()) if last else about
    await write_last_status(request.primary, files, status)
    tell_event(request.primary, about)


async def _had_no_term(request: ReplicationRequest, vm: Vm) -> bool:
    """Whether the service was killed before it had a term, of a VM whose term is another host's: it
    came here by a migration since.

    Without a claim the VM was never left to this replication's standby.
    """
    if await vm.host.exists(vm.directory.claim):
        return False
    with suppress(ArbiterDownError, OutcomeUnknownError, StorageError):
        found = await open_arbiter(request.options).read(request.vm)
        return found is not None and not _is_of(request, found.record.holder)
    return False


def _is_of(request: ReplicationRequest, holder: str) -> bool:
    """Whether the holder is a service of the primary's host, of any run, or this run's standby."""
    return holder.startswith(f"{request.primary.name}/") or request.is_standbys(holder)


async def _gone_on(vm: Vm | None, files: ServiceFiles) -> str:
    """This side has the term: let the guest run if it is alive here; returns what became of it."""
    if vm is not None:
        await vm.host.remove(vm.directory.claim)
        for process in await vm.host.find_processes("\0".join(await guard_of(vm))):
            await vm.host.kill(process)
        kill(vm.qemu.process, signal.SIGCONT, wait_s=0.0)  # one of them may have held it
        if await vm.is_alive():
            await finish(_freed(vm, files))
    if vm is None or not await vm.is_alive():
        return "off: the primary's QEMU died, and the standby did not take over"
    return "alone: the primary's service died, and the standby did not take over"


async def _end_replaced(request: ReplicationRequest, vm: Vm | None) -> None:
    """End what runs here of a guest whose standby has the term, and remove what is certainly stale.

    A standby that has the term may have died before it had the guest: then this home, which is not
    started without the arbiter's word, is the only one. Raises as `remove_stale_home` does.
    """
    if await _is_at_home(request):
        await remove_stale_home(request.primary, request.vm, request.qemu_id)
    elif vm is not None and vm.qemu.files.qemu_id == request.qemu_id:
        await end_stale(vm)


async def _takes_term(
    request: ReplicationRequest, *, at_any_rate: bool, standby_is_dead: bool = False
) -> bool | None:
    """Wait until it is clear which side continues. True: this side. None: an operator ends the
    replication, or has ended it, which needs the VM's lock that is held here.

    A standby that has the term need not have the guest yet. An arbiter that knows of no term
    has forgotten ours, or is not mounted: wait for it, but not `at_any_rate`. Then, with no claim,
    the service was killed before it had a term; with one, only `standby_is_dead` rules out that the
    standby has the guest. With that, a silent arbiter is not needed either: the next
    protection records which replica it may still have. Raises RefusedError when the term is neither
    side's or the arbiter has no record, StorageError.
    """
    claimant = f"{request.primary.name}/{request.run}/recovery"
    store, span = open_arbiter(request.options), LeaseSpan(request.options.lease_s)
    lease: Lease | None = None
    until_s, look_s, answered_s = math.inf, 0.0, boottime_s()
    while True:
        if not standby_is_dead and boottime_s() >= look_s:
            if await _is_left_to_others(request, at_any_rate=at_any_rate):
                return None
            look_s = boottime_s() + CHECK_S
        if standby_is_dead and boottime_s() - answered_s > ARBITER_S:
            await _note_replica(request)
            return True
        with suppress(ArbiterDownError, OutcomeUnknownError, StorageError):
            found = await store.read(request.vm)
            if found is None:
                if at_any_rate:
                    await _require_free(request, standby_is_dead=standby_is_dead)
                    return True
            elif (holder := found.record.holder) == claimant:
                break
            elif request.is_standbys(holder) and not found.record.released and not standby_is_dead:
                until_s = min(until_s, boottime_s() + GIVEN_UP_S)
                if boottime_s() > until_s or await _is_at_home(request):
                    return False
            elif not _is_of(request, holder):
                raise RefusedError(
                    f"the term of '{request.vm}' is not {request.primary.name}'s to take back",
                    why=f"according to the arbiter, {holder} holds it",
                    remedy="see `vmckpt vm list`: where the VM runs now it may be protected again",
                )
            else:
                if lease is None or lease.claimant.succeeds != holder:
                    lease = Lease(store, request.vm, Claimant(claimant, succeeds=holder), span)
                with suppress(RefusedError):  # its lease may still run
                    await lease.take()
                    break
            answered_s = boottime_s()
        await asyncio.sleep(POLL_S)
    # The arbiter gave the term: an earlier `_note_replica` no longer applies.
    await request.primary.remove(vm_dir(request.primary.state_dir, request.vm).gone_replica)
    return True


async def _note_replica(request: ReplicationRequest) -> None:
    """Record that only the operator's declaration freed this home: the arbiter may still list the
    replica, or the standby's term.
    """
    here = vm_dir(request.primary.state_dir, request.vm)
    await request.primary.write_text(here.gone_replica, request.replica)


async def _require_free(request: ReplicationRequest, *, standby_is_dead: bool) -> None:
    """The arbiter has no record: require that no standby can have the guest, or that the operator
    says so, which is recorded. Raises RefusedError.
    """
    claim = vm_dir(request.primary.state_dir, request.vm).claim
    if standby_is_dead:
        await _note_replica(request)
    elif await request.primary.exists(claim):
        raise RefusedError(
            f"where '{request.vm}' may run is not certain",
            why=f"{request.standby.name} was its standby, and the arbiter has no record of it: its "
            "directory may not be mounted",
            remedy="restore access to the arbiter and to hosts that do not answer, then try again; "
            f"if {request.standby.name} is certainly off: vmckpt replicate stop {request.vm} "
            "--standby-is-dead",
        )


async def _is_left_to_others(request: ReplicationRequest, *, at_any_rate: bool) -> bool:
    """Whether the replication was ended, or another process, to which the operator has declared
    more, waits to do this. If the kernel does not say (no free descriptor), the next check will.
    """
    if not await _is_going_on(request, at_any_rate=at_any_rate):
        return True
    path = ServiceFiles.of(request.primary, request.vm).path
    mark = release_mark(path, standby_is_dead=at_any_rate)
    with suppress(OutcomeUnknownError):
        return bool(await request.primary.find_processes(mark))
    return False


async def _is_going_on(request: ReplicationRequest, *, at_any_rate: bool) -> bool:
    """Whether there is something to do, as far as the files can be read: meanwhile the replication
    may have been ended and the VM protected again, or another operator's process may have done what
    this one is to do `at_any_rate`.
    """
    files = ServiceFiles.of(request.primary, request.vm)
    try:
        text = await request.primary.read_text(files.request)
        status = await last_status(request.primary, files)
    except (OSError, StorageError):
        return True
    if at_any_rate and status is not None and status.has_ended and not status.has_left:
        return False
    with suppress(StorageError):
        return text is not None and REQUEST.decode(text, files.request).run == request.run
    return False


async def _is_at_home(request: ReplicationRequest) -> bool:
    """Whether the standby certainly has the guest; unknown for another machine."""
    return request.one_machine and await read_home(request.standby, request.vm) is not None


async def _freed(vm: Vm, files: ServiceFiles) -> None:
    await _if_libvirtd_starts_again(vm, partial(_free, vm, files))


async def _if_libvirtd_starts_again(vm: Vm, work: Callable[[], Awaitable[T]]) -> T:
    """Do it, also if the libvirtd that has a domain's monitor has to start again first."""
    again = (HostDownError, OutcomeUnknownError) if vm.qemu.domain else ()
    return await retry(work, again, every_s=POLL_S, within_s=LIBVIRTD_S)


async def _free(vm: Vm, files: ServiceFiles) -> None:
    """Release its output, restore QEMU's settings, and let it run."""
    async with operator_monitor(vm) as monitor:
        with (
            suppress(VmckptError, OSError),  # one that does not end prevents nothing from running
            attended(await guard_of(vm), files.guard_log) as tell_guard,
        ):
            await drop_mirrors(monitor, tell_guard)
        await HeldOutput(monitor, await holds_output(monitor)).release_all()
        for _ in range(CONT_POLLS):
            state = await commands.query_status(monitor)
            if state.status not in STOPPED_FOR_AN_EPOCH:
                break
            with suppress(CommandRefusedError):  # QEMU is still ending what the epoch began
                await commands.cont(monitor)
            await asyncio.sleep(0.005)
        if not monitor.is_lent:
            await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
            await commands.trace(monitor, VCPU_TRACE, enabled=True)
