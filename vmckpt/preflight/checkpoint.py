"""Whether a VM can be checkpointed, and whether a checkpoint can become a VM on a host."""

from collections.abc import AsyncIterator, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.preflight import capture, destination_host, vm_users
from vmckpt.preflight.adopted import adopted_changes
from vmckpt.preflight.blockers import device_checks
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask
from vmckpt.preflight.isolation import isolation_checks
from vmckpt.preflight.passthrough import away_names, free_checks, hook_checks, saved_whole_checks
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import session
from vmckpt.vm.disks.backing import snapshots_of
from vmckpt.vm.disks.images import disk_of_others, standby_users, used_besides
from vmckpt.vm.disks.shared_storage import is_device
from vmckpt.vm.inventory import Vm
from vmckpt.vm.probe import abilities
from vmckpt.vm.spec.spec import Spec


class NewImage(NamedTuple):
    """An image to be written.

    `is_new`: it must not exist yet; `is_own`: the VM that is to be replaced currently writes it.
    """

    path: Path
    size_bytes: int
    is_new: bool
    is_own: bool


class Wanted(NamedTuple):
    """A VM to be created from a checkpoint.

    `variables`: the UEFI variable store from which a copy's is made; `firmware_sha256`: of the
    firmware with which the checkpoint was taken, if any; `taken_unix_s`: when that was.
    """

    vm: Vm
    disks: tuple[NewImage, ...]
    variables: Path | None
    firmware_sha256: str | None
    taken_unix_s: float = inf


async def capture_checks(vm: Vm) -> list[Finding]:
    """For a running VM: whether its state can be captured while it runs. Raises HostDownError."""
    away = await away_names(vm)
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        found = await ask(
            await adopted_changes(vm, monitor),
            capture.memory(vm, monitor),
            capture.devices(monitor, away),
        )
    return [*found, *await ask(hook_checks(vm), capture.guarded(vm), capture.tracking(vm))]


async def save_checks(vm: Vm) -> list[Finding]:
    """For a running VM: whether QEMU can save it as a whole. Raises HostDownError."""
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        blockers = (await commands.query_migrate(monitor)).blockers
        pci_ids = await commands.query_pci_ids(monitor) if blockers else {}
        state = await commands.query_status(monitor)
        changed = await adopted_changes(vm, monitor)
    checks = [*changed, *device_checks(blockers, pci_ids), *saved_whole_checks(vm)]
    if not state.running:
        remedy = "let it run: see `vmckpt vm show`"
        checks.append(Finding("running", REFUSE, f"its state is '{state.status}'", remedy))
    return checks


async def restore_checks(to: Wanted, *, in_place: bool, lazy: bool, plugged: bool) -> list[Finding]:
    """Every check for creating it; changes nothing. Raises HostDownError."""
    vm, host = to.vm, to.vm.host
    theirs = await abilities(host)
    read_only = [disk.on(host.state_dir) for disk in vm.spec.disks if disk.read_only]
    found = await ask(
        destination_host.name(vm, host) if not in_place else (),
        destination_host.machine(vm, host, theirs),
        destination_host.accel(vm, host),
        destination_host.permissions(vm, host),
        vm_users.checks(host, vm.spec),
        destination_host.room(vm, host),
        _files(to, read_only),
        _disks(to),
        # In place it inherits those of the VM that it replaces.
        free_checks(vm.spec.passthrough, host) if not in_place else (),
    )
    if plugged and not vm.spec.is_isolated:
        found += [
            one for one in await ask(destination_host.network(vm, host)) if one.code == "bridge"
        ]
        # In place the old QEMU has them until the new one runs.
        stop = f"stop it first: vmckpt vm stop {vm.name}" if in_place else "free them there"
        found += await ask(destination_host.forwards(vm, host, stop))
    return found + await ask(
        isolation_checks(vm.spec, host) if not plugged else (),
        destination_host.userfaults(host, by_qemu=False) if lazy else (),
    )


async def require_replaceable(
    host: Host, name: str, disks: Iterable[tuple[Path, str]], what: str, taken_unix_s: float = inf
) -> None:
    """Raises RefusedError if a restore must not replace a disk of the VM or domain of that name.

    `disks`: paths and formats.
    """
    own = (*standby_users(name), f"domain {name}")
    for path, kind in disks:
        found = await _irreplaceable(host, path, kind, taken_unix_s)
        if found := found or await _below_others(host, path, own):
            raise RefusedError(what, why=found.reason, remedy=found.remedy)


