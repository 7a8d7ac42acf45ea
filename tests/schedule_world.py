"""A machine with a scheduler on it, in virtual time: clocks that step, reboots, kills, failures.

What runs is `fleet.schedule.run.run` with its real files; checkpoints are names in a dict. A kill
is an exception that nothing catches, at any place where the run asks or tells someone: between any
two of its writes.
"""

import asyncio
import errno
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.errors import BusyError, HostDownError, NotFoundError, RefusedError
from vmckpt.fleet.schedule.due import BeginRun, ClockReading, Settle, Wait, decide
from vmckpt.fleet.schedule.learned import VmSample
from vmckpt.fleet.schedule.record import MOST_RUNS, ScheduleRecord, add, forget, load, new_record
from vmckpt.fleet.schedule.request import CatchUp, ScheduleRequest, When
from vmckpt.fleet.schedule.run import (
    DONE,
    SKIPPED,
    UNCOPIED,
    Checked,
    Event,
    Gone,
    Point,
    SchedulerTools,
    run,
)

# 2026-11-22 00:00 UTC; multiples of an hour, and so of what divides one.
BEGIN_S = 1795305600.0


class Killed(BaseException):
    """The scheduler's process is no more."""


@dataclass
class World:
    """One machine, one schedule. `now_s` is true time; the wall clock is off by `off_s`."""

    loop: asyncio.AbstractEventLoop
    rng: random.Random
    request: ScheduleRequest
    now_s: float = BEGIN_S
    off_s: float = 0.0
    boot: int = 0
    booted_s: float = BEGIN_S - 500.0
    # Checkpoints that are there, by id; a store has each once.
    made: dict[str, float] = field(default_factory=dict)
    # Of killed schedulers: what is still at it will be done then, and holds the VM until it is.
    orphans: dict[str, float] = field(default_factory=dict)
    # Which run was tried when, by true time, and in which boot.
    begun: list[tuple[int, float, int]] = field(default_factory=list)
    kill_in: int = -1
    fail_next: int = 0
    stops: bool = False
    far: bool = False
    # What comes after a checkpoint ends with errors that are none of ours.
    breaks: bool = False
    damage: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    name: str = "web"
    # Where the VM is, and which hosts give no answer, or have no store any longer.
    host: str = "host"
    dead: set[str] = field(default_factory=set)
    emptied: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        forget(self.name)
        add(new_record(self.name, self.request, self.clock()))

    def clock(self) -> ClockReading:
        return ClockReading(
            self.now_s + self.off_s, self.now_s - self.booted_s, f"boot-{self.boot}"
        )

    @property
    def record(self) -> ScheduleRecord:
        return load(self.name)

    def done(self) -> list[float]:
        """The due times of the runs that are over, in order."""
        wanted = (DONE, UNCOPIED, SKIPPED)
        return [one.due_s for one in self.record.runs if one.outcome in wanted]

    # -- what happens to the machine ---------------------------------------------------------

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds
        for key, at_s in list(self.orphans.items()):
            if at_s <= self.now_s:
                del self.orphans[key]
                self.made.setdefault(key, at_s)

    def step_clock(self, by_s: float) -> None:
        self.off_s += by_s

    def reboot(self, down_s: float) -> None:
        # What was still at it has died with the machine.
        self.orphans.clear()
        self.pass_(down_s)
        self.boot += 1
        self.booted_s = self.now_s

    # -- the scheduler ------------------------------------------------------------------------

    def work(self, for_s: float) -> bool:
        """The scheduler runs for so long; False: it was killed before that."""
        until_s = self.now_s + for_s
        while True:
            now, record = self.clock(), self.record
            decision = decide(record.timing, record.state, now)
            if isinstance(decision.move, Wait):
                wake_s = decision.move.until_s
                rest_s = 2.0 if wake_s is None else max(wake_s - now.wall_s, 0.001)
                # As the scheduler does, which looks again every two seconds.
                if record.state != decision.state:
                    self._run()
                if self.now_s + rest_s >= until_s:
                    self.pass_(max(0.0, until_s - self.now_s))
                    return True
                self.pass_(rest_s)
                continue
            assert isinstance(decision.move, BeginRun | Settle)
            try:
                self._run()
            except Killed:
                return False
            self.pass_(0.5)

    def _run(self) -> None:
        self.loop.run_until_complete(
            run(self.name, SchedulerTools(self._asked_time, self, self._told))
        )

    def _asked_time(self) -> ClockReading:
        self._maybe_die()
        return self.clock()

    def _told(self, event: Event) -> None:
        self._maybe_die()

    def _maybe_die(self) -> None:
        self.kill_in -= 1
        if self.kill_in == 0:
            raise Killed

    # -- Work ---------------------------------------------------------------------------------

    async def find(self, record: ScheduleRecord) -> Point | None:
        self._maybe_die()
        making = record.making
        if making is None or making.place is None:
            return None
        if making.host in self.dead:
            raise HostDownError(f"{making.host} is down", why="it has no power", remedy="wait")
        if making.host in self.emptied:
            raise RefusedError("the store is gone", why="it was used before", remedy="mount it")
        if self.orphans:
            raise BusyError("'web' is busy", why="a service is at it", remedy="wait")
        return self._point(making.id) if making.id in self.made else None

    async def take(
        self, record: ScheduleRecord, begins: Callable[[str, str], None]
    ) -> Point | None:
        self._maybe_die()
        held, making = record.state.claim, record.making
        assert held
        assert making
        self.begun.append((held.number, self.now_s, self.boot))
        if self.stops:
            return None
        begins("store", self.host)
        if self.host in self.dead:
            raise HostDownError(f"{self.host} is down", why="it has no power", remedy="wait")
        if self.fail_next:
            self.fail_next -= 1
            raise HostDownError("host is down", why="as it was told", remedy="wait")
        took_s = self.rng.uniform(0.1, 3.0)
        if self.kill_in == 1:
            # Its service lives on, and begins when it likes.
            self.orphans[making.id] = self.now_s + took_s * self.rng.uniform(0.1, 20)
        self._maybe_die()
        if self.orphans:
            raise BusyError("'web' is busy", why="a service is at it", remedy="wait")
        self.pass_(took_s)
        if making.id in self.made:
            raise RefusedError("it is there already", why="-", remedy="-")
        self.made[making.id] = self.now_s
        self._maybe_die()
        return self._point(making.id)

    async def copy(self, record: ScheduleRecord, point: Point) -> list[str]:
        self._maybe_die()
        if self.far:
            raise HostDownError("the other host is down", why="as it was told", remedy="wait")
        return ["store"]

    async def prune(self, record: ScheduleRecord, taken: str) -> Gone:
        self._maybe_die()
        if self.breaks:
            raise ValueError("what no store has said before")
        return Gone([])

    async def check(self, record: ScheduleRecord) -> Checked:
        self._maybe_die()
        if self.breaks:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return Checked(self.damage, self.unchecked, {"store": record.checked.get("store", 0) + 1})

    async def sample(self, record: ScheduleRecord, now: ClockReading) -> VmSample | None:
        raise NotFoundError("not asked", why="-", remedy="-")

    def _point(self, key: str) -> Point:
        return Point(key, "point", 0.01, 1.0, 100)


