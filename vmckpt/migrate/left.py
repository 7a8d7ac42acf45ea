"""What a migration leaves on a target that gives no answer, when its guest goes on at the source.

STATE/left/VM.RUN.json on the source is that run's journal: with it nobody lets the run's target
run, whatever has arrived there, nor takes it for the VM. What it holds is removed when its host
answers again.
"""

from collections.abc import Callable
from pathlib import Path

from vmckpt.errors import HostDownError, OutcomeUnknownError, StorageError
from vmckpt.hosts.host import Host
from vmckpt.migrate.disk_files import remove_files
from vmckpt.migrate.ends import Pair, discard
from vmckpt.migrate.journal import Journal
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import end_qemu


async def keep_at_source(journal: Journal, source: Host) -> None:
    """Its target never runs from here on: that is on the source's disk when this returns.

    Raises StorageError, HostDownError.
    """
    path = _path(journal, source)
    await journal.write_to(source, path)
    try:
        parents = path.parent, path.parent.parent
        done = await source.run(["sync", "--", *map(str, (path, *parents))])
    except OutcomeUnknownError as exc:
        raise HostDownError(exc.what, why=exc.why, remedy=exc.remedy) from exc
    if done.returncode:
        raise StorageError(
            f"cannot keep {path} on {source.name}",
            why=done.stderr.strip(),
            remedy="mend the storage of its state directory",
        )


async def is_kept_at_source(journal: Journal, source: Host) -> bool:
    """Whether it was decided that its target never runs."""
    return await source.exists(_path(journal, source))


async def leave(journal: Journal, source: Host) -> None:
    """The source has the guest, and may be worked on; what the target has is for later."""
    await keep_at_source(journal, source)
    await journal.remove((source,))


async def forget(journal: Journal, source: Host, target: Host) -> None:
    """The migration is done or undone, on both hosts."""
    await journal.remove((source, target))
    await source.remove(_path(journal, source))


async def undo_target(pair: Pair) -> None:
    """The source has the guest: nothing of the migration stays on the target."""
    await discard(pair.target, pair.ram_dir)
    await pair.target.host.remove(
        vm_dir(pair.target.host.state_dir, pair.target.files.vm_name).path
    )


async def undo_or_leave(
    pair: Pair, journal: Journal, note: Callable[[str], None], *, may_leave: bool
) -> bool:
    """The source has the guest: whether the target is undone; left if its host is silent.

    Raises HostDownError when it is and may not be left.
    """
    try:
        await undo_target(pair)
        await remove_files(pair.target.host, journal.run, journal.disks)
    except HostDownError as exc:
        if not may_leave:
            raise
        await leave(journal, pair.source.host)
        note(f"what {pair.target.host.name} has of it is removed when it answers: {exc}")
        return False
    return True


async def clear(journal: Journal, source: Host, target: Host) -> None:
    """Remove what was left on the target, for the holder of both locks.

    What else of a VM of that name is there stays. Raises OutcomeUnknownError when it is the VM, and
    what the hosts raise.
    """
    directory = vm_dir(target.state_dir, journal.vm)
    home = await read_vm(target, journal.vm)
    if home is not None and home.qemu.files.qemu_id == journal.target_qemu:
        raise OutcomeUnknownError(
            f"'{journal.vm}' is at home on {target.name}, and was on {source.name}",
            why=f"{_path(journal, source)} says that run {journal.run} left it there",
            remedy="see on both where it runs, end the other QEMU, and remove that file",
        )
    await end_qemu(target, Path(journal.ram_dir), directory.qemu(journal.target_qemu))
    await remove_files(target, journal.run, journal.disks)
    found = await Journal.read(target, journal.vm)
    if found is not None and found.run == journal.run:
        await journal.remove((target,))
    if set(await target.list_dir(directory.path)) <= {directory.spec.name, directory.point.name}:
        await target.remove(directory.path)
    await source.remove(_path(journal, source))


def _path(journal: Journal, source: Host) -> Path:
    return source.state_dir / "left" / f"{journal.vm}.{journal.run}.json"
