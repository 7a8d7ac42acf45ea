"""How much of a VM's memory its host has not had to give it yet."""

from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.vm.inventory import Vm

# What `stat` counts blocks in, whatever the file system's are.
_BLOCK_BYTES = 512


async def hole_pages(vm: Vm) -> int | None:
    """Pages of its RAM file that are holes: whoever reads one first waits for the kernel.

    None where its memory is in no file of its own. Raises HostDownError.
    """
    ram_file = vm.qemu.files.ram(vm.spec.ram_dir)
    done = await vm.host.run(["stat", "--format=%s %b", str(ram_file)])
    if done.returncode:
        return None
    size_bytes, blocks = (int(word) for word in done.stdout.split())
    return max(size_bytes - blocks * _BLOCK_BYTES, 0) // PAGE_BYTES
