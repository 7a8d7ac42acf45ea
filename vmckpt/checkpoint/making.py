"""What a restore or a fork makes of a VM, written down before it is there: `vms/NAME/restore.json`.

Whoever makes it may be killed. Until `vm.json` names the new QEMU nothing of it stays then; from
that moment on all of it is the VM's, and the guest is let run.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vmckpt.hosts.host import Host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.state.durable import damaged_record, parse_record, rename_durably
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec import parse_spec
from vmckpt.vm.start import end_qemu


class Making(NamedTuple):
    """A QEMU of a VM in the making, and its files.

    `made` are the VM's own if it comes to it, else removed. `renames` are disks' new contents, and
    the disks whose names they get.
    """

    qemu_id: str
    spec: str
    made: Sequence[str] = ()
    renames: Sequence[tuple[str, str]] = ()


async def write_down(vm: Vm, making: Making) -> None:
    """Before the first of it is made. Raises StorageError."""
    await vm.host.write_text(vm.directory.restoring, json.dumps(making._asdict()))


async def settle(host: Host, name: str) -> None:
    """Finish what was begun of a VM if its `vm.json` names it, else undo it.

    On that host, for the holder of the VM's lock. Raises OperationFailedError, StorageError.
    """
    directory = vm_dir(host.state_dir, name)
    text = await host.read_text(directory.restoring)
    if text is None:
        return
    making = _parse(text, f"{directory.restoring} on {host.name}", name)
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


def _parse(text: str, where: str, name: str) -> Making:
    remedy = (
        f"it lists what a restore of '{name}' that was cut off was making: see that no QEMU of it "
        "runs there, remove images that only the restore made, and remove the file"
    )
    words = parse_record(text, where, remedy=remedy)
    try:
        return Making(**words)
    except TypeError as exc:
        raise damaged_record(text, where, exc, remedy=remedy) from exc
