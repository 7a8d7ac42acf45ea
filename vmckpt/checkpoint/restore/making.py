"""The record of a restore or fork, written before anything is created: `vms/NAME/restore.json`.

Its process may be killed. Until `vm.json` names the new QEMU, recovery removes everything; from
then on everything belongs to the VM, and recovery resumes the guest.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from vmckpt.errors import VmckptError
from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.state.durable import rename_durably
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import end_qemu


@dataclass(frozen=True, slots=True)
class PendingQemu:
    """A QEMU of a VM in the making, and its files.

    `made` belong to the VM once committed, else they are removed. `renames` are the disks' new
    contents and their final names.
    """

    qemu_id: str
    spec: str
    made: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()


_SCHEMA = Schema(
    PendingQemu,
    "it lists what a restore of '{directory.name}' that was interrupted was making: see "
    "that no QEMU of it runs there, remove images that only the restore made, and remove "
    "the file",
)


async def write_down(vm: Vm, making: PendingQemu) -> None:
    """Write the record before the first file is created. Raises StorageError."""
    await save_to(vm.host, vm.directory.restoring, _SCHEMA, making)


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


async def settle(host: Host, name: str) -> None:
    """Finish what was begun for a VM if its `vm.json` names it, else undo it.

    Runs on that host; the caller holds the VM's lock. Raises OperationFailedError, StorageError.
    """
    directory = vm_dir(host.state_dir, name)
    making = await load_from(host, directory.restoring, _SCHEMA)
    if making is None:
        return
    now = await read_vm(host, name)
    if now is not None and now.qemu.files.qemu_id == making.qemu_id:
        for made, path in making.renames:
            await in_thread(partial(rename_durably, Path(made), Path(path).name))
        await host.write_text(directory.spec, making.spec)
        await host.remove(directory.restoring)
        return
    spec = parse_spec(making.spec, str(directory.restoring), directory.path)
    await end_qemu(host, spec.ram_dir, directory.qemu(making.qemu_id))
    for made in (*making.made, *(made for made, _ in making.renames)):
        await host.remove(Path(made))
    await host.remove(directory.path if now is None else directory.restoring)