def random_request(rng: random.Random) -> tuple[ScheduleRequest, float]:
    """A schedule, and the seconds from one run to the next: by calendar all its multiples."""
    every_s = rng.choice([60.0, 300.0, 900.0, 3600.0])
    cron = {60.0: "* * * * *", 300.0: "*/5 * * * *", 900.0: "*/15 * * * *", 3600.0: "0 * * * *"}
    by_calendar = rng.random() < 0.5
    request = ScheduleRequest(
        vm="web",
        when=When.CRON if by_calendar else When.EVERY,
        zone="UTC",
        every_s=None if by_calendar else every_s,
        cron=cron[every_s] if by_calendar else None,
        jitter_s=rng.choice([0.0, 0.0, every_s / 10, every_s / 3]),
        catch_up=CatchUp.ONCE,
        rule=RetentionRule(keep_last=3),
    )
    return request, every_s


def newest_of_grid(every_s: float, wall_s: float) -> float:
    """The last multiple of a time that is not later."""
    return wall_s // every_s * every_s


def one_history(seed: int, loop: asyncio.AbstractEventLoop, turns: int = 25) -> int:
    """Play one history; AssertionError when a run is missed or doubled. How many runs were done."""
    rng = random.Random(seed)
    request, every_s = random_request(rng)
    world = World(loop, rng, request)
    # In some nothing happens but to the clock: then intervals are to be kept to the second.
    happens = ["step", "step", "down", "reboot", "kill", "kill", "fail", "far", "stop"]
    happens = ["step"] if (is_calm := rng.random() < 0.2) else happens
    for _ in range(turns):
        what = rng.choice([*happens, *["work"] * len(happens)])
        if what == "step":
            world.step_clock(rng.choice([-3600.0, 3600.0, rng.uniform(-3600, 3600)]))
        elif what == "down":
            world.pass_(rng.uniform(1, 5) * every_s)
        elif what == "reboot":
            world.reboot(rng.uniform(0.1, 5) * every_s)
        elif what == "kill":
            world.kill_in = rng.randrange(1, 14)
        elif what == "fail":
            world.fail_next = rng.randrange(1, 4)
        world.far, world.stops = what == "far", what == "stop"
        if not world.work(rng.uniform(0.2, 4) * every_s):
            world.kill_in = -1
            world.pass_(rng.choice([0.0, rng.uniform(0, 2), rng.uniform(0, 3) * every_s]))
    world.kill_in, world.fail_next, world.far, world.stops = -1, 0, False, False
    # Whatever failed last is tried again within a quarter of an hour.
    assert world.work(2000.0)
    check(world, every_s, is_calm=is_calm)
    return len(world.done())


