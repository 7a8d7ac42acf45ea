"""Schedules through clocks that step, reboots, downtimes, kills and failures, by the thousand.

`tests/schedule_world.py` plays them in virtual time, with real files.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator

import pytest

from tests.schedule_world import one_history
from vmckpt.fleet.schedule.record import schedules_dir

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


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_in_thousands_of_histories() -> None:
    count = int(os.environ.get("VMCKPT_SCHEDULE_HISTORIES", MANY))
    print(count, "histories,", play(range(FEW, FEW + count)), "runs done")
