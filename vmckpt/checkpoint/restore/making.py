"""The record of a restore or fork, written before anything is created: `vms/NAME/restore.json`.

Its process may be killed. Until `vm.json` names the new QEMU, recovery removes everything; from
then on everything belongs to the VM, and recovery resumes the guest.

Recovery may come late, after a power cut: by then another file may have a new file's name, or the
VM may have been run from it. So a new file is created under another name, its proof, which stays
beside its own until the commit: only what still has both is removed.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vmckpt.errors import VmckptError
from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.state.durable import rename_durably, sync_directory
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import PROOF_SUFFIX, vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import end_qemu


@dataclass(frozen=True, slots=True)
class PendingQemu:
    """A QEMU of a VM in the making, and its files.

    `made` belong to the VM once committed; before, they are removed; `proofs` are their other names
    (an older vmckpt made none). `renames` are the disks' new contents and their final names.
    `was_paused`: the guest of the VM to be replaced; undone, it stays so.
    """

    qemu_id: str
    spec: str
    made: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    proofs: tuple[str, ...] = ()
    was_paused: bool = False


def making(
    vm: Vm,
    made: Iterable[Path] = (),
    renames: Iterable[tuple[Path, Path]] = (),
    *,
    was_paused: bool = False,
) -> PendingQemu:
    """The record of a VM in the making, with its new files and their proofs."""
    made, qemu_id = tuple(made), vm.qemu.files.qemu_id
    return PendingQemu(
        qemu_id,
        vm.spec.text,
        tuple(map(str, made)),
        tuple((str(new), str(path)) for new, path in renames),
        tuple(str(proof_of(path, qemu_id)) for path in made),
        was_paused,
    )


def proof_of(path: Path, qemu_id: str) -> Path:
    """The name under which the new file at `path` is created."""
    return path.with_name(f"{path.name}{PROOF_SUFFIX}{qemu_id}")


def take_name(proof: Path, path: Path) -> None:
    """Give the new file its own name, too. Blocking. Raises FileExistsError, OSError."""
    try:
        os.link(proof, path)
    except OSError as exc:
        if exc.errno not in _NO_LINKS:
            raise
        # The file system has no hard links: after a crash the file stays.
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from exc
        proof.rename(path)
    sync_directory(path.parent)


_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
_SCHEMA = Schema(
    PendingQemu,
    "it lists what a restore of '{directory.name}' that was interrupted was making: see "
    "that no QEMU of it runs there, remove images that only the restore made, and remove "
    "the file",
)


async def write_down(vm: Vm, begun: PendingQemu) -> None:
    """Write the record before the first file is created. Raises StorageError."""
    await save_to(vm.host, vm.directory.restoring, _SCHEMA, begun)


async def committed(vm: Vm, *works: Callable[[], Awaitable[None]]) -> list[str]:
    """Do what follows a commit; returns what could not be done, in words.

    The VM was restored all the same, also on a full disk: the next command on it settles the rest.
    """
    left = list[str]()
    for work in works:
        try:
            await work()
        except VmckptError as exc:
            left.append(f"left for the next command on '{vm.name}': {exc.what}: {exc.why}")
    return left


async def stays_paused(host: Host, name: str) -> bool:
    """Whether the guest was paused before an in-place restore of its VM that is not committed.

    Call it before `settle`. Raises StorageError.
    """
    begun = await load_from(host, vm_dir(host.state_dir, name).restoring, _SCHEMA)
    now = await read_vm(host, name)
    if begun is None or now is None:
        return False
    return begun.was_paused and now.qemu.files.qemu_id != begun.qemu_id


async def settle(host: Host, name: str) -> None:
    """Finish what was begun for a VM if its `vm.json` names it, else undo it.

    Runs on that host; the caller holds the VM's lock. Raises OperationFailedError, StorageError.
    """
    directory = vm_dir(host.state_dir, name)
    begun = await load_from(host, directory.restoring, _SCHEMA)
    if begun is None:
        return
    now = await read_vm(host, name)
    if now is not None and now.qemu.files.qemu_id == begun.qemu_id:
        for made, path in begun.renames:
            await in_thread(partial(rename_durably, Path(made), Path(path).name))
        for proof in begun.proofs:
            await host.remove(Path(proof))
        await host.write_text(directory.spec, begun.spec)
        await host.remove(directory.restoring)
        return
    spec = parse_spec(begun.spec, str(directory.restoring), directory.path)
    await end_qemu(host, spec.ram_dir, directory.qemu(begun.qemu_id))
    await _remove_made(host, begun, _files_of(now))
    for made, _ in begun.renames:
        await host.remove(Path(made))
    await host.remove(directory.path if now is None else directory.restoring)


async def _remove_made(host: Host, begun: PendingQemu, kept: set[Path]) -> None:
    """Remove the new files, except `kept` ones and files that others have put in their places."""
    proofs = map(Path, begun.proofs)
    for path in map(Path, begun.made):
        proof = next(proofs, None)
        is_own = proof is None or await _is_same(host, path, proof)
        if is_own and path not in kept:
            await host.remove(path)
        if proof is not None:
            await host.remove(proof)


async def _is_same(host: Host, path: Path, proof: Path) -> bool:
    return (await host.run(["test", str(path), "-ef", str(proof)])).returncode == 0


def _files_of(vm: Vm | None) -> set[Path]:
    """The files of the VM that is there now, under whatever QEMU."""
    if vm is None:
        return set()
    return {disk.on(vm.host.state_dir) for disk in vm.spec.disks} | set(vm.spec.files)
