"""Making one host the VM's home and leaving nothing on the other: the ends of every migration."""

from pathlib import Path

from vmckpt.hosts.host import Host
from vmckpt.migrate.ends import End, discard
from vmckpt.vm.argv import Platform
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import Qemu


async def settle_on_target(target: End, qemu: Qemu, source: Host) -> None:
    """The target becomes the VM's home; from here on the source's files only wait to be removed."""
    name = target.files.vm_name
    await target.host.write_text(vm_dir(target.host.state_dir, name).current, qemu.to_json())
    await source.remove(vm_dir(source.state_dir, name).current)


async def release(end: End, ram_dir: Path) -> None:
    """The VM is at home elsewhere: end its QEMU on this host and remove what it had here."""
    # The guest is elsewhere and goes on: nobody waits for the kernel to free its old memory.
    await discard(end, ram_dir, await_freed=False)
    await end.host.remove(vm_dir(end.host.state_dir, end.files.vm_name).path)


async def find_qemu(end: End, platform: Platform) -> Qemu | None:
    """The running QEMU of an end as vm.json records it; None when it has ended."""
    processes = await end.host.find_processes(end.files.mark)
    return Qemu(end.files, processes[0], platform) if processes else None
