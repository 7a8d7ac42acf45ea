"""QEMU's internal snapshots (savevm) on qcow2: RAM and disks in one image, the VM stopped."""

import secrets
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from vmckpt.deadlines import poll
from vmckpt.epoch.disks import forget_bitmaps
from vmckpt.errors import NotFoundError, OperationFailedError, RefusedError
from vmckpt.events.types import Emit, JobProgress, unless_gone
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.preflight.finding import require
from vmckpt.preflight.passthrough import saved_whole_checks
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.plain import switch_off_capabilities
from vmckpt.qemu.replies import QemuJob, Snapshot
from vmckpt.sequence.steps import finish
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.lifecycle import held
from vmckpt.vm.record import open_monitor

POLL_S = 0.05


async def save(vm: Vm, name: str, emit: Emit) -> Snapshot:
    """Save RAM, devices and every writable disk as snapshot `name`; the VM then continues.

    Refuses, before the VM is paused, a name in use or a disk that cannot hold snapshots. Raises
    UsageError (the name), RefusedError, BusyError, OperationFailedError (nothing of the snapshot
    remains).
    """
    check_name(name, "snapshot")
    nodes = _snapshot_nodes(vm)
    require(saved_whole_checks(vm), f"'{vm.name}' cannot have snapshots")
    async with held(vm, "snapshot save") as now:
        monitor = await _open(now)
        try:
            if name in {snapshot.name for snapshot in await _snapshots(monitor, nodes)}:
                raise RefusedError(
                    f"'{vm.name}' has a snapshot '{name}' already",
                    why="QEMU would overwrite it without asking",
                    remedy=f"choose another name, or: vmckpt checkpoint rm {name} --kind internal "
                    f"--vm {vm.name}",
                )
            await switch_off_capabilities(monitor)  # left on by another migration
            job = _job_id("save")
            begin = commands.snapshot_save(monitor, job, name, nodes[0], nodes)
            await finish(_run_job(monitor, begin, job, "save", emit))
            return next(s for s in await _snapshots(monitor, nodes) if s.name == name)
        finally:
            await finish(monitor.close())


async def load(vm: Vm, name: str, emit: Emit) -> Snapshot:
    """Revert the VM to snapshot `name`: memory, devices and disks; later changes are lost.

    A VM that was running continues. A failed load leaves it stopped (its memory is half replaced)
    and says so. Raises NotFoundError, OperationFailedError, BusyError.
    """
    nodes = _snapshot_nodes(vm)
    async with held(vm, "snapshot load") as now:
        monitor = await _open(now)
        try:
            snapshot = await _find(vm, monitor, nodes, name)
            await finish(_load(vm, monitor, name, nodes, emit))
            return snapshot
        finally:
            await finish(monitor.close())


async def list_all(vm: Vm) -> list[Snapshot]:
    """The snapshots of a running VM, oldest first."""
    nodes = _snapshot_nodes(vm)
    await require_alive(vm)
    monitor = await open_monitor(vm.host, vm.qemu, vm.qemu.files.onlooker)
    try:
        found = await _snapshots(monitor, nodes)
    finally:
        await monitor.close()
    return sorted(found, key=lambda snapshot: snapshot.taken_unix_s)


async def delete(vm: Vm, name: str, emit: Emit) -> None:
    """Delete snapshot `name`. Raises NotFoundError (QEMU would ignore it silently), BusyError."""
    nodes = _snapshot_nodes(vm)
    async with held(vm, "snapshot delete") as now:
        monitor = await _open(now)
        try:
            await _find(vm, monitor, nodes, name)
            job = _job_id("delete")
            begin = commands.snapshot_delete(monitor, job, name, nodes)
            await finish(_run_job(monitor, begin, job, "delete", emit))
        finally:
            await finish(monitor.close())