async def _irreplaceable(host: Host, path: Path, kind: str, taken_unix_s: float) -> Finding | None:
    """Why a restore of a checkpoint of that time must not make an image file there, if so."""
    if await is_device(host, path):
        reason = f"{path} is a device, and a restore makes image files: there one would be in "
        return Finding(
            "disk-device",
            REFUSE,
            f"{reason}the host's memory, and gone after a boot",
            "make a copy, whose disks are image files (--as NAME); or write the content to the "
            "device: vmckpt checkpoint serve-disk, and qemu-img convert -n",
        )
    found = await snapshots_of(host, path) if kind == "qcow2" else []
    if older := [one.name for one in found if one.taken_unix_s < taken_unix_s]:
        return Finding(
            "disk-snapshots",
            REFUSE,
            f"{path} has internal snapshots from before that, which would be lost: "
            f"{', '.join(older)}",
            "remove them (vmckpt checkpoint rm NAME --kind internal --vm VM), or make a copy: "
            "--as NAME",
        )
    return None


async def _below_others(host: Host, path: Path, own: Sequence[str]) -> Finding | None:
    """Why new content of a disk would be that of others too, if so. `own`: its VM."""
    if not (users := await disk_of_others(host, path, own)):
        return None
    reason = f"{path} is a disk of others too, or they are based on it: {', '.join(users)}"
    return Finding(
        "disk-target",
        REFUSE,
        reason,
        "remove them if nothing needs them; or make a copy: --as NAME",
    )


async def _files(restored: Wanted, read_only: Sequence[Path]) -> AsyncIterator[Finding]:
    spec, host = restored.vm.spec, restored.vm.host
    first = [restored.variables] if restored.variables else []
    wanted = [*read_only, *first, *(path for path in spec.files if not _is_vars(spec, path))]
    if missing := [str(path) for path in wanted if not await host.readable(path)]:
        reason = f"{host.name} cannot read {', '.join(missing)}"
        yield Finding("files", REFUSE, reason, "put the files there with which the VM was started")
        return
    yield Finding("files", OK, f"{len(wanted)} files of the VM are readable on {host.name}")
    if spec.firmware and restored.firmware_sha256:
        code = await host.fingerprint(spec.firmware.code)
        if code is None or code.sha256 != restored.firmware_sha256:
            reason = f"{spec.firmware.code} is another build than when the checkpoint was taken"
            yield Finding("firmware", WARN, reason, "the guest uses it when it next boots")


def _is_vars(spec: Spec, path: Path) -> bool:
    return spec.firmware is not None and path == spec.firmware.vars


async def _disks(restored: Wanted) -> AsyncIterator[Finding]:
    host = restored.vm.host
    kinds = {disk.on(host.state_dir): disk.format for disk in restored.vm.spec.disks}
    for disk in restored.disks:
        kind = "raw" if disk.is_new else kinds.get(disk.path, "raw")
        if found := await _irreplaceable(host, disk.path, kind, restored.taken_unix_s):
            yield found
            continue
        if disk.is_new and await host.exists(disk.path):
            reason = f"{disk.path} exists already"
            yield Finding("disk-target", REFUSE, reason, "remove it, or choose another name")
            continue
        name = restored.vm.name
        own = standby_users(name)
        if disk.is_own and (found := await _below_others(host, disk.path, own)):
            yield found
            continue
        if not (disk.is_new or disk.is_own) and await used_besides(host, disk.path, own):
            reason = f"{disk.path}, which '{name}' no longer has, is in use"
            remedy = f"see what uses it (vmckpt host images {host.name}), or make a copy: --as NAME"
            yield Finding("disk-target", REFUSE, reason, remedy)
            continue
        if not await host.may_write_below(disk.path.parent):
            reason = f"nothing can be written to {disk.path.parent}"
            yield Finding("disk-target", REFUSE, reason, "fix its permissions, or use another host")
            continue
        yield Finding(
            "disk-target", OK, f"{disk.path} can be made ({disk.size_bytes} bytes at most)"
        )
