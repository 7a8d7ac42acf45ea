"""Create a VM from its spec, started or off, and give one that is off another spec."""

import secrets
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    RefusedError,
    UsageError,
    VmckptError,
)
from vmckpt.hosts.host import Completed, Host
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.drained import require_open
from vmckpt.hosts.inventory.inventory import all_hosts, local_host
from vmckpt.sequence.steps import finish
from vmckpt.vm.disks.shared_storage import is_device
from vmckpt.vm.identity import identity_of
from vmckpt.vm.inventory import Vm, homes, require_unused
from vmckpt.vm.lifecycle import boot, held, owner
from vmckpt.vm.paths import VmDir, lock_path, vm_dir
from vmckpt.vm.probe import abilities, choose_accel
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec, anchored, parse_spec
from vmckpt.vm.start import sweep

# Runs wherever TCG does, and is the same in every QEMU, unlike "max".
TCG_CPU = "qemu64"
KVM_CPU = "host"


def read_spec(path: Path) -> Spec:
    """Read a spec; relative paths start from its directory. Raises UsageError."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            f"cannot read {path}", why=str(exc), remedy="name a spec file (TOML)"
        ) from exc
    base = path.absolute().parent
    return parse_spec(anchored(parse_spec(text, str(path), base), base), str(path), base)


async def run_vm(spec: Spec, host: Host, *, silent_are_off: bool = False) -> Vm:
    """Create the VM on `host` and start it. Raises as `create_vm`."""
    async with new_name(spec.name, host, "vm run"):
        return await create_vm(spec, host, silent_are_off=silent_are_off)


async def define_vm(spec: Spec, host: Host) -> Vm:
    """Create the VM on `host` and leave it off. Raises as `create_vm`."""
    async with new_name(spec.name, host, "vm define"):
        return await create_vm(spec, host, starts=False)


@asynccontextmanager
async def new_name(name: str, host: Host, action: str) -> AsyncIterator[None]:
    """Lock the name of a VM that is about to be created, and the VM on `host`."""
    await host.require_up()
    async with name_lock(name, action), host.lock(lock_path(host.state_dir, name), owner(action)):
        yield


def name_lock(name: str, action: str) -> AbstractAsyncContextManager[None]:
    """The lock under which a name is assigned, on whichever host."""
    return local_host().lock(state_dir() / "names" / name, owner(action))


async def create_vm(
    spec: Spec, host: Host, *, starts: bool = True, silent_are_off: bool = False
) -> Vm:
    """Create the VM, as the holder of `new_name`; on an error nothing of it remains.

    Without `starts` it is off afterwards; its QEMU was started and ended before the guest ran, so
    that everything in the spec is known to exist. `silent_are_off`: no host that does not answer
    runs it. Raises RefusedError if the inventory has a VM of
    that name anywhere, or the host is drained; BusyError if there may soon be one.
    """
    directory = vm_dir(host.state_dir, spec.name)
    await require_open(host)  # a drain writes its mark first, then looks for locks
    if taken := await homes(spec.name, all_hosts(), silent_are_off=silent_are_off):
        raise RefusedError(
            f"there is a VM '{spec.name}' already",
            why=f"on host {taken[0].host.name}",
            remedy=f"choose another name, start it (`vmckpt vm start {spec.name}`), or remove it",
        )
    await require_unused([spec.name], host, all_hosts())
    await sweep(host, spec, directory, None)
    await host.make_dir(directory.path)
    created: list[Path] = []
    try:
        await host.write_text(directory.spec, spec.text)
        await identity_of(host, directory)
        await _create_disks(host, spec, created)
        platform = await settled_platform(spec, host)
        return await boot(spec, host, platform, is_new=True, starts=starts)
    except BaseException:
        await finish(_undo_run(host, directory, created))
        raise


async def redefine_vm(vm: Vm, spec: Spec) -> Vm:
    """Give a VM that is off, and was found as `vm`, another spec, which counts from its next start.

    Its QEMU is started and ended before the guest runs, as by `create_vm`; on an error everything
    is as before. Raises RefusedError if the VM runs, or its name would change; BusyError if its
    spec was changed meanwhile.
    """
    if spec.name != vm.name:
        raise RefusedError(
            f"'{vm.name}' cannot become '{spec.name}'",
            why="checkpoints, schedules and replication know a VM by its name",
            remedy=f'write name = "{vm.name}"; or define a new VM',
        )
    async with held(vm, "vm edit") as now:
        if await now.is_alive():
            raise RefusedError(
                f"'{now.name}' runs",
                why="a spec counts from the start of its QEMU",
                remedy=f"stop it first: vmckpt vm stop {now.name}",
            )
        if now.spec.text != vm.spec.text:
            raise BusyError(
                f"the spec of '{now.name}' was changed meanwhile",
                why="by another command, whose change would be lost",
                remedy=f"edit it again: vmckpt vm edit {now.name}",
            )
        created: list[Path] = []
        try:
            await _create_disks(now.host, spec, created)
            offered = await settled_platform(spec, now.host)
            platform = kept_platform(now.spec, now.qemu.platform, spec, offered)
            edited = await boot(spec, now.host, platform, starts=False)
            await now.host.write_text(now.directory.spec, spec.text)
        except BaseException:
            await finish(_as_before(now, created))
            raise
        return edited


async def _as_before(vm: Vm, created: Iterable[Path]) -> None:
    # First: on a full disk it makes room.
    await _remove_images(vm.host, vm.name, created)
    await vm.host.write_text(vm.directory.current, vm.qemu.to_json())


def kept_platform(old_spec: Spec, old: Platform, spec: Spec, offered: Platform) -> Platform:
    """The platform after a change of the spec: what that does not touch stays resolved. Pure."""
    same_accel = spec.accel == old_spec.accel
    return Platform(
        old.machine if spec.machine == old_spec.machine else offered.machine,
        old.accel if same_accel else offered.accel,
        old.cpu if same_accel and spec.cpu == old_spec.cpu else offered.cpu,
    )


async def _undo_run(host: Host, directory: VmDir, created: Iterable[Path]) -> None:
    """Remove the new VM, and the images made for it that no other VM has begun to use."""
    await _remove_images(host, directory.path.name, created)
    await host.remove(directory.path)


async def _remove_images(host: Host, name: str, created: Iterable[Path]) -> None:
    from vmckpt.vm.disks.images import used_besides

    for path in created:
        try:
            is_used = await used_besides(host, path, (f"VM {name}",))
        except VmckptError:  # libvirtd is silent, or a VM's files are damaged
            is_used = True
        if not is_used:
            await host.remove(path)


async def settled_platform(spec: Spec, host: Host) -> Platform:
    """Resolve a spec's platform on a host. Raises RefusedError if the host does not offer it."""
    offered = (await abilities(host)).machines
    if spec.machine not in offered:
        raise RefusedError(
            f"QEMU on {host.name} has no machine type '{spec.machine}'",
            why=f"it offers {', '.join(sorted(set(offered.values()), reverse=True)[:6])}, ...",
            remedy="choose one of them, or a host with a QEMU that has it",
        )
    accel, _ = await choose_accel(host, spec.accel)
    cpu = spec.cpu if spec.cpu != "auto" else (KVM_CPU if accel == "kvm" else TCG_CPU)
    return Platform(offered[spec.machine], accel, cpu)


