"""What a schedule writes down, and what others are told of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.errors import NotFoundError, RefusedError, StorageError
from vmckpt.fleet.schedule.due import ClaimedRun, ClockReading, ScheduleState
from vmckpt.fleet.schedule.learned import CheckpointCost, LearnedCosts, VmSample
from vmckpt.fleet.schedule.record import (
    MOST_RUNS,
    PendingCheckpoint,
    ScheduleRecord,
    ScheduleRun,
    add,
    forget,
    load,
    load_all,
    new_record,
    save,
    schedules_dir,
)
from vmckpt.fleet.schedule.request import CatchUp, ScheduleRequest, When
from vmckpt.fleet.schedule.status import next_by_vm, status

pytestmark = pytest.mark.unit
NOW = ClockReading(1795305600.5, 1000.25, "boot")


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))


def record(
    name: str = "web", when: When = When.EVERY, **schedule_request: float | str
) -> ScheduleRecord:
    given = {"every_s": 900.0} if when is When.EVERY else {}
    return new_record(name, ScheduleRequest("web", when, "UTC", **given | schedule_request), NOW)  # type: ignore[arg-type]


def test_it_is_read_as_it_was_written() -> None:
    schedule_request = ScheduleRequest(
        "web", When.CRON, "Europe/Berlin", cron="0 3 * * *", window="22:00-06:00", jitter_s=60.0,
        catch_up=CatchUp.SKIP, rule=RetentionRule(daily=7, max_age_s=1e6), store="lab-a:",
        copies=("lab-b:", "/srv"), kind="file", max_pause_s=0.0, key_file="/root/key",
    )  # fmt: skip
    full = replace(
        new_record("web", schedule_request, NOW),
        state=ScheduleState(3, 7.5, NOW, ClaimedRun(3, 7.5, 2, NOW, 4, NOW, 30.0, "why")),
        learned=LearnedCosts(5.0, 1, VmSample(NOW, "q", alive=True), CheckpointCost(0.1, 2.0), 7),
        making=PendingCheckpoint("id", "lab-a:", "lab-a"),
        runs=(ScheduleRun(2, 1.0, 2.0, 3.0, "done", "id", "", 1, 2),),
        places=("lab-a:",),
    )
    add(full)
    assert load("web") == full
    assert [path.name for path in schedules_dir().iterdir()] == ["web.json"]
    with pytest.raises(RefusedError, match="there is a schedule 'web' already"):
        add(record())
    forget("web")
    forget("web")
    with pytest.raises(NotFoundError, match="no schedule 'web'"):
        load("web")


@pytest.mark.parametrize("text", ["", "{", "{}", '{"format": 9}', "[]"])
def test_a_damaged_one_is_named_and_hides_no_other(text: str) -> None:
    add(record("a"))
    add(record("b"))
    (schedules_dir() / "a.json").write_text(text)
    known = load_all()
    assert list(known.records) == ["b"]
    assert "a.json is damaged" in known.damaged[0].what


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "schedules").write_text("no directory")
    with pytest.raises(StorageError, match="cannot make"):
        add(record())


def test_old_runs_are_forgotten() -> None:
    one = record()
    for number in range(MOST_RUNS + 5):
        one = one.ended(ScheduleRun(number, 1.0, 1.0, 1.0, "done"))
    save_dir = schedules_dir()
    save_dir.mkdir()
    save(one)
    assert [run.number for run in load("web").runs] == list(range(5, MOST_RUNS + 5))


def test_what_is_told_is_json_and_names_what_is_next() -> None:
    done = replace(
        record(), state=ScheduleState(1, NOW.wall_s, NOW), last_done_s=NOW.wall_s, done_total=1
    )
    told = status(done, NOW)
    assert json.loads(json.dumps(told)) == told
    assert (told["next_unix_s"], told["when"]) == (NOW.wall_s + 900, "every 15m00s")
    sooner = told | {"next_unix_s": NOW.wall_s + 60, "schedule": "other"}
    never = told | {"next_unix_s": None, "vm": "db"}
    assert next_by_vm([told, sooner, never]) == {"web": sooner}


def test_auto_says_what_it_rests_on() -> None:
    auto = record("auto", When.AUTO, rpo_s=600.0)
    assert status(auto, NOW)["when"] == "auto"
    paid = replace(auto, learned=LearnedCosts().paid(CheckpointCost(0.02, 2.0)))
    told = status(paid, NOW)["interval"]
    assert (told["by"], told["cost_s"]) == ("what it costs and how often the VM fails", 0.02)
    assert told["every_s"] == pytest.approx(322, rel=0.01)
    assert told["mtbf_s"] == 30 * 86400


def test_a_zone_that_has_gone_is_told_not_raised() -> None:
    gone = record("gone")
    told = status(replace(gone, request=replace(gone.request, zone="Mars/Olympus")), NOW)
    assert told["next_unix_s"] is None
    assert "Mars/Olympus" in told["why"]
