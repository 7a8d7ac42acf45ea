"""The operations of schedules on real VMs and stores."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry, catalogue, contradiction
from vmckpt.checkpoint.catalogue.location import (
    StoreLocation,
    is_there,
    opened,
    own,
    parse_location,
)
from vmckpt.checkpoint.catalogue.maintain import prune
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.drivers.find import find
from vmckpt.errors import BusyError, NotFoundError, OperationFailedError, VmckptError
from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.fleet.schedule.learned import VmSample
from vmckpt.fleet.schedule.record import PendingCheckpoint, ScheduleRecord
from vmckpt.fleet.schedule.run import Checked, Gone, Point
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.identity import host_identity
from vmckpt.hosts.inventory.inventory import all_hosts, find_host, local_host
from vmckpt.sequence.in_thread import in_thread
from vmckpt.store.check import check as check_store
from vmckpt.store.collect import Collected, collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.damage.subset import part_of
from vmckpt.store.files.manifest import Manifest, is_same
from vmckpt.store.files.naming import IfTaken, dated
from vmckpt.store.files.order import owners
from vmckpt.store.sealing.keys import KeyHolder, KeySource
from vmckpt.store.store import Store
from vmckpt.vm.ended import ran_to_the_end
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import lock_path

# Tags of a schedule's checkpoints: its name, when the run was due, and the machine that has the
# schedule: two operators' schedules may share a name and a store.
TAG, DUE, BY = "schedule", "due", "scheduler"
# How the action of a VM's holder begins that protects it, for days maybe: it takes no checkpoint.
PROTECTION = "replicate "


class Checkpoints:
    """`ScheduleActions` on real VMs; `tell` receives what was ended because its process was
    killed.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    async def find(self, record: ScheduleRecord) -> Point | None:
        """See `ScheduleActions`."""
        making = record.making
        if making is None or making.place is None or making.host is None:
            return None
        try:
            host, location = find_host(making.host), parse_location(making.place)
        except NotFoundError:  # it left the inventory: what is there is out of reach
            return None
        # In this order: a process that has released the lock has committed, or never will.
        holder = await host.lock_owner(lock_path(host.state_dir, record.vm))
        if await is_there(location):
            async with opened(location, key_of(record)) as store:
                if making.id in await in_thread(store.ids):
                    return _point(await in_thread(partial(store.manifest, making.id)))
        if holder is not None and not holder.action.startswith(PROTECTION):
            raise BusyError(
                f"'{record.vm}' is busy",
                why=f"held by {holder.action} (pid {holder.pid}), which may be this run's own work",
                remedy="it is tried again when that has ended",
            )
        return None

    async def take(
        self, record: ScheduleRecord, begins: Callable[[str, str], None]
    ) -> Point | None:
        """See `ScheduleActions`."""
        request, held, making = record.request, record.state.claim, record.making
        if held is None or making is None:
            raise ValueError(f"no run of {record.name} is claimed")
        vm = await find(record.vm, self._tell)
        if not (await vm.inspect()).is_on:
            return None
        holder = await vm.host.lock_owner(lock_path(vm.host.state_dir, record.vm))
        if holder is not None and holder.action.startswith(PROTECTION):
            raise OperationFailedError(
                f"'{record.vm}' is replicated",
                why="no checkpoints are taken of a VM while it is",
                remedy=f"remove the schedule, or: vmckpt replicate stop {record.vm}",
            )
        location = parse_location(request.store, vm.host) if request.store else own(vm.host)
        begins(location.label, vm.host.name)
        due = time.gmtime(held.due_s)
        name = dated(record.name, at=due)
        tags = {
            TAG: record.name,
            DUE: time.strftime("%Y-%m-%dT%H:%M:%SZ", due),
            BY: await _this_scheduler(),
        }
        number = IfTaken.NUMBER.value
        options = TakeOptions(name, tags, TAG, request.max_pause_s, request.kind, making.id, number)
        try:
            await vm.checkpoint(request.store, options, lambda _: None, key_of(record))
        except VmckptError:
            # Whatever the error: if the checkpoint exists, all is well.
            with suppress(VmckptError):
                found = await self.find(replace(record, making=_begun(making, location, vm.host)))
                if found is not None:
                    return found
            raise
        return await self._taken(record, _begun(making, location, vm.host))

    async def copy(self, record: ScheduleRecord, point: Point) -> list[str]:
        """See `ScheduleActions`."""
        making = record.making
        if not record.request.copies or making is None or making.place is None:
            return []
        key, done = key_of(record), []
        async with opened(parse_location(making.place), key) as source:
            manifest = await in_thread(partial(source.manifest, point.id))
            for label in record.request.copies:
                async with opened(parse_location(label), key) as destination:
                    work = partial(copy_checkpoints, source, destination, [manifest])
                    if await in_thread(work):
                        done.append(label)
        return done

    async def prune(self, record: ScheduleRecord, taken: str) -> Gone:
        """See `ScheduleActions`."""
        rule = record.request.rule
        if rule is None:
            return Gone([])
        key, silent = key_of(record), list[str]()
        entries: dict[str, CatalogueEntry] = {}
        locations: dict[str, StoreLocation] = {}
        for label in dict.fromkeys([*record.places, *record.request.copies]):
            try:
                there = await catalogue(all_hosts(), label, key, record.vm)
            except VmckptError as exc:
                silent.append(f"{exc.what}: {exc.why}")
                continue
            for one in there.entries:
                known = entries.get(one.id, one)
                if not is_same(known.manifest, one.manifest):
                    error = contradiction(one.location, one.id)
                    silent.append(f"{error.what}: {error.why}")
                    continue
                both = one.locations if known is one else (*known.locations, *one.locations)
                pins = (*known.pins, *(pin for pin in one.pins if pin not in known.pins))
                entries[one.id] = replace(known, locations=both, pins=pins)
                locations |= {location.label: location for location in one.locations}
        gone, clocks = list[CatalogueEntry](), ""
        if taken in entries:
            # Leave out those of another VM of that name: two sites may share a store.
            every = list(entries.values())
            whose = owners(one.manifest for one in every)
            me = await _this_scheduler()
            mine = [one for one in every if whose[one.id] == whose[taken] and _is_by(me, one)]
            tags = {TAG: record.name}
            found, clocks = await prune(mine, rule, tags, key, apply=True, just_taken=[taken])
            gone = [one.entry for one in found if not one.keep]
        else:
            silent.append(f"no store that answers has checkpoint {taken}, which was just taken")
        for label in {location.label for one in gone for location in one.locations}:
            async with opened(locations[label], key) as store:
                await in_thread(partial(_collect, store))
        if silent:
            raise OperationFailedError(
                "not all stores were searched",
                why="; ".join(silent),
                remedy="they are searched again after the next run",
            )
        return Gone([one.name for one in gone], clocks)

    async def check(self, record: ScheduleRecord) -> Checked:
        """If a part could not be read, it is read next time: none is left out."""
        percent, parts = record.request.check_percent, dict(record.checked)
        damaged, silent = list[str](), list[str]()
        if percent is None:
            return Checked(damaged, silent, parts)
        for label in dict.fromkeys([*record.places, *record.request.copies]):
            number = parts.get(label, 0)
            subset = part_of(percent, number)
            try:
                async with opened(parse_location(label), key_of(record)) as store:
                    report = await in_thread(partial(check_store, store, subset=subset))
            except VmckptError as exc:
                silent.append(f"{label} was not checked: {exc.what}: {exc.why}")
                continue
            parts[label] = number + 1
            if not report.whole:
                damaged.append(
                    f"{label} is damaged: {len(report.findings)} findings, {len(report.lost)} "
                    f"checkpoints cannot be restored: vmckpt store check {label}"
                )
        return Checked(damaged, silent, parts)

    async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
        """See `ScheduleActions`."""
        answers = await ask_every(all_hosts(), lambda host: read_vm(host, record.vm))
        found = [vm for vm in answers.given if vm is not None]
        if len(found) != 1:
            return None
        vm = found[0]
        qemu = f"{vm.host.name} {vm.qemu.files.path.name}"
        if await vm.is_alive():
            return VmSample(now, qemu, alive=True)
        log = await vm.host.read_text(vm.qemu.files.stderr) or ""
        return VmSample(now, qemu, alive=False, ended_running=ran_to_the_end(log))

    async def _taken(self, record: ScheduleRecord, making: PendingCheckpoint) -> Point:
        async with opened(parse_location(str(making.place)), key_of(record)) as store:
            return _point(await in_thread(partial(store.manifest, making.id)))


