"""Whether a VM can be replicated to a host, and if not, why not and what would mend it."""

from collections.abc import AsyncIterator, Iterator

from vmckpt.hosts.host import Host
from vmckpt.qemu import commands
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.replicate.disks.checks import disk_checks
from vmckpt.vm import target_checks
from vmckpt.vm.blockers import device_checks
from vmckpt.vm.check import OK, REFUSE, WARN, Check
from vmckpt.vm.inventory import Vm
from vmckpt.vm.probe import abilities

# Devices that write the guest's memory, or send for it, past QEMU: types begin so.
BYPASSES = {
    "vfio": "a device passed through (VFIO)",
    "vhost-": "a device whose back end is another process or the kernel (vhost)",
    "ivshmem": "memory shared with others (ivshmem)",
    "usb-host": "a device passed through (USB)",
}


async def check(vm: Vm, standby: Host, *, holds_output: bool) -> list[Check]:
    """All that is for and against it; changes nothing. Raises HostDownError."""
    if vm.host.name == standby.name:
        reason = f"the VM is on {standby.name} itself"
        return [Check("same-host", REFUSE, reason, "name another host as its standby")]
    checks = list(_memory(vm))
    if not await vm.is_alive():
        remedy = f"start it: vmckpt vm start {vm.name}"
        return [*checks, Check("running", REFUSE, f"'{vm.name}' is stopped", remedy)]
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        checks += [found async for found in devices(monitor)]
        images = await query_disk_images(monitor)
    theirs = await abilities(standby)
    checks += [found async for found in disk_checks(vm, standby, images)]
    checks += _firmware(vm)
    checks += [found async for found in target_checks.name(vm, standby)]
    checks += target_checks.machine(vm, standby, theirs)
    checks += await target_checks.accel(vm, standby)
    checks.append(await target_checks.permissions(vm, standby))
    checks += [found async for found in target_checks.room(vm, standby)]
    shared = [disk.on(standby.state_dir) for disk in vm.spec.disks if disk.read_only]
    checks += [found async for found in target_checks.files(vm, standby, shared)]
    checks += await target_checks.network(vm, standby)
    checks += await target_checks.ports(standby, needed=1)
    checks += [await _tracking(vm), _output(vm, holds_output=holds_output)]
    return checks


def _memory(vm: Vm) -> Iterator[Check]:
    if vm.spec.adopted is not None:
        reason = "its command line is not vmckpt's: where its memory and its network are is unknown"
        yield Check("spec", REFUSE, reason, _from_a_spec(vm))
    elif vm.ram_is_shared:
        yield Check("memory-file", OK, "its memory is a named file")
    else:
        reason = "its memory is no named file of its own"
        yield Check("memory-file", REFUSE, reason, _from_a_spec(vm))


def _from_a_spec(vm: Vm) -> str:
    return (
        f"shut it down, forget it (vmckpt vm rm {vm.name}), and run the same disks from a spec of "
        "its own: vmckpt vm run SPEC.toml; README says what a spec has"
    )


def _firmware(vm: Vm) -> Iterator[Check]:
    if vm.spec.firmware:
        reason = (
            f"its firmware keeps variables in {vm.spec.firmware.vars}, which the guest can write "
            "to: they do not reach the standby"
        )
        remedy = "vmckpt replicates VMs that boot without UEFI, or from a kernel, for now"
        yield Check("firmware-variables", REFUSE, reason, remedy)


async def devices(monitor: Monitor) -> AsyncIterator[Check]:
    """Whether QEMU can save all devices, and none writes or sends past it."""
    blockers = (await commands.query_migrate(monitor)).blockers
    pci_ids = await commands.query_pci_ids(monitor) if blockers else {}
    for found in device_checks(blockers, pci_ids):
        yield found
    for place in ("peripheral", "peripheral-anon"):
        children = await commands.qom_children(monitor, f"/machine/{place}")
        for name, kind in children.items():
            for prefix, what in BYPASSES.items():
                if kind.startswith(prefix):
                    reason = f"'{name}' ({kind}) is {what}: what it writes is not seen"
                    remedy = f"shut it down, vmckpt vm rm, and run its spec without '{name}'"
                    yield Check("bypass", REFUSE, reason, remedy)


async def _tracking(vm: Vm) -> Check:
    if await vm.host.scans_pagemaps():
        return Check("page-tracking", OK, "the primary's kernel has PAGEMAP_SCAN")
    reason = f"the kernel of {vm.host.name} has no PAGEMAP_SCAN: what was written cannot be found"
    return Check("page-tracking", REFUSE, reason, "boot a kernel of 6.7 or newer there")


def _output(vm: Vm, *, holds_output: bool) -> Check:
    if holds_output:
        return Check("output", OK, f"the output of {len(vm.spec.nics)} NICs is held until safe")
    reason = "what the guest sends is not held: after a failover it may contradict itself"
    return Check("output", WARN, reason, "leave out --unsafe-no-output-commit")
