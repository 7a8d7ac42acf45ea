"""Restore a running VM from a checkpoint: the VM itself, or a copy.

Runs on the VM's future host. Memory is loaded while the guest runs (`pager.py`), or before. The
commit is the moment when `vm.json` names the new QEMU: until then everything is undone, afterwards
only forward. In place, the disks' new contents lie beside the old ones until then. `making.py`
guarantees this however the process ends.
"""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.disks.qcow2 import write_image
from vmckpt.checkpoint.facts import (
    DEVICES,
    FILE,
    MAPPED_RAM,
    RAM,
    SAVED,
    machine_from_json,
    own_facts,
)
from vmckpt.checkpoint.group.member import ALONE, Alone, Member
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.restore.first_pages import runs
from vmckpt.checkpoint.restore.identity import tell_guest
from vmckpt.checkpoint.restore.making import (
    PendingQemu,
    committed,
    making,
    proof_of,
    settle,
    take_name,
    write_down,
)
from vmckpt.checkpoint.restore.old_vm import is_paused, pause_or_kill, resume_old
from vmckpt.checkpoint.restore.paging import PagerProcess, see_to_pages
from vmckpt.checkpoint.restore.planned import (
    PlannedRestore,
    cannot_become,
    checks,
    copy_variables,
    plan_copy,
    plan_itself,
    replaced_file,
    replacement_path,
    standing_of,
)
from vmckpt.checkpoint.restore.requests import CheckpointSource, Restored, RestoreOptions
from vmckpt.checkpoint.restore.whole_again import load_whole
from vmckpt.checkpoint.secret import keep
from vmckpt.checkpoint.whole import saved_room
from vmckpt.devices.absence import bring_back, plug_in
from vmckpt.epoch.load import SETTINGS, load_devices
from vmckpt.errors import (
    NotFoundError,
    OperationFailedError,
    RefusedError,
    VmckptError,
)
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.promises import is_in_huge_pages
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, mapped
from vmckpt.preflight.finding import require
from vmckpt.qemu import commands
from vmckpt.qemu.compare import describe, differences
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import both, finish, to_the_end
from vmckpt.state.durable import make_dir_durably
from vmckpt.store.area import Area
from vmckpt.store.store import Checkpoint
from vmckpt.vm.inventory import Vm, homes, read_vm
from vmckpt.vm.lifecycle import held, owner
from vmckpt.vm.paths import IN_MEMORY, lock_path
from vmckpt.vm.record import Qemu
from vmckpt.vm.start import end_qemu, plug_taps, start_qemu, sweep


async def restore(
    host: LocalHost,
    source: CheckpointSource,
    options: RestoreOptions,
    running: Callable[[Restored], None],
    *,
    member: Member | Alone = ALONE,
) -> None:
    """Restore it; `running` is called when the guest runs, before all memory is loaded.

    It is called again when the guest has been informed of its identity. A `member` runs when its
    whole group does, or not at all.

    Raises RefusedError, NotFoundError, BusyError, OperationFailedError: nothing was changed.
    VmLostError: a page could not be loaded later.
    """
    async with reading(source.location, source.checkpoint, source.secret) as point:
        planned = await plan_of(point, source, options, host)
        async with entitled(planned, options) as old:
            work = _Restoring(planned, point, source, options, old, member=member)
            await work.run(running)


async def plan_of(
    point: Checkpoint, source: CheckpointSource, options: RestoreOptions, host: LocalHost
) -> PlannedRestore:
    """Plan the restore of a checkpoint. Raises RefusedError."""
    facts = own_facts(point.manifest)
    standing = await standing_of(
        point.manifest, host, known=source.known, is_foreign=source.is_foreign
    )
    if options.name is None:
        return plan_itself(facts, host, standing, plugged=options.plugged)
    return plan_copy(
        facts, host, options.name, standing, keep_macs=options.keep_macs, plugged=options.plugged
    )


@asynccontextmanager
async def entitled(planned: PlannedRestore, options: RestoreOptions) -> AsyncIterator[Vm | None]:
    """Hold the VM's lock for the block; yields the VM to be replaced, if any."""
    vm, host = planned.vm, planned.vm.host
    found = await read_vm(host, vm.name)
    if options.in_place:
        if found is None:
            raise NotFoundError(
                f"there is no VM '{vm.name}' on {host.name} that it could replace",
                why="a checkpoint is restored in place where its VM is",
                remedy="leave out --in-place, or name the host that has it: --host",
            )
        async with held(found, "checkpoint restore") as now:
            yield now
        return
    lock = lock_path(host.state_dir, vm.name)
    name_lock = local_host().lock(state_dir() / "names" / vm.name, owner("checkpoint restore"))
    async with name_lock, host.lock(lock, owner("checkpoint restore")):
        if taken := await homes(vm.name, [host]):
            raise RefusedError(
                f"there is a VM '{vm.name}' already",
                why=f"on host {taken[0].host.name}",
                remedy="restore it --in-place, or make a copy: --as NAME",
            )
        await settle(host, vm.name)
        await sweep(host, vm.spec, vm.directory, None)
        yield None


