"""One schedule whose host hangs, or says what nothing foresaw, stops no other."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.schedule_work import OnlyTaking
from tests.unreadable import nothing_is_listed
from vmckpt.deadlines import poll
from vmckpt.errors import HostDownError, NotFoundError, StorageError
from vmckpt.fleet.schedule import scheduler
from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.fleet.schedule.learned import VmSample
from vmckpt.fleet.schedule.record import ScheduleRecord, add, load, new_record, schedules_dir
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import Event, Point, RunResult, SchedulerTools, clock

pytestmark = pytest.mark.contract

Take = Callable[[str], Awaitable[None]]


class Scripted(OnlyTaking):
    """`ScheduleActions` that does `take` for each VM, and then has a checkpoint."""

    def __init__(self, take: Take) -> None:
        self._take = take

    async def find(self, record: ScheduleRecord) -> Point | None:
        return None

    async def take(
        self, record: ScheduleRecord, begins: Callable[[str, str], None]
    ) -> Point | None:
        begins("store", "host")
        await self._take(record.vm)
        return Point("a" * 32, "point", 0.01, 1.0, 100)

    async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
        raise HostDownError("host is down", why="it has no power", remedy="wait")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(scheduler, "CHECK_S", 0.05)
    schedules_dir().mkdir(mode=0o700)


def scheduled(*names: str, when: When = When.EVERY) -> None:
    for name in names:
        add(new_record(name, ScheduleRequest(name, when, "UTC", every_s=3600.0), clock()))


def is_done(name: str) -> bool:
    return load(name).done_total > 0


async def served(take: Take, until: Callable[[], bool]) -> list[Event]:
    told: list[Event] = []
    serving = asyncio.ensure_future(
        scheduler.serve(SchedulerTools(clock, Scripted(take), told.append))
    )
    try:
        async with asyncio.timeout(10):
            while not until():
                assert not serving.done(), serving.result()
                await asyncio.sleep(0.02)
    finally:
        serving.cancel()
        await asyncio.wait({serving})
    return told


def test_runs_that_do_not_get_on_keep_no_other_from_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And are named: as many as are run at once wait for a store that gives no answer."""
    monkeypatch.setattr(scheduler, "TURN_S", 0.3)
    stuck = [f"stuck-{number}" for number in range(scheduler.PARALLEL)]
    scheduled(*stuck, "web")

    async def take(vm: str) -> None:
        if vm in stuck:
            await asyncio.Event().wait()

    told = asyncio.run(served(take, lambda: is_done("web")))
    assert [one.schedule for one in told if one.event == "late"] == stuck


def test_what_nothing_foresaw_is_a_failure_of_that_schedule() -> None:
    scheduled("evil", "web")

    async def take(vm: str) -> None:
        if vm == "evil":
            raise KeyError("result")

    told = asyncio.run(served(take, lambda: is_done("web") and load("evil").failures > 0))
    assert "vmckpt has a bug: KeyError: 'result'" in load("evil").why
    assert "evil" in {one.schedule for one in told if one.event == "failed"}


def test_run_due_tells_what_was_done_whatever_stands_in_one_ones_way() -> None:
    scheduled("evil", "web")
    scheduled("auto", when=When.AUTO)

    async def take(vm: str) -> None:
        if vm == "evil":
            raise KeyError("result")
        if vm == "auto":
            raise NotFoundError("there is no VM 'auto'", why="-", remedy="-")

    tools = SchedulerTools(clock, Scripted(take), lambda event: None)
    found = asyncio.run(scheduler.run_due([], tools))
    assert {one.schedule: one.outcome for one in found} == {
        "auto": None,
        "evil": None,
        "web": "done",
    }


def test_run_due_serves_the_others_while_one_hangs_and_returns_when_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "TURN_S", 0.3)
    scheduled("stuck", "web")
    ends = asyncio.Event()

    async def take(vm: str) -> None:
        if vm == "stuck":
            await ends.wait()

    async def main() -> tuple[list[RunResult], list[Event]]:
        told: list[Event] = []
        tools = SchedulerTools(clock, Scripted(take), told.append)
        running = asyncio.ensure_future(scheduler.run_due([], tools))
        assert await poll(
            lambda: is_done("web") and any(one.event == "late" for one in told),
            every_s=0.02,
            within_s=20,
        )
        # What becomes due, or is added, meanwhile is run as well.
        scheduled("mail")
        assert await poll(lambda: is_done("mail"), every_s=0.02, within_s=20)
        assert not running.done()
        ends.set()
        return await running, told

    found, told = asyncio.run(main())
    assert [one.schedule for one in told if one.event == "late"] == ["stuck"]
    assert {(one.schedule, one.outcome) for one in found} == {
        ("stuck", "done"),
        ("web", "done"),
        ("mail", "done"),
    }


def test_run_due_names_a_file_that_it_cannot_read() -> None:
    scheduled("web")
    (schedules_dir() / "bad.json").write_text("{")
    tools = SchedulerTools(clock, Scripted(nothing), lambda event: None)
    found = asyncio.run(scheduler.run_due([], tools))
    assert sorted((one.schedule, one.outcome or "") for one in found) == [
        ("-", ""),
        ("web", "done"),
    ]
    # One that is named is run whatever becomes of the others.
    assert asyncio.run(scheduler.run_due(["web"], tools)) == []


async def nothing(vm: str) -> None:
    """No trouble."""


def test_run_due_ends_although_a_host_takes_long_to_say_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its timer starts no other before, and what is due next is due in vain."""
    monkeypatch.setattr(scheduler, "OBSERVE_S", 0.1)
    scheduled("auto", when=When.AUTO)

    class Slow(Scripted):
        async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
            await asyncio.sleep(0.2)
            return None

    async def take(vm: str) -> None:
        pass

    async def main() -> list[RunResult]:
        async with asyncio.timeout(10):
            return await scheduler.run_due([], SchedulerTools(clock, Slow(take), lambda _: None))

    assert [one.outcome for one in asyncio.run(main())] == ["done"]


def test_schedules_that_cannot_be_read_are_not_none() -> None:
    """Nothing was due then, without a word, and `run-due` ended with 0."""
    scheduled("web")
    told: list[Event] = []

    async def take(_: str) -> None:
        return None

    async def main() -> None:
        tools = SchedulerTools(clock, Scripted(take), told.append)
        with nothing_is_listed():
            with pytest.raises(StorageError, match="schedules"):
                await scheduler.run_due([], tools)
            serving = asyncio.ensure_future(scheduler.serve(tools))
            assert await poll(lambda: bool(told), every_s=0.02, within_s=10)
        # They go on once they can be read.
        assert await poll(lambda: is_done("web"), every_s=0.02, within_s=10)
        assert not serving.done()
        serving.cancel()
        await asyncio.wait({serving})

    asyncio.run(main())
    assert [(one.event, "cannot read" in one.text) for one in told][:1] == [("failed", True)]
