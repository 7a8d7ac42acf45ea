"""Check what a VM's own user can access on a host."""

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Executable, Host
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.users.users import VmUser, below

# Prints each path that the user cannot use as its letter requires, and what prevents it.
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

REACH = (
    "put it where every user may pass through (chmod o+x DIRECTORY), not below /root or a home; or "
    "run VMs as vmckpt's own user: vmckpt host set HOST --vm-uids none"
)


async def require_reachable(host: Host, spec: Spec, user: VmUser) -> None:
    """Raises RefusedError naming what the user cannot access, and what prevents it."""
    if found := await _unreachable(host, spec, user):
        raise RefusedError(
            f"the user of '{spec.name}' (uid {user.uid}) cannot reach all that it needs",
            why="; ".join(found),
            remedy=REACH,
        )


async def closed(host: Host, spec: Spec | None, user: VmUser) -> list[str]:
    """What a VM's user can never access: directories that are not vmckpt's."""
    binary = await host.find_executable(host.qemu)
    wanted = [*_program(binary), f"x{host.state_dir.parent}"]
    if spec is not None:
        disks = [disk.path for disk in spec.disks if disk.path.is_absolute()]
        wanted += [f"x{path.parent}" for path in (spec.ram_dir / "-", *disks, *spec.files)]
    done = await host.run(user.command(["sh", "-c", _TRY, "sh", *wanted]))
    return done.stdout.splitlines() if not done.returncode else [done.stderr.strip()]


def _program(binary: Executable | None) -> list[str]:
    """If there is no QEMU, that is the fault, and other checks report it."""
    return [f"x{binary.path}"] if binary else []


async def _unreachable(host: Host, spec: Spec, user: VmUser) -> list[str]:
    binary = await host.find_executable(host.qemu)
    wanted = [*_program(binary), f"x{spec.ram_dir}", f"x{host.state_dir}"]
    for disk in spec.disks:
        path = disk.on(host.state_dir)
        if await host.exists(path):
            wanted.append(f"{'r' if disk.read_only else 'w'}{path}")
            if disk.format == "qcow2":
                wanted += [f"r{path}" async for path in below(host, path)]
    wanted += [f"r{path}" for path in spec.files]
    done = await host.run(user.command(["sh", "-c", _TRY, "sh", *wanted]))
    return done.stdout.splitlines() if not done.returncode else [done.stderr.strip()]
