"""Where the RAM of a VM is, so that another process can read it and see what is written to it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vmckpt.epoch.devices import ram_blocks
from vmckpt.epoch.head import ram_block, readable
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import Vm


class VmRam(NamedTuple):
    """The RAM of a running VM, and what its QEMU calls it."""

    name: str
    ram: GuestRam


async def find_ram(vm: Vm, monitor: Monitor) -> VmRam | None:
    """Its RAM; None: it is private to its QEMU, at an unknown address or in several parts.

    Raises as `Monitor.ask` does.
    """
    name, file = vm.ram_name, vm.qemu.files.ram(vm.spec.ram_dir)
    if name is None:
        return None
    if vm.ram_is_shared:
        return VmRam(name, GuestRam(file))
    blocks = await ram_blocks(monitor)
    block = ram_block(blocks, name)
    if block is None or block.address is None or readable(blocks, name) is None:
        return None
    if not block.used_bytes == block.total_bytes == vm.spec.memory_bytes:
        return None
    span = (block.address, block.address + block.used_bytes)
    return VmRam(name, GuestRam(None, span))


async def require_ram(vm: Vm, monitor: Monitor) -> VmRam:
    """Its RAM. Raises RefusedError, and as `Monitor.ask` does."""
    found = await find_ram(vm, monitor)
    if found is None:
        raise RefusedError(
            f"the memory of '{vm.name}' cannot be read while it runs",
            why="it is private to its QEMU, which does not report its address (10.0 does), or "
            "has it in several parts",
            remedy=f"save it as a whole: vmckpt checkpoint create {vm.name} --kind file",
        )
    return found


@contextmanager
def memory_errors(vm: Vm) -> Iterator[None]:
    """For the block: raises OperationFailedError for an OSError that its memory's reading raised.

    Such as: its QEMU ended, another tracks it, or it belongs to another user.
    """
    try:
        yield
    except OSError as exc:
        why = "its QEMU has ended" if isinstance(exc, ProcessLookupError) else exc.strerror
        remedy = f"see whether it runs, and try again: vmckpt vm show {vm.name}"
        if exc.errno == errno.EOPNOTSUPP:
            remedy = "save it while it is paused, into its image: --kind internal"
        raise OperationFailedError(
            f"the memory of '{vm.name}' cannot be read", why=why or str(exc), remedy=remedy
        ) from exc
