"""One run of a schedule: claim, checkpoint, copies, pruning, record.

Before anything starts, the run is claimed in the schedule's file. A process that finds a claim and
holds the schedule's lock knows that the claiming process is gone: it checks whether the claimed
checkpoint exists, and continues from there. The checkpoint's id is derived from the claim, and a
store accepts an id only once, so nothing is taken twice even if a job of the dead process is still
running.
"""

import hashlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from vmckpt.errors import (
    BusyError,
    OperationFailedError,
    StorageError,
    VmckptError,
)
from vmckpt.fleet.schedule.due import (
    BeginRun,
    ClaimedRun,
    ClockReading,
    MayTake,
    Settle,
    Wait,
    claim,
    claim_again,
    decide,
    ended,
    failed,
)
from vmckpt.fleet.schedule.learned import CheckpointCost, VmSample
from vmckpt.fleet.schedule.record import (
    PendingCheckpoint,
    ScheduleRecord,
    ScheduleRun,
    load,
    lock_path,
    save,
)
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.vm.lifecycle import owner

DONE, SKIPPED, MISSED, UNCOPIED = "done", "skipped", "missed", "uncopied"


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a schedule did, or a problem that it has."""

    schedule: str
    vm: str
    event: str
    text: str
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Point:
    """An existing checkpoint."""

    id: str
    name: str
    stall_s: float
    took_s: float
    stored_bytes: int


class ScheduleActions(Protocol):
    """The operations on VMs and stores. A failure raises VmckptError."""

    async def find(self, record: ScheduleRecord) -> Point | None:
        """The claimed run's checkpoint; None: it does not exist, and is not being taken.

        Raises BusyError while another process that holds the VM may be taking it.
        """

    async def take(
        self, record: ScheduleRecord, begins: Callable[[str, str], None]
    ) -> Point | None:
        """Take it; `begins` first receives its store and host. None: the VM does not run."""

    async def copy(self, record: ScheduleRecord, point: Point) -> list[str]:
        """Copy it to the schedule's stores; returns those that did not have it yet."""

    async def prune(self, record: ScheduleRecord, taken: str) -> "Gone":
        """Remove checkpoints that the schedule's rule does not keep.

        Only of the VM of checkpoint `taken`, and never that one.
        """

    async def check(self, record: ScheduleRecord) -> "Checked":
        """Read the next part of each of its stores."""

    async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
        """State of the VM; None: unknown."""


class Gone(NamedTuple):
    """The checkpoints that were removed, by name; `clocks`: problems of hosts' clocks."""

    names: list[str]
    clocks: str = ""


class Checked(NamedTuple):
    """The result of a check: `damaged` stores, and those not checked, with reasons.

    `parts`: how many parts of each store's content have been read, in all.
    """

    damaged: list[str]
    silent: list[str]
    parts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SchedulerTools:
    """Dependencies of a scheduler: clocks, actions, and a listener."""

    clock: Callable[[], ClockReading]
    work: ScheduleActions
    tell: Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of serving a schedule once: how its run ended, or why there was none."""

    schedule: str
    outcome: str | None
    error: VmckptError | None


def clock() -> ClockReading:
    """This machine's clocks now."""
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return ClockReading(time.time(), boot_s, BOOT_ID.read_text().strip())


async def run(name: str, tools: SchedulerTools) -> RunResult:
    """Run what is due for a schedule, once; with nothing due its outcome is None.

    Errors of the work are reported and recorded: the run is retried later. Raises BusyError
    (another process runs it), NotFoundError (it was removed), StorageError (it cannot be written).
    """
    async with local_host().lock(lock_path(name), owner("schedule")):
        return await _Running(load(name), tools).run()


