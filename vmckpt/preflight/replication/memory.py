"""The memory that a replication's services need, besides the guest's own and the standby's.

It must be available on both hosts at the start, and the services never exceed it.

The primary's service keeps a copy of what it has sent, at most all of the guest's memory, and
another if written pages are found by comparing. Both services hold an epoch: the primary until it
is sent, the standby until it has arrived completely. So an epoch has a limit: near it an epoch ends
early, and a guest that writes even more in one continues without protection.
"""

from collections.abc import AsyncIterator, Iterator

from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.units import format_size
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import IN_MEMORY
from vmckpt.vm.spec.spec import Spec

MIB = 1 << 20
# An epoch may have half of the guest's memory, at most what a 100 Gbit/s link carries in 0.3 s, and
# at least all of a small guest's, including what is written twice.
_SHARE, _LEAST_BYTES, _MOST_BYTES = 2, 256 * MIB, 4096 * MIB
_TWICE_BYTES = 16 * MIB
# The standby holds more of an epoch than its pages: their numbers, devices, read-ahead.
_BESIDES_BYTES = 16 * MIB
# The program and its libraries; an epoch's disk writes, bounded by `replicate/disks/intake.py`.
SERVICE_BYTES, DISK_BYTES = 64 * MIB, 192 * MIB
# The share of a disk's length that knowing it block by block takes: on the primary a digest of each
# 64 KiB of a disk that is copied, on the standby where each cluster of a qcow2 copy is.
_KNOWN_SHARE = 2048


def epoch_limit_bytes(ram_bytes: int) -> int:
    """The maximum size of an epoch's pages, as the primary sends them."""
    all_of_it = 2 * ram_bytes + _TWICE_BYTES
    return min(all_of_it, _MOST_BYTES, max(_LEAST_BYTES, ram_bytes // _SHARE))


def epoch_room_bytes(ram_bytes: int, *, has_disks: bool) -> int:
    """The maximum the standby accepts of an incomplete epoch; more closes the connection."""
    limit_bytes = epoch_limit_bytes(ram_bytes)
    return limit_bytes + limit_bytes // 8 + _BESIDES_BYTES + (DISK_BYTES if has_disks else 0)


def primary_bytes(ram_bytes: int, tracking: str, *, has_disks: bool, copied_bytes: int = 0) -> int:
    """The maximum memory of the primary's service. `copied_bytes`: the length of all disks that are
    copied; none of shared ones is.
    """
    copies = 2 if tracking == PageTracking.COMPARISON else 1
    disk_bytes = DISK_BYTES if has_disks else 0
    fixed_bytes = SERVICE_BYTES + disk_bytes + copied_bytes // _KNOWN_SHARE
    return copies * ram_bytes + epoch_limit_bytes(ram_bytes) + fixed_bytes


def standby_bytes(ram_bytes: int, *, has_disks: bool, qcow2_bytes: int = 0) -> int:
    """The maximum memory of the standby's service, besides the memory of its QEMU. `qcow2_bytes`:
    the length of all disks that it has as qcow2 copies.

    The writes of one epoch are still being applied while the next one arrives.
    """
    room_bytes = epoch_room_bytes(ram_bytes, has_disks=has_disks)
    disk_bytes = DISK_BYTES if has_disks else 0
    return room_bytes + SERVICE_BYTES + disk_bytes + qcow2_bytes // _KNOWN_SHARE


async def checks(
    vm: Vm, standby: Host, *, copied_bytes: int = 0, qcow2_bytes: int = 0
) -> AsyncIterator[Finding]:
    """Whether both hosts have the memory, besides what is reserved for others."""
    spec, has_disks = vm.spec, any(not disk.read_only for disk in vm.spec.disks)
    ram_bytes, how = spec.memory_bytes, await vm.host.page_tracking()
    here_bytes = primary_bytes(ram_bytes, how, has_disks=has_disks, copied_bytes=copied_bytes)
    there_bytes = standby_bytes(ram_bytes, has_disks=has_disks, qcow2_bytes=qcow2_bytes)
    disks = ", what its disks' copies hold" if copied_bytes else ""
    what = f"for the primary's service (a copy of the guest's memory, an epoch on its way{disks})"
    yield await _check("memory-primary", vm.host, spec, here_bytes, what)
    what = "for the standby's service (an epoch on its way)"
    if spec.ram_dir.is_relative_to(IN_MEMORY):
        there_bytes, what = there_bytes + ram_bytes, f"{what} and the guest"
    if vm.host.is_this_machine and standby.is_this_machine:
        there_bytes, what = there_bytes + here_bytes, f"{what}, besides the primary's service"
    yield await _check("memory-standby", standby, spec, there_bytes, what)


async def _check(code: str, host: Host, spec: Spec, need_bytes: int, what: str) -> Finding:
    others_bytes = (await host.memory_room(IN_MEMORY)).promised_bytes
    free_bytes = max(0, await host.available_memory_bytes() - others_bytes)
    text = figures(host, need_bytes, what, free_bytes, others_bytes)
    if free_bytes >= need_bytes:
        return Finding(code, OK, text)
    if spec.overcommit:
        return Finding(
            code, WARN, text, "services and guests die when memory runs out (overcommit)"
        )
    return Finding(code, REFUSE, text, remedy(host))


def figures(host: Host, need_bytes: int, what: str, free_bytes: int, others_bytes: int) -> str:
    """The memory needed and available, in words."""
    text = (
        f"{host.name} needs {format_size(need_bytes)} of memory {what}; "
        f"{format_size(free_bytes)} are free"
    )
    if others_bytes:
        text += f", without {format_size(others_bytes)} that other processes may still touch"
    return text


def remedy(host: Host) -> str:
    """How to give a host enough."""
    return (
        f"end or move other VMs on {host.name}, use a host with more memory, give the VM less, or "
        "accept that processes die when memory runs out: overcommit = true in its spec"
    )


def blocks(vm: Vm) -> Iterator[Finding]:
    """Refuse memory that a standby could not have as one file. Pure."""
    if len(vm.ram_names) > 1:
        reason = "its memory is in several blocks (NUMA nodes, memory modules)"
        remedy = f"schedule checkpoints: vmckpt schedule add {vm.name} --every 15m"
        yield Finding("memory-blocks", REFUSE, reason, remedy)
