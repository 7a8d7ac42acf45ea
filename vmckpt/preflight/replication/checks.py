"""Whether a VM can be replicated to a host; reasons against it, with fixes."""

from collections.abc import AsyncIterator, Iterator

from vmckpt.epoch.senders import require_holdable, senders
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host, HostEntry
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.preflight import capture, destination_host, vm_users
from vmckpt.preflight.adopted import adopted_changes, based_disks, restarted_by_others
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask
from vmckpt.preflight.replication import memory
from vmckpt.preflight.replication.arbiter import arbiter_check
from vmckpt.preflight.replication.disks import disk_checks
from vmckpt.qemu import commands
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm
from vmckpt.vm.lifecycle import STANDING_STILL
from vmckpt.vm.probe import abilities

# As measured: 8 to 10 GiB/s (Python 3.11, one core of a server).
_COMPARED_BYTES_PER_S = 8 << 30


async def check(vm: Vm, standby: Host, options: ReplicationOptions) -> list[Finding]:
    """Run every check; changes nothing. Raises HostDownError."""
    if vm.host.name == standby.name:
        reason = f"the VM is on {standby.name} itself"
        return [Finding("same-host", REFUSE, reason, "name another host as its standby")]
    if not await vm.is_alive():
        remedy = f"start it: vmckpt vm start {vm.name}"
        stopped = Finding("running", REFUSE, f"'{vm.name}' is stopped", remedy)
        return [stopped]
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        found = await ask(
            await adopted_changes(vm, monitor),
            runs(vm, monitor),
            capture.memory(vm, monitor, remedy=_first(vm)),
            memory.blocks(vm),
            capture.devices(monitor),
            _output(vm, monitor, holds_output=options.holds_output),
        )
        images = await query_disk_images(monitor)
    theirs, shares = await abilities(standby), options.disks == SHARED
    read_only = [disk.on(standby.state_dir) for disk in vm.spec.disks if disk.read_only]
    disks = [] if shares else list(zip(vm.spec.disks, vm.nodes, strict=True))
    sizes = [(one, images[node].virtual_size_bytes) for one, node in disks if not one.read_only]
    copied, qcow2 = [size for _, size in sizes], [n for one, n in sizes if one.format != "raw"]
    return found + await ask(
        capture.guarded(vm, remedy=_first(vm)),
        restarted_by_others(vm),
        based_disks(vm.spec),
        disk_checks(vm, standby, images, options.disks),
        _firmware(vm),
        _passthrough(vm),
        destination_host.name(vm, standby),
        destination_host.machine(vm, standby, theirs),
        destination_host.accel(vm, standby),
        destination_host.permissions(vm, standby),
        vm_users.checks(standby, vm.spec, vm.host if shares else None),
        destination_host.room(vm, standby),
        memory.checks(vm, standby, copied_bytes=sum(copied), qcow2_bytes=sum(qcow2)),
        destination_host.files(vm, standby, read_only),
        destination_host.network(vm, standby),
        destination_host.forwards(vm, standby),
        destination_host.address(vm.host, standby),
        destination_host.ports(standby, needed=1),
        capture.tracking(vm),
        _compared(vm, options.lease_s),
        arbiter_check(vm.host, standby, options),
        second_path(vm.host, standby),
    )


async def runs(vm: Vm, monitor: Monitor) -> AsyncIterator[Finding]:
    """Whether its guest runs. A paused one has no epochs, and the end of its protection would
    resume it.
    """
    status = await commands.query_status(monitor)
    if not status.running:
        reason = f"the guest of '{vm.name}' does not run: its state is '{status.status}'"
        does = "resume" if status.status in STANDING_STILL else "show"
        yield Finding("running", REFUSE, reason, f"vmckpt vm {does} {vm.name}")


async def _compared(vm: Vm, lease_s: float) -> AsyncIterator[Finding]:
    """Whether the lease can be renewed while all memory is compared: the service does nothing else
    meanwhile, and renews it each third of its time.
    """
    if await vm.host.page_tracking() != PageTracking.COMPARISON:
        return
    most_bytes = int(_COMPARED_BYTES_PER_S * lease_s / 3)
    if vm.spec.memory_bytes > most_bytes:
        reason = (
            f"comparing its {format_size(vm.spec.memory_bytes)} of memory takes longer than a "
            f"third of a lease of {lease_s:g} s: it would end again and again, and the guest be "
            "paused or taken over"
        )
        remedy = (
            f"boot Linux 6.7 or newer on {vm.host.name}, or turn swap off there; or have at most "
            f"{format_size(most_bytes)}, or a longer --lease-time"
        )
        yield Finding("page-tracking", REFUSE, reason, remedy)


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


def second_path(primary: Host, standby: Host) -> Iterator[Finding]:
    """Whether primary and standby hear each other over two networks."""
    if lacks := lacks_second(primary, standby):
        reason = f"{lacks}: if the connection is lost, neither knows whether the other is alive"
        remedy = "name an address on another network: vmckpt host set HOST --second-addr ADDRESS"
        yield Finding("second-path", WARN, reason, remedy)
        return
    both = f"{primary.second_address} and {standby.second_address}"
    yield Finding("second-path", OK, f"heartbeats go between {both}, too")


def _first(vm: Vm) -> str:
    """How a VM gets memory and monitors that are vmckpt's."""
    if len(vm.ram_names) != 1:
        return "run its disks from a spec of vmckpt's own: docs/spec.md says what a spec has"
    return f"migrate it first, there and back: vmckpt migrate {vm.name} HOST"


async def _output(vm: Vm, monitor: Monitor, *, holds_output: bool) -> AsyncIterator[Finding]:
    if holds_output:
        try:
            await require_holdable(vm, monitor, await senders(vm, monitor))
        except RefusedError as exc:
            yield Finding("output", REFUSE, f"{exc.what}: {exc.why}", _first(vm))
            return
        yield Finding("output", OK, f"the output of {len(vm.spec.nics)} NICs is held until safe")
        return
    reason = "the guest's output is not held: after a failover it may contradict itself"
    yield Finding("output", WARN, reason, "leave out --unsafe-no-output-commit")


def lacks_second(*hosts: HostEntry | Host) -> str:
    """Why there is no second path between these hosts; empty: each has a second address."""
    lacking = [host.name for host in hosts if not host.second_address]
    if not lacking:
        return ""
    return f"{' and '.join(lacking)} {'have' if len(lacking) > 1 else 'has'} one address only"
