"""Restore only the disks of a checkpoint, for a VM that is off.

For a host on which the machine cannot run, or a guest that is to boot afresh. Memory and devices
are left out; the guest finds its disks as after a power cut at that moment. As in a restore, images
are created beside the old ones, `vm.json` is the commit, and `making.py` ends an interrupted
restore.
"""

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.disks.qcow2 import while_wanted, write_image
from vmckpt.checkpoint.disks.stored_disks import StoredDisk, stored_disks
from vmckpt.checkpoint.facts import known_facts
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.restore.adopted import with_new_images
from vmckpt.checkpoint.restore.making import (
    committed,
    making,
    proof_of,
    settle,
    take_name,
    write_down,
)
from vmckpt.checkpoint.restore.planned import (
    PlannedRestore,
    cannot_become,
    changed,
    checks,
    copy_variables,
    replaced_file,
    replacement_path,
)
from vmckpt.checkpoint.restore.requests import CheckpointSource, RestoreOptions
from vmckpt.checkpoint.restore.restore import entitled, plan_of
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.checkpoint import require_replaceable
from vmckpt.preflight.finding import REFUSE, WARN, Finding, require
from vmckpt.qemu.disks.qcow2 import tables_bytes
from vmckpt.sequence.in_thread import in_thread, until_cancelled
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.state.durable import make_dir_durably
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES
from vmckpt.store.store import Checkpoint
from vmckpt.units import format_size
from vmckpt.vm.create import settled_platform
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Spec

# What prevents the machine from running here does not prevent having its disks here.
_OF_THE_MACHINE = frozenset(
    {"machine-type", "cpu-model", "accel", "memory", "files", "forwarded-ports", "userfaultfd"}
)


@dataclass(frozen=True, slots=True)
class DisksRestored:
    """A VM that is off, with the checkpoint's disks; `disks` are their images."""

    vm: str
    host: str
    checkpoint: str
    disks: tuple[str, ...]
    warnings: tuple[str, ...]


class _Image(NamedTuple):
    """An image to create at `path`."""

    disk: StoredDisk
    path: Path
    format: str


async def restore_disks(
    host: LocalHost, source: CheckpointSource, options: RestoreOptions
) -> DisksRestored:
    """Restore the disks in place, for a copy, or for the VM itself if no host has it.

    Raises RefusedError (the VM runs, ...), NotFoundError, BusyError, DamagedError, StorageError:
    nothing was changed.
    """
    async with reading(source.location, source.checkpoint, source.secret) as point:
        planned = await plan_of(point, source, options, host)
        async with entitled(planned, options) as old:
            if old is not None:
                return await _in_place(old, point, source)
            return await _anew(planned, options, point, source)


async def _in_place(old: Vm, point: Checkpoint, source: CheckpointSource) -> DisksRestored:
    """Keep the VM's present spec; its disks become the checkpoint's."""
    if await old.is_alive():
        raise RefusedError(
            f"'{old.name}' runs",
            why="its guest would find its disks changed",
            remedy=f"stop it first: vmckpt vm stop {old.name}",
        )
    images, warnings = _matched(old.spec, old.host, point)
    taken_unix_s = known_facts(point.manifest.facts).taken_unix_s
    await require_replaceable(
        old.host,
        old.name,
        [(image.path, image.format) for image in images],
        f"the disks of '{old.name}' cannot be replaced",
        taken_unix_s,
    )
    renames = {image: replaced_file(image.path) for image in images}
    made = {image: replacement_path(path) for image, path in renames.items()}
    paths = {image.path for image in images}
    new = Qemu(old.directory.qemu(new_qemu_id()), ProcessId(0, 0), old.qemu.platform)
    anew = [disk for disk in old.spec.disks if disk.on(old.host.state_dir) in paths]
    spec = changed(old.spec, with_new_images(old.spec, anew))
    vm = old._replace(spec=spec, qemu=new)
    async with _undone_unless_committed(old.host, old.name):
        pairs = ((aside, renames[image]) for image, aside in made.items())
        await write_down(vm, making(vm, renames=pairs))
        await _write(point, made)
        left = await to_the_end(_commit(vm, point, source))
    return _result(old, point, images, [*warnings, *left])


async def _anew(
    planned: PlannedRestore, options: RestoreOptions, point: Checkpoint, source: CheckpointSource
) -> DisksRestored:
    """Create the VM as the checkpoint describes it, or a copy."""
    host, vm = planned.vm.host, planned.vm
    found = [_eased(one, planned) for one in await checks(planned, in_place=False, lazy=False,
             plugged=options.plugged)]  # fmt: skip
    require(found, cannot_become(vm.name, host))
    warnings = [one.reason for one in found if one.verdict == WARN]
    stored = {disk.path: disk for disk in stored_disks(point.manifest)}
    facts = planned.facts.disks
    images = [
        _Image(stored[facts[new.number].path], new.path, facts[new.number].format)
        for new in planned.disks
        if facts[new.number].path in stored
    ]
    platform = await _platform(vm.spec, host, vm.qemu.platform)
    vm = vm._replace(qemu=Qemu(vm.qemu.files, ProcessId(0, 0), platform))
    own, qemu_id = planned.own_variables, vm.qemu.files.qemu_id
    new = [*([own] if own else []), *(image.path for image in images)]
    async with _undone_unless_committed(host, vm.name):
        await host.make_dir(vm.directory.path)
        await write_down(vm, making(vm, new))
        if own:
            await finish(in_thread(partial(copy_variables, planned, proof_of(own, qemu_id))))
        await _write(point, {image: proof_of(image.path, qemu_id) for image in images})
        for path in new:
            await in_thread(partial(take_name, proof_of(path, qemu_id), path))
        identity = source.identity_for(point.manifest, options.name)
        await host.write_text(vm.directory.spec, vm.spec.text)
        await host.write_text(vm.directory.identity, f"{identity}\n")
        left = await to_the_end(_commit(vm, point, source))
    return _result(vm, point, images, [*warnings, *left])