def _begun(making: PendingCheckpoint, location: StoreLocation, host: Host) -> PendingCheckpoint:
    return replace(making, place=location.label, host=host.name)


async def _this_scheduler() -> str:
    """This machine, for a tag: the first part of its identity, to fit a table."""
    return (await host_identity(local_host())).partition("-")[0]


def _is_by(scheduler: str, entry: CatalogueEntry) -> bool:
    """Earlier versions had no such tag: their checkpoints count for every schedule of that name."""
    tags = entry.facts.tags if entry.facts else {}
    return tags.get(BY, scheduler) == scheduler


def key_of(record: ScheduleRecord) -> KeySource | None:
    """The source of the key for the schedule's stores, if any."""
    request = record.request
    if request.key_file is not None:
        return KeySource(KeyHolder.FILE, request.key_file)
    return (
        KeySource(KeyHolder.COMMAND, request.key_command)
        if request.key_command is not None
        else None
    )


def _point(manifest: Manifest) -> Point:
    facts = CheckpointFacts.from_json(manifest.facts)
    stall_s = max(facts.stopped_ms, facts.pause_ms) / 1e3
    return Point(manifest.id, facts.name, stall_s, facts.took_s, manifest.added_bytes)


def _collect(store: Store) -> Collected:
    return collect(store, plan_gc(store))
