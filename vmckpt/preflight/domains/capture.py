"""Whether a running domain's state can be captured through libvirt's monitor. On its host."""

from collections.abc import AsyncIterator, Iterator
from shlex import quote

from vmckpt.epoch.ram import find_ram
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.preflight import capture
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.qemu import block, commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.domains.definition.parts import Parts
from vmckpt.vm.domains.running import unfit_name
from vmckpt.vm.inventory import Vm

VHOST = "/dev/vhost-"
# It is stopped with the guest, and what it writes is seen like QEMU's writes
# (tests/kernel/test_vhost.py).
VHOST_NET = "/dev/vhost-net"
# The chip with the UEFI variables, whose content is in QEMU's own state.
VARIABLES = "/machine/system.flash1"


def described(name: str, memory_bytes: int, parts: Parts) -> Iterator[Finding]:
    """What its XML says. Pure."""
    if (why := unfit_name(name, memory_bytes)) is not None:
        remedy = "rename it while it is off: virsh domrename"
        yield Finding("domain-name", REFUSE, f"checkpoints cannot record it: {why}", remedy)
    for obstacle in parts.obstacles:
        yield Finding("domain-xml", REFUSE, obstacle, _otherwise(name))
    if not parts.obstacles:
        yield Finding("domain-xml", OK, "all that it consists of is in its QEMU")


async def memory(vm: Vm, monitor: Monitor) -> AsyncIterator[Finding]:
    """Whether its memory can be read, and writes to it be seen."""
    if await vm.host.page_tracking() != PageTracking.PROTECTION:
        reason = f"the kernel of {vm.host.name} has no PAGEMAP_SCAN, which sees writes to memory"
        remedy = f"boot Linux 6.7 there; {_otherwise(vm.name)}"
        yield Finding("page-tracking", REFUSE, reason, remedy)
    elif await find_ram(vm, monitor) is None:
        reason = "its QEMU does not say where all of its memory is (10.0 does)"
        yield Finding("memory-file", REFUSE, reason, _otherwise(vm.name))
    else:
        yield Finding("memory-file", OK, "its memory is read from its QEMU")


async def devices(vm: Vm, monitor: Monitor) -> AsyncIterator[Finding]:
    """Whether QEMU can save all devices, and none writes or sends bypassing it."""
    async for found in capture.devices(monitor):
        yield found._replace(remedy=found.remedy and _otherwise(vm.name))
    pid = vm.qemu.process.pid
    words = ["find", f"/proc/{pid}/fd", "-lname", f"{VHOST}*", "-printf", "%l\n"]
    opened = await vm.host.run(words)
    if names := sorted(set(opened.stdout.split()) - {VHOST_NET}):
        reason = f"its QEMU has opened {', '.join(names)}: a device that the host's kernel serves"
        yield Finding("bypass", REFUSE, reason, _otherwise(vm.name))


async def disks(vm: Vm, monitor: Monitor) -> AsyncIterator[Finding]:
    """Whether its XML names all disks that its QEMU has; a checkpoint would lack others."""
    for drive in await block.query_drives(monitor):
        if drive.node not in vm.nodes and not drive.read_only and drive.path != VARIABLES:
            reason = f"its QEMU has a disk that is not in its XML: {drive.file or drive.node}"
            remedy = "have it there as a <disk> (virsh edit), or unplug it"
            yield Finding("domain-disks", REFUSE, reason, remedy)


async def unused(vm: Vm, monitor: Monitor) -> AsyncIterator[Finding]:
    """Nothing else works on its disks."""
    if jobs := await commands.query_jobs(monitor):
        names = ", ".join(f"{one.id} ({one.type})" for one in jobs)
        remedy = "wait for their end; virsh domjobinfo shows libvirt's"
        yield Finding("busy", REFUSE, f"its QEMU has jobs on its disks: {names}", remedy)


def _otherwise(name: str) -> str:
    return (
        "have libvirt save it while it is paused: "
        f"vmckpt checkpoint create {quote(name)} --kind internal"
    )
