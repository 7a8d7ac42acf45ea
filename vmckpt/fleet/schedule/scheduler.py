"""The process that runs due schedules: continuously (`serve`), or once (`run_due`)."""

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

from vmckpt.errors import BusyError, NotFoundError, StorageError, UsageError, VmckptError
from vmckpt.fleet.schedule.due import ClockReading, Wait, decide
from vmckpt.fleet.schedule.learned import VmSample
from vmckpt.fleet.schedule.record import (
    ScheduleRecord,
    load,
    load_all,
    lock_path,
    save,
    scheduler_lock_path,
    schedules_dir,
)
from vmckpt.fleet.schedule.request import When
from vmckpt.fleet.schedule.run import Event, RunResult, SchedulerTools, as_error, run
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.sequence.steps import finish
from vmckpt.units import format_duration
from vmckpt.vm.lifecycle import owner

# How often files are read, to notice new schedules and clock changes.
CHECK_S, _LEAST_S = 2.0, 0.01
# How often VMs with counted failures are sampled, and the samples written.
OBSERVE_S, NOTE_S = 15.0, 600.0
# Concurrent runs, each for a different VM. A run that lasts longer than the second value, because
# its host or store hangs, no longer delays others.
PARALLEL, TURN_S = 4, 3600.0
# An interrupted run may turn out to be done, with the next one due.
_MOST_ROUNDS = 3


async def run_due(names: Sequence[str], tools: SchedulerTools) -> list[RunResult]:
    """Run all due runs of these schedules (all without names), and return at the end.

    While a run is late (see TURN_S), the other schedules are served as by `serve`. Raises BusyError
    if another scheduler is running, NotFoundError, StorageError (the schedules cannot be read).
    """
    async with _only_one("schedule run-due"):
        for name in names:
            load(name)
        serving = _Serving(tools, names)
        try:
            return await serving.until_nothing_is_due()
        finally:
            await finish(serving.end())


async def serve(tools: SchedulerTools) -> None:
    """Run what is due until cancelled. Raises BusyError if another scheduler is running.

    An interrupted run is continued by the next scheduler.
    """
    async with _only_one("serve --scheduler"):
        serving = _Serving(tools)
        try:
            await serving.for_ever()
        finally:
            await finish(serving.end())


@asynccontextmanager
async def _only_one(action: str) -> AsyncIterator[None]:
    await local_host().make_dir(schedules_dir())
    async with AsyncExitStack() as stack:
        try:
            lock = local_host().lock(scheduler_lock_path(), owner(action))
            await stack.enter_async_context(lock)
        except BusyError as exc:
            raise BusyError(
                "another scheduler is running",
                why=exc.why,
                remedy="one is enough: it runs what is due of all schedules",
            ) from exc
        yield


async def _observe(name: str, tools: SchedulerTools) -> None:
    """Sample the VM of an `auto` schedule, and record changes."""
    async with local_host().lock(lock_path(name), owner("schedule")):
        record = load(name)
        if record.request.when is not When.AUTO:
            return
        seen = await tools.work.sample(record, tools.clock())
        if seen is not None and _is_news(record.learned.last, seen):
            save(replace(record, learned=record.learned.seen(seen)))


def _is_news(before: VmSample | None, now: VmSample) -> bool:
    if before is None or replace(before, at=now.at) != now:
        return True
    return now.alive and now.at.since(before.at) > NOTE_S


class _ActiveRun(NamedTuple):
    vm: str
    task: asyncio.Task[None]
    since: ClockReading


def _is_late(one: _ActiveRun, now: ClockReading) -> bool:
    return now.since(one.since) >= TURN_S


