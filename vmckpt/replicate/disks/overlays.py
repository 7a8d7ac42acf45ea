"""Overlays for disks that both hosts share: they receive the guest's writes while it is protected.

On the primary each such disk gets an overlay of the host's own (a qcow2 file in VM/aside) over the
shared file. From then on that QEMU only reads the shared file, without locks. The standby's service
writes each epoch, once it has all of it, to the shared file, as it would to a copy. So the file is
never ahead of the memory from which a failover continues. The primary's guest does not see these
writes: its overlay has all of them and more.

When the protection has ended here, the overlay is committed to the shared file (`commit_overlays`):
only by the side that has the VM's term, and only after the standby's service has certainly ended.
So there are never two writers.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from vmckpt.epoch.guarding import guard_command, guest_paused
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, StorageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.deadman import attended
from vmckpt.hosts.processes.other_user import become
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import RecordStore
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import block, commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, session
from vmckpt.qemu.replies import QemuJob
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.disks.mirrors import MirrorSource
from vmckpt.replicate.request import REQUEST, ReplicationRequest
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.durable import rename_durably, write_durably
from vmckpt.vm.create import qemu_img
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import VmDir, lock_path, vm_dir
from vmckpt.vm.users.users import let_read, let_write

# Names in QEMU of the overlays, of the nodes below them, and of the jobs that commit them; of nodes
# that keep a disk's own while nothing else uses that: one of `-drive` goes with its last user.
LAYER, BELOW, COMMIT, KEEPER = "aside-", "below-", "fold-", "keeper-"
POLL_S, BRIEF_S = 0.05, 0.002
# The state of a mirror that an error has stopped, before and after it was ready.
STOPPED = ("paused", "standby")
# For a large disk on slow storage.
COMMIT_S = 24 * 3600.0


def request_of(text: str, path: Path) -> ReplicationRequest:
    """The replication to which the overlays belong, from the file at `path`.

    Raises OperationFailedError.
    """
    try:
        return REQUEST.decode(text, path)
    except StorageError as exc:
        raise OperationFailedError(
            f"it is unknown to which replication the overlay in {path.parent} belongs",
            why=f"{path.name} is damaged, or another version's: {exc.why}",
            remedy="install the version of vmckpt that protected the VM, and repeat the command",
        ) from exc


def _layer(directory: VmDir, number: int) -> Path:
    return directory.overlays / f"disk{number}.qcow2"


def _committed(layer: Path) -> Path:
    """The name of an overlay whose disk has all of its content, or more: it is no longer needed."""
    return layer.with_suffix(".folded")


async def add_overlays(
    monitor: Monitor, request: ReplicationRequest, vm: Vm, sources: Sequence[MirrorSource]
) -> list[MirrorSource]:
    """Make the guest write to overlays, which become the sources.

    Raises OperationFailedError, CommandRefusedError, StorageError; `commit_overlays` undoes what
    was done.
    """
    host, drives = vm.host, {drive.node: drive for drive in await block.query_drives(monitor)}
    await host.remove(
        vm.directory.overlays
    )  # not committed by a killed `commit_overlays`, and no longer needed
    write_durably(vm.directory.overlays_request, REQUEST.encode(request))
    await let_read(host, vm.qemu.files, vm.directory.overlays, ())
    found = []
    for source in sources:
        path, number = vm.spec.disks[source.number].on(host.state_dir), source.number
        layer = _layer(vm.directory, number)
        await _made(host, layer, path)
        await let_write(host, vm.qemu.files, layer)
        below = {"driver": "file", "filename": str(path), "locking": "off", "read-only": True}
        await block.blockdev_add(
            monitor,
            {"driver": "raw", "node-name": f"{BELOW}{number}", "read-only": True, "file": below},
        )
        await block.blockdev_add(
            monitor,
            {
                "driver": "qcow2",
                "node-name": f"{LAYER}{number}",
                "file": {"driver": "file", "filename": str(layer), "discard": "unmap"},
                "backing": f"{BELOW}{number}",
                "discard": "unmap",
            },
        )
        if vm.spec.adopted is not None:
            keeper = {"driver": "raw", "node-name": f"{KEEPER}{number}", "file": source.node}
            await block.blockdev_add(monitor, keeper)
        await block.set_drive(monitor, drives[source.node], f"{LAYER}{number}")
        # The other host reads what QEMU wrote before; it is not written again from here.
        await in_thread(partial(_flush, path))
        found.append(source._replace(node=f"{LAYER}{number}", is_shared=True))
    return found


def _flush(path: Path) -> None:
    try:
        with open_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            os.fdatasync(fd)
    except OSError as exc:
        raise StorageError(
            f"what was written to {path} before may not be on it",
            why=exc.strerror or str(exc),
            remedy="restore access to the shared storage",
        ) from exc


async def _made(host: Host, layer: Path, path: Path) -> None:
    create = ["create", "-q", "-f", "qcow2", "-b", str(path), "-F", "raw", str(layer)]
    done = await host.run([str(qemu_img(host)), *create])
    if done.returncode:
        raise OperationFailedError(
            f"cannot create an overlay for {path}",
            why=done.stderr.strip(),
            remedy=f"check {layer.parent} on {host.name}",
        )


async def commit_overlays(directory: Path) -> None:
    """Commit the overlays in VM/aside to the shared disks, whether the VM runs or not.

    The standby's service has ended, according to its host or the operator: the term that was left
    to it is taken back. Raises RefusedError (another holds the VM's term, or another replica may
    take over), BusyError, OperationFailedError, StorageError. After an error the overlays are
    intact.
    """
    request_file = directory / "request.json"
    if not request_file.exists():
        return  # another process has committed them meanwhile
    request = request_of(request_file.read_text(), request_file)
    host, name = request.primary, request.vm
    async with host.lock(lock_path(host.state_dir, name), owner("replicate stop")):
        vm = await read_vm(host, name)
        # Those of an earlier QEMU are of a home whose removal was cut off: they are older.
        if vm is None or vm.qemu.files.qemu_id == request.qemu_id:
            await _have_term(request)
            await _commit(request, vm)
        await host.remove(request_file)  # first: without it there are no overlays
        await host.remove(directory)


async def _commit(request: ReplicationRequest, vm: Vm | None) -> None:
    host, name = request.primary, request.vm
    if vm is not None and await vm.is_alive():
        async with session(await host.connect(vm.qemu.files.operator), name) as monitor:
            for disk in request.disks:
                await _commit_running(monitor, vm, disk.number)
        return
    home = vm_dir(host.state_dir, name)
    for disk in request.disks:
        if await host.exists(layer := _layer(home, disk.number)):
            await _commit_offline(host, layer)


async def _have_term(request: ReplicationRequest) -> None:
    """Require that no other host has the guest or gets it: then the old primary's writes are void.

    An arbiter that is gone, or has no record, is not needed if it recorded all of this before. What
    the standby may have had of the guest ended with its service. The overlay over the epochs on the
    disk equals the disk of a VM whose QEMU has died: nothing that was flushed is missing.
    """
    store, us = open_arbiter(request.options), f"{request.primary.name}/"
    standby = request.replica
    is_settled = await _is_settled(request)
    try:
        found = await store.read(request.vm)
    except (HostDownError, StorageError):
        if not is_settled:
            raise
        found = None
    record = None if found is None else found.record
    if record is None and is_settled:
        return
    is_ours = record is not None and record.holder.startswith(us)
    if record is not None and is_ours and record.in_sync is None:
        return
    # It never took over, or reported that it could not: one that has taken over gives nothing up.
    if record is not None and (
        (is_ours and record.in_sync == standby)
        or (request.is_standbys(record.holder) and record.released)
    ):
        await _take_back(store, request, record)
        return
    reason = "there is no record of the VM"
    if record is not None:
        reason = f"{record.holder} has its term, and {record.in_sync or 'no standby'} may take over"
    raise RefusedError(
        f"what '{request.vm}' wrote on {request.primary.name} must not be written to its disks",
        why=f"the arbiter says: {reason}",
        remedy="see `vmckpt vm list` where the VM runs, and `vmckpt replicate status`",
    )


async def _is_settled(request: ReplicationRequest) -> bool:
    """Whether the VM is at home without a claim (`replicate/primary/claim.py`): ask no arbiter."""
    home = vm_dir(request.primary.state_dir, request.vm)
    is_claimed = await request.primary.exists(home.claim)
    return not is_claimed and await read_vm(request.primary, request.vm) is not None


async def _take_back(store: RecordStore, request: ReplicationRequest, record: LeaseRecord) -> None:
    name = f"{request.primary.name}/{request.run}/fold"
    claimant = Claimant(name, succeeds=record.holder)
    lease = Lease(store, request.vm, claimant, LeaseSpan(request.options.lease_s))
    try:
        await lease.take()
    except RefusedError:  # the lease of a primary that could not give it up may last this long
        await asyncio.sleep(record.span.claimant_s)
        await lease.take()


async def _commit_running(monitor: Monitor, vm: Vm, number: int) -> None:
    """Commit an overlay while the VM runs. Safe if killed at any moment.

    The overlay keeps its name while it has content that the disk lacks. When the mirror is ready
    both are identical, and the guest is paused for the switch.
    """
    layer, below, job = f"{LAYER}{number}", f"{BELOW}{number}", f"{COMMIT}{number}"
    disk, path = vm.nodes[number], _layer(vm.directory, number)
    drives = {drive.node for drive in await block.query_drives(monitor)}
    jobs = {one.id for one in await commands.query_jobs(monitor)}
    if layer in drives and job not in jobs:
        await _rename(_committed(path), path)  # left by a mirror that broke
        await block.blockdev_mirror(monitor, job, layer, disk, 0, write_through=True, sync="top")
    while one := await _job(monitor, job):
        if one.status in STOPPED and not one.error:  # its error, if any, is known again by then
            with suppress(CommandRefusedError):
                await block.block_job_resume(monitor, job)
        if not one.concluded and (one.error or one.status == "ready"):
            async with _guest_paused(monitor, vm):
                if not one.error:
                    await in_thread(partial(_flush, vm.spec.disks[number].on(vm.host.state_dir)))
                    await _rename(path, _committed(path))
                one = await _ended(monitor, one)
                if one.error:  # before the guest writes to the overlay alone
                    await _rename(_committed(path), path)
        if one.concluded:
            if one.error:
                await _rename(_committed(path), path)
            await commands.job_dismiss(monitor, job)
            if one.error:
                raise OperationFailedError(
                    f"the overlay could not be committed to {disk}",
                    why=one.error,
                    remedy="restore access to the shared storage, and repeat the command; the VM "
                    "keeps running",
                )
        await asyncio.sleep(POLL_S)
    nodes = {one.node_name for one in await commands.query_named_block_nodes(monitor)}
    for node in (layer, below, f"{KEEPER}{number}"):
        if node in nodes:
            await block.blockdev_del(monitor, node)


@asynccontextmanager
async def _guest_paused(monitor: Monitor, vm: Vm) -> AsyncIterator[None]:
    """Pause the guest: QEMU 7.2 crashes on a write that arrives while a disk replaces a mirror."""
    log = vm.directory.overlays / "guard.log"
    with attended(guard_command(vm.qemu), log) as tell:
        async with guest_paused(monitor, tell):
            yield


async def _job(monitor: Monitor, name: str) -> QemuJob | None:
    return next((job for job in await block.query_mirrors(monitor, name) if job.id == name), None)


async def _ended(monitor: Monitor, job: QemuJob) -> QemuJob:
    """End a mirror that is ready, or that an error has stopped, and wait for its end.

    Raises MonitorLostError.
    """
    error = job.error
    while not job.concluded:
        with suppress(CommandRefusedError):  # it is already ending
            if error:
                await block.block_job_cancel(monitor, job.id, force=True)
            else:
                await block.job_complete(monitor, job.id)
        await asyncio.sleep(BRIEF_S)
        job = await _job(monitor, job.id) or job
        error = error or job.error
    return job._replace(error=error)


async def _rename(path: Path, other: Path) -> None:
    await in_thread(partial(rename_durably, path, other.name))


async def _commit_offline(host: Host, layer: Path) -> None:
    """Commit an overlay while the VM is off. Idempotent."""
    argv = [str(qemu_img(host)), "commit", "-q", "-f", "qcow2", str(layer)]
    # As the user that wrote the overlay, whatever --vm-uids is now: the overlay itself names the
    # file to which it is committed.
    if (uid := layer.stat().st_uid) != await host.user_id():
        argv = become(uid, (uid,), argv)
    done = await host.run(argv, COMMIT_S)
    if done.returncode:
        raise OperationFailedError(
            f"the overlay {layer} could not be committed to its disk",
            why=done.stderr.strip(),
            remedy="restore access to the shared storage, and repeat the command",
        )
