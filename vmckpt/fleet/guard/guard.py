"""A guard: a proved checkpoint, then the risky work, then a health check.

It fails closed: if anything fails before the command begins, the command is not run, and the VM is
unchanged. If anything fails later, the VM is rolled back, or the guard stays open if the operator
chose to be asked. Each step is recorded before it is taken. If this process is killed, a dead-man's
switch continues from there; after a reboot, `resume` does.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vmckpt.checkpoint.catalogue.catalogue import catalogue
from vmckpt.checkpoint.catalogue.location import parse_location
from vmckpt.checkpoint.catalogue.maintain import remove, verify
from vmckpt.checkpoint.jobs import CHECKPOINT, RESTORE
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.driver import Driver
from vmckpt.drivers.find import find
from vmckpt.errors import (
    BusyError,
    HostDownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.fleet.guard.command import end_worker, release_worker, run_command
from vmckpt.fleet.guard.health import HealthCheck, health_problems, parse_check, require_possible
from vmckpt.fleet.guard.pinned import pin_for, released
from vmckpt.fleet.guard.proof import copy_name, remove_copy, require_provable, run_copy
from vmckpt.fleet.guard.record import (
    GuardPhase,
    GuardProof,
    GuardRecord,
    GuardRequest,
    GuardWorker,
    OnFailure,
    Where,
    ended,
    forget,
    guards_dir,
    keep_room,
    load,
    load_all,
    save,
)
from vmckpt.fleet.guard.rollback import (
    Find,
    Tell,
    left_open,
    point_of,
    roll_back,
    was_restored,
)
from vmckpt.fleet.schedule.run import clock
from vmckpt.hosts.inventory.inventory import all_hosts, find_host, local_host
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import own_command
from vmckpt.jobs.handle import revoke
from vmckpt.sequence.steps import finish
from vmckpt.store.files.naming import IfTaken, dated
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import file_name

TRIGGER, TAG = "guard", "guard"


@dataclass(frozen=True, slots=True)
class GuardTools:
    """Dependencies of a guard: reporting, asking the operator, and finding VMs.

    `ask` returns None if there is no terminal. The command's output goes to descriptor `output` if
    it runs here, otherwise to `say`.
    """

    tell: Tell
    say: Callable[[str], None]
    ask: Callable[[str], Awaitable[bool | None]]
    output: int
    find: Find = find


async def guard(run: str, request: GuardRequest, tools: GuardTools) -> GuardRecord:
    """Guard a command; returns its final record, KEPT or ROLLED_BACK.

    Raises why the command was not started; GuardOpenError: the operator has to decide.
    """
    async with _only_one(request.vm):
        _require_none_open(request.vm)
        await expire()
        vm = await tools.find(request.vm, tools.tell)
        request = _located(request, vm)
        checks = _checks(request)
        await require_possible(vm, checks, in_guest=request.where is Where.GUEST)
        await vm.require_replaceable(f"'{vm.name}' could not be rolled back")
        await require_provable(vm, request.proof)
        if found := await health_problems(vm, checks):
            raise RefusedError(
                f"'{vm.name}' fails its checks before the command",
                why="; ".join(found),
                remedy="fix it, or leave out the check",
            )
        record = GuardRecord(run, request, GuardPhase.PREPARING, time.time(), host=vm.host.name)
        record = save(record, is_domain=not isinstance(vm, DirectVm))
        with _switch(record):
            return await _Guarding(record, tools, checks).from_the_start(vm)


async def resume(record: GuardRecord, tools: GuardTools) -> GuardRecord | None:
    """Continue a guard whose process was killed. None: its command had not started; it is removed.

    Raises GuardOpenError; BusyError, HostDownError: something of it stays for now.
    """
    async with _only_one(record.vm):
        record = load(record.run)
        return await _Guarding(record, tools, _checks(record.request)).from_where_it_was()


async def commit(record: GuardRecord, tell: Tell) -> GuardRecord:
    """Keep the VM as it is, on the operator's order, even if the command's host is gone.

    Raises BusyError while the guard is at work, or a rollback that it has begun does not end;
    RefusedError if its command was not begun, or the VM was rolled back.
    """
    async with _only_one(record.vm):
        record = _begun(record)
        if record.phase is GuardPhase.ROLLED_BACK:
            raise RefusedError(
                f"'{record.vm}' was rolled back",
                why=record.why or f"its guard {record.run} says so",
                remedy="the command's effects are gone: run it again",
            )
        if await was_restored(record, tell):
            raise RefusedError(
                f"'{record.vm}' was rolled back",
                why=f"restore {record.restore and record.restore.run} of its interrupted rollback "
                "has restored it",
                remedy=f"end the guard: vmckpt guard rollback {record.vm}, which does not restore "
                "it again if it runs",
            )
        return await _kept(record, tell)


async def undo(record: GuardRecord, tools: GuardTools) -> GuardRecord:
    """Roll the VM back on the operator's order, even after it was kept.

    Raises BusyError, GuardOpenError, RefusedError (its command was not begun), NotFoundError (the
    checkpoint has expired).
    """
    async with _only_one(record.vm):
        record = _begun(record)
        await point_of(record)
        if record.phase.is_over:
            record = replace(record, restore=None)  # an earlier rollback is not the one requested
        return await roll_back(record, "asked for", tools.find, tools.tell, is_confirmed=True)


def _begun(record: GuardRecord) -> GuardRecord:
    """The guard's record, read under its lock. Raises RefusedError, NotFoundError."""
    record = load(record.run)
    if record.phase is GuardPhase.PREPARING:
        raise RefusedError(
            f"the guard of '{record.vm}' had not begun its command",
            why=f"it was interrupted: {record.phase.words}",
            remedy=f"vmckpt guard resume {record.vm}, which removes what is left of it",
        )
    return record


