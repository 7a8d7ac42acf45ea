"""Removes what a replication leaves on a host that no longer needs it."""

from contextlib import suppress

from vmckpt.deadlines import retry
from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    OutcomeUnknownError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.replicate.primary.claim import was_given_term, was_protected_by
from vmckpt.replicate.request import REQUEST, ServiceFiles, release_mark
from vmckpt.state.documents import load_from
from vmckpt.vm.disks.superseded import note_superseded
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import remove_home, remove_qemu_files, sweep

POLL_S, BUSY_S = 0.1, 30.0


class StaleHomeStaysError(OperationFailedError):
    """A stale home on `host` was not removed, or its QEMU has not ended after SIGKILL: its storage
    fails, which may be why the VM was taken over. The guest never runs there again.
    """

    def __init__(self, host: Host, name: str, exc: VmckptError) -> None:
        super().__init__(
            f"what {host.name} still has of '{name}' cannot be removed",
            why=f"{exc.what}: {exc.why}",
            remedy=f"repair its storage, or take it out: vmckpt host rm {host.name}",
        )
        self.host_name = host.name


async def remove_stale_home(host: Host, name: str, qemu_id: str) -> None:
    """The guest continues elsewhere, in a higher term: end and remove what `host` has of it.

    Only what ran in the QEMU that was taken over from: the VM may have come back since. Its images
    stay, recorded as leftovers: the next protection reuses them, a migration replaces them. Raises
    HostDownError, StaleHomeStaysError.
    """
    stale = await read_home(host, name)
    if stale is None or stale.qemu.files.qemu_id != qemu_id:
        return
    try:
        await _end_and_remove(host, stale)
    except (StorageError, OperationFailedError) as exc:
        raise StaleHomeStaysError(host, name, exc) from exc


async def _end_and_remove(host: Host, stale: Vm) -> None:
    await end_stale(stale)
    if not await _is_there(host, stale):
        return
    is_noted = await _noted(host, stale)
    await remove_qemu_files(host, stale.spec.ram_dir, stale.qemu.files)
    if not await _is_there(host, stale):
        return
    await remove_home(host, stale.directory)
    if not is_noted:
        await _noted(host, stale)


async def _is_there(host: Host, stale: Vm) -> bool:
    """Whether this home still exists.

    While this command was suspended another may have removed it, and the VM may be back.
    """
    now = await read_home(host, stale.name)
    return now is not None and now.qemu.files.qemu_id == stale.qemu.files.qemu_id


async def _noted(host: Host, stale: Vm) -> bool:
    """Record its images. A full disk, the very reason for the takeover, does not keep the home."""
    try:
        await note_superseded(host, stale)
    except StorageError:
        return False
    return True


async def remove_taken_over(host: Host, name: str, qemu_id: str, standby: Host) -> bool:
    """Remove a home on the word of the standby's host. Raises as `remove_stale_home`.

    False: it stays. Its own host's records say that it was not protected by that standby, or that
    the arbiter gave it the term since, or is asked to; a takeover without the arbiter counts all
    the same.
    """
    stale = await read_home(host, name)
    if stale is None or stale.qemu.files.qemu_id != qemu_id:
        return True
    if not await was_protected_by(stale, standby.name) or await _is_given_term(stale):
        return False
    took_alone = vm_dir(standby.state_dir, name).gone_replica
    if await was_given_term(stale) and not await standby.exists(took_alone):
        return False
    await remove_stale_home(host, name, qemu_id)
    return True


async def _is_given_term(vm: Vm) -> bool:
    """Whether a `stop --standby-is-dead` is just doing so: it may have the term already, and has
    not recorded it. If the kernel does not say, it is.
    """
    mark = release_mark(ServiceFiles.of(vm.host, vm.name).path, standby_is_dead=True)
    try:
        return bool(await vm.host.find_processes(mark))
    except OutcomeUnknownError:
        return True


async def end_stale(vm: Vm) -> None:
    """End the QEMU of a guest that continues elsewhere. Raises OperationFailedError."""
    if not await vm.host.stop_for_good(vm.qemu.process):
        raise OperationFailedError(
            f"QEMU {vm.qemu.process.pid} on {vm.host.name} does not end",
            why=f"'{vm.name}' continues elsewhere, but its process here survived SIGKILL",
            remedy="it is stuck in the kernel: check its storage",
        )


async def remove_replaced(vm: Vm, host: Host) -> None:
    """Remove what `host` still has of a VM that was taken over from it. Raises as above."""
    if vm.qemu.replaces is not None and vm.qemu.replaces.host == host.name:
        await remove_taken_over(host, vm.name, vm.qemu.replaces.qemu_id, vm.host)


async def _domain_awaited(host: Host, name: str) -> str | None:
    """The UUID of the domain for which a standby waited there; None: it was no domain."""
    with suppress(StorageError):  # of another version
        request = await load_from(host, ServiceFiles.of(host, name).request, REQUEST)
        if request is not None and request.domain is not None and request.standby.name == host.name:
            return request.domain.uuid
    return None


async def end_waiting(host: Host, name: str) -> None:
    """End the QEMU that a standby's service left waiting when it was killed.

    If it is a VM's home by now, it is left alone. Raises BusyError, HostDownError, StorageError.
    """
    directory = vm_dir(host.state_dir, name)

    async def end() -> None:
        async with host.lock(lock_path(host.state_dir, name), owner("replicate stop")):
            text = await host.read_text(directory.spec)
            if text is None or await read_home(host, name) is not None:
                return  # there is none, or the VM is at home there
            if (uuid := await _domain_awaited(host, name)) is not None:
                from vmckpt.replicate.domains.waiting import end_waiting_domain

                await end_waiting_domain(host, name, uuid)
            spec = parse_spec(text, str(directory.spec), directory.path)
            await sweep(host, spec, directory, None)
            await host.remove(directory.path)

    await retry(end, BusyError, every_s=POLL_S, within_s=BUSY_S)
