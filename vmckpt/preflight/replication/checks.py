"""Whether a VM can be replicated to a host, and if not, why not and what would mend it."""

from collections.abc import Iterator

from vmckpt.hosts.host import Entry, Host
from vmckpt.options.replication import SHARED, Options
from vmckpt.preflight import capture, target_host, vm_users
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.preflight.replication import memory
from vmckpt.preflight.replication.arbiter import arbiter_check
from vmckpt.preflight.replication.disks import disk_checks
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import Vm
from vmckpt.vm.probe import abilities


async def check(vm: Vm, standby: Host, options: Options) -> list[Finding]:
    """All that is for and against it; changes nothing. Raises HostDownError."""
    if vm.host.name == standby.name:
        reason = f"the VM is on {standby.name} itself"
        return [Finding("same-host", REFUSE, reason, "name another host as its standby")]
    checks = list(capture.memory(vm))
    if not await vm.is_alive():
        remedy = f"start it: vmckpt vm start {vm.name}"
        return [*checks, Finding("running", REFUSE, f"'{vm.name}' is stopped", remedy)]
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        checks += [found async for found in capture.devices(monitor)]
        images = await query_disk_images(monitor)
    theirs = await abilities(standby)
    checks += [found async for found in disk_checks(vm, standby, images, options.disks)]
    checks += [*_firmware(vm), *_passthrough(vm)]
    checks += [found async for found in target_host.name(vm, standby)]
    checks += target_host.machine(vm, standby, theirs)
    checks += await target_host.accel(vm, standby)
    checks.append(await target_host.permissions(vm, standby))
    shares = options.disks == SHARED
    checks += await vm_users.checks(standby, vm.spec, vm.host if shares else None)
    checks += [found async for found in target_host.room(vm, standby)]
    checks += [found async for found in memory.checks(vm, standby)]
    shared = [disk.on(standby.state_dir) for disk in vm.spec.disks if disk.read_only]
    checks += [found async for found in target_host.files(vm, standby, shared)]
    checks += await target_host.network(vm, standby)
    checks += await target_host.ports(standby, needed=1)
    checks += [await capture.tracking(vm), _output(vm, holds_output=options.holds_output)]
    checks.append(await arbiter_check(vm.host, standby, options))
    return [*checks, _second_path(vm.host, standby)]


def _passthrough(vm: Vm) -> Iterator[Finding]:
    for device in vm.spec.passthrough:
        reason = (
            f"'{device.id}' is passed through ({device.strategy}): what it holds and writes is in "
            "no epoch, and it cannot be unplugged for each, many times a second"
        )
        remedy = "migrate it or take checkpoints of it instead, or run its spec without the device"
        yield Finding(f"device-{device.id}", REFUSE, reason, remedy)


def _firmware(vm: Vm) -> Iterator[Finding]:
    if vm.spec.firmware:
        reason = (
            f"its firmware keeps variables in {vm.spec.firmware.vars}, which the guest can write "
            "to: they do not reach the standby"
        )
        remedy = "vmckpt replicates VMs that boot without UEFI, or from a kernel, for now"
        yield Finding("firmware-variables", REFUSE, reason, remedy)


def _second_path(primary: Host, standby: Host) -> Finding:
    if lacks := lacks_second(primary, standby):
        reason = f"{lacks}: where the connection is lost neither hears whether the other lives"
        remedy = "name an address on another network: vmckpt host set HOST --second-addr ADDRESS"
        return Finding("second-path", WARN, reason, remedy)
    both = f"{primary.second_address} and {standby.second_address}"
    return Finding("second-path", OK, f"heartbeats go between {both}, too")


def _output(vm: Vm, *, holds_output: bool) -> Finding:
    if holds_output:
        return Finding("output", OK, f"the output of {len(vm.spec.nics)} NICs is held until safe")
    reason = "what the guest sends is not held: after a failover it may contradict itself"
    return Finding("output", WARN, reason, "leave out --unsafe-no-output-commit")


def lacks_second(*hosts: Entry | Host) -> str:
    """Why there is no second path between these hosts; empty: each has another address."""
    lacking = [host.name for host in hosts if not host.second_address]
    if not lacking:
        return ""
    return f"{' and '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} one address only"