async def expire() -> None:
    """Remove expired checkpoints of ended guards, and these guards' records."""
    for record in load_all().records.values():
        if not record.has_expired(clock()):
            continue
        # A silent store, or a checkpoint that is being read, is retried later.
        with suppress(VmckptError):
            found = await catalogue(all_hosts(), record.request.store, vm=record.vm)
            entries = await released(record, found)
            mine = [one for one in entries if one.id == record.checkpoint]
            await remove([one for one in mine if not one.pins])  # an operator's pin keeps it
            if not found.silent:
                forget(record)


async def who_is_at_work(record: GuardRecord) -> str:
    """The process that works on an unfinished guard; "": none."""
    holder = await local_host().lock_owner(_lock_path(record.vm))
    return f"process {holder.pid}" if holder and not record.phase.is_over else ""


@asynccontextmanager
async def _only_one(vm: str) -> AsyncIterator[None]:
    await local_host().make_dir(guards_dir())
    async with local_host().lock(_lock_path(vm), owner("guard")):
        yield


def _lock_path(vm: str) -> Path:
    return guards_dir() / f"{file_name(vm, 'VM')}.lock"


def _switch(record: GuardRecord) -> AbstractContextManager[None]:
    """For the block: if this process dies, another continues the guard."""
    command = [*own_command(), "guard", "resume", record.run]
    log = guards_dir() / f"{record.run}.recovery.log"
    log.unlink(missing_ok=True)
    return armed(command, log)


def _require_none_open(vm: str) -> None:
    # An unreadable record may be this VM's.
    for record in load_all().require_sound():
        if record.vm == vm and not record.phase.is_over:
            raise RefusedError(
                f"'{vm}' has an unfinished guard",
                why=record.why or f"it was interrupted: {record.phase.words}",
                remedy=f"vmckpt guard rollback {vm}, guard commit {vm}, or guard resume {vm}",
            )


def _located(request: GuardRequest, vm: Driver) -> GuardRequest:
    """With the store as it is called from anywhere: a bare directory is of the VM's host."""
    if request.store is None:
        return request
    return replace(request, store=parse_location(request.store, vm.host).label)


