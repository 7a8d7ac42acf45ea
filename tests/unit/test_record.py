"""Run records: written whole, read back whole, and nothing else taken for one."""

import json
import stat
from pathlib import Path

import pytest

from vmckpt.errors import NotFoundError
from vmckpt.events import record as records
from vmckpt.events.record import RunRecord, load_all
from vmckpt.events.types import Event, JobProgress, Note, PhaseBegan, Progress, unless_gone

SAMPLE = Progress(
    at_s=0.3,
    status="active",
    round=2,
    total_bytes=1 << 29,
    remaining_bytes=1 << 20,
    transferred_bytes=1 << 28,
    throughput_bytes_per_s=1e8,
    dirty_rate_bytes_per_s=2e6,
    expected_downtime_ms=12,
    throttle_percent=0,
    postcopy_requests=0,
    eta_s=0.01,
    normal_pages=65536,
    zero_pages=9,
)


def record(run: str = "20250101-120000-abcd", began_unix_s: float = 1e9) -> RunRecord:
    return RunRecord(run, "migrate", {"vm": "web", "target": "b"}, began_unix_s)


def test_a_record_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    written = record()
    written.add(PhaseBegan(0.1, "prepare"))
    written.add(SAMPLE)
    written.add(Note(0.4, "time-up", "the time is up"))
    written.add(JobProgress(0.5, "save", 1, 2))
    written.result = {"outcome": "completed"}
    path = written.save(tmp_path / "runs")
    assert path == tmp_path / "runs/20250101-120000-abcd.json"
    assert RunRecord.load(path) == written
    assert [event["event"] for event in written.events] == ["PhaseBegan", "Note", "JobProgress"]
    assert written.samples == [
        {
            "at_s": 0.3,
            "status": "active",
            "round": 2,
            "total_bytes": 536870912,
            "remaining_bytes": 1048576,
            "transferred_bytes": 268435456,
            "throughput_bytes_per_s": 1e8,
            "dirty_rate_bytes_per_s": 2e6,
            "expected_downtime_ms": 12,
            "throttle_percent": 0,
            "postcopy_requests": 0,
            "eta_s": 0.01,
            "normal_pages": 65536,
            "zero_pages": 9,
        }
    ]


def test_a_record_is_one_json_object_that_says_its_format(tmp_path: Path) -> None:
    data = json.loads(record().save(tmp_path).read_text())
    assert data["format"] == 1
    assert set(data) == {
        "format",
        "run",
        "operation",
        "request",
        "began_unix_s",
        "events",
        "samples",
        "result",
        "forecast",
    }


def test_a_record_is_private_and_leaves_no_part_behind(tmp_path: Path) -> None:
    path = record().save(tmp_path / "runs")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_saving_again_replaces_the_record(tmp_path: Path) -> None:
    one = record()
    one.save(tmp_path)
    one.result = {"outcome": "completed"}
    assert RunRecord.load(one.save(tmp_path)).result == {"outcome": "completed"}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "7", '{"format": 2}', '{"format": 1, "run": "x"}', "\x00"]
)
def test_what_is_no_record_is_not_found(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(NotFoundError, match="there is no run 'x'"):
        RunRecord.load(path)


def test_a_missing_record_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="vmckpt runs list"):
        RunRecord.load(tmp_path / "gone.json")


def test_all_records_come_oldest_first_without_what_is_none(tmp_path: Path) -> None:
    for name, began_unix_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        record(name, began_unix_s).save(tmp_path)
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / ".d.part").write_text("{}")
    assert [each.run for each in load_all(tmp_path)] == ["a", "b", "c"]
    assert load_all(tmp_path / "missing") == []


def test_a_listener_that_has_gone_stops_nobody() -> None:
    def gone(event: Event) -> None:
        raise BrokenPipeError(str(event))

    unless_gone(gone)(Note(0.0, "code", "text"))
    heard: list[Event] = []
    unless_gone(heard.append)(Note(0.0, "code", "text"))
    assert heard == [Note(0.0, "code", "text")]


def test_a_record_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    record = RunRecord("r", "migrate", {})
    (tmp_path / "r.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        record.save(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.json"]


def test_of_old_runs_what_came_of_them_stays_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the course of every run was read for every plan and every look at the metrics."""
    monkeypatch.setattr(records, "WHOLE_KEPT", 3)
    samples = [{"at_s": 1.0, "status": "active"}] * 500
    asked, result = {"vm": "web"}, {"outcome": "completed"}
    for number in range(4):
        one = RunRecord(f"r{number}", "migrate", asked, samples=samples)
        one.result = None if number == 1 else result  # that one was cut off
        one.forecast = {"total_s": 1}
        one.save(tmp_path)
    for number in range(4, 6):
        RunRecord(f"r{number}", "migrate", asked).save(tmp_path)
    known = {one.run: one for one in load_all(tmp_path)}
    assert [bool(known[f"r{number}"].samples) for number in range(4)] == [False, True, False, True]
    assert known["r0"].result == known["r2"].result == result
    assert known["r0"].request == asked
    assert known["r0"].forecast == {"total_s": 1}
    assert (tmp_path / "r0.json").stat().st_size < 400
