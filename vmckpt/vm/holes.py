"""The part of a VM's memory that its host has not allocated yet."""

from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.vm.inventory import Vm


async def hole_pages(vm: Vm) -> int | None:
    """The number of holes in its RAM file, in pages: the first read of one takes a page fault.

    None if its memory is not in a file of its own. Raises HostDownError.
    """
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    found = await vm.host.allocation(ram_file)
    return found and max(found.size_bytes - found.allocated_bytes, 0) // PAGE_BYTES