async def _create_disks(host: Host, spec: Spec, created: list[Path]) -> None:
    """Create missing images; each path is added to `created` before the file exists."""
    for disk in spec.disks:
        path = disk.on(host.state_dir)
        if await host.exists(path):
            continue
        if disk.size_bytes is None:
            raise RefusedError(
                f"disk image {path} is not on {host.name}",
                why="and the spec gives no size to create it with",
                remedy='create it, fix the path, or add size = "10G"',
            )
        if await is_device(host, path):
            raise RefusedError(
                f"{path} is not on {host.name}",
                why="it would be a device: an image made there would be in the host's memory, and "
                "gone after a boot",
                remedy="make the volume, or give the disk another path",
            )
        if not disk.path.is_absolute():
            await host.make_dir(path.parent)
        created.append(path)
        try:
            await create_image(host, path, disk.format, disk.size_bytes)
        except OperationFailedError:
            created.remove(path)  # it is another VM's, created meanwhile
            raise


async def create_image(host: Host, path: Path, image_format: str, size_bytes: int) -> None:
    """Create an empty disk image; nothing may exist at `path`. Raises OperationFailedError.

    It is there complete and durable, or not at all: cut off in between, an unfinished one would be
    taken for the VM's disk, and data that a guest flushes later could be lost with its name.
    """
    part = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}")
    try:
        await _write_image(host, part, path, [image_format, str(size_bytes)])
    finally:
        with suppress(VmckptError):  # the host is down
            await finish(host.remove(part))
    done = await host.run(["sync", "--", str(path.parent)])
    if done.returncode:
        await host.remove(path)
        raise _not_created(host, path, done)


async def _write_image(host: Host, part: Path, path: Path, words: list[str]) -> None:
    """Write it as `part`, and give it its name, if nothing has that."""
    # qemu-img would follow another user's dangling symbolic link.
    begin = 'test -e "$2" || test -L "$2" && { echo "it exists already" >&2; exit 1; }; '
    begin += 'set -C; : >"$1"'
    image_format, size = words
    for command in (
        ["sh", "-c", begin, "sh", str(part), str(path)],
        [str(qemu_img(host)), "create", "-q", "-f", image_format, str(part), size],
        ["sync", "--", str(part)],
        ["ln", "-T", "--", str(part), str(path)],
    ):
        done = await host.run(command)
        if done.returncode and command[0] == "ln" and not await host.exists(path):
            # A file system without hard links.
            done = await host.run(["mv", "-n", "-T", "--", str(part), str(path)])
        if done.returncode:
            raise _not_created(host, path, done)


def _not_created(host: Host, path: Path, done: Completed) -> OperationFailedError:
    return OperationFailedError(
        f"cannot create disk image {path} on {host.name}",
        why=done.stderr.strip(),
        remedy="check the path, free space, and that no file exists there",
    )


def qemu_img(host: Host) -> Path:
    """The qemu-img that belongs to a host's QEMU."""
    return Path(host.qemu).parent / "qemu-img" if "/" in host.qemu else Path("qemu-img")
