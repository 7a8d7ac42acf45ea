"""Schedules through clocks that step, reboots, downtimes, kills and failures, by the thousand.

`tests/schedule_world.py` plays them in virtual time, with real files.
"""

import asyncio
import json
import os
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.guest_like import memory, save
from tests.schedule_world import World, one_history
from vmckpt.codec import builtins, convert
from vmckpt.fleet.schedule.record import ScheduleRecord, new_record, schedules_dir
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import clock
from vmckpt.fleet.schedule.work import Checkpoints
from vmckpt.store.damage.subset import part_of
from vmckpt.store.open import create_store

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
    request = ScheduleRequest(
        vm="web", when=When.EVERY, zone="UTC", every_s=60.0, check_percent=2.0
    )
    try:
        world = World(loop, random.Random(1), request, damage=["the store is damaged"])
        world.work(70.0)
        assert world.record.why == "the store is damaged"
        assert (world.record.failures, world.record.runs[-1].why) == (0, world.record.why)
        world.damage = []
        world.work(70.0)
        assert (world.record.why, world.record.runs[-1].outcome) == ("", "done")
        world.unchecked = ["the store was not checked"]
        world.work(70.0)
        assert world.record.why == "the store was not checked"
        assert world.record.checked["store"] == len(world.record.runs)
    finally:
        loop.close()


def test_no_store_keeps_another_from_being_checked_and_no_part_is_left_out(tmp_path: Path) -> None:
    """Of every second run nothing is read, as of one that finds its VM off."""
    percent = 34.0
    places = [str(tmp_path / name) for name in ("one", "two")]
    request = ScheduleRequest("web", When.EVERY, zone="UTC", every_s=60.0, check_percent=percent)
    record = replace(new_record("web", request, clock()), places=("no-such:", *places))
    for number, location in enumerate(places):
        with create_store(location) as store:
            save(store, memory(64, number))
    flip_any_pack(Path(places[0]))
    work, read = Checkpoints(print), set[str]()
    for number in range(0, 8, 2):
        state = replace(record.state, number=number)
        found = asyncio.run(work.check(replace(record, state=state)))
        assert "no-such: was not checked" in found.silent[0]
        read |= {line.partition(" ")[0] for line in found.damaged}
        record = replace(record, checked=found.parts)
    assert read == {places[0]}
    assert record.checked == dict.fromkeys(places, 4)
    again = convert(ScheduleRecord, json.loads(json.dumps(builtins(record))))
    assert again.checked == record.checked


def flip_any_pack(location: Path) -> None:
    """One bit in each pack: whichever part is read last finds it."""
    for path in (location / "packs").glob("[0-9a-f]*"):
        data = bytearray(path.read_bytes())
        data[100] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("when", [When.EVERY, When.CRON])
def test_a_host_that_dies_in_a_run_holds_the_schedule_up_no_longer_than_to_the_next(
    when: When,
) -> None:
    loop = asyncio.new_event_loop()
    by_calendar = when is When.CRON
    request = ScheduleRequest(
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


def test_a_run_whose_store_is_gone_holds_the_schedule_up_no_longer_than_to_the_next() -> None:
    """Its host was made again while the VM is on another: no run came after that one."""
    loop = asyncio.new_event_loop()
    request = ScheduleRequest(vm="web", when=When.EVERY, zone="UTC", every_s=60.0)
    try:
        world = World(loop, random.Random(1), request)
        world.dead = {"host"}
        world.work(5.0)
        assert world.record.failures > 0
        world.dead, world.emptied, world.host = set(), {"host"}, "other"
        world.work(180.0)
        assert len(world.done()) >= 2
        assert (world.record.failures, world.record.why) == (0, "")
        (missed,) = [one for one in world.record.runs if one.outcome == "missed"]
        assert "the store is gone" in missed.why
    finally:
        loop.close()


def test_what_breaks_after_a_checkpoint_keeps_no_run_from_its_end() -> None:
    """Its run was found done again and again, and the next one never came."""
    loop = asyncio.new_event_loop()
    request = ScheduleRequest(
        vm="web", when=When.EVERY, zone="UTC", every_s=60.0, check_percent=5.0
    )
    try:
        world = World(loop, random.Random(1), request)
        world.breaks = True
        world.work(200.0)
        assert len(world.done()) >= 3
        assert "has said before" in world.record.why
        assert "were not checked" in world.record.why
    finally:
        loop.close()


def test_runs_after_one_another_read_all_of_a_store() -> None:
    packs = [bytes([number, 7]) * 8 for number in range(200)]
    read = [part_of(2.0, number).choose(packs) for number in range(50)]
    assert set().union(*read) == set(packs)
    assert sum(map(len, read)) == len(packs)
    assert part_of(100.0, 5).choose(packs) == set(packs)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_in_thousands_of_histories() -> None:
    count = int(os.environ.get("VMCKPT_SCHEDULE_HISTORIES", MANY))
    print(count, "histories,", play(range(FEW, FEW + count)), "runs done")
