"""Schedulers as processes: killed with -9, started twice, under a clock that is set."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import eventually
from vmckpt.fleet.schedule.record import ScheduleRecord, add, load, new_record
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import DONE, clock
from vmckpt.hosts.processes.process import find_by_argument

PROGRAM = [sys.executable, "-m", "tests.schedule_process"]
PATIENCE_S = 60.0


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    (tmp_path / "made").mkdir()
    (tmp_path / "log").touch()
    (tmp_path / "off").write_text("0")
    yield tmp_path


def begin(place: Path, verb: str) -> "subprocess.Popen[str]":
    words = [*PROGRAM, str(place), verb]
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )


def every(seconds: float) -> ScheduleRecord:
    add(new_record("web", ScheduleRequest("web", When.EVERY, "UTC", every_s=seconds), clock()))
    return load("web")


def made_once(place: Path) -> list[str]:
    """The ids of all checkpoints, each of which was made once; no one is at one any longer."""
    eventually(
        lambda: not find_by_argument(f"tests.schedule_service\0{place}"),
        PATIENCE_S,
        lambda: str(load("web")),
    )
    log = (place / "log").read_text().split()
    assert len(log) == len(set(log)), "a checkpoint was made twice"
    assert set(log) == {path.name for path in (place / "made").iterdir()}
    return log


def test_kills_at_any_moment_neither_miss_nor_double_a_run(place: Path) -> None:
    """Each due time has one run, found or made again by whoever comes next."""
    rng = random.Random(8)
    every(1.0)
    for _ in range(4):
        killed = begin(place, "serve")
        time.sleep(rng.uniform(0.3, 1.6))  # a random moment is what it is about
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
    last = begin(place, "serve")
    number = load("web").state.number
    eventually(lambda: load("web").state.number > number + 1, PATIENCE_S, lambda: str(load("web")))
    last.send_signal(signal.SIGTERM)
    out, err = last.communicate(timeout=PATIENCE_S)
    assert (last.returncode, err) == (0, "")
    assert all(json.loads(line)["event"] for line in out.splitlines())
    record, log = load("web"), made_once(place)
    done = [one for one in record.runs if one.outcome == DONE]
    assert [one.number for one in done] == list(range(1, len(done) + 1))
    # What was cut off last may be there and not written down yet; the next one finds it.
    assert [one.checkpoint for one in done] == log[: len(done)]
    assert len(log) - len(done) <= 1


def test_of_two_schedulers_one_says_who_the_other_is(place: Path) -> None:
    every(3600.0)
    first = begin(place, "serve")
    eventually(lambda: load("web").last_done_s is not None, PATIENCE_S, lambda: str(load("web")))
    for verb in ("serve", "run-due"):
        second = begin(place, verb)
        _, err = second.communicate(timeout=PATIENCE_S)
        assert second.returncode == 5, err
        assert f"serve --scheduler (run -, pid {first.pid})" in err
    first.kill()
    first.communicate()
    # A dead one's lock is free.
    third = begin(place, "run-due")
    assert third.communicate(timeout=PATIENCE_S) == ("", "")
    assert third.returncode == 0
    assert len(made_once(place)) == 1


def test_a_clock_that_is_set_has_no_calendar_time_run_twice_or_left_out(place: Path) -> None:
    now = clock()
    # As if it had been added a minute before the hour, which begins when the clock steps.
    hour_s = (now.wall_s // 3600 + 1) * 3600
    base_s = hour_s - 60 - now.wall_s
    request = ScheduleRequest("web", When.CRON, "UTC", cron="0 * * * *")
    add(new_record("web", request, now._replace(wall_s=hour_s - 60)))
    for off_s in (0, 3600, -3600, 7200):
        (place / "off").write_text(str(base_s + off_s))
        assert begin(place, "run-due").communicate(timeout=PATIENCE_S)[1] == ""
    # The hour that the first step passed, and the one more that the last one did.
    assert [one.due_s - hour_s for one in load("web").runs] == [0.0, 3600.0]
    assert len(made_once(place)) == 2
