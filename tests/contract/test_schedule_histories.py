"""Schedules through clocks that step, reboots, downtimes, kills and failures, by the thousand.

`tests/schedule_world.py` plays them in virtual time, with real files.
"""

import asyncio
import os
import random
import tempfile
from collections.abc import Iterator

import pytest

from tests.schedule_world import World, one_history
from vmckpt.fleet.schedule.record import schedules_dir
from vmckpt.fleet.schedule.request import Request, When
from vmckpt.store.damage.subset import part_of_run

FEW, MANY = 12, 3000


@pytest.fixture(autouse=True)
def _state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In memory: each run writes its file durably some five times."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="vk-") as path:
        monkeypatch.setenv("VMCKPT_STATE_DIR", path)
        schedules_dir().mkdir(parents=True)
        yield


def play(seeds: range) -> int:
    """How many runs were done in all."""
    loop = asyncio.new_event_loop()
    try:
        return sum(one_history(seed, loop) for seed in seeds)
    finally:
        loop.close()


def test_no_run_is_missed_and_none_is_doubled() -> None:
    assert play(range(FEW)) > FEW


def test_damage_that_a_check_finds_is_said_and_the_run_is_done() -> None:
    loop = asyncio.new_event_loop()
    request = Request(vm="web", when=When.EVERY, zone="UTC", every_s=60.0, check_percent=2.0)
    try:
        world = World(loop, random.Random(1), request, damage=["the store is damaged"])
        world.work(70.0)
        assert world.record.why == "the store is damaged"
        assert (world.record.failures, world.record.runs[-1].why) == (0, world.record.why)
        world.damage = []
        world.work(70.0)
        assert (world.record.why, world.record.runs[-1].outcome) == ("", "done")
    finally:
        loop.close()


@pytest.mark.parametrize("when", [When.EVERY, When.CRON])
def test_a_host_that_dies_in_a_run_holds_the_schedule_up_no_longer_than_to_the_next(
    when: When,
) -> None:
    loop = asyncio.new_event_loop()
    by_calendar = when is When.CRON
    request = Request(
        vm="web", when=when, zone="UTC", every_s=None if by_calendar else 60.0,
        cron="* * * * *" if by_calendar else None,
    )  # fmt: skip
    try:
        world = World(loop, random.Random(1), request)
        world.work(70.0)
        done = len(world.done())
        world.dead = {"host"}
        world.work(70.0)  # it dies in this one
        assert world.record.failures > 0
        world.host = "other"  # its standby took the VM over
        world.work(180.0)
        assert len(world.done()) >= done + 2
        assert (world.record.failures, world.record.why) == (0, "")
        missed = [one for one in world.record.runs if one.outcome == "missed"]
        assert len(missed) == 1
        assert "host is down" in missed[0].why
        world.dead = set()
        world.work(60.0)
        assert world.record.failures == 0
    finally:
        loop.close()


def test_runs_after_one_another_read_all_of_a_store() -> None:
    packs = [bytes([number, 7]) * 8 for number in range(200)]
    read = [part_of_run(2.0, run).choose(packs) for run in range(50)]
    assert set().union(*read) == set(packs)
    assert sum(map(len, read)) == len(packs)
    assert part_of_run(100.0, 5).choose(packs) == set(packs)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_in_thousands_of_histories() -> None:
    count = int(os.environ.get("VMCKPT_SCHEDULE_HISTORIES", MANY))
    print(count, "histories,", play(range(FEW, FEW + count)), "runs done")
