"""What is for and against users of their own for a host's VMs, and what such a user can reach."""

from pathlib import Path

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Executable, Host
from vmckpt.hosts.uids import Uids, taken
from vmckpt.vm.check import OK, REFUSE, WARN, Check
from vmckpt.vm.spec import Spec
from vmckpt.vm.users import VmUser, below, unfit

ACCOUNTS = (Path("/etc/passwd"), Path("/etc/group"))
SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
# Of no system's own, and so many that two VMs of a host do not meet.
SUGGESTED = Uids(2_000_000_000, 2_099_999_999)
# Prints each path that the user cannot use as the letter before it says, and what is in its way.
_TRY = """\
for one; do
    path=${one#?}; mode=${one%"$path"}
    [ "-$mode" = -w ] && [ -r "$path" ] && [ -w "$path" ] && continue
    [ "-$mode" != -w ] && [ "-$mode" "$path" ] && continue
    rest=${path#/}; way=
    while [ "$rest" != "${rest#*/}" ]; do
        way=$way/${rest%%/*}; rest=${rest#*/}
        [ -x "$way" ] || { echo "$path: $way is closed"; continue 2; }
    done
    echo "$path"
done
"""

_REACH = (
    "put it where every user may pass through (chmod o+x DIRECTORY), not below /root or a home; or "
    "run VMs as vmckpt's own user: vmckpt host set HOST --vm-uids none"
)


async def checks(host: Host, spec: Spec, sharer: Host | None = None) -> list[Check]:
    """Whether a VM can run there as a user of its own; nothing where it has none.

    `sharer` has some of its images too, and its QEMU there now.
    """
    if (uids := host.vm_uids) is None:
        return []
    if why := unfit(spec):
        remedy = "choose a host without --vm-uids"
        return [Check("vm-uids", REFUSE, f"it cannot have a user on {host.name}: {why}", remedy)]
    if sharer is not None and sharer.vm_uids not in (None, uids):
        reason = f"VMs are uids {uids} on {host.name}, {sharer.vm_uids} on {sharer.name}: an image "
        remedy = f"vmckpt host set {host.name} --vm-uids {sharer.vm_uids}"
        return [Check("vm-uids", REFUSE, f"{reason}that both have has one owner", remedy)]
    probe = VmUser(uids.first + 1, uids)
    if found := await _closed(host, spec, probe):
        return [Check("vm-uids", REFUSE, f"no VM's user can reach {'; '.join(found)}", _REACH)]
    return [Check("vm-uids", OK, f"its QEMU has a user of its own on {host.name}, of {uids}")]


async def host_checks(host: Host) -> list[Check]:
    """Whether the VMs of a host have users of their own, and which. What is wrong with them."""
    is_root = await host.user_id() == 0
    if (uids := host.vm_uids) is None:
        if not is_root:
            return []
        reason = f"QEMU is root on {host.name}: a guest that breaks out of it is root there"
        remedy = f"vmckpt host set {host.name} --vm-uids {SUGGESTED}"
        return [Check("vm-uids", WARN, reason, remedy)]
    if why := await obstacle(host, uids):
        remedy = f"vmckpt host set {host.name} --vm-uids FIRST-LAST"
        return [Check("vm-uids", REFUSE, why, remedy)]
    if found := await _closed(host, None, VmUser(uids.first + 1, uids)):
        return [Check("vm-uids", REFUSE, f"no VM's user can reach {'; '.join(found)}", _REACH)]
    return [Check("vm-uids", OK, f"each VM's QEMU has a user of its own, of {uids}")]


async def obstacle(host: Host, uids: Uids) -> str:
    """Why a host cannot have these for its VMs; "": it can. Raises HostDownError."""
    if await host.user_id() != 0:
        return f"vmckpt is not root on {host.name}: it can start QEMU as its own user alone"
    if await host.find_executable("setpriv") is None:
        return f"{host.name} has no setpriv (util-linux)"
    accounts = [await host.read_text(path) or "" for path in ACCOUNTS]
    subordinate = [await host.read_text(path) or "" for path in SUBORDINATE]
    if found := taken(uids, accounts, subordinate):
        return f"some of {uids} belong to {', '.join(found[:5])} on {host.name}"
    return ""


async def _closed(host: Host, spec: Spec | None, user: VmUser) -> list[str]:
    """What a VM's user cannot reach whatever it is given: directories that are not vmckpt's."""
    binary = await host.find_executable(host.qemu)
    wanted = [*_program(binary), f"x{host.state_dir.parent}"]
    if spec is not None:
        disks = [disk.path for disk in spec.disks if disk.path.is_absolute()]
        wanted += [f"x{path.parent}" for path in (spec.ram_dir / "-", *disks, *spec.files)]
    done = await host.run(user.command(["sh", "-c", _TRY, "sh", *wanted]))
    return done.stdout.splitlines() if not done.returncode else [done.stderr.strip()]


def _program(binary: Executable | None) -> list[str]:
    """Where there is no QEMU, that is what is wrong, and others say so."""
    return [f"x{binary.path}"] if binary else []


async def require_reachable(host: Host, spec: Spec, user: VmUser) -> None:
    """Raises RefusedError, naming what the user cannot reach and what is in the way."""
    if found := await _unreachable(host, spec, user):
        raise RefusedError(
            f"the user of '{spec.name}' (uid {user.uid}) cannot reach all that it needs",
            why="; ".join(found),
            remedy=_REACH,
        )


async def _unreachable(host: Host, spec: Spec, user: VmUser) -> list[str]:
    binary = await host.find_executable(host.qemu)
    wanted = [*_program(binary), f"x{spec.ram_dir}", f"x{host.state_dir}"]
    for disk in spec.disks:
        path = disk.on(host.state_dir)
        if await host.exists(path):
            wanted.append(f"{'r' if disk.read_only else 'w'}{path}")
            if disk.format == "qcow2":
                wanted += [f"r{path}" async for path in below(host, await host.resolve(path))]
    wanted += [f"r{path}" for path in spec.files]
    done = await host.run(user.command(["sh", "-c", _TRY, "sh", *wanted]))
    return done.stdout.splitlines() if not done.returncode else [done.stderr.strip()]