async def _load(vm: Vm, monitor: Monitor, name: str, nodes: Sequence[str], emit: Emit) -> None:
    # QEMU itself stops a running VM and resumes it when all is loaded, so a process that dies
    # meanwhile does not leave it stopped. QEMU does not revert a disk with a dirty bitmap; without
    # one the next checkpoint reads the whole disk.
    await forget_bitmaps(monitor)
    await switch_off_capabilities(monitor)
    job = _job_id("load")
    begin = commands.snapshot_load(monitor, job, name, nodes[0], nodes)
    try:
        await _run_job(monitor, begin, job, "load", emit)
    except OperationFailedError as exc:
        raise OperationFailedError(
            f"'{vm.name}' is stopped: snapshot '{name}' did not load",
            why=exc.why,
            remedy=f"load another snapshot, or: vmckpt vm stop --force {vm.name} and vm start",
        ) from exc


def _snapshot_nodes(vm: Vm) -> list[str]:
    """The disks' nodes; the first one also receives the memory. Raises RefusedError with the
    reason.
    """
    why = None
    writable = [n for n, disk in enumerate(vm.spec.disks) if not disk.read_only]
    raw = [
        str(vm.spec.disks[n].on(vm.host.state_dir))
        for n in writable
        if vm.spec.disks[n].format == "raw"
    ]
    if vm.spec.firmware:
        why = f"its UEFI variable store {vm.spec.firmware.vars} is a raw image on pflash"
    elif raw:
        why = f"{', '.join(raw)} is raw, and only qcow2 holds internal snapshots"
    elif not writable:
        why = "it has no writable disk to keep the snapshot in"
    if why:
        raise RefusedError(
            f"'{vm.name}' cannot have internal snapshots",
            why=why,
            remedy="convert the disk (qemu-img convert -O qcow2), or add a small qcow2 disk",
        )
    return [vm.nodes[n] for n in writable]


async def _open(vm: Vm) -> Monitor:
    await require_alive(vm)
    return await open_monitor(vm.host, vm.qemu, vm.qemu.files.operator)


async def _snapshots(monitor: Monitor, nodes: Sequence[str]) -> list[Snapshot]:
    for node in await commands.query_named_block_nodes(monitor):
        if node.node_name == nodes[0]:
            return list(node.snapshots)
    return []


async def _find(vm: Vm, monitor: Monitor, nodes: Sequence[str], name: str) -> Snapshot:
    found = await _snapshots(monitor, nodes)
    for snapshot in found:
        if snapshot.name == name:
            return snapshot
    raise NotFoundError(
        f"'{vm.name}' has no snapshot '{name}'",
        why=f"it has: {', '.join(s.name for s in found) or 'none'}",
        remedy=f"see: vmckpt checkpoint list {vm.name} --kind internal",
    )


def _job_id(verb: str) -> str:
    return f"vmckpt-{verb}-{secrets.token_hex(4)}"


async def _run_job(
    monitor: Monitor, begin: Coroutine[Any, Any, None], job_id: str, phase: str, emit: Emit
) -> QemuJob:
    """Run a job to its end and dismiss it. Raises OperationFailedError with QEMU's reason.

    Only query-jobs has the errors: the command that starts a job always answers {}.
    """
    began_s, show = time.monotonic(), unless_gone(emit)
    await begin

    async def query() -> QemuJob:
        # QEMU does not answer while it saves or loads, however long that takes; if it dies, it
        # hangs up.
        jobs = await commands.query_jobs(monitor, timeout_s=None)
        job = next((job for job in jobs if job.id == job_id), None)
        if job is None:
            raise OperationFailedError(
                f"the {phase} job vanished",
                why="another client of QEMU dismissed it",
                remedy="list the snapshots: vmckpt checkpoint list VM --kind internal",
            )
        show(JobProgress(time.monotonic() - began_s, phase, job.done, job.total))
        return job

    job = await poll(query, lambda job: job.concluded, every_s=POLL_S)
    await commands.job_dismiss(monitor, job_id)
    if job.error:
        raise OperationFailedError(
            f"QEMU could not {phase} the snapshot", why=job.error, remedy="fix the reported cause"
        )
    return job