class _Serving:
    """Active runs, their results, and reported problems of unreadable files."""

    def __init__(self, tools: SchedulerTools, names: Sequence[str] = ()) -> None:
        self._tools, self._names = tools, names
        self._tasks: dict[str, _ActiveRun] = {}
        self._reported: set[str] = set()
        self._observed: dict[str, ClockReading] = {}
        # Of the present call of `until_nothing_is_due`.
        self._results: list[RunResult] | None = None

    async def for_ever(self) -> None:
        """Serve until cancelled."""
        while True:
            now = self._tools.clock()
            try:
                until_s = self._process_all(now)
            except StorageError as exc:  # the schedules cannot be read now
                self._tell_once("-", "-", exc)
                until_s = now.wall_s + CHECK_S
            await asyncio.sleep(min(CHECK_S, max(_LEAST_S, until_s - now.wall_s)))
            self._forget_ended()

    async def until_nothing_is_due(self) -> list[RunResult]:
        """Serve until no run is active or due; returns the results, and unreadable files."""
        results: list[RunResult] = []
        self._results = results
        while True:
            now = self._tools.clock()
            try:
                self._process_all(now)
            except StorageError:  # the schedules cannot be read now
                if not self._tasks:
                    raise
            if not self._tasks:
                damaged = () if self._names else load_all().damaged
                return results + [RunResult("-", None, exc) for exc in damaged]
            if self._is_any_late(now):
                await asyncio.sleep(CHECK_S)
            else:
                tasks = [one.task for one in self._tasks.values()]
                await asyncio.wait(tasks, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
            self._forget_ended()

    async def end(self) -> None:
        """Cancel running work; returns when it has ended."""
        for one in self._tasks.values():
            one.task.cancel()
        if self._tasks:
            await asyncio.wait([one.task for one in self._tasks.values()])

    def _process_all(self, now: ClockReading) -> float:
        """Begin due runs; returns when to check again at the latest, by the wall clock."""
        known = load_all()
        for exc in () if self._names else known.damaged:
            self._tell_once("-", "-", exc)
        until_s = now.wall_s + CHECK_S
        for record in known.records.values():
            if self._names and record.name not in self._names:
                continue
            if (under_way := self._tasks.get(record.name)) is not None:
                self._tell_if_late(record, under_way, now)
            elif self._may_begin(record.name, now):
                until_s = min(until_s, self._process(record, now))
        return until_s

    def _may_begin(self, name: str, now: ClockReading) -> bool:
        """False if `until_nothing_is_due` has run it already."""
        if not self._is_ending(now):
            return True
        own = [one for one in self._results or () if one.schedule == name]
        return len(own) < _MOST_ROUNDS and not any(one.error for one in own)

    def _is_ending(self, now: ClockReading) -> bool:
        """Whether this is `until_nothing_is_due`, and no late run prolongs it."""
        return self._results is not None and not self._is_any_late(now)

    def _is_any_late(self, now: ClockReading) -> bool:
        return any(_is_late(one, now) for one in self._tasks.values())

    def _note(self, result: RunResult) -> None:
        """Record a result; a lasting problem counts once."""
        if self._results is None or (result.outcome is None and result.error is None):
            return
        known = {(one.schedule, str(one.error)) for one in self._results if one.error}
        if result.error is None or (result.schedule, str(result.error)) not in known:
            self._results.append(result)

    def _process(self, record: ScheduleRecord, now: ClockReading) -> float:
        """Begin a due run; returns when to check the schedule again, by the wall clock."""
        try:
            move = decide(record.timing, record.state, now).move
        except UsageError as exc:
            self._tell_once(record.name, record.vm, exc)
            self._note(RunResult(record.name, None, exc))
            return now.wall_s + CHECK_S
        if isinstance(move, Wait):
            if self._is_to_be_observed(record, now):
                self._begin(record, _observe(record.name, self._tools), now)
            return move.until_s or now.wall_s + CHECK_S
        busy = {one.vm for one in self._tasks.values()}
        taking_turns = [one for one in self._tasks.values() if not _is_late(one, now)]
        if record.vm not in busy and len(taking_turns) < PARALLEL:
            self._begin(record, self._run(record.name), now)
        return now.wall_s + CHECK_S

    def _tell_if_late(
        self, record: ScheduleRecord, under_way: _ActiveRun, now: ClockReading
    ) -> None:
        if _is_late(under_way, now):
            text = f"a run has been under way for {format_duration(TURN_S)} and more"
            self._tell_once_of(Event(record.name, record.vm, "late", text))

    def _is_to_be_observed(self, record: ScheduleRecord, now: ClockReading) -> bool:
        if record.request.when is not When.AUTO:
            return False
        last = self._observed.get(record.name)
        # Sampling a silent host takes longer than the interval.
        if last is not None and (self._is_ending(now) or now.since(last) < OBSERVE_S):
            return False
        self._observed[record.name] = now
        return True

    def _begin(
        self, record: ScheduleRecord, work: Coroutine[Any, Any, None], now: ClockReading
    ) -> None:
        task = asyncio.ensure_future(self._quietly(record, work))
        self._tasks[record.name] = _ActiveRun(record.vm, task, now)

    async def _run(self, name: str) -> None:
        try:
            self._note(await run(name, self._tools))
        except NotFoundError:
            raise
        except Exception as exc:
            self._note(RunResult(name, None, as_error(name, exc)))
            raise

    async def _quietly(self, record: ScheduleRecord, work: Coroutine[Any, Any, None]) -> None:
        """A problem of one schedule is reported once, and does not stop others."""
        try:
            with suppress(NotFoundError):  # it was removed meanwhile
                await work
            self._reported = {
                text for text in self._reported if not text.startswith(f"{record.name} ")
            }
        except Exception as exc:  # noqa: BLE001 - as above, whatever it is
            self._tell_once(record.name, record.vm, as_error(record.name, exc))

    def _forget_ended(self) -> None:
        for name, one in list(self._tasks.items()):
            if one.task.done():
                del self._tasks[name]

    def _tell_once(self, name: str, vm: str, exc: VmckptError) -> None:
        event = "busy" if isinstance(exc, BusyError) else "failed"
        self._tell_once_of(Event(name, vm, event, str(exc), {"kind": exc.kind}))

    def _tell_once_of(self, event: Event) -> None:
        text = f"{event.schedule} {event.text}"
        if text not in self._reported:
            self._reported.add(text)
            self._tools.tell(event)
