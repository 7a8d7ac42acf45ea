"""Start many VMs from one checkpoint; they share memory and disks until they write.

The checkpoint's memory is put into one file in memory, and each fork's QEMU maps it privately: the
kernel copies a page when a fork writes to it. The file's only names are the forks' hard links, so
it goes with the last fork. Disks are qcow2 overlays over one image each, which stays in the host's
`images/`. Forks are cut off from every network unless you ask otherwise.
"""

import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.disks.qcow2 import while_wanted, write_image, write_overlay
from vmckpt.checkpoint.facts import (
    DEVICES,
    FILE,
    DiskFacts,
    machine_from_json,
    own_facts,
)
from vmckpt.checkpoint.fork.room import ForkRoom, load_content, room_files, room_for_all
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore.identity import tell_guest
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
    checks,
    copy_variables,
    overcommitted,
    plan_copy,
    standing_of,
)
from vmckpt.devices.absence import bring_back, plug_in
from vmckpt.epoch.load import SETTINGS, load_devices
from vmckpt.errors import OperationFailedError, RefusedError, VmckptError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import check_name, local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.memory.ram_file import give_name, unnamed
from vmckpt.preflight.finding import require
from vmckpt.preflight.isolation import drivers_of
from vmckpt.qemu import commands
from vmckpt.qemu.compare import describe, differences
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.in_thread import in_thread, until_cancelled
from vmckpt.sequence.steps import all_of, finish, to_the_end
from vmckpt.state.durable import rename_durably
from vmckpt.store.store import Checkpoint
from vmckpt.vm.identity import new_identity
from vmckpt.vm.inventory import Vm, homes
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import IMAGES, IN_MEMORY, lock_path
from vmckpt.vm.probe import abilities
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.start import end_qemu, plug_taps, start_qemu, sweep

# The first QEMU that accepts a read-only memory-backend-file as RAM.
READ_ONLY_RAM = (8, 2, 0)
# A device by which a guest gives pages back: QEMU then punches holes into the file that it can
# write, also where others map it (ram_block_discard_range).
_BALLOON = "virtio-balloon"


@dataclass(frozen=True, slots=True)
class ForkOptions:
    """The request: this many forks of `checkpoint`, named `name`-1, `name`-2, ...

    `known`, `is_foreign`: see `CheckpointSource`; `trust`: see `foreign.py`.
    """

    checkpoint: str
    name: str
    number: int
    plugged: bool
    trust: bool = False
    overcommit: bool = False
    known: str = ""
    is_foreign: bool = True

    @property
    def names(self) -> list[str]:
        """The forks' names."""
        return [f"{self.name}-{number + 1}" for number in range(self.number)]


