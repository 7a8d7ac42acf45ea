"""Whether a VM's state can be captured from outside its QEMU while it runs."""

from collections.abc import AsyncIterator, Collection

from vmckpt.epoch.ram import find_ram
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.preflight.blockers import device_checks
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm

# Devices that write the guest's memory, or send for it, bypassing QEMU: prefixes of their types.
BYPASSES = {
    "vfio": "a device passed through (VFIO)",
    "vhost-": "a device whose back end is another process or the kernel (vhost)",
    "ivshmem": "memory shared with others (ivshmem)",
    "usb-host": "a device passed through (USB)",
}


async def memory(vm: Vm, monitor: Monitor, remedy: str = "") -> AsyncIterator[Finding]:
    """Whether its memory can be read, and writes to it be seen, from outside its QEMU.

    `remedy`: what to do otherwise; "": save it as a whole.
    """
    remedy = remedy or _otherwise(vm)
    if vm.ram_is_shared:
        yield Finding("memory-file", OK, "its memory is a named file")
        return
    if not vm.ram_names:
        reason = "its memory stays where its command line says: docs/adopt.md names what does"
        yield Finding("memory-file", REFUSE, reason, remedy)
    elif await find_ram(vm, monitor) is None:
        reason = "its QEMU has its memory alone, and does not say where all of it is (10.0 does)"
        yield Finding("memory-file", REFUSE, reason, remedy)
    elif await vm.host.page_tracking() != PageTracking.PROTECTION:
        reason = f"its QEMU has its memory alone: the kernel of {vm.host.name} cannot track that"
        yield Finding("memory-file", REFUSE, reason, f"boot Linux 6.7 there, or {remedy}")
    else:
        yield Finding("memory-file", OK, "its memory is read from its QEMU")


async def guarded(vm: Vm, remedy: str = "") -> AsyncIterator[Finding]:
    """Whether a guard can watch its pauses: by a monitor of its own. `remedy`: as above."""
    if vm.qemu.is_foreign and not await vm.host.exists(vm.qemu.files.rescue):
        reason = "it was adopted with fewer than three monitors: none is left for the guard"
        does = (
            f"adopt it again with three: vmckpt vm rm {vm.name}, then vmckpt vm adopt {vm.name} "
            f"--qmp A --qmp B --qmp C; or {remedy or _otherwise(vm)}"
        )
        yield Finding("guard", REFUSE, reason, does)


def _otherwise(vm: Vm) -> str:
    return f"save it as a whole, paused: vmckpt checkpoint create {vm.name} --kind file"


async def devices(monitor: Monitor, away: Collection[str] = ()) -> AsyncIterator[Finding]:
    """Whether QEMU can save all devices, and none writes or sends bypassing it.

    Devices and addresses in `away` are unplugged first.
    """
    blockers = [
        blocker
        for blocker in (await commands.query_migrate(monitor)).blockers
        if not any(name in blocker for name in away)
    ]
    pci_ids = await commands.query_pci_ids(monitor) if blockers else {}
    for found in device_checks(blockers, pci_ids):
        yield found
    for container in ("peripheral", "peripheral-anon"):
        children = await commands.qom_children(monitor, f"/machine/{container}")
        for name, kind in children.items():
            for prefix, what in BYPASSES.items():
                if kind.startswith(prefix) and name not in away:
                    reason = f"'{name}' ({kind}) is {what}: its writes are not seen"
                    remedy = f"shut it down, vmckpt vm rm, and run its spec without '{name}'"
                    yield Finding("bypass", REFUSE, reason, remedy)


async def tracking(vm: Vm) -> AsyncIterator[Finding]:
    """Its host's kernel can track writes; otherwise everything is compared."""
    match await vm.host.page_tracking():
        case PageTracking.PROTECTION:
            yield Finding("page-tracking", OK, "the host's kernel has PAGEMAP_SCAN")
            return
        case PageTracking.SOFT_DIRTY:
            yield Finding("page-tracking", OK, "the host's kernel marks pages (soft-dirty)")
            return
    reason = (
        f"the kernel of {vm.host.name} has no PAGEMAP_SCAN, and no soft-dirty bits that nothing "
        f"swaps out: all {format_size(vm.spec.memory_bytes)} of memory are compared in each pause, "
        "with a copy as large"
    )
    remedy = "for short pauses boot Linux 6.7 or newer there, or turn swap off"
    yield Finding("page-tracking", WARN, reason, remedy)
