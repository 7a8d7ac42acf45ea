"""What another host has to provide for a VM that is to continue there."""

from collections.abc import AsyncIterator, Iterator, Sequence
from ipaddress import ip_address
from pathlib import Path

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.qemu.abilities import Abilities
from vmckpt.sequence.steps import both
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.probe import abilities, choose_accel

# Beyond this difference certificates, time-outs and recorded times no longer mean the same on both
# hosts.
CLOCK_SKEW_S = 1.0
USERFAULTFD = Path("/proc/sys/vm/unprivileged_userfaultfd")
# May be owned by a group; QEMU opens it since this version.
USERFAULTFD_DEVICE, BY_DEVICE = Path("/dev/userfaultfd"), (8, 0, 0)


async def name(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    """No other VM has its name."""
    if await read_vm(destination, vm.name):
        reason = f"{destination.name} has a VM '{vm.name}' already"
        yield Finding(
            "name-free", REFUSE, reason, f"remove or rename the one on {destination.name}"
        )
    else:
        yield Finding("name-free", OK, f"{destination.name} has no other VM of that name")


def machine(vm: Vm, destination: Host, theirs: Abilities) -> Iterator[Finding]:
    """The host's QEMU has its machine type and CPU model."""
    kind = vm.qemu.platform.machine
    if kind not in theirs.machines:
        yield Finding(
            "machine-type",
            REFUSE,
            f"QEMU {theirs.version} on {destination.name} has no machine type {kind}",
            f'run the VM with a machine type that both have (machine = "{_newest(theirs)}")',
        )
    else:
        yield Finding("machine-type", OK, f"{kind} on both sides")
    if len(vm.ram_names) > 1:
        yield from _memory_blocks(destination, theirs)
    model = vm.qemu.platform.cpu.partition(",")[0]
    if model not in theirs.cpu_models:
        reason = f"QEMU {theirs.version} on {destination.name} has no CPU model '{model}'"
        yield Finding("cpu-model", REFUSE, reason, "run the VM with a CPU model that both have")
    else:
        yield Finding("cpu-model", OK, f"{model}; the features are compared before memory is sent")


def _memory_blocks(destination: Host, theirs: Abilities) -> Iterator[Finding]:
    from vmckpt.vm.adopted.memory import BLOCKS_IN_A_FILE  # few VMs need it

    if theirs.version < BLOCKS_IN_A_FILE:
        reason = f"QEMU {theirs.version} on {destination.name} has no blocks of memory in one file"
        remedy = f"use QEMU {BLOCKS_IN_A_FILE} or newer there"
        yield Finding("memory-blocks", REFUSE, reason, remedy)


def _newest(theirs: Abilities) -> str:
    return theirs.machines.get("q35", "q35")


async def accel(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    """The same accelerator."""
    needed = vm.qemu.platform.accel
    try:
        await choose_accel(destination, needed)
    except RefusedError as exc:
        reason = f"the VM runs on {needed}, and {exc.what}: {exc.why}"
        yield Finding("accel", REFUSE, reason, "QEMU cannot move a VM between KVM and TCG")
        return
    yield Finding("accel", OK, f"{needed} on both sides")


async def permissions(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    """Permission to place its memory and its files there."""
    directories = (vm.spec.ram_dir, destination.state_dir)
    if closed := [
        str(directory)
        for directory in directories
        if not await destination.may_write_below(directory)
    ]:
        reason = f"this user may not write to {' and '.join(closed)} on {destination.name}"
        yield Finding("permissions", REFUSE, reason, "give it the right to, or choose others")
        return
    yield Finding("permissions", OK, f"{' and '.join(map(str, directories))} can be written to")


async def userfaults(destination: Host, *, by_qemu: bool = True) -> AsyncIterator[Finding]:
    """Post-copy needs userfaultfd, which may be restricted to root or a group with access to its
    device, or open to every user.

    A lazy restore needs it too, and opens the device for any QEMU (not `by_qemu`).
    """
    is_root = await destination.user_id() == 0 and destination.vm_uids is None
    if (await destination.read_text(USERFAULTFD) or "").strip() == "1" or is_root:
        yield Finding("userfaultfd", OK, f"this user may use it on {destination.name}")
        return
    knows_device = not by_qemu or (await abilities(destination)).version >= BY_DEVICE
    if knows_device and await destination.usable(USERFAULTFD_DEVICE):
        yield Finding(
            "userfaultfd", OK, f"this user may use {USERFAULTFD_DEVICE} on {destination.name}"
        )
        return
    what = "post-copy" if by_qemu else "a lazy restore"
    reason = f"{what} needs userfaultfd, which this user may not use on {destination.name}"
    remedy = f"as root: chgrp kvm {USERFAULTFD_DEVICE} && chmod 660 {USERFAULTFD_DEVICE}"
    if not knows_device:
        reason += f", and QEMU before {BY_DEVICE[0]}.{BY_DEVICE[1]} does not know its device"
        remedy = "install a newer QEMU, or as root: sysctl -w vm.unprivileged_userfaultfd=1"
    yield Finding("userfaultfd", REFUSE, reason, remedy)


async def room(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    """Room for its memory."""
    need = vm.spec.memory_bytes
    if not await destination.exists(vm.spec.ram_dir):
        reason = f"{destination.name} has no directory {vm.spec.ram_dir} for the VM's memory"
        yield Finding("memory", REFUSE, reason, "create it, or choose another ram_dir")
        return
    found = await destination.memory_room(vm.spec.ram_dir)
    free, others = found.free_bytes, found.promised_bytes
    text = f"{format_size(need)} needed, {format_size(free)} free on {destination.name}"
    if free < need and others:
        text += f", besides {format_size(others)} that other VMs may still touch"
    if free < need and vm.spec.overcommit:
        yield Finding("memory", WARN, text, "guests die when memory runs out (overcommit)")
    elif free < need:
        yield Finding(
            "memory", REFUSE, text, f"free memory on {destination.name}, or choose another host"
        )
    else:
        yield Finding("memory", OK, text)


async def files(vm: Vm, destination: Host, shared: Sequence[Path]) -> AsyncIterator[Finding]:
    """Every file that QEMU opens by path exists, `shared` ones too; the firmware is the same."""
    spec = vm.spec
    wanted = [*shared, *spec.files]
    missing = [str(path) for path in wanted if not await destination.readable(path)]
    if missing:
        reason = f"{destination.name} cannot read {', '.join(missing)}"
        yield Finding(
            "files", REFUSE, reason, "put the VM's files on storage that both hosts share"
        )
    elif wanted:
        yield Finding(
            "files", OK, f"{len(wanted)} files of the VM are readable on {destination.name}"
        )
    if spec.firmware and not missing:
        yield await _firmware(spec.firmware.code, vm.host, destination)


async def _firmware(code: Path, source: Host, destination: Host) -> Finding:
    ours, theirs = await source.fingerprint(code), await destination.fingerprint(code)
    if ours is None or ours == theirs:
        return Finding("firmware", OK, f"{code} is the same on both sides")
    remedy = f"install the same firmware package on {source.name} and {destination.name}"
    if theirs is None or ours.size_bytes != theirs.size_bytes:
        reason = (
            f"{code} has another size on {destination.name}: QEMU cannot load the guest into it"
        )
        return Finding("firmware", REFUSE, reason, remedy)
    reason = f"{code} is another build on {destination.name}; the guest uses it when it next boots"
    return Finding("firmware", WARN, reason, remedy)


async def variables(
    source: Host, destination: Host, here: Path, there: Path
) -> AsyncIterator[Finding]:
    """For a VM that is off: its firmware variables, which only a running guest takes along."""
    ours, theirs = await both(source.fingerprint(here), destination.fingerprint(there))
    if ours is not None and ours == theirs:
        yield Finding("firmware-variables", OK, f"{here} is the same on both sides")
        return
    reason = f"its firmware's variables, {here}, are not seen to be the same on {destination.name}"
    remedy = f"copy that file to {there} there, or start the VM, and move it while it runs"
    yield Finding("firmware-variables", REFUSE, reason, remedy)


async def network(vm: Vm, destination: Host) -> AsyncIterator[Finding]:
    """A bridge for its NICs, which really exists. Raises HostDownError when the host is down."""
    networks = {nic.network for nic in vm.spec.nics}
    if "bridge" in networks and destination.bridge is not None:
        async for found in bridge(destination, destination.bridge):
            yield found
    else:
        await destination.require_up()
    if "bridge" in networks and destination.bridge is None:
        reason = f"{destination.name} has no bridge for the VM's NICs"
        yield Finding("bridge", REFUSE, reason, _name_a_bridge(destination))
    if "user" in networks:
        reason = "connections through user-mode NAT break: they end at the source's QEMU"
        remedy = 'use network = "bridge" for what must stay open'
        yield Finding("user-network", WARN, reason, remedy)


async def bridge(destination: Host, name: str) -> AsyncIterator[Finding]:
    """The host's bridge really exists."""
    done = await destination.run(["ip", "-oneline", "link", "show", "dev", name, "type", "bridge"])
    if done.returncode == 0 and done.stdout.strip():
        yield Finding("bridge", OK, f"{name} on {destination.name}")
        return
    await destination.require_up()
    why = done.stderr.strip() or "it is not a bridge"
    remedy = f"create it, or {_name_a_bridge(destination)}"
    yield Finding("bridge", REFUSE, f"{destination.name} has no bridge '{name}': {why}", remedy)


def _name_a_bridge(destination: Host) -> str:
    return f"name another: vmckpt host set {destination.name} --bridge BRIDGE"


async def address(source: Host, destination: Host) -> AsyncIterator[Finding]:
    """The migration address is not one that means the source itself on the source."""
    try:
        is_loopback = ip_address(destination.migration_address).is_loopback
    except ValueError:  # a name
        return
    if not is_loopback:
        return
    here, there = await both(source.read_text(BOOT_ID), destination.read_text(BOOT_ID))
    if here == there:
        return
    reason = (
        f"{source.name} would connect to {destination.migration_address}, which is itself: "
        f"{destination.name} has no other migration address"
    )
    remedy = f"vmckpt host set {destination.name} --migration-addr ADDRESS"
    yield Finding("address", REFUSE, reason, remedy)


async def ports(destination: Host, *, needed: int) -> AsyncIterator[Finding]:
    """Free ports for its migration, if the host has a range of them."""
    if destination.migration_ports is None:
        return
    first, last = destination.migration_ports
    taken = await destination.listening_ports(destination.migration_address)
    free = last - first + 1 - sum(first <= port <= last for port in taken)
    text = f"{free} of the ports {first} to {last} of {destination.name} are free, {needed} needed"
    if free < needed:
        remedy = (
            f"let others end, or: vmckpt host set {destination.name} --migration-ports FIRST-LAST"
        )
        yield Finding("ports", REFUSE, text, remedy)
        return
    yield Finding("ports", OK, text)


async def forwards(
    vm: Vm, destination: Host, remedy: str = "free them there"
) -> AsyncIterator[Finding]:
    """The host ports that an adopted VM's user-mode networks listen on."""
    if vm.spec.adopted is None or not vm.spec.adopted.forwards:
        return
    taken = await destination.listening_ports(destination.migration_address)
    wanted = vm.spec.adopted.forwards
    if clash := [str(port) for port in wanted if port in taken]:
        reason = f"the VM forwards {', '.join(clash)} of its host, taken on {destination.name}"
        yield Finding("forwarded-ports", REFUSE, reason, remedy)
        return
    yield Finding("forwarded-ports", OK, f"{len(wanted)} are free on {destination.name}")


async def clock(source: Host, destination: Host) -> AsyncIterator[Finding]:
    """Both hosts' clocks roughly agree."""
    if source.name == destination.name:
        return
    skew_s = abs(await source.unix_time_s() - await destination.unix_time_s())
    text = f"the clocks of {source.name} and {destination.name} are {skew_s:.1f} s apart"
    if skew_s > CLOCK_SKEW_S:
        remedy = "run a time service (chrony) on both: certificates and the guest's clock need it"
        yield Finding("clock", WARN, text, remedy)
        return
    yield Finding("clock", OK, text)