@dataclass(frozen=True, slots=True)
class Forked:
    """One fork: running, or the reason why not. `took_ms`: its share of the time until it ran."""

    name: str
    took_ms: float
    error: str = ""
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the caller."""
        return asdict(self)


async def fork(
    host: LocalHost, location: str, options: ForkOptions, secret: bytes | None = None, *, run: str
) -> list[Forked]:
    """Make the forks one after the other; a failed one leaves nothing behind.

    They start to run together when the last one is ready, so that none takes processor time from
    those in the making. `run` is this run's id.

    Raises RefusedError, NotFoundError, StorageError if none can be made.
    """
    async with reading(location, options.checkpoint, secret) as point:
        return await _Forking(host, point, options, location, run).run()


def remove_parts(host: LocalHost, run: str) -> None:
    """After a run has died: remove the disk image that it was writing. Blocking."""
    shutil.rmtree(room_files(run).memory(IN_MEMORY), ignore_errors=True)
    for part in (host.state_dir / IMAGES).glob(f".*.{run}"):
        part.unlink(missing_ok=True)


class _Ready(NamedTuple):
    """A fork that waits to run; without a monitor it has failed."""

    planned: PlannedRestore
    made: list[Path]
    monitor: Monitor | None
    error: str
    took_s: float


class _Forking:
    """All forks of one request."""

    def __init__(
        self, host: LocalHost, point: Checkpoint, options: ForkOptions, location: str, run: str
    ) -> None:
        self._host, self._point, self._options, self._run_name = host, point, options, run
        self._history = History().then(point.manifest.id, host, location)
        self._facts = own_facts(point.manifest)
        self._ram, self._was_named, self._is_read_only = -1, False, False
        self._disks: dict[int, Path] = {}
        self._base = point.manifest.id

    async def run(self) -> list[Forked]:
        names = [check_name(name, "VM") for name in self._options.names]
        plugged, options = self._options.plugged, self._options
        manifest = self._point.manifest
        standing = await standing_of(
            manifest, self._host, known=options.known, is_foreign=options.is_foreign
        )
        planned = [
            plan_copy(
                self._facts,
                self._host,
                name,
                standing,
                keep_macs=False,
                plugged=plugged,
                overlays=True,
            )
            for name in names
        ]
        self._require_memory(planned[0].vm)
        if options.is_foreign:  # a forged id must not get another checkpoint's image
            self._base = f"{manifest.id}-{digest(manifest)[:8]}"
        # The room for all of them is reserved below.
        first = overcommitted(planned[0])
        found = await checks(first, in_place=False, lazy=False, plugged=plugged)
        require(found, cannot_become(names[0], self._host))
        await self._require_apart(first.spec)
        if options.overcommit:
            planned = [overcommitted(one) for one in planned]
        try:
            async with AsyncExitStack() as locks:
                forks = await self._made(planned, locks)
            # After all run: waiting for one guest agent delays no other fork.
            return await all_of(map(self._with_warnings, forks, planned))
        finally:
            if self._ram >= 0:
                os.close(self._ram)

    def _require_memory(self, vm: Vm) -> None:
        """Raises RefusedError if its memory is not pages that forks could share."""
        if self._facts.kind == FILE:
            copy = "vmckpt checkpoint restore ID --as NAME"
            remedy = f"make a copy of it ({copy}), and fork that"
            if not vm.ram_names:
                remedy = f"make copies, each with memory of its own: {copy}"
            raise RefusedError(
                "the checkpoint cannot be forked",
                why="it was saved as a whole (--kind file): its memory is as QEMU wrote it",
                remedy=remedy,
            )

    async def _made(self, planned: Sequence[PlannedRestore], locks: AsyncExitStack) -> list[Forked]:
        """Make and run them, with their locks held until these are released."""
        # First: loading memory takes long, and other hosts see by these locks that the names are
        # in use.
        refused = [await self._refused(one.vm.name, locks) for one in planned]
        if all(refused):
            names = (one.vm.name for one in planned)
            return [Forked(name, 0.0, why) for name, why in zip(names, refused, strict=True)]
        spec = planned[0].spec
        room = ForkRoom(len(planned), self._facts.memory_bytes, spec.ram_dir, spec.overcommit)
        async with room_for_all(self._host, self._run_name, self._point, room):
            await self._make_base(planned[0])
        state = await in_thread(partial(self._point.blob, DEVICES))
        ready: list[_Ready] = []
        try:
            for one, why in zip(planned, refused, strict=True):
                ready.append(await self._one(one, state, why, locks))
        except BaseException:
            await finish(self._undo_all(ready))
            raise
        # A waiting fork must not stay paused.
        return await to_the_end(self._run_all(ready))

    async def _require_apart(self, spec: Spec) -> None:
        """Raises RefusedError if a fork could change the memory that all of them share."""
        found = (await abilities(self._host)).version
        self._is_read_only = found >= READ_ONLY_RAM
        if self._is_read_only:
            return
        why = ""
        if self._host.vm_uids is not None:
            why = "its VMs have users of their own (--vm-uids), which may not write to memory that "
            why += "they share"
        elif any(driver.startswith(_BALLOON) for driver in drivers_of(spec)):
            why = "the VM has a balloon: a page that one fork gives back is lost to the others"
        if why:
            raise RefusedError(
                f"the checkpoint cannot be forked on {self._host.name}",
                why=f"{why}; QEMU {found} cannot open it read-only",
                remedy="use QEMU 8.2 or newer there, or make copies: vmckpt checkpoint restore ID "
                "--as NAME",
            )

    async def _with_warnings(self, fork: Forked, planned: PlannedRestore) -> Forked:
        """The outcome, once the guest was informed as far as possible."""
        if fork.error:
            return fork
        agent, plugged = planned.vm.qemu.files.agent, self._options.plugged
        unsaid = await tell_guest(self._host, agent, self._facts, planned.spec, plugged=plugged)
        return replace(fork, warnings=(*fork.warnings, *unsaid))

    async def _make_memory(self, planned: PlannedRestore) -> None:
        if self._ram >= 0:
            os.close(self._ram)
            self._ram = -1
        self._ram, self._was_named = unnamed(planned.spec.ram_dir), False
        await finish(in_thread(self._fill))

    async def _make_base(self, planned: PlannedRestore) -> None:
        await self._make_memory(planned)
        for disk in planned.disks:
            facts = self._facts.disks[disk.number]
            name = f"{self._base}-{disk.number}.{facts.format}"
            path = self._host.state_dir / IMAGES / name
            await self._host.make_dir(path.parent)
            self._disks[disk.number] = path
            if facts.area and not path.exists():
                part = path.with_name(f".{path.name}.{self._run_name}")
                await until_cancelled(partial(self._write_part, part, facts))
                rename_durably(part, path.name)

    def _write_part(self, part: Path, facts: DiskFacts, still_wanted: Callable[[], None]) -> None:
        chunks = while_wanted(self._point.area(str(facts.area)).stream(), still_wanted)
        write_image(part, facts.format, facts.size_bytes, chunks)

    def _fill(self) -> None:
        """Load the checkpoint's memory into a sparse file. Blocking."""
        load_content(self._ram, self._point, self._facts.memory_bytes)

    async def _refused(self, name: str, locks: AsyncExitStack) -> str:
        """Reserve the name for the block; returns why that failed, in words."""
        try:
            await self._entitle(name, locks)
        except (VmckptError, OSError) as exc:
            return str(exc)
        return ""

    async def _one(
        self, planned: PlannedRestore, state: bytes, refused: str, locks: AsyncExitStack
    ) -> "_Ready":
        """A fork that waits to run, with its lock held; or why it failed."""
        began_s = time.monotonic()
        made: list[Path] = []
        if refused:
            return _Ready(planned, made, None, refused, 0.0)
        monitor, error = None, ""
        try:
            await settle(self._host, planned.vm.name)
            await sweep(self._host, planned.spec, planned.vm.directory, None)
            try:
                monitor = await self._start(planned, state, made)
            except BaseException:
                await finish(self._undo(planned, made))
                raise
            locks.push_async_callback(monitor.close)
        except (VmckptError, OSError) as exc:
            error = str(exc)
        return _Ready(planned, made, monitor, error, time.monotonic() - began_s)

    async def _entitle(self, name: str, locks: AsyncExitStack) -> None:
        """Reserve the name for the block. Raises BusyError, RefusedError (the name is in use)."""
        name_lock = local_host().lock(state_dir() / "names" / name, owner("fork"))
        await locks.enter_async_context(name_lock)
        lock = lock_path(self._host.state_dir, name)
        await locks.enter_async_context(self._host.lock(lock, owner("fork")))
        if await homes(name, [self._host]):
            raise RefusedError(
                f"there is a VM '{name}' already",
                why=f"on host {self._host.name}",
                remedy="choose another name for the forks (--name), or remove it",
            )

    async def _run_all(self, ready: Sequence["_Ready"]) -> list[Forked]:
        """Run all, then finish their records: these writes delay no fork."""
        running = [await self._run(one) for one in ready]
        return [await self._settled(one) for one in running]

    async def _run(self, one: "_Ready") -> "_Ready":
        if one.monitor is None:
            return one
        began_s = time.monotonic()
        try:
            await to_the_end(commands.cont(one.monitor))
        except VmckptError as exc:
            await finish(self._undo(one.planned, one.made))
            return one._replace(monitor=None, error=str(exc))
        return one._replace(took_s=one.took_s + time.monotonic() - began_s)

    async def _settled(self, one: "_Ready") -> Forked:
        vm, error = one.planned.vm, one.error
        name, held = vm.name, list[str]()
        if one.monitor is not None:
            # It runs, also where a full disk leaves something of its record.
            held += await committed(vm, partial(settle, self._host, name))
            try:
                held += await bring_back(vm, one.monitor, name)
            except VmckptError as exc:
                await finish(self._undo(one.planned, one.made))
                error = str(exc)
        return Forked(name, round(one.took_s * 1e3, 1), error, tuple(held))

    async def _start(self, planned: PlannedRestore, state: bytes, made: list[Path]) -> Monitor:
        vm, host = planned.vm, self._host
        files, spec = vm.qemu.files, vm.spec
        own = [planned.own_variables] if planned.own_variables else []
        disks = [disk.path for disk in planned.disks]
        for path in disks:
            if await host.exists(path):
                raise RefusedError(
                    f"{path} exists already",
                    why="another VM may use it",
                    remedy="remove it, or choose another name for the forks (--name)",
                )
        await host.make_dir(files.path)
        await write_down(vm, making(vm, (*own, *disks)))
        proofs = {path: proof_of(path, files.qemu_id) for path in (*own, *disks)}
        made += proofs.values()
        for path in own:
            await in_thread(partial(copy_variables, planned, proofs[path]))
        for disk in planned.disks:
            facts, proof = self._facts.disks[disk.number], proofs[disk.path]
            write_overlay(proof, facts.size_bytes, self._disks[disk.number], facts.format)
        for path, proof in proofs.items():
            take_name(proof, path)
            made.append(path)
        await host.make_private_dir(files.memory(spec.ram_dir))
        if self._was_named and not os.fstat(self._ram).st_nlink:
            # All forks so far have failed: a file without names cannot be linked again.
            await self._make_memory(planned)
        give_name(self._ram, files.ram(spec.ram_dir))
        self._was_named = True
        # It determines the user of its QEMU.
        await host.write_text(vm.directory.identity, f"{new_identity()}\n")
        qemu, monitor = await start_qemu(
            host, spec, vm.qemu.platform, files, incoming=True,
            private_ram=True, ram_is_read_only=self._is_read_only,
        )  # fmt: skip
        try:
            here = machine_from_json(self._facts.machine)
            if found := differences(here, await describe(monitor)):
                raise OperationFailedError(
                    f"the QEMU on {host.name} would be a different machine to the guest",
                    why="; ".join(found),
                    remedy="use the QEMU that the checkpoint was taken with, or a compatible one",
                )
            await commands.migrate_set_capabilities(monitor, SETTINGS)
            await load_devices(monitor, state, blocks=len(planned.vm.ram_names))
            await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
            if self._options.plugged:
                await plug_taps(host, spec, files)
            await plug_in(vm._replace(qemu=qemu), monitor)
            await host.write_text(vm.directory.spec, spec.text)
            await host.write_text(vm.directory.point, self._history.text)
            await host.write_text(vm.directory.current, qemu.to_json())
        except BaseException:
            await finish(monitor.close())
            raise
        return monitor

    async def _undo_all(self, ready: Sequence["_Ready"]) -> None:
        for one in ready:
            # Files under a name without a fork here belong to something else.
            if one.monitor is not None:
                await self._undo(one.planned, one.made)

    async def _undo(self, planned: PlannedRestore, made: list[Path]) -> None:
        await end_qemu(self._host, planned.spec.ram_dir, planned.vm.qemu.files)
        for path in (*made, planned.vm.directory.path):
            await self._host.remove(path)
