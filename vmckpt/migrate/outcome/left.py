"""Remains of a migration on an end that does not answer, while the other has the guest.

STATE/left/VM.RUN.json on the end that has the guest is that run's journal. On the source it says
that the destination never runs, whatever has arrived there; on the destination, that the VM is at
home there. The remains on the other end are never taken for the VM: they are removed when its host
answers again.
"""

from collections.abc import Callable
from pathlib import Path

from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.hosts.host import Host
from vmckpt.migrate.outcome.ends import End, Pair, discard
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.steps.disk_files import hand_over_files, remove_files
from vmckpt.migrate.steps.handover import release
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import left_file, vm_dir
from vmckpt.vm.start import end_qemu


async def keep_at(journal: MigrationJournal, host: Host) -> None:
    """Record durably that this end has the guest.

    Raises StorageError, HostDownError.
    """
    await journal.write_to(host, _path(journal, host))


async def is_kept_at(journal: MigrationJournal, host: Host) -> bool:
    """Whether it was decided, while the other end was silent, that this end has the guest."""
    return await host.exists(_path(journal, host))


async def leave(journal: MigrationJournal, host: Host) -> None:
    """The guest is here. Cleanup on the unreachable host is deferred."""
    await keep_at(journal, host)
    await journal.remove((host,))


async def forget(journal: MigrationJournal, source: Host, destination: Host) -> None:
    """Remove the journal: the migration is done or undone, on both hosts."""
    await journal.remove((source, destination))
    for host in (source, destination):
        await host.remove(_path(journal, host))


async def undo_destination(pair: Pair) -> None:
    """The source has the guest: remove everything of the migration from the destination."""
    await discard(pair.destination, pair.ram_dir)
    await pair.destination.host.remove(
        vm_dir(pair.destination.host.state_dir, pair.destination.files.vm_name).path
    )


async def undo_or_leave(
    pair: Pair, journal: MigrationJournal, note: Callable[[str], None], *, may_leave: bool
) -> bool:
    """The source has the guest: undo the destination, or defer that if its host is silent.

    Returns whether it was undone. Raises HostDownError if the host is silent and `may_leave` is not
    set.
    """
    try:
        await undo_destination(pair)
        await remove_files(pair.destination.host, journal.run, journal.disks)
    except HostDownError as exc:
        if not may_leave:
            raise
        await leave(journal, pair.source.host)
        note(f"leftovers on {pair.destination.host.name} are removed when it answers: {exc}")
        return False
    return True


async def clear_destination(journal: MigrationJournal, source: Host, destination: Host) -> None:
    """Remove remains on the destination. The caller holds both locks.

    Anything else of a VM of that name stays. Raises OutcomeUnknownError if it is the VM, and what
    the hosts raise.
    """
    directory = vm_dir(destination.state_dir, journal.vm)
    home = await read_vm(destination, journal.vm)
    if home is not None and home.qemu.files.qemu_id == journal.target_qemu:
        raise _contradiction(journal, source, destination)
    await end_qemu(destination, Path(journal.ram_dir), directory.qemu(journal.target_qemu))
    await remove_files(destination, journal.run, journal.disks)
    found = await MigrationJournal.read(destination, journal.vm)
    if found is not None and found.run == journal.run:
        await journal.remove((destination,))
    if set(await destination.list_dir(directory.path)) <= {
        directory.spec.name,
        directory.identity.name,
        directory.point.name,
        directory.gone_replica.name,
    }:
        await destination.remove(directory.path)
    await source.remove(_path(journal, source))


async def clear_source(
    journal: MigrationJournal, source: Host, destination: Host, note: Callable[[str], None]
) -> None:
    """Remove remains on the source, with its copied disks. The caller holds both locks.

    Raises OutcomeUnknownError if another QEMU is the VM there, and what the hosts raise.
    """
    home = await read_vm(source, journal.vm)
    if home is not None and home.qemu.files.qemu_id != journal.source_qemu:
        raise _contradiction(journal, destination, source)
    await hand_over_files(source, destination, journal.run, journal.disks, note)
    files = vm_dir(source.state_dir, journal.vm).qemu(journal.source_qemu)
    await release(End(source, files), Path(journal.ram_dir))
    await destination.remove(_path(journal, destination))


def _contradiction(journal: MigrationJournal, owner: Host, other: Host) -> OutcomeUnknownError:
    path = _path(journal, owner)
    return OutcomeUnknownError(
        f"'{journal.vm}' is at home on {other.name}, where it cannot be",
        why=f"{path} on {owner.name} says that it stayed there when run {journal.run} ended",
        remedy=f"see on both where it runs, end the other QEMU, and remove {path}",
    )


def _path(journal: MigrationJournal, host: Host) -> Path:
    return host.state_dir / "left" / left_file(journal.vm, journal.run)
