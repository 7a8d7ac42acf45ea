"""How much of a VM's memory its host has not had to give it yet."""

from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.vm.inventory import Vm


async def hole_pages(vm: Vm) -> int | None:
    """Pages of its RAM file that are holes: whoever reads one first waits for the kernel.

    None where its memory is in no file of its own. Raises HostDownError.
    """
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    found = await vm.host.allocation(ram_file)
    return found and max(found.size_bytes - found.allocated_bytes, 0) // PAGE_BYTES