def check(world: World, every_s: float, *, is_calm: bool) -> None:
    """Nothing was missed, and nothing is there twice, now that all is quiet."""
    record, jitter_s = world.record, world.request.jitter_s
    done = world.done()
    assert record.state.claim is None
    # Each checkpoint is that of one run that was done, and of each run there is one.
    ids = [one.checkpoint for one in record.runs if one.outcome in (DONE, UNCOPIED)]
    assert len(ids) == len(set(ids))
    assert set(ids) <= world.made.keys()
    if len(record.runs) < MOST_RUNS:
        assert set(ids) == world.made.keys(), "a checkpoint that no run knows of"
    if record.request.cron is None:
        _check_intervals(world, every_s, is_calm=is_calm)
        return
    assert done == sorted(set(done)), "a due time was run twice"
    assert all(due_s % every_s == 0 for due_s in done)
    # The last time that is due, its jitter over, was run, or a later one was.
    wanted = newest_of_grid(every_s, world.clock().wall_s - jitter_s - 10)
    last_s = done[-1] if done else record.added.wall_s
    assert last_s >= wanted, (done[-3:], wanted)
    # Each time stands for itself and those that were missed before it: none is left out.
    for before, after in pairwise(record.runs):
        assert after.due_s - before.due_s == (after.missed + 1) * every_s, (before, after)


def _check_intervals(world: World, every_s: float, *, is_calm: bool) -> None:
    """True time from one begin to the next, whatever the wall clock said."""
    jitter_s = world.request.jitter_s
    for (number, at_s, boot), (later, then_s, now_boot) in pairwise(world.begun):
        gap_s = then_s - at_s
        if later != number and boot == now_boot:
            assert gap_s >= every_s / 2 - jitter_s - 5, "two runs in a row"
        if is_calm:
            assert abs(gap_s - every_s) <= jitter_s + 5, gap_s
    assert world.now_s - world.begun[-1][1] <= every_s + jitter_s + 10, "a run was missed"
