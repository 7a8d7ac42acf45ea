"""`vmckpt schedule` where there is no VM: what is refused, and what is shown."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import vmckpt
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.fleet.schedule.record import add, new_record
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import clock

pytestmark = pytest.mark.contract


def schedule(state: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = vmckpt(state, "schedule", *words, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    return tmp_path


def test_a_vm_that_is_not_there_has_no_schedule(state: Path) -> None:
    assert schedule(state, "add", "web", "--every", "1h")[0] == 3
    code, said = schedule(state, "run-due", "web")
    assert (code, said["error"]["what"]) == (3, "there is no schedule 'web'")
    assert schedule(state, "run-due") == (0, {"runs": []})


def test_what_there_is_is_shown_run_and_removed(state: Path) -> None:
    asked = ScheduleRequest(
        "web", When.CRON, "Asia/Tokyo", cron="30 3 * * *", rule=RetentionRule(daily=7)
    )
    add(new_record("web", asked, clock()))
    hourly = ScheduleRequest("db", When.EVERY, "UTC", every_s=3600.0)
    add(new_record("db", hourly, clock()))
    (state / "schedules/bad.json").write_text("{")
    _, listed = schedule(state, "list")
    assert [one["schedule"] for one in listed["schedules"]] == ["db", "web"]
    assert "bad.json is damaged" in listed["silent"][0]["what"]
    _, following = schedule(state, "next", "web", "--count", "2")
    assert all(one["at"].endswith("03:30:00 JST") for one in following["next"])
    assert following["next"][1]["at_unix_s"] - following["next"][0]["at_unix_s"] == 86400
    shown = vmckpt(state, "schedule", "show", "web").stdout
    assert "30 3 * * * (Asia/Tokyo)" in shown
    # There is no VM: it failed, is told so, and by the class's exit code.
    code, ran = schedule(state, "run-due")
    assert (code, ran["runs"][0]["error"]["kind"]) == (3, "not-found")
    _, shown_again = schedule(state, "show", "db")
    assert (shown_again["failures"], shown_again["runs_failed"]) == (1, 1)
    assert "there is no VM 'db'" in shown_again["why"]
    assert schedule(state, "rm", "db") == (0, {"removed": "db"})


def test_a_time_zone_that_is_gone_hides_no_schedule(state: Path) -> None:
    """As US/Eastern is after an upgrade to Debian 13, until tzdata-legacy is installed."""
    add(new_record("db", ScheduleRequest("db", When.EVERY, "UTC", every_s=3600.0), clock()))
    gone = new_record("web", ScheduleRequest("web", When.EVERY, "Atlantis/Port", 60.0), clock())
    add(replace(gone, last_done_s=1.0))
    code, listed = schedule(state, "list")
    assert (code, [one["schedule"] for one in listed["schedules"]]) == (0, ["db", "web"])
    assert "no time zone 'Atlantis/Port'" in listed["schedules"][1]["why"]
    assert "1970-01-01 00:00:01 UTC" in vmckpt(state, "schedule", "show", "web").stdout
    following = vmckpt(state, "schedule", "next", "--count", "1", "--json")
    assert [one["schedule"] for one in json.loads(following.stdout)["next"]] == ["db"]
    assert "not listed: web: there is no time zone" in following.stderr
    assert schedule(state, "next", "web")[0] == 2
