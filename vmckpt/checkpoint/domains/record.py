"""The record of a domain's restore, written before anything is created or replaced.

Its process may be killed. While libvirt has not started the new guest, recovery undoes everything;
afterwards it finishes. New images are created under another name, their proof, which for a new
domain stays beside their own until the end: only what still has both is removed.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path

from vmckpt.checkpoint.domains.loading.missing import see_to_memory
from vmckpt.checkpoint.domains.settle import AGAIN_S
from vmckpt.checkpoint.restore.making import proof_of
from vmckpt.deadlines import retry
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.state.durable import rename_durably, sync_directory
from vmckpt.vm.disks.backing import base_of_its_own
from vmckpt.vm.disks.images import remove_own
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState, RunningReason
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.loading.image_pipe import release
from vmckpt.vm.domains.running import domain_dir
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import IN_MEMORY, QemuDir, lock_path

_OLD = ".vmckpt-old-"
# The first bytes of a save image that libvirt has not finished writing.
_INCOMPLETE = b"LibvirtQemudPart"


class Phase(StrEnum):
    """How far a restore is.

    SAVING: libvirt saves the old guest; SWITCHING: it has; RUNNING: it has started the new one,
    whatever became of that since.
    """

    MAKING = "making"
    SAVING = "saving"
    SWITCHING = "switching"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class PendingDomain:
    """A domain in the making. `images` are its disks'.

    `replaces`: the domain is there already; `was_active`: with a guest, which libvirt saves first.
    """

    name: str
    uuid: str
    id: str
    images: tuple[str, ...]
    replaces: bool
    was_active: bool
    definition: str
    phase: Phase = Phase.MAKING

    def at(self, phase: Phase) -> "PendingDomain":
        """The same, that far."""
        return replace(self, phase=phase)

    def proofs(self) -> list[tuple[Path, Path, Path]]:
        """Of each image: its path, the name under which the new one is created, and the name that
        the old one keeps until the end.
        """
        paths = list(map(Path, self.images))
        olds = [path.with_name(f"{path.name}{_OLD}{self.id}") for path in paths]
        return [(path, proof_of(path, self.id), old) for path, old in zip(paths, olds, strict=True)]

    def put_in_place(self) -> None:
        """Give the new images their names; the old ones stay beside them. Blocking."""
        for path, proof, old in self.proofs():
            status = path.stat()
            os.link(path, old)
            os.chown(proof, status.st_uid, status.st_gid)
            proof.chmod(status.st_mode & 0o7777)
            sync_directory(path.parent)
            rename_durably(proof, path.name)

    def are_in_place(self) -> bool:
        """Whether the domain may have new images. Blocking."""
        return any(old.exists() for _, _, old in self.proofs()) or not self.images

    def put_back(self) -> None:
        """Undo any part of `put_in_place`. Blocking."""
        for path, _, old in self.proofs():
            if old.exists():
                rename_durably(old, path.name)
                old.unlink(missing_ok=True)  # both were still the same file, which rename leaves


_SCHEMA = Schema(
    PendingDomain,
    "it lists what a restore of a domain that was interrupted was making: see whether the domain "
    "runs (virsh list --all), remove images that only the restore made, and remove the file",
)


async def write_down(host: Host, pending: PendingDomain) -> None:
    """Write the record. Raises StorageError."""
    directory = domain_dir(host, pending.uuid)
    await host.make_dir(directory.path)
    await save_to(host, directory.restoring, _SCHEMA, pending)


def files_of(host: Host, uuid: str, restore_id: str) -> QemuDir:
    """The files of a restore, apart from those of a checkpoint of the same domain (`settle.py`)."""
    return QemuDir(domain_dir(host, uuid).path / f"restore-{restore_id}", uuid, restore_id)


def old_of(host: Host, pending: PendingDomain) -> Path:
    """The file of the old guest, which libvirt writes."""
    return files_of(host, pending.uuid, pending.id).path / "old-guest.save"


def image_of(host: Host, pending: PendingDomain) -> Path:
    """The pipe that libvirt reads the new guest from."""
    return files_of(host, pending.uuid, pending.id).path / "image"


async def settle_all(host: Host, within_s: float = 0.0) -> None:
    """Settle interrupted restores of all domains of this machine that nothing works on.

    What libvirt still saves or loads is waited for, and a libvirtd that does not answer, and memory
    that is still loaded.
    """
    for uuid in await host.list_dir(domain_dir(host, "-").path.parent):
        with suppress(VmckptError):  # the next restore tries again
            await settle_domain(host, uuid, within_s)


async def cut_off_on(host: Host) -> list[str]:
    """The UUIDs of domains of the host whose restore was interrupted, and is not settled yet.

    libvirt is not asked: it may wait for such a restore. Raises HostDownError, StorageError.
    """
    found = []
    for uuid in await host.list_dir(domain_dir(host, "-").path.parent):
        pending = await load_from(host, domain_dir(host, uuid).restoring, _SCHEMA)
        if pending and await host.lock_owner(lock_path(host.state_dir, pending.name)) is None:
            found.append(uuid)
    return found


async def settle_domain(host: Host, uuid: str, within_s: float) -> None:
    """As `settle_all`, for one domain. Raises as `settle_restore` and `see_to_memory`."""
    settle_it = partial(_settle_unheld, host, uuid)
    try:
        if within_s:  # libvirt waits for a QEMU that waits for pages
            await see_to_memory(host, uuid)
    finally:
        await retry(settle_it, (BusyError, HostDownError), every_s=AGAIN_S, within_s=within_s)


async def _settle_unheld(host: Host, uuid: str) -> None:
    pending = await load_from(host, domain_dir(host, uuid).restoring, _SCHEMA)
    if pending is not None:
        lock = lock_path(host.state_dir, pending.name)
        async with host.lock(lock, owner("checkpoint restore")), libvirtd(host) as session:
            await settle_restore(host, uuid, session)


async def settle_restore(host: Host, uuid: str, session: Libvirtd) -> None:
    """Finish or undo an interrupted restore of the domain. The caller holds its lock.

    Raises BusyError: libvirt still works on it; OperationFailedError, HostDownError.
    """
    pending = await load_from(host, domain_dir(host, uuid).restoring, _SCHEMA)
    if pending is None:
        return
    # A libvirt that waits for data from the dead restore does not answer queries about the domain.
    release(image_of(host, pending))
    domain = await _found(session, host, uuid)
    is_active = domain is not None and domain.is_active
    if domain and is_active and await _is_worked_on(domain, session):
        raise BusyError(
            f"libvirt still works on '{pending.name}'",
            why="a restore of it was interrupted, and libvirt saves or loads its memory",
            remedy="wait until that has ended, and try again",
        )
    is_new = not pending.replaces
    if pending.phase is Phase.SWITCHING:  # else the old guest has its disks, and may run again
        is_new = await in_thread(pending.are_in_place)
    if pending.phase is Phase.RUNNING or (domain and is_new and _was_restored(domain)):
        await finished(host, pending, session)
    elif is_active and is_new:
        raise _started_otherwise(host, pending)
    else:
        await undone(host, pending, session)


async def _is_worked_on(domain: Domain, session: Libvirtd) -> bool:
    """Whether libvirt saves or loads its memory, or has just ended doing so."""
    try:
        return domain.is_arriving or (await session.job(domain.uuid)).active
    except LibvirtRefusedError:  # it was active a moment ago, and is not now
        return True


def _was_restored(domain: Domain) -> bool:
    """Whether it has been running since libvirt restored it."""
    seen = domain.seen
    return seen.state is DomainState.RUNNING and seen.reason == RunningReason.RESTORED


def _started_otherwise(host: Host, pending: PendingDomain) -> OperationFailedError:
    """It was booted, say, while its images were being replaced: which ones it has is not known."""
    record = domain_dir(host, pending.uuid).restoring
    kept = ", ".join(str(old) for _, _, old in pending.proofs())
    return OperationFailedError(
        f"'{pending.name}' runs, and its restore did not start it",
        why="a restore of it was interrupted; something else has started it since",
        remedy=f"see on {host.name} whether it has the right disks; its former ones are {kept}, "
        f"its former memory {old_of(host, pending)}. If all is right, remove them and {record}",
    )


async def _found(session: Libvirtd, host: Host, uuid: str) -> Domain | None:
    seen = await session.find(uuid)
    return None if seen is None else as_domain(host, seen)


async def finished(host: Host, pending: PendingDomain, session: Libvirtd) -> None:
    """The new guest runs: define its domain, and remove everything else."""
    if pending.definition:
        await session.define(pending.definition)
    await host.remove(old_of(host, pending))  # also makes room for the record, on a full disk
    if pending.phase is not Phase.RUNNING:
        with suppress(StorageError):
            await write_down(host, pending.at(Phase.RUNNING))
    for path, proof, old in pending.proofs():
        base = await base_of_its_own(host, path, old) if pending.replaces else None
        await host.remove(proof)
        await host.remove(old)
        if base is not None:
            await remove_own(host, [base])
    await _forget(host, pending)


async def undone(host: Host, pending: PendingDomain, session: Libvirtd) -> None:
    """The new guest does not run: nothing of it remains, and the old one continues.

    Raises OperationFailedError: libvirt does not start the old guest; its memory is kept.
    """
    if pending.replaces and pending.phase is not Phase.MAKING:
        await in_thread(partial(pending.put_back))
        old = old_of(host, pending)
        domain = await _found(session, host, pending.uuid)
        is_off = domain is None or not domain.is_active
        # If the guest powered off before it was saved, there is no file; a power cut leaves half.
        if pending.was_active and is_off and await _is_complete(host, old):
            try:
                await session.restore(old)
            except VmckptError as exc:
                raise OperationFailedError(
                    f"'{pending.name}' is off: its guest was not started again",
                    why=f"{exc.what}: {exc.why}",
                    remedy=f"its disks and memory are intact; on {host.name}: virsh restore {old}",
                ) from exc
    for path, proof, _ in pending.proofs():
        is_ours = await host.run(["test", str(path), "-ef", str(proof)])
        if not pending.replaces and is_ours.returncode == 0:
            await host.remove(path)
        await host.remove(proof)
    await _forget(host, pending)


async def _is_complete(host: Host, save_image: Path) -> bool:
    """Whether the file is there, and libvirt has written all of it."""
    head = await host.read_from(save_image, 0)
    return bool(head.strip(b"\0")) and not head.startswith(_INCOMPLETE)


async def _forget(host: Host, pending: PendingDomain) -> None:
    """Remove the record, last, and the files beside it."""
    files = files_of(host, pending.uuid, pending.id)
    await host.remove(files.memory(IN_MEMORY))
    await host.remove(files.path)
    await host.remove(domain_dir(host, pending.uuid).restoring)
