"""What a host still has of a VM that another one has taken over."""

from vmckpt.hosts.host import Host
from vmckpt.vm.inventory import read_vm


async def remove_stale_home(host: Host, name: str, qemu_id: str) -> None:
    """The guest goes on elsewhere, in a higher term: end and remove what `host` has of it.

    Only what ran in the QEMU that was taken over from: the VM may have come back since. Raises
    HostDownError, StorageError.
    """
    stale = await read_vm(host, name)
    if stale is None or stale.qemu.files.qemu_id != qemu_id:
        return
    await host.stop_for_good(stale.qemu.process)
    await host.remove(stale.qemu.files.ram(stale.spec.ram_dir))
    await host.remove(stale.directory.path)
