"""The operator's side of `start`: run both services until the standby could take over."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from vmckpt.errors import HostDownError, OperationFailedError, VmckptError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.remote.tls import have_listen
from vmckpt.options.replication import ReplicationOptions
from vmckpt.preflight.finding import WARN, require
from vmckpt.preflight.replication.checks import check
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.compare import GuestMachine, describe, differences
from vmckpt.qemu.monitor import session
from vmckpt.replicate.arbiter import require_location
from vmckpt.replicate.control import DISMISS, ask
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.domains.guest import return_to_libvirt
from vmckpt.replicate.operator.committing import commit_overlays_on
from vmckpt.replicate.operator.leftover_copies import CopiesFate, settle_copies
from vmckpt.replicate.operator.leftovers import end_waiting, remove_replaced
from vmckpt.replicate.operator.sides import (
    POLL_S,
    last_status,
    sides,
    until_gone,
    until_recovered,
)
from vmckpt.replicate.paths import HEARD, NONE, SECOND, WAITING
from vmckpt.replicate.primary.claim import (
    is_of_this_home,
    require_right,
    take_anew_there,
    took_over,
)
from vmckpt.replicate.request import (
    REQUEST,
    ReplicationRequest,
    ServiceFiles,
    as_itself,
)
from vmckpt.replicate.status import DEAD, PROMOTED, PROTECTED, ReplicaStatus, ReplicationOutcome
from vmckpt.sequence.steps import finish
from vmckpt.state.documents import save_to
from vmckpt.units import format_size
from vmckpt.vm.identity import hand_over, identity_of
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import QEMU_PREFIX, QemuDir, vm_dir

if TYPE_CHECKING:
    from vmckpt.replicate.domains.described import DescribedDomain

# A guest that writes this share of the link's rate leaves no room for a busier moment.
NEAR = 0.8
ROOM_BYTES = 16 << 10
# How a host begins to protect a VM, in the run of that id.
Begin = Callable[[Host, ReplicationOptions, str], Awaitable[ReplicationOutcome]]


async def start(
    vm: Vm,
    standby: Host,
    options: ReplicationOptions,
    run: str,
    described: "DescribedDomain | None" = None,
) -> ReplicationOutcome:
    """Have `standby` protect the VM; returns the primary's status once it does. `described`: what
    its host says of a libvirt domain.

    Raises UsageError, RefusedError (nothing was changed), OperationFailedError (undone: the VM
    still runs where it was, unprotected), HostDownError, BusyError (another command starts one).
    """
    one_machine = vm.host.is_this_machine and standby.is_this_machine
    require_location(options)
    options.require_sense(one_machine=one_machine)
    # Two would write to the same files, and a failure of one would end what the other has started.
    lock = ServiceFiles.of(vm.host, vm.name).beginning
    async with vm.host.lock(lock, owner("replicate start", run)):
        return await _begun(vm, standby, options, run, described, one_machine=one_machine)


async def _begun(
    vm: Vm,
    standby: Host,
    options: ReplicationOptions,
    run: str,
    described: "DescribedDomain | None",
    *,
    one_machine: bool,
) -> ReplicationOutcome:
    if await took_over(vm):
        await require_right(vm)  # a twin has no term to begin with
    await remove_replaced(vm, standby)
    if await vm.host.exists(vm.directory.overlays_request):
        await _require_new(vm, standby)
        await commit_overlays_on(vm.name, all_hosts())
    if described is None:
        checks = await check(vm, standby, options)
    else:
        from vmckpt.replicate.domains.describing import check_domain, forget_gone

        await forget_gone(standby, vm)
        checks = await check_domain(vm, standby, options, described)
    require(checks, f"'{vm.name}' cannot be replicated to {standby.name}")
    await _require_new(vm, standby)
    request = ReplicationRequest(
        run=run,
        vm=vm.name,
        spec=vm.spec.text,
        platform=vm.qemu.platform,
        primary=as_itself(vm.host),
        standby=as_itself(standby),
        options=options,
        one_machine=one_machine,
        qemu_id=vm.qemu.files.qemu_id,
        disks=await _copied_disks(vm) if described is None else described.disks,
        identity=vm.qemu.domain or await identity_of(vm.host, vm.directory),
        domain=None if described is None else described.domain,
    )
    ours, theirs = ServiceFiles.of(vm.host, vm.name), ServiceFiles.of(standby, vm.name)
    try:
        await _write(standby, theirs, request)
        endpoint = await have_listen(standby, theirs.path, ("replica", "standby"))
        if described is None:  # libvirt itself compares the two machines
            await _require_same(vm, standby)
            # And its last checkpoint: none is taken while it is protected.
            await hand_over(vm.host, vm.directory, standby)
        await _write(vm.host, ours, replace(request, place=endpoint))
        command = [*await vm.host.own_command(), "replica", "primary", str(ours.path)]
        service = await vm.host.spawn(command, ours.log)
        status = await _until_protected(vm, ours, service)
    except BaseException as exc:
        await finish(_undo(vm.host, ours, standby, theirs))
        if isinstance(exc, VmckptError) and await _is_undefined(vm):
            raise _not_returned(vm, exc) from exc
        raise
    warnings = [found.reason for found in checks if found.verdict == WARN]
    return ReplicationOutcome(status, (*warnings, *_unheard(status), *_slowed(status)))


async def _copied_disks(vm: Vm) -> tuple[CopiedDisk, ...]:
    """The disks to copy to a standby: all writable ones. Raises HostDownError."""
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        images = await query_disk_images(monitor)
    return tuple(
        CopiedDisk(number, images[node].virtual_size_bytes)
        for number, (disk, node) in enumerate(zip(vm.spec.disks, vm.nodes, strict=True))
        if not disk.read_only
    )


async def _require_new(vm: Vm, standby: Host) -> None:
    """Require that no other replication of the VM is active.

    If the services of one were killed, the arbiter lists a standby that may take over, except for
    the primary from which this VM was taken over. A primary that has ended has told the arbiter
    that its standby may not take over, or has left the guest to it.
    """
    old = vm.qemu.replaces.host if vm.qemu.replaces is not None else None
    found = await sides(vm.name, (vm.host, standby))
    is_of_home = await is_of_this_home(vm)
    has_ended = {
        side.status.run
        for side in found
        if side.status.is_primary and side.status.has_ended
        if not side.status.has_left
    } - {None}  # one that does not say is unknown
    for side in found:
        status = side.status
        is_dead = status.state == DEAD
        was_replaced = is_dead and status.is_primary and side.host.name == old
        was_lost = is_dead and not status.is_primary and status.run in has_ended
        is_left = side.host.name == vm.host.name and status.has_left and is_of_home
        is_over = status.has_ended and not is_left
        if side.answers or not (was_replaced or was_lost or is_over):
            why = "answers" if side.answers else f"is {status.state}, not ended"
            raise OperationFailedError(
                f"'{vm.name}' is being replicated",
                why=f"the {status.role}'s service on {side.host.name} {why}",
                remedy=f"vmckpt replicate stop {vm.name}",
            )
        if was_lost:
            await end_waiting(side.host, vm.name)
            await settle_copies(side.host, ServiceFiles.of(side.host, vm.name), CopiesFate.KEEP)
        if side.host.name == vm.host.name and await took_over(vm):
            await take_anew_there(vm)
        await side.host.remove(ServiceFiles.of(side.host, vm.name).path)


async def _write(host: Host, files: ServiceFiles, request: ReplicationRequest) -> None:
    await host.make_dir(files.path)
    await host.remove(files.status)  # of an earlier one, whose removal was cut off
    await host.write_text(files.room, "-" * ROOM_BYTES)
    await save_to(host, files.request, REQUEST, request)


async def _require_same(vm: Vm, standby: Host) -> None:
    """Require that both QEMUs are the same machine to the guest. Raises OperationFailedError."""
    directory = vm_dir(standby.state_dir, vm.name)
    names = [
        name for name in await standby.list_dir(directory.path) if name.startswith(QEMU_PREFIX)
    ]
    if not names:
        raise OperationFailedError(
            f"the standby's QEMU on {standby.name} has ended",
            why="its service has ended, or was ended",
            remedy=f"see {ServiceFiles.of(standby, vm.name).log} there, and start again",
        )
    waiting = directory.qemu(names[-1].removeprefix(QEMU_PREFIX))
    here, there = await _machine(vm.host, vm.qemu.files), await _machine(standby, waiting)
    if found := differences(here, there):
        raise OperationFailedError(
            f"the QEMU on {standby.name} is a different machine",
            why="; ".join(found),
            remedy="use the same QEMU on both hosts, or a machine type and CPU that both support",
        )


async def _machine(host: Host, files: QemuDir) -> GuestMachine:
    async with session(await host.connect(files.onlooker), files.vm_name) as monitor:
        return await describe(monitor)


async def _until_protected(vm: Vm, files: ServiceFiles, service: ProcessId) -> ReplicaStatus:
    while True:
        with suppress(HostDownError):  # it does not listen yet, or has ended
            status = await ask(vm.host, files, "status")
            if status.state == PROTECTED and _second_path(status) != WAITING:
                return status
        if not await vm.host.is_alive(service):
            ended = await last_status(vm.host, files)
            why, remedy = last_error(await vm.host.read_text(files.log) or "")
            raise OperationFailedError(
                f"'{vm.name}' could not be protected",
                why=ended.why or "-" if ended else why or "its service ended",
                remedy=f"{remedy or 'fix that'}; the VM keeps running where it was, unprotected",
            )
        await asyncio.sleep(POLL_S)


def _second_path(status: ReplicaStatus) -> str:
    """Its state; a service of another version may not report it."""
    return (status.paths or {}).get(SECOND, NONE)


def _unheard(status: ReplicaStatus) -> list[str]:
    """The warning about a second path that was configured and is not heard."""
    if _second_path(status) in (HEARD, NONE):
        return []
    here, *_, there = (status.path_addresses or {}).get(SECOND) or ("?", "?")
    return [
        f"no heartbeats arrive from {there} at {here}, or none return (UDP): primary and standby "
        "hear each other over the connection only"
    ]


def _slowed(status: ReplicaStatus) -> list[str]:
    """The warning about a guest that writes faster than the link takes, or nearly so."""
    writes = status.written_bytes_per_s or 0
    takes = status.link_bytes_per_s or 0
    slowed, stops = status.slowed_percent or 0, "by pauses of up to a tenth of a second"
    if not (slowed or (takes and writes > NEAR * takes)):
        return []
    reason = "the guest writes faster than the link transfers"
    if takes and writes > NEAR * takes:
        reason = f"the guest writes {format_size(writes)}/s, and the link transfers "
        reason += f"{format_size(takes)}/s of it"
    now = f", now for {slowed} % of its time" if slowed else ""
    return [
        f"{reason}: it is throttled to that {stops}{now}, and its output is delayed; see "
        "`vmckpt replicate status`"
    ]


def last_error(log: str) -> tuple[str, str]:
    """Why a service ended, from its log, and what to do; after any other end, its last words."""
    lines = [line.strip() for line in log.strip().splitlines()][-3:]
    labels = ("error: ", "why: ", "do: ")
    if [line[: len(label)] for line, label in zip(lines, labels, strict=False)] != [*labels]:
        return "; ".join(lines), ""
    what, why, do = (line[len(label) :].strip() for line, label in zip(lines, labels, strict=True))
    return f"{what}: {why}", do


async def _undo(primary: Host, ours: ServiceFiles, standby: Host, theirs: ServiceFiles) -> None:
    """End both services, the primary's in good order: the guest runs, its output is released.

    Once nothing is left of the standby, the VM needs no arbiter, which may be gone for good.
    """
    name, is_over = ours.path.name, False
    home = vm_dir(primary.state_dir, name)
    with suppress(VmckptError):  # the earlier failure says more
        # Repeatedly: it may not listen yet.
        await until_gone(primary, name, lambda: ask(primary, ours, "stop"))
        await until_recovered(primary, name)  # after a kill, see `replicate/recovery.py`
        if not await primary.exists(home.undefined):  # else they have a domain's only definition
            await primary.remove(ours.path)
        is_over = True
    with suppress(VmckptError):
        # Its primary may never have connected to it.
        await until_gone(standby, name, lambda: ask(standby, theirs, DISMISS))
        await end_waiting(standby, name)
        if await _took_over(standby, name):
            return  # of a primary that has died: its files name the arbiter
        await settle_copies(standby, theirs, CopiesFate.UNDO)
        await standby.remove(theirs.path)
        await commit_overlays_on(name, (primary, standby))
        if is_over:
            await primary.remove(home.claim)
            await return_to_libvirt(primary, name, (primary, standby))
            await primary.remove(ours.path)


async def _is_undefined(vm: Vm) -> bool:
    """Whether a domain is this home's only, and its libvirt has no definition of it; a host that
    does not answer does not say.
    """
    with suppress(HostDownError):
        is_left = await vm.host.exists(vm.directory.claim)
        return not is_left and await vm.host.exists(vm.directory.undefined)
    return False


def _not_returned(vm: Vm, exc: VmckptError) -> OperationFailedError:
    return OperationFailedError(
        f"'{vm.name}' is not protected, and libvirt on {vm.host.name} has no definition of it",
        why=f"libvirt did not take that back when the start failed ({exc.what}: {exc.why})",
        remedy="see that libvirtd runs there, then return the definition: "
        f"vmckpt replicate stop {vm.name}",
    )


async def _took_over(standby: Host, name: str) -> bool:
    """Whether the VM is, or was, at home with a standby that has ended."""
    ended = await last_status(standby, ServiceFiles.of(standby, name))
    has_word = ended is not None and ended.state == PROMOTED
    return has_word or await read_home(standby, name) is not None
