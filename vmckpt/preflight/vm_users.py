"""Whether a host's VMs can have separate users, and what such a user can access."""

from collections.abc import AsyncIterator
from pathlib import Path

from vmckpt.hosts.host import Host
from vmckpt.hosts.uids import Uids, taken
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.users.reach import REACH, closed
from vmckpt.vm.users.users import VmUser, unfit

ACCOUNTS = (Path("/etc/passwd"), Path("/etc/group"))
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
# Outside any system's own range, and large enough that two VMs of a host do not collide.
SUGGESTED = Uids(2_000_000_000, 2_099_999_999)


async def checks(host: Host, spec: Spec, sharer: Host | None = None) -> AsyncIterator[Finding]:
    """Whether a VM can run there as a separate user; nothing if the host has no such users.

    `sharer` is a host that also has some of its images, and runs its QEMU now.
    """
    if (uids := host.vm_uids) is None:
        return
    if why := unfit(spec):
        remedy = "choose a host without --vm-uids"
        yield Finding("vm-uids", REFUSE, f"it cannot have a user on {host.name}: {why}", remedy)
        return
    if sharer is not None and sharer.vm_uids not in (None, uids):
        reason = f"VMs are uids {uids} on {host.name}, {sharer.vm_uids} on {sharer.name}: an image "
        remedy = f"vmckpt host set {host.name} --vm-uids {sharer.vm_uids}"
        yield Finding("vm-uids", REFUSE, f"{reason}that both have has one owner", remedy)
        return
    probe = VmUser(uids.first + 1, uids)
    if found := await closed(host, spec, probe):
        yield Finding("vm-uids", REFUSE, f"no VM's user can reach {'; '.join(found)}", REACH)
        return
    yield Finding("vm-uids", OK, f"its QEMU has a user of its own on {host.name}, of {uids}")


async def host_checks(host: Host) -> AsyncIterator[Finding]:
    """Whether the VMs of a host have separate users, which, and what is wrong with them."""
    is_root = await host.user_id() == 0
    if (uids := host.vm_uids) is None:
        if not is_root:
            return
        reason = f"QEMU is root on {host.name}: a guest that breaks out of it is root there"
        remedy = f"vmckpt host set {host.name} --vm-uids {SUGGESTED}"
        yield Finding("vm-uids", WARN, reason, remedy)
        return
    if why := await obstacle(host, uids):
        remedy = f"vmckpt host set {host.name} --vm-uids FIRST-LAST"
        yield Finding("vm-uids", REFUSE, why, remedy)
        return
    if found := await closed(host, None, VmUser(uids.first + 1, uids)):
        yield Finding("vm-uids", REFUSE, f"no VM's user can reach {'; '.join(found)}", REACH)
        return
    yield Finding("vm-uids", OK, f"each VM's QEMU has a user of its own, of {uids}")


async def obstacle(host: Host, uids: Uids) -> str:
    """Why a host cannot use these for its VMs; "": it can. Raises HostDownError."""
    if await host.user_id() != 0:
        return f"vmckpt is not root on {host.name}: it can start QEMU as its own user alone"
    if await host.find_executable("setpriv") is None:
        return f"{host.name} has no setpriv (util-linux)"
    accounts = [await host.read_text(path) or "" for path in ACCOUNTS]
    subordinate = [await host.read_text(path) or "" for path in SUBORDINATE]
    if found := taken(uids, accounts, subordinate):
        return f"some of {uids} belong to {', '.join(found[:5])} on {host.name}"
    return ""
