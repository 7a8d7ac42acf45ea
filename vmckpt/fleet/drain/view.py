"""The state that a drain works from: VMs on all hosts, and the hosts' capacity."""

import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vmckpt.drivers.driver import Driver, VmInfo
from vmckpt.drivers.find import find, inspect_everywhere
from vmckpt.errors import HostDownError, VmckptError
from vmckpt.forecast.drain.fleet import HostRoom
from vmckpt.hosts.every import Answers, ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import is_closed
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.hosts.lock import JUST_BEGUN
from vmckpt.units import parse_size_bytes
from vmckpt.vm.inventory import RECOVERY, is_worked_on
from vmckpt.vm.paths import lock_path, vm_dir

_MEM_TOTAL = re.compile(r"MemTotal: +([0-9]{1,15}) kB *")
# In /sys/devices/system/cpu/online, between commas.
_SPAN = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")
# Operations that hold a VM's lock and then start it on the host. They may have begun before the
# host was marked, and take long.
BEGINNINGS = (
    JUST_BEGUN, "vm run", "vm start", "vm reboot", "vm adopt", "checkpoint restore", "fork",
)  # fmt: skip
# No limit, as a number that is never reached.
ANY_NUMBER = 1 << 20


@dataclass(frozen=True, slots=True)
class DrainTools:
    """The functions with which a drain queries VMs and hosts. `is_worked_on`: an operation holds
    the VM now.
    """

    inspect: Callable[[], Awaitable[Answers[VmInfo]]] = inspect_everywhere
    find: Callable[[str, Callable[[str], None]], Awaitable[Driver]] = find
    is_worked_on: Callable[[str], Awaitable[bool]] = is_worked_on
    hosts: Callable[[], Sequence[Host]] = all_hosts


TOOLS = DrainTools()


class HostLimits(NamedTuple):
    """Limits for every host: memory that stays free, vCPUs per processor, VMs."""

    keep_free_bytes: int = parse_size_bytes("512M")
    vcpus_a_cpu: float = 16.0
    most_vms: int | None = None


class HostSeen(NamedTuple):
    """A host with its capacity for VMs, or the reason why it gets none."""

    host: Host
    room: HostRoom | None
    closed: str = ""


async def inspect_hosts(
    hosts: Iterable[Host],
    seen: Sequence[VmInfo],
    limits: HostLimits,
    leaving: Collection[str],
    to_open: Collection[str] = (),
) -> list[HostSeen]:
    """The capacity of each host besides the VMs that stay there: those not `leaving`.

    `to_open`: hosts that will be open before the first move, marked or not.
    """

    async def inspect(host: Host) -> HostSeen:
        if host.name not in to_open and await is_closed(host):
            return HostSeen(host, None, "it is drained")
        there = [vm for vm in seen if vm.host == host.name and vm.is_on and vm.name not in leaving]
        return HostSeen(host, await _room(host, there, limits))

    async def inspect_or_explain(host: Host) -> HostSeen:
        try:
            return await inspect(host)
        except VmckptError as exc:
            return HostSeen(host, None, f"{exc.what}: {exc.why}")

    return (await ask_every(hosts, inspect_or_explain)).given


async def coming(host: Host) -> set[str]:
    """The VMs that are about to run on the host, by the holders of their locks there.

    For a move, or its recovery, the host is a destination that is not home yet.
    """

    async def is_coming(name: str) -> bool:
        holder = await host.lock_owner(lock_path(host.state_dir, name))
        if holder is None or not holder.action.startswith(("migrate to ", RECOVERY)):
            return holder is not None and holder.action in BEGINNINGS
        return not await host.exists(vm_dir(host.state_dir, name).current)

    names = await host.list_dir(host.state_dir / "locks")
    return {name for name in names if await is_coming(name)}


async def _room(host: Host, there: Sequence[VmInfo], limits: HostLimits) -> HostRoom:
    promised = sum(vm.memory_bytes for vm in there)
    # Memory that guests have not touched yet looks free, but is theirs.
    free = min(await host.available_memory_bytes(), await _memory_bytes(host) - promised)
    vcpus = int(await _processors(host) * limits.vcpus_a_cpu)
    most = ANY_NUMBER if limits.most_vms is None else limits.most_vms
    return HostRoom(
        host.name,
        max(free - limits.keep_free_bytes, 0),
        max(vcpus - sum(vm.vcpus for vm in there), 0),
        max(most - len(there), 0),
        apart=frozenset(word for vm in there for word in vm.placement.apart),
        together=frozenset(word for vm in there for word in vm.placement.together),
    )


async def _memory_bytes(host: Host) -> int:
    """All memory of a host. Raises HostDownError."""
    for line in (await host.read_text(Path("/proc/meminfo")) or "").splitlines():
        if found := _MEM_TOTAL.fullmatch(line):
            return int(found[1]) * 1024
    raise _tells_not(host, "/proc/meminfo")


async def _processors(host: Host) -> int:
    text = await host.read_text(Path("/sys/devices/system/cpu/online")) or ""
    spans = [_SPAN.fullmatch(part) for part in text.strip().split(",")]
    count = sum(int(one[2] or one[1]) - int(one[1]) + 1 for one in spans if one)
    if all(spans) and count > 0:
        return count
    raise _tells_not(host, "/sys/devices/system/cpu/online")


def _tells_not(host: Host, path: str) -> HostDownError:
    return HostDownError(
        f"{host.name} does not report its resources",
        why=f"{path} has no usable content",
        remedy=f"check {path} on {host.name}",
    )