class _Restoring:
    """One restore."""

    # Whether the guest that is to be replaced was paused before.
    _old_was_paused = False

    def __init__(
        self,
        planned: PlannedRestore,
        point: Checkpoint,
        source: CheckpointSource,
        options: RestoreOptions,
        old: Vm | None,
        *,
        member: Member | Alone,
    ) -> None:
        self._member = member
        self._planned, self._point, self._source = planned, point, source
        # A passed-through device needs all memory present; a pager gives pages of 4 KiB.
        spec = planned.spec
        if any(one.match for one in spec.passthrough) or is_in_huge_pages(spec.ram_dir):
            options = replace(options, eager=True)
        self._is_whole = planned.facts.kind == FILE
        self._options, self._old = options, old
        self._host, self._files = planned.vm.host, planned.vm.qemu.files
        self._replaced = {disk.number: disk.path for disk in planned.disks}
        self._made = dict(self._replaced)
        if options.in_place:
            self._replaced = {n: replaced_file(path) for n, path in self._replaced.items()}
            self._made = {n: replacement_path(path) for n, path in self._replaced.items()}
        # What an undo removes; files that existed before are not listed.
        self._created: list[Path] = []
        self._began_s = 0.0
        self._disks_ms = 0.0
        self._identity = source.identity_for(point.manifest, options.name)

    async def run(self, running: Callable[[Restored], None]) -> None:
        """Run the restore."""
        options, vm = self._options, self._planned.vm
        began_s = time.monotonic()
        async with AsyncExitStack() as undone:
            undone.push_async_exit(self._undo)
            await self._host.make_dir(self._files.path)
            if self._source.secret is not None:
                await self._host.make_private_dir(self._files.memory(IN_MEMORY))
            helper = None
            if not options.eager and not self._is_whole:
                ram_dir = self._planned.spec.ram_dir
                if await self._host.exists(ram_dir):  # otherwise refused below
                    # The pager puts the first pages there, perhaps before QEMU starts.
                    await self._host.make_private_dir(self._files.memory(ram_dir))
                # It starts slowly; the checks run meanwhile.
                helper = await self._pager()
                # From the commit on the pager serves the guest, so later errors must not end it.
                undone.push_async_callback(helper.end)
            warnings = await self._preflight()
            state = b""
            if not self._is_whole:
                state = await in_thread(partial(self._point.blob, DEVICES))
            qemu, monitor = await self._same_machine()
            try:
                if helper is not None:
                    await helper.opened()
                self._began_s = time.monotonic()
                await both(self._fill_disks(), self._have_memory(qemu, helper))
                load = self._load(monitor, state)
                await both(helper.alive_during(load) if helper else load, self._plug_now())
                if self._old is None:
                    await plug_in(vm._replace(qemu=qemu), monitor)
                await self._member.all_ready()
                await self._commit(qemu, monitor, helper)
                undone.pop_all()
                took_ms = (time.monotonic() - self._began_s) * 1e3
                restored = Restored(
                    vm=vm.name,
                    host=self._host.name,
                    checkpoint=self._point.manifest.id,
                    preflight_ms=round((self._began_s - began_s) * 1e3, 1),
                    disks_ms=round(self._disks_ms, 1),
                    running_ms=round(took_ms, 1),
                    ran_unix_s=time.time(),
                    warnings=warnings,
                )
                running(restored)
                try:
                    unsaid = await to_the_end(self._afterwards(qemu, monitor))
                    warnings += tuple(unsaid)
                    running(replace(restored, warnings=warnings, settled=True))
                finally:
                    if helper is not None:
                        await self._all_pages(helper, qemu)
            finally:
                await finish(monitor.close())

    async def _pager(self) -> PagerProcess:
        host, source = self._host, self._source
        return await PagerProcess.start(
            source.location,
            source.checkpoint,
            self._files.path / "pager.log",
            self._files.ram(self._planned.spec.ram_dir),
            noted=host.state_dir / "cache" / "first-pages" / Path(self._point.manifest.vm).name,
            key=await in_thread(self._keep_key),
        )

    async def _all_pages(self, helper: PagerProcess, qemu: Qemu) -> None:
        """Wait for the last page; if the pager dies, start another."""
        await helper.ended()
        await see_to_pages(self._host, qemu)

    async def _preflight(self) -> tuple[str, ...]:
        """Returns warnings. Raises RefusedError."""
        options = self._options
        lazy = not options.eager and not self._is_whole
        found = await checks(
            self._planned, in_place=options.in_place, lazy=lazy, plugged=options.plugged
        )
        require(found, cannot_become(self._planned.vm.name, self._host))
        return tuple(check.reason for check in found if check.verdict == "warn")

    async def _same_machine(self) -> tuple[Qemu, Monitor]:
        """Start a QEMU that waits for the guest: the same machine, its disks still empty.

        Raises OperationFailedError if the machine differs.
        """
        if self._old is not None:
            self._old_was_paused = await is_paused(self._old)
        await write_down(self._planned.vm, self._making())
        await finish(in_thread(self._make_disks))
        qemu, monitor = await self._start()
        try:
            if not self._is_whole:
                await commands.migrate_set_capabilities(monitor, SETTINGS)
            here = machine_from_json(self._planned.facts.machine)
            if found := differences(here, await describe(monitor)):
                raise OperationFailedError(
                    f"the QEMU on {self._host.name} would be a different machine to the guest",
                    why="; ".join(found),
                    remedy="use the QEMU that the checkpoint was taken with, or a compatible one",
                )
        except BaseException:
            await finish(monitor.close())
            raise
        return qemu, monitor

    def _making(self) -> PendingQemu:
        planned = self._planned
        if self._options.in_place:
            renames = [(made, self._replaced[number]) for number, made in self._made.items()]
            return making(planned.vm, renames=renames, was_paused=self._old_was_paused)
        own = [planned.own_variables] if planned.own_variables else []
        return making(planned.vm, (*own, *self._made.values()))

    def _make_disks(self) -> None:
        """Create images with only their first bytes, which tell QEMU their geometry. Blocking."""
        if (own := self._planned.own_variables) is not None:
            proof = self._begun(own)
            copy_variables(self._planned, proof)
            self._named(proof, own)
        for disk in self._planned.disks:
            facts = self._planned.facts.disks[disk.number]
            if facts.area is None:
                raise NotFoundError(
                    f"the checkpoint has no content for disk {disk.path}",
                    why="the disk was read-only when the checkpoint was taken",
                    remedy="restore another checkpoint",
                )
            path = self._made[disk.number]
            make_dir_durably(path.parent)
            area, first = self._point.area(facts.area), np.array([0])
            chunks = [(first, area.read(first))] if 0 in area.numbers()[:1] else []
            if self._options.in_place:
                write_image(path, facts.format, facts.size_bytes, chunks)
                self._created.append(path)
                continue
            proof = self._begun(path)
            write_image(proof, facts.format, facts.size_bytes, chunks)
            self._named(proof, path)

    def _begun(self, path: Path) -> Path:
        """The name under which a new file is created."""
        proof = proof_of(path, self._files.qemu_id)
        self._created.append(proof)
        return proof

    def _named(self, proof: Path, path: Path) -> None:
        take_name(proof, path)
        self._created.append(path)

    async def _fill_disks(self) -> None:
        """Fill the disks before the devices are loaded: QEMU then rereads the image tables.

        It does so at the end of a migration too, whose source has written to them all along.
        """
        for number, path in self._made.items():
            facts = self._planned.facts.disks[number]
            chunks = self._point.area(str(facts.area)).stream()
            write = partial(write_image, path, facts.format, facts.size_bytes, chunks, fills=True)
            await in_thread(write)
        self._disks_ms = (time.monotonic() - self._began_s) * 1e3

    async def _start(self) -> tuple[Qemu, Monitor]:
        """Start a QEMU that waits for the guest: the same machine."""
        vm = self._planned.vm
        spec = vm.spec
        if self._options.in_place:
            # The old disks keep their names until the commit.
            spec = spec._replace(
                disks=tuple(
                    disk._replace(path=self._made.get(number, disk.path))
                    for number, disk in enumerate(spec.disks)
                )
            )
        if self._old is None:  # it determines QEMU's user
            await self._host.write_text(vm.directory.identity, f"{self._identity}\n")
        return await start_qemu(self._host, spec, vm.qemu.platform, self._files, incoming=True)

    async def _have_memory(self, qemu: Qemu, helper: PagerProcess | None) -> None:
        """Have memory loaded, or served on demand."""
        if helper is not None:
            await helper.attach(qemu.process.pid)
        elif not self._is_whole:  # a VM saved as a whole brings memory with the devices
            await in_thread(self._fill)

    async def _load(self, monitor: Monitor, state: bytes) -> None:
        """Load the devices, or all that QEMU saved."""
        if not self._is_whole:
            await load_devices(monitor, state, blocks=len(self._planned.vm.ram_names))
            return
        area, mapped = self._point.area(SAVED), self._planned.facts.saved_as == MAPPED_RAM
        file = self._files.saved_file(in_memory=self._source.secret is not None)
        size_bytes = len(area.numbers()) * area.chunk_bytes if mapped else 0
        async with saved_room(self._host, self._planned.spec, self._files, file, size_bytes):
            await load_whole(monitor, area, self._files, mapped=mapped, file=file)

    def _keep_key(self) -> Path | None:
        """Keep an encrypted store's secret for the pager and its successors. Blocking."""
        if self._source.secret is None:
            return None
        keep(self._files.key, self._source.secret)
        return self._files.key

    async def _plug_now(self) -> None:
        """A group connects its NICs later: packets of the old guests are not for the new ones."""
        if not self._member.is_grouped:
            await self._plug()

    async def _old_ones_still(self) -> None:
        """In a group: wait until no old guest runs, and what they sent has passed."""
        await self._member.all_switched()
        if self._member.is_grouped:
            await self._plug()

    async def _run(self, monitor: Monitor) -> None:
        """Run the guest; in a group, only if all others do."""
        await commands.cont(monitor)
        await self._member.all_running()

    async def _plug(self) -> None:
        if self._options.plugged:
            await plug_taps(self._host, self._planned.spec, self._files)

    def _fill(self) -> None:
        """Load all memory before the guest runs. Blocking."""
        with mapped(self._files.ram(self._planned.spec.ram_dir)) as ram:
            load_memory(ram, self._point.area(RAM))

    async def _commit(self, qemu: Qemu, monitor: Monitor, helper: PagerProcess | None) -> None:
        if helper is not None:
            await helper.go(self._host, self._files)
        await to_the_end(self._switch(qemu, monitor))

    async def _switch(self, qemu: Qemu, monitor: Monitor) -> None:
        """Stop the old guest and run the new one; the commit lies between."""
        vm, old = self._planned.vm, self._old
        if old is None:
            await self._old_ones_still()
            await self._host.write_text(vm.directory.spec, vm.spec.text)
            await self._host.write_text(vm.directory.current, qemu.to_json())
            await self._run(monitor)
            return
        try:
            await pause_or_kill(old)
            await self._old_ones_still()
            await self._host.write_text(vm.directory.current, qemu.to_json())
            await self._run(monitor)
        except BaseException:
            # End the new QEMU first: even if `cont` took effect, only one guest runs.
            await end_qemu(self._host, vm.spec.ram_dir, self._files)
            await resume_old(old, was_paused=self._old_was_paused)
            raise

    async def _afterwards(self, qemu: Qemu, monitor: Monitor) -> list[str]:
        """Only forward: the guest runs. Returns warnings, also about what could not be done."""
        vm = self._planned.vm
        settled = partial(settle, self._host, vm.name)
        left = await committed(vm, self._write_history, self._end_old, settled)
        # If it stayed on, the next migration would leave the memory behind.
        await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
        plugged, facts = self._options.plugged, self._planned.facts
        unsaid = await tell_guest(self._host, qemu.files.agent, facts, vm.spec, plugged=plugged)
        with suppress(VmckptError):  # it continues without, as after a migration
            if plugged:
                await commands.announce_self(monitor)
        return [
            *left,
            *unsaid,
            *await bring_back(vm._replace(qemu=qemu), monitor, self._source.checkpoint),
        ]

    async def _end_old(self) -> None:
        if self._old is not None:
            await end_qemu(self._host, self._old.spec.ram_dir, self._old.qemu.files)

    async def _write_history(self) -> None:
        vm, manifest = self._planned.vm, self._point.manifest
        history = History.parse(await self._host.read_text(vm.directory.point))
        is_itself = self._old is None and self._identity == manifest.vm_id
        sequence = manifest.sequence if is_itself else None
        history = history.then(manifest.id, self._host, self._source.location, sequence)
        await self._host.write_text(vm.directory.point, history.text)

    async def _undo(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            return
        await finish(self._remove())

    async def _remove(self) -> None:
        vm = self._planned.vm
        await end_qemu(self._host, vm.spec.ram_dir, self._files)
        for path in self._created:
            await self._host.remove(path)
        if self._old is None:
            await self._host.remove(vm.directory.path)
        else:
            await self._host.remove(vm.directory.restoring)


def load_memory(ram: RamFile, area: Area) -> None:
    """Load all memory of a checkpoint into an empty RAM file. Blocking. Raises OSError (ENOSPC)."""
    for numbers, contents in area.stream():
        for first, count in runs(numbers, np.arange(len(numbers))):
            start = int(numbers[first]) * PAGE_BYTES
            data = contents[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
            ram.write([(start, start + count * PAGE_BYTES)], data)