def _checks(request: GuardRequest) -> tuple[HealthCheck, ...]:
    return tuple(parse_check(text, request.address) for text in request.checks)


async def _kept(record: GuardRecord, tell: Tell) -> GuardRecord:
    """End the guard; release what its command left running, if its host answers."""
    record = save(record, **ended(record, GuardPhase.KEPT, clock()))
    if (worker := record.worker) is None:
        return record
    try:
        await release_worker(find_host(worker.host), worker)
    except VmckptError as exc:
        tell(f"succeeded, but files of the command remain on {worker.host}: {exc}")
        return record
    return save(record, worker=None)


class _Guarding:
    """One guard, from a given phase on. The record in memory is always the one on disk."""

    def __init__(
        self, record: GuardRecord, tools: GuardTools, checks: tuple[HealthCheck, ...]
    ) -> None:
        self._record, self._tools, self._checks = record, tools, checks
        self._request = record.request

    def _save(self, **changes: Any) -> None:
        self._record = save(self._record, **changes)

    async def from_the_start(self, vm: Driver) -> GuardRecord:
        """Run all of it."""
        try:
            keep_room(self._record)
            await self._prepare(vm)
            self._save(phase=GuardPhase.COMMAND, command_unix_s=time.time())
        except BaseException:
            with suppress(BusyError, HostDownError):  # already reported; `resume` removes the rest
                await finish(self._never_begun())
            raise
        return await self._decide(self._command(vm))

    async def from_where_it_was(self) -> GuardRecord | None:
        """Continue after the death of the previous process, or a reboot."""
        match self._record.phase:
            case GuardPhase.PREPARING:
                await self._never_begun()
                return None
            case GuardPhase.COMMAND:
                return await self._cut_off()
            case GuardPhase.WATCHING:
                return await self._decide(self._watch())
            case GuardPhase.ROLLING_BACK:
                return await self._roll_back(self._record.why)
            case GuardPhase.OPEN:
                raise left_open(self._record, self._record.why)
        return self._record

    async def _cut_off(self) -> GuardRecord:
        """End the command before anything else, and before the operator decides."""
        why = "the guard was killed while its command ran"
        if self._record.worker is not None:
            try:
                await end_worker(find_host(self._record.worker.host), self._record.worker)
            except VmckptError as exc:
                self._save(phase=GuardPhase.OPEN, why=f"{why}; not rolled back: {exc}")
                raise left_open(self._record, self._record.why) from exc
        return await self._failed(why)

    async def _decide(self, work: Coroutine[Any, Any, str]) -> GuardRecord:
        """Keep the VM if `work` finds no fault; a cancelled or failed `work` counts as a fault."""
        try:
            failure = await work
        except asyncio.CancelledError:
            await self._failed("it was cancelled")
            raise
        except Exception as exc:  # noqa: BLE001 - whatever it is, the VM has its way back
            known = isinstance(exc, (VmckptError, OSError))
            failure = str(exc) if known else f"{type(exc).__name__}: {exc}"
        if failure:
            return await self._failed(failure)
        await self._keep()
        return self._record

    async def _keep(self) -> None:
        try:
            self._record = await _kept(self._record, self._tools.tell)
        except StorageError as exc:
            raise left_open(self._record, f"the VM is healthy, but {exc.what}: {exc.why}") from exc

    # -- before the command ---------------------------------------------------------------------

    async def _prepare(self, vm: Driver) -> None:
        name = dated(vm.name, "guard")
        tags, pause_s = {TAG: self._record.run}, self._request.max_pause_s
        options = TakeOptions(name, tags, TRIGGER, pause_s, if_taken=IfTaken.NUMBER.value)
        taken = await vm.checkpoint(self._request.store, options, self._tools.tell, None)
        self._save(checkpoint=taken.id)
        entry = await point_of(self._record)
        await pin_for(self._record, entry)
        self._tools.tell(f"{entry.name}: the VM was paused for {taken.facts.pause_ms:.1f} ms")
        if self._request.proof is GuardProof.RUN:
            self._tools.tell("proving it: a copy of it runs")
            await run_copy(self._record, entry, vm.host)
        else:
            self._tools.tell("proving it: reading all of it")
            await verify(entry)

    async def _never_begun(self) -> None:
        """The command was not begun: remove everything of the guard.

        Raises BusyError, HostDownError: something stays for now, and with it the guard's record.
        """
        later: VmckptError | None = None
        for work in (self._end_services, self._remove_points):
            try:
                await work()
            except VmckptError as exc:
                self._tools.tell(f"the command was not started, but cleanup failed: {exc}")
                if isinstance(exc, (BusyError, HostDownError)):
                    later = exc
        if later is not None:
            self._tools.tell(f"to remove it: vmckpt guard resume {self._record.vm}")
            raise later
        forget(self._record)

    async def _end_services(self) -> None:
        host = find_host(self._record.host or local_host().name)
        await revoke(CHECKPOINT, host, lambda _, request: _is_of(request.wish.tags, self._record))
        await revoke(RESTORE, host, lambda vm, _: vm == copy_name(self._record))
        await remove_copy(self._record, host)

    async def _remove_points(self) -> None:
        # The tag identifies a checkpoint that exists but was not recorded.
        found = await catalogue(all_hosts(), self._request.store, vm=self._record.vm)
        entries = await released(self._record, found)
        mine = [one for one in entries if one.facts and _is_of(one.facts.tags, self._record)]
        await remove([one for one in mine if not one.pins])

    # -- from the command on --------------------------------------------------------------------

    async def _command(self, vm: Driver) -> str:
        self._tools.tell("running the command")

        async def begun(worker: GuardWorker) -> None:
            self._save(worker=worker)

        tools = self._tools
        if failure := await run_command(vm, self._record, begun, tools.say, tools.output):
            return failure
        until_s = time.time() + self._request.watch_s
        self._save(phase=GuardPhase.WATCHING, watch_until_unix_s=until_s, watch_began=clock())
        return await self._watch()

    async def _watch(self) -> str:
        """Check until the time is over, and at least once; returns a lasting fault of the VM."""
        self._tools.tell("watching the VM")
        in_a_row = 0
        while True:
            found = await self._health_problems()
            in_a_row = in_a_row + 1 if found else 0
            if in_a_row >= self._request.failures:
                return "; ".join(found)
            for one in found:
                self._tools.tell(f"check failed ({in_a_row} of {self._request.failures}): {one}")
            if not found and self._has_been_watched():
                return ""
            await asyncio.sleep(self._request.every_s)

    def _has_been_watched(self) -> bool:
        if self._record.watch_began is None:  # begun by an older vmckpt
            return time.time() >= (self._record.watch_until_unix_s or 0)
        return clock().since(self._record.watch_began) >= self._request.watch_s

    async def _health_problems(self) -> list[str]:
        try:
            vm = await self._tools.find(self._record.vm, self._tools.tell)
            return await health_problems(vm, self._checks)
        except VmckptError as exc:
            return [str(exc)]

    async def _failed(self, why: str) -> GuardRecord:
        """Roll back, or do as the operator answers; only the question ends with a cancellation."""
        if self._request.on_failure is OnFailure.ASK:
            self._save(phase=GuardPhase.OPEN, why=why)
            try:
                answer = await self._tools.ask(why)
            except asyncio.CancelledError:
                answer = None
            if answer is None:
                raise left_open(self._record, why)
            if not answer:
                await finish(self._keep())
                return self._record
        return await finish(self._roll_back(why))

    async def _roll_back(self, why: str) -> GuardRecord:
        self._record = await roll_back(self._record, why, self._tools.find, self._tools.tell)
        return self._record


def _is_of(tags: Mapping[str, str], record: GuardRecord) -> bool:
    return tags.get(TAG) == record.run
