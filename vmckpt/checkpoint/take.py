"""Take a checkpoint: memory, devices and disks of a running VM as of one moment.

Runs on the VM's host. While the guest runs, all of its memory is read, then what it wrote
meanwhile, in passes, until the rest fits the pause (`epoch.capture`). Nothing needs to run between
two checkpoints: unchanged pages are recognized by their content.
"""

import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vmckpt.checkpoint.catalogue.location import open_or_create
from vmckpt.checkpoint.facts import (
    DEVICES,
    EPOCH,
    RAM,
    CheckpointFacts,
    DiskFacts,
    DomainFacts,
    machine_to_json,
)
from vmckpt.checkpoint.group.member import ALONE, Alone, Member, Output, OutputHold
from vmckpt.checkpoint.history import History
from vmckpt.checkpoint.memory_passes import MemoryPasses
from vmckpt.checkpoint.origin import marked
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.store_thread import StoreThread, store_thread
from vmckpt.devices.absence import without_devices
from vmckpt.epoch.capture import Capture, Pausing, capturing
from vmckpt.epoch.disks import DisksAtOnce
from vmckpt.epoch.epoch import Epoch
from vmckpt.epoch.guarding import guard_command
from vmckpt.epoch.output import BriefHold, HeldOutput, StaysPaused, brief_holds
from vmckpt.epoch.ram import memory_errors, require_ram
from vmckpt.epoch.senders import require_holdable, senders
from vmckpt.errors import (
    OperationFailedError,
    RefusedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.hosts.processes.deadman import attended
from vmckpt.preflight.checkpoint import capture_checks
from vmckpt.preflight.finding import require
from vmckpt.qemu import commands
from vmckpt.qemu.compare import describe
from vmckpt.qemu.disks.nbd import MOST_READ_BYTES, NbdExport
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.sequence.steps import finish, to_the_end
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.checkpoint_file import CHECKPOINTS
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES, MOST_SEQUENCE, PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.files.naming import Called, IfTaken
from vmckpt.store.files.order import of_vm
from vmckpt.store.open import Access
from vmckpt.store.store import Store
from vmckpt.store.transaction import AreaWriter, Origin, Transaction, new_id
from vmckpt.vm.argv import macs
from vmckpt.vm.identity import identity_of
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.lifecycle import held


async def require_capturable(vm: Vm) -> None:
    """Raises RefusedError with every reason why a VM cannot be checkpointed in this way."""
    await require_alive(vm)
    require(await capture_checks(vm), f"'{vm.name}' cannot have checkpoints while it runs")


async def take(
    vm: Vm,
    location: str,
    options: TakeOptions,
    tell: Callable[[str], None],
    access: Access,
    *,
    member: Member | Alone = ALONE,
) -> TakenCheckpoint:
    """Take it; the guest continues in any case.

    `access` opens the store at `location`. A `member` is taken together with the others of its
    group. Raises RefusedError, BusyError, StorageError, OperationFailedError: then nothing of it
    remains.
    """
    async with held(vm, "checkpoint create") as now:
        await require_capturable(now)
        if member.is_grouped:
            _require_alike(now)
        sends = await _senders(now) if member.is_grouped else ()
        guard = guard_command(now.qemu, brief_holds(sends))
        with attended(guard, now.qemu.files.path / "guard.log") as tell_guard:
            connected = await now.host.connect(now.qemu.files.operator)
            calls = store_thread(last=member.is_grouped)
            async with session(connected, now.name) as monitor, calls as store_calls:
                await require_holdable(now, monitor, sends)
                work = Taking(now, monitor, options, store_calls, tell)
                work.join(member, tell_guard, sends)
                return await without_devices(
                    now, monitor, options.name, tell, lambda: work.take(location, access)
                )


async def _senders(vm: Vm) -> list[str]:
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        return await senders(vm, monitor)


def _require_alike(vm: Vm) -> None:
    """Raises RefusedError unless all of its output can be held until the others are paused, too."""
    if not vm.spec.passthrough:
        return
    device = vm.spec.passthrough[0]
    raise RefusedError(
        f"'{vm.name}' cannot have checkpoints together with others",
        why=f"'{device.id}' is passed through ({device.strategy}): detaching it takes "
        "long, and output that bypasses QEMU cannot be held",
        remedy=f"take one of this VM alone: vmckpt checkpoint create {vm.name}",
    )


class StopTimes(NamedTuple):
    """The guest's pauses for a checkpoint, that of the checkpoint's moment last."""

    unix_s: float
    pauses_s: Sequence[float]
    passes: int
    changed_pages: int
    kind: str
    saved_as: str


class Taking:
    """One checkpoint in the making. `domain`: libvirt's description of the VM, if it is one."""

    def __init__(
        self,
        vm: Vm,
        monitor: Monitor,
        options: TakeOptions,
        store_calls: StoreThread,
        tell: Callable[[str], None],
        *,
        domain: Callable[[], Awaitable[DomainFacts]] | None = None,
    ) -> None:
        self._domain = domain
        self._vm, self._monitor, self._options, self._store_calls = (
            vm,
            monitor,
            options,
            store_calls,
        )
        self._tell = tell
        self._began_s = time.monotonic()
        self._disks = DisksAtOnce(monitor, vm.qemu.files)
        self._pauses_s: list[float] = []
        self._passes = 0
        self._member: Member | Alone = ALONE
        self._tell_guard: Callable[[str], None] = _ignored
        self._senders: Sequence[str] = ()
        # Why the VM's history lacks the committed checkpoint.
        self._unwritten: str | None = None

    def join(
        self, member: Member | Alone, tell_guard: Callable[[str], None], sends: Sequence[str] = ()
    ) -> None:
        """Take it together with the other members of a group, if any.

        `sends`: the network back ends that are held for that, of a VM that does not stay paused.
        """
        self._member, self._tell_guard, self._senders = member, tell_guard, sends

    async def take(self, location: str, access: Access) -> TakenCheckpoint:
        """Take the checkpoint into the store at `location`."""
        store = await self._store_calls(partial(open_or_create, location, access))
        try:
            return await self._take(store)
        finally:
            await finish(self._store_calls(store.close))

    async def _take(self, store: Store) -> TakenCheckpoint:
        history = History.parse(await self._vm.host.read_text(self._vm.directory.point))
        vm_id = await identity_of(self._vm.host, self._vm.directory)
        every = await self._store_calls(store.manifests)
        mine = of_vm(every, self._vm.name, vm_id, history.last)
        parent = await self._parent(store, history, mine)
        # Larger than all known numbers; a correct clock keeps the order with those in other stores.
        known = max([history.sequence, *(one.sequence or 0 for one in mine)])
        sequence = min(max(known + 1, int(time.time())), MOST_SEQUENCE)
        origin = Origin(self._options.id, self._vm.name, parent, None, vm_id, sequence)
        new, damaged = await self._begin(store, await self._named(store, origin))
        try:
            # QEMU's bitmaps record the writes since this checkpoint only.
            is_start = not damaged and await self._is_as_taken(store, history, parent)
            start = parent if is_start else None
            await self._disks.prepare(self._written_disks(), new.id, start)
            moment = await self._moment(new)
            await self._store_disks(new)
            facts = replace(await self._facts(moment), name=new.name)
            facts = replace(facts, group=await self._member.all_stored(new.id))
            manifest = await to_the_end(self._commit(new, facts, history, store))
            apart = history.last is not None and parent is None
            kept = new.not_replaced
            taken = TakenCheckpoint(
                manifest.id,
                facts,
                manifest.added_bytes,
                parent,
                apart,
                damaged,
                tuple(new.replaced),
                f"{kept.what}: {kept.why}" if kept else None,
            )
        finally:
            not_ended = await finish(self._end(new))
        return replace(taken, not_ended=not_ended or self._unwritten)

    async def _commit(
        self, new: Transaction, facts: CheckpointFacts, history: History, store: Store
    ) -> Manifest:
        """Commit it and record it in the VM's history, as the parent of the next one."""
        words = marked(facts.to_json(), self._options.site_key, new.id, self._vm.name)
        commit = partial(new.commit, words, created_unix_s=facts.taken_unix_s)
        manifest = await self._store_calls(commit)
        version = ""
        with suppress(StorageError, UsageError):  # unknown: the next one reads disks as a whole
            version = (await self._store_calls(partial(_versions, store))).get(manifest.id, "")
        now = history.then(
            manifest.id, self._vm.host, store.location, manifest.sequence, version=version
        )
        try:
            await self._vm.host.write_text(self._vm.directory.point, now.text)
        except StorageError as exc:  # a full disk: the checkpoint is there all the same
            self._unwritten = f"{exc.what}: {exc.why}"
        return manifest

    async def _parent(self, store: Store, history: History, mine: Sequence[Manifest]) -> str | None:
        """The checkpoint last taken of it or restored to it, otherwise the newest of `mine`."""
        if history.last is not None and history.last in await self._store_calls(store.ids):
            return history.last
        return mine[-1].id if mine else None

    async def _is_as_taken(self, store: Store, history: History, parent: str | None) -> bool:
        """Whether the parent is the very object that was taken last.

        Clients that may only add to the store can put another checkpoint in the place of one that
        was removed. Call it once the parent has been read.
        """
        if parent is None or parent != history.last or not history.version:
            return False
        return (await self._store_calls(partial(_versions, store))).get(parent) == history.version

    async def _begin(self, store: Store, origin: Origin) -> tuple[Transaction, str | None]:
        """A new transaction, and why it does not reuse its parent: never one that is damaged."""
        called = Called(self._options.name, IfTaken(self._options.if_taken))
        begin = partial(store.begin, self._vm.name, origin=origin, called=called)
        try:
            return await self._store_calls(partial(begin, origin.parent)), None
        except DamagedError as exc:
            if origin.parent is None:
                raise
            return await self._store_calls(begin), f"{exc.what}: {exc.why}"

    async def _named(self, store: Store, origin: Origin) -> Origin:
        """A new id, or the requested one. Raises RefusedError if that exists.

        The VM's lock is held, so no other process can be taking the same one.
        """
        wanted = origin.id
        if not wanted:
            return origin._replace(id=new_id())
        if wanted in await self._store_calls(store.ids):
            raise RefusedError(
                f"checkpoint {wanted} exists already",
                why="an earlier request has taken it",
                remedy="there is nothing to do: see `vmckpt checkpoint show`",
            )
        return origin

    async def _end(self, new: Transaction) -> str | None:
        """Remove what the checkpoint needed; returns why that failed if it was committed.

        The next checkpoint retries it.
        """
        try:
            try:
                await self._store_calls(new.abort)
            finally:
                # Between checkpoints, nothing of vmckpt's remains in a QEMU that libvirt inspects.
                await self._disks.end(keep_bitmap=new.is_committed and self._domain is None)
        except VmckptError as exc:
            if not new.is_committed:
                raise
            return f"{exc.what}: {exc.why}"
        return None

    def _written_disks(self) -> list[str]:
        disks = self._vm.spec.disks
        return [self._vm.nodes[n] for n, disk in enumerate(disks) if not disk.read_only]

    async def _moment(self, new: Transaction) -> StopTimes:
        """Put memory and devices into the new checkpoint, with the disks as of the same moment."""
        with memory_errors(self._vm):
            epoch, unix_s = await self._memory(new)
        devices = epoch.device_base + epoch.device_state
        await self._store_calls(partial(new.blob, DEVICES, devices))
        return StopTimes(unix_s, self._pauses_s, self._passes, epoch.pages.count, EPOCH, "")

    async def _memory(self, new: Transaction) -> tuple[Epoch, float]:
        """Put all memory into the new checkpoint; returns its epoch and the time of it."""
        ram = await self._store_calls(
            self._area(new, RAM, self._vm.spec.memory_bytes, PAGE_CHUNK_BYTES)
        )
        memory = MemoryPasses(
            ram,
            self._store_calls,
            self._pauses_s,
            memory_bytes=self._vm.spec.memory_bytes,
            max_pause_s=self._options.max_pause_s,
        )
        output = HeldOutput(self._monitor, [])
        pausing: Pausing = partial(self._member.pausing, self._tell_guard)
        vm = self._vm
        where = await require_ram(vm, self._monitor)
        async with capturing(
            vm.qemu.process.pid, where.ram, self._monitor, output, pausing,
            ram_bytes=vm.spec.memory_bytes, ram_names=where.names,
        ) as capture:  # fmt: skip
            with pausing():
                self._pauses_s.append(await capture.learn_devices())
            self._tell("reading memory")
            new_pages = await memory.everything(capture)
            waiting = await memory.passes_until_it_fits(capture, new_pages)

            async def keep_up() -> None:
                nonlocal waiting
                waiting += await memory.passes_until_it_fits(capture, ())
                waiting = await memory.spilled(waiting)

            await self._member.all_prepared(keep_up)  # still at low priority: guests run as before
            with self._member.high_priority():
                self._tell("pausing the guest")
                if is_saved := capture.saves_devices():
                    await self._disks.add_filters()
                epoch, unix_s = await self._epoch(capture), time.time()
                if is_saved and not capture.saves_devices():
                    raise self._was_reset()
            self._pauses_s.append(epoch.pause.total_s)
        self._tell("storing")
        await memory.put_newest([*waiting, epoch.pages])
        self._passes = memory.passes
        return epoch, unix_s

    async def _epoch(self, capture: Capture) -> Epoch:
        def output(most_s: float) -> Output:
            if self._domain is not None:
                return StaysPaused()
            return BriefHold(self._monitor, self._senders, most_s)

        async def together(hold: OutputHold | None) -> Epoch:
            also = self._disks.in_pause
            if hold is None:
                return await capture.epoch(0, also=also)
            return await capture.epoch(
                0,
                also=also,
                before=hold.begin,
                at_stop=hold.stopped,
                may_run=hold.may_run,
                at_run=hold.runs,
            )

        return await self._member.cut(output, self._tell_guard, together)

    def _was_reset(self) -> OperationFailedError:
        return OperationFailedError(
            f"'{self._vm.name}' was reset during its checkpoint",
            why="the state of its devices may be inconsistent",
            remedy="take it again",
        )

    @staticmethod
    def _area(new: Transaction, name: str, size_bytes: int, chunk_bytes: int) -> Any:
        return partial(new.area, name, size_bytes=size_bytes, chunk_bytes=chunk_bytes)

    async def _store_disks(self, new: Transaction) -> None:
        if not self._disks.nodes:
            return
        self._tell("storing disks")
        async with self._disks.served() as path:
            for number, node in enumerate(self._disks.nodes):
                size = -(-self._disks.size_bytes(node) // BLOCK_CHUNK_BYTES) * BLOCK_CHUNK_BYTES
                make = self._area(new, f"disk-{number}", size, BLOCK_CHUNK_BYTES)
                area, sock = await self._store_calls(make), await self._vm.host.connect(path)
                await self._store_calls(partial(self._store_disk, area, sock, node))

    def _store_disk(self, area: AreaWriter, sock: socket.socket, node: str) -> None:
        names = self._disks.contexts(node)
        export = NbdExport(sock, node, names)
        try:
            for read in self._disks.read(export, node, MOST_READ_BYTES, BLOCK_CHUNK_BYTES):
                first = read.start // BLOCK_CHUNK_BYTES
                count = -(-read.length // BLOCK_CHUNK_BYTES)
                numbers = np.arange(first, first + count, dtype=np.int64)
                if read.data is None:
                    area.put_zero(numbers)
                    continue
                read.data.extend(bytes(count * BLOCK_CHUNK_BYTES - len(read.data)))
                area.put(numbers, bytes(read.data))
        finally:
            export.close()

    async def _facts(self, moment: StopTimes) -> CheckpointFacts:
        vm, spec = self._vm, self._vm.spec
        written = self._disks.nodes
        code = await vm.host.fingerprint(spec.firmware.code) if spec.firmware else None
        images = await _sizes(self._monitor, vm)
        return CheckpointFacts(
            name=self._options.name,
            host=vm.host.name,
            taken_unix_s=moment.unix_s,
            trigger=self._options.trigger,
            tags=dict(self._options.tags),
            spec=spec.text,
            platform=asdict(vm.qemu.platform),
            qemu_version=str(await commands.query_version(self._monitor)),
            machine=machine_to_json(await describe(self._monitor)),
            firmware=code.sha256 if code else None,
            memory_bytes=spec.memory_bytes,
            disks=tuple(
                DiskFacts(
                    str(disk.path),
                    disk.format,
                    images[vm.nodes[n]],
                    disk.read_only,
                    f"disk-{written.index(vm.nodes[n])}" if vm.nodes[n] in written else None,
                )
                for n, disk in enumerate(spec.disks)
            ),
            macs=macs(spec),
            pause_ms=round(max(moment.pauses_s) * 1e3, 3),
            stopped_ms=round(sum(moment.pauses_s) * 1e3, 3),
            passes=moment.passes,
            took_s=round(time.monotonic() - self._began_s, 3),
            changed_pages=moment.changed_pages,
            kind=moment.kind,
            saved_as=moment.saved_as,
            domain=await self._domain() if self._domain is not None else None,
        )


def _versions(store: Store) -> dict[str, str]:
    """The versions of all checkpoints' objects. Raises StorageError, UsageError (an old `lend`)."""
    found = store.opened.backend.versions(CHECKPOINTS)
    return {one: version for one, (_, version) in found.items()}


def _ignored(_: str) -> None:
    """Discard the progress text."""


async def _sizes(monitor: Monitor, vm: Vm) -> dict[str, int]:
    from vmckpt.qemu.block import query_disk_images

    images = await query_disk_images(monitor)
    return {node: images[node].virtual_size_bytes for node in vm.nodes}
