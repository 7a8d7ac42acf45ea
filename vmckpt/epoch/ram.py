"""Where the RAM of a VM is, so that another process can read it and see what is written to it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from vmckpt.epoch.devices import ram_blocks
from vmckpt.epoch.head import guest_blocks, readable
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import Span
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import Vm


class VmRam(NamedTuple):
    """The RAM of a running VM, and what its QEMU calls its blocks."""

    names: tuple[str, ...]
    ram: GuestRam


async def find_ram(vm: Vm, monitor: Monitor) -> VmRam | None:
    """Its RAM; None: it is private to its QEMU, which does not report where all of it is.

    Raises as `Monitor.ask` does.
    """
    names, file = vm.ram_names, vm.qemu.files.ram(vm.spec.ram_dir)
    if vm.ram_is_shared:
        return VmRam(names, GuestRam(file))
    blocks = await ram_blocks(monitor)
    mine, spans = guest_blocks(blocks, names) or (), list[Span]()
    for block in mine:
        if block.address is None or block.used_bytes != block.total_bytes:
            return None
        spans.append((block.address, block.address + block.used_bytes))
    if sum(end - start for start, end in spans) != vm.spec.memory_bytes:
        return None  # it has memory that is no RAM of its own, such as an NVDIMM
    return None if readable(blocks, names) is None else VmRam(names, GuestRam(None, tuple(spans)))


async def require_ram(vm: Vm, monitor: Monitor) -> VmRam:
    """Its RAM. Raises RefusedError, and as `Monitor.ask` does."""
    found = await find_ram(vm, monitor)
    if found is None:
        raise RefusedError(
            f"the memory of '{vm.name}' cannot be read while it runs",
            why="it is private to its QEMU, which does not report where all of it is (10.0 does)",
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