def _matched(spec: Spec, host: Host, point: Checkpoint) -> tuple[list[_Image], list[str]]:
    """Match the images to the VM's disks, by path, else by order.

    Raises RefusedError if the match is ambiguous.
    """
    stored = stored_disks(point.manifest)
    mine = [disk for disk in spec.disks if not disk.read_only]
    by_path = {str(disk.path): disk for disk in mine}
    if all(disk.path in by_path for disk in stored):
        pairs = [(disk, by_path[disk.path]) for disk in stored]
    elif len(stored) == len(mine):
        pairs = list(zip(stored, mine, strict=True))
    else:
        raise RefusedError(
            f"the disks of '{spec.name}' differ from the checkpoint's",
            why=f"the VM has {', '.join(by_path) or 'none'}; the checkpoint has "
            f"{', '.join(disk.path for disk in stored) or 'none'}",
            remedy="restore it as a copy (--as NAME), or export the disks that you want: "
            "vmckpt checkpoint export-disk",
        )
    kept = [path for path, disk in by_path.items() if disk not in [own for _, own in pairs]]
    warnings = [f"{path} is not in the checkpoint and stays as it is" for path in kept]
    return [_Image(one, own.on(host.state_dir), own.format) for one, own in pairs], warnings


@asynccontextmanager
async def _undone_unless_committed(host: Host, name: str) -> AsyncIterator[None]:
    """If the block fails, `making.settle` undoes it or, once committed, finishes it."""
    try:
        yield
    except BaseException:
        await finish(_end(host, name))
        raise


async def _end(host: Host, name: str) -> None:
    await settle(host, name)
    if await read_vm(host, name) is None:
        await host.remove(vm_dir(host.state_dir, name).path)


async def _commit(vm: Vm, point: Checkpoint, source: CheckpointSource) -> list[str]:
    """The commit: `vm.json` names the VM with these disks. From here on only forward.

    Returns what could not be done after it.
    """

    async def write_history() -> None:
        history = History.parse(await vm.host.read_text(vm.directory.point))
        history = history.then(point.manifest.id, vm.host, source.location)
        await vm.host.write_text(vm.directory.point, history.text)

    await vm.host.write_text(vm.directory.current, vm.qemu.to_json())
    return await committed(vm, partial(settle, vm.host, vm.name), write_history)


async def _write(point: Checkpoint, images: dict[_Image, Path]) -> None:
    """Write the images one after the other; chunks are verified as they are read."""
    for image, path in images.items():
        await until_cancelled(partial(_write_one, point, image, path))


def _write_one(
    point: Checkpoint, image: _Image, path: Path, still_wanted: Callable[[], None]
) -> None:
    make_dir_durably(path.parent)
    area = point.area(image.disk.name)
    needed = len(area.numbers()) * BLOCK_CHUNK_BYTES + tables_bytes(image.disk.size_bytes)
    there = os.statvfs(path.parent)
    if (free := there.f_bavail * there.f_frsize) < needed:
        raise RefusedError(
            f"there is no room for {path}",
            why=f"it takes up to {format_size(needed)}, {format_size(free)} are free",
            remedy="make room there; nothing was changed",
        )
    chunks = while_wanted(area.stream(), still_wanted)
    write_image(path, image.format, image.disk.size_bytes, chunks)


def _eased(check: Finding, planned: PlannedRestore) -> Finding:
    """Turn a finding that only keeps the machine from running here into a warning."""
    eases = check.code in _OF_THE_MACHINE
    if check.code == "files" and planned.variables is not None:
        eases = False  # the copy's variable store is made from one of these files
    return check._replace(verdict=WARN) if eases and check.verdict == REFUSE else check


async def _platform(spec: Spec, host: Host, theirs: Platform) -> Platform:
    """The platform it will run on here: the old one, otherwise that of its spec, if possible."""
    try:
        here = await settled_platform(spec, host)
    except RefusedError:  # a warning says so: it starts once its spec is changed
        return theirs
    return theirs if here.accel == theirs.accel and here.machine == theirs.machine else here


def _result(
    vm: Vm, point: Checkpoint, images: Sequence[_Image], warnings: Sequence[str]
) -> DisksRestored:
    paths = tuple(str(image.path) for image in images)
    return DisksRestored(vm.name, vm.host.name, point.manifest.id, paths, tuple(warnings))