class _Running:
    """One schedule, under its lock. The record in memory is always the one on disk."""

    def __init__(self, record: ScheduleRecord, tools: SchedulerTools) -> None:
        self._record, self._tools = record, tools

    async def run(self) -> RunResult:
        now = self._tools.clock()
        timing = self._record.timing
        decision = decide(timing, self._record.state, now)
        for note in decision.notes:
            self._tell("note", note)
        match decision.move:
            case Wait():
                if decision.state != self._record.state:
                    self._save(state=decision.state)
                return self._result(None)
            case BeginRun() as begin:
                state = claim(timing, decision.state, begin, now)
                self._save(state=state, making=PendingCheckpoint(_id(self._record, state.number)))
                self._tell_begun("due")
                return await self._attempt(self._make)
            case Settle() as settle:
                self._save(state=decision.state)
                return await self._attempt(lambda: self._settle(settle))

    async def _settle(self, settle: Settle) -> str:
        """The outcome of a run that was claimed before.

        If its host or store does not answer, it is queried until the next run is due, and then
        abandoned: the VM may be on another host by then, and its next checkpoint must not wait for
        a dead one.
        """
        try:
            found = await self._tools.work.find(self._record)
        except BusyError:  # it may be running
            raise
        except VmckptError as exc:
            if settle.due_s <= self._claim.due_s and settle.may_take is not MayTake.NO:
                raise
            return self._end(MISSED, why=f"its outcome is unknown: {exc.what}: {exc.why}")
        if found is not None:
            self._tell("found", f"{found.name} was taken", checkpoint=found.id)
            is_last = settle.due_s > self._claim.due_s
            return await self._finish(found, found.took_s, is_last_try=is_last)
        if settle.may_take is MayTake.NO:
            return self._end(MISSED, why=self._claim.why or "its process was ended")
        now = self._tools.clock()
        if settle.may_take is MayTake.LATER:
            why = self._claim.why or "its process was ended"
            self._save(state=failed(self._record.state, why, now))
            return "waiting"
        state = claim_again(self._record.timing, self._record.state, settle, now)
        self._save(state=state)
        self._tell_begun("again")
        return await self._make()

    async def _make(self) -> str:
        def begins(location: str, host: str) -> None:
            making = replace(self._making, place=location, host=host)
            places = tuple(dict.fromkeys([*self._record.places, location]))
            self._save(making=making, places=places)

        point = await self._tools.work.take(self._record, begins)
        if point is None:
            return self._end(SKIPPED, why=f"{self._record.vm} does not run")
        text = f"{point.name} is taken: the guest was paused for {point.stall_s * 1000.0:.1f} ms"
        facts = {"stall_ms": point.stall_s * 1e3, "stored_bytes": point.stored_bytes}
        self._tell("taken", text, checkpoint=point.id, **facts)
        return await self._finish(point, None, is_last_try=False)

    async def _finish(self, point: Point, took_s: float | None, *, is_last_try: bool) -> str:
        """The steps after the checkpoint. `took_s` of None: it was begun just now."""
        outcome, why = DONE, ""
        try:
            for location in await self._tools.work.copy(self._record, point):
                self._tell("copied", f"{point.name} is in {location} too", store=location)
        except Exception as exc:
            if not is_last_try:
                raise
            # The next run is due: its own checkpoint matters more.
            outcome, why = UNCOPIED, str(as_error(self._record.name, exc))
            text = f"{point.name} was not copied: {why}"
            self._tell("failed", text, failures_before=self._record.failures)
        if took_s is None:
            took_s = self._tools.clock().since(self._claim.begun)
        results = [why, await self._prune(point.id), await self._check()]
        learned = self._record.learned.paid(CheckpointCost(point.stall_s, took_s))
        return self._end(outcome, point.id, "; ".join(filter(None, results)), learned=learned)

    async def _prune(self, taken: str) -> str:
        """Prune; what cannot be removed now is removed after another run. Returns why, in words."""
        try:
            gone = await self._tools.work.prune(self._record, taken)
        except Exception as exc:  # noqa: BLE001 - the checkpoint is there, whatever it is
            error = as_error(self._record.name, exc)
            text = f"expired checkpoints, or their space, remain: {error}"
            self._tell("not-pruned", text)
            return "" if isinstance(error, BusyError) else text  # another gc is not a problem
        if gone.clocks:
            self._tell("note", gone.clocks)
        if gone.names:
            self._tell("pruned", f"removed: {', '.join(gone.names)}", removed=gone.names)
        return ""

    async def _check(self) -> str:
        """Read a part of each store; returns what is damaged or was not checked, in words.

        The run is done all the same.
        """
        if self._record.request.check_percent is None:
            return ""
        try:
            found = await self._tools.work.check(self._record)
        except Exception as exc:  # noqa: BLE001 - as above
            text = f"the stores were not checked: {as_error(self._record.name, exc)}"
            self._tell("not-checked", text)
            return text
        self._save(checked=dict(found.parts))
        for text in found.damaged:
            self._tell("damaged", text)
        for text in found.silent:
            self._tell("not-checked", text)
        if not (found.damaged or found.silent):
            self._tell("checked", "what was read of the stores is intact")
        return "; ".join([*found.damaged, *found.silent])

    async def _attempt(self, work: Callable[[], Any]) -> RunResult:
        try:
            return self._result(await work())
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is this schedule's alone
            error = as_error(self._record.name, exc)
            # Another operation on the VM is not a failure of this run.
            is_busy = isinstance(error, BusyError)
            now, why = self._tools.clock(), f"{error.what}: {error.why}"
            before = self._record.failures
            state = failed(self._record.state, why, now, is_busy=is_busy)
            count = 0 if is_busy else 1
            self._save(
                state=state,
                failures=before + count,
                failed_total=self._record.failed_total + count,
                why=str(error),
            )
            event = "failed" if count else "busy"
            self._tell(event, str(error), kind=error.kind, failures_before=before)
            return RunResult(self._record.name, None, error)

    def _end(
        self, outcome: str, checkpoint: str | None = None, why: str = "", **changes: Any
    ) -> str:
        held, now, before = self._claim, self._tools.clock(), self._record.failures
        run = ScheduleRun(
            held.number, held.due_s, held.begun.wall_s, now.wall_s, outcome, checkpoint, why,
            held.missed, held.tries,
        )  # fmt: skip
        changes |= {"state": ended(self._record.state), "making": None}
        if outcome in (DONE, SKIPPED):
            # For a completed run: damage of a store, shown to people.
            changes |= {"failures": 0, "why": why if outcome == DONE else ""}
        if outcome == DONE:
            changes |= {"done_total": self._record.done_total + 1, "last_done_s": now.wall_s}
        if outcome == UNCOPIED:
            changes |= {
                "failures": before + 1,
                "failed_total": self._record.failed_total + 1,
                "why": why,
            }
        self._record = save(self._record.ended(run, **changes))
        text = {DONE: "done", UNCOPIED: "done, but for copying"}.get(outcome, f"{outcome}: {why}")
        facts = {"checkpoint": checkpoint, "due_unix_s": held.due_s}
        self._tell(outcome, text, failures_before=before, **facts)
        return outcome

    def _save(self, **changes: Any) -> None:
        self._record = save(replace(self._record, **changes))

    def _result(self, outcome: str | None) -> RunResult:
        return RunResult(self._record.name, outcome, None)

    def _tell(self, event: str, text: str, **more: Any) -> None:
        self._tools.tell(Event(self._record.name, self._record.vm, event, text, more))

    def _tell_begun(self, event: str) -> None:
        held = self._claim
        text = "a run is due" if event == "due" else "nothing of it is there: it is made now"
        if held.missed:
            text += f"; it stands for {held.missed} more that were missed"
        more = {"due_unix_s": held.due_s, "number": held.number, "missed": held.missed}
        self._tell(event, text, **more)

    @property
    def _claim(self) -> ClaimedRun:
        held = self._record.state.claim
        if held is None:
            raise ValueError(f"no run of {self._record.name} is claimed")
        return held

    @property
    def _making(self) -> PendingCheckpoint:
        return self._record.making or PendingCheckpoint(_id(self._record, self._claim.number))


def _id(record: ScheduleRecord, number: int) -> str:
    """The id of a run's checkpoint, the same in every process."""
    return hashlib.sha256(f"vmckpt schedule {record.uid} {number}".encode()).hexdigest()[:32]


def as_error(schedule: str, exc: Exception) -> VmckptError:
    """A schedule's problem as a VmckptError."""
    if isinstance(exc, VmckptError):
        return exc
    if isinstance(exc, OSError):
        return _storage(exc)
    return OperationFailedError(
        f"the run of '{schedule}' failed unexpectedly",
        why=f"vmckpt has a bug: {type(exc).__name__}: {exc}",
        remedy="report it; the run is tried again",
    )


def _storage(exc: OSError) -> VmckptError:
    return StorageError(
        f"cannot use {exc.filename or 'a file'}",
        why=exc.strerror or str(exc),
        remedy="check that it exists, its permissions, and free space",
    )
