"""Watching a job on another host: how it ended is told whatever becomes of its record here."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.job_examples import REPORT
from vmckpt.codec import builtins
from vmckpt.errors import VmckptError, VmLostError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Event, Note
from vmckpt.hosts.host import MOST_TEXT_BYTES
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.values import pack_error
from vmckpt.jobs.handle import attach
from vmckpt.jobs.kind import OUTCOME, Outcome
from vmckpt.migrate.elsewhere.job import MIGRATE, MigrationResult
from vmckpt.migrate.elsewhere.watch import watch
from vmckpt.migrate.outcome.recover import FINISHED, Recovery
from vmckpt.migrate.report import MigrationReport

pytestmark = pytest.mark.contract

LOST = VmLostError("'web' is lost", why="both ends are gone", remedy="-")
RECOVERY = Recovery("r1", "web", "b", "release", FINISHED)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHost:
    """A host with the record of a run that was cut off."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "op"))
    RunRecord("r1", "migrate", {"vm": "web"}).save(tmp_path / "a/runs")
    return LocalHost("a", tmp_path / "a", "127.0.0.1")


@pytest.fixture
def full(source: LocalHost) -> Iterator[None]:
    """The operator's disk has no space, but an unfinished record."""
    state = runs_dir().parent
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8k,mode=0700", "tmpfs", str(state)]
    subprocess.run(mount, check=True)
    try:
        RunRecord("r1", "migrate", {"vm": "web"}).save(runs_dir())
        (state / "filler").write_bytes(bytes(4096))
        yield
    finally:
        subprocess.run(["umount", state], check=True)


def watched(source: LocalHost, end: MigrationResult | VmckptError) -> tuple[object, list[Event]]:
    """What watching a job that ended so returns or raises, and what it tells."""
    job, said = attach(MIGRATE, source, "r1"), list[Event]()
    job.files.path.mkdir(parents=True)
    error = tuple(pack_error(end, "a")) if isinstance(end, VmckptError) else None
    outcome = Outcome(None if error else builtins(end), error)
    job.files.outcome.write_text(OUTCOME.encode(outcome))

    async def play() -> object:
        return await watch(job, said.append)

    try:
        return asyncio.run(play()), said
    except VmckptError as exc:
        return exc, said


@pytest.mark.usefixtures("full")
def test_a_full_disk_does_not_hide_that_a_vm_is_lost(source: LocalHost) -> None:
    ended, said = watched(source, LOST)
    assert isinstance(ended, VmLostError)
    assert [event.code for event in said if isinstance(event, Note)] == ["record"]
    # Neither fetched nor completed, and still the whole of what was there.
    assert RunRecord.load(runs_dir() / "r1.json").result is None


@pytest.mark.usefixtures("full")
def test_a_full_disk_does_not_hide_that_a_vm_has_moved(source: LocalHost) -> None:
    ended, said = watched(source, MigrationResult(report=REPORT))
    assert isinstance(ended, MigrationReport)
    assert ended.outcome == "completed"
    assert [event.code for event in said if isinstance(event, Note)] == ["record"]


@pytest.mark.usefixtures("full")
def test_a_full_disk_does_not_hide_a_recovery(source: LocalHost) -> None:
    ended, _ = watched(source, MigrationResult(recovery=RECOVERY))
    assert ended == RECOVERY


COMPLETED = json.loads(json.dumps(builtins(REPORT)))
HOSTILE: dict[str, dict[str, Any]] = {
    "no time": {"began_unix_s": "x"},
    "no date": {"began_unix_s": 1e300},
    "no request": {"request": []},
    "no events": {"events": [7]},
    "no samples": {"samples": [{"at_s": "x"}]},
    "no result": {"result": {"outcome": "completed", "total_time_s": "x"}},
    "another format": {"format": 2},
    "no time of holding": {"request": {"vm": "web", "held_s": "x"}},
    "no number of channels": {"request": {"vm": "web", "channels": "x"}},
    "less than nothing to copy": {"request": {"vm": "web", "disk_bytes": -1}},
    "no report": {"result": {"outcome": "completed"}},
    "channels that are none": {"result": COMPLETED | {"channels": "x"}},
    "endless devices": {"result": COMPLETED | {"device_out_s": 1e308, "device_back_s": 1e308}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_record_of_the_source_that_is_none_is_not_kept_here(source: LocalHost, what: str) -> None:
    """It ended `plan`, `migrate`, `drain`, `metrics` and `runs list` of all VMs."""
    path = source.state_dir / "runs/r1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HOSTILE[what]))
    RunRecord("r1", "migrate", {"vm": "web", "source": "a"}).save(runs_dir())
    ended, said = watched(source, MigrationResult(report=REPORT))
    assert isinstance(ended, MigrationReport)
    assert [event.code for event in said if isinstance(event, Note)] == ["record"]
    assert RunRecord.load(runs_dir() / "r1.json").request == {"vm": "web", "source": "a"}


def test_a_record_that_is_one_is_kept_here(source: LocalHost) -> None:
    path = source.state_dir / "runs/r1.json"
    request = {"vm": "web", "channels": None, "compression": "zstd", "in_turn": False, "more": [1]}
    theirs = json.loads(path.read_text()) | {"request": request, "result": COMPLETED}
    path.write_text(json.dumps(theirs))
    watched(source, MigrationResult(report=REPORT))
    kept = RunRecord.load(runs_dir() / "r1.json")
    assert (kept.request, kept.result) == (request, COMPLETED)


def test_the_record_of_a_run_of_an_hour_is_kept_here(source: LocalHost) -> None:
    """It is longer than a text that is read whole."""
    theirs = RunRecord("r1", "migrate", {"vm": "web"}, result=COMPLETED)
    theirs.events = [{"event": "Note", "at_s": 1.0, "code": "x", "text": "y" * 2000}] * 5000
    path = theirs.save(source.state_dir / "runs")
    assert path.stat().st_size > MOST_TEXT_BYTES
    _, said = watched(source, MigrationResult(report=REPORT))
    assert said == []
    assert len(RunRecord.load(runs_dir() / "r1.json").events) == 5000


def test_what_was_asked_of_a_run_is_as_it_is_known_here(source: LocalHost) -> None:
    theirs = RunRecord("r1", "migrate", {"vm": "db", "disk_bytes": 7}, forecast={"x": 1})
    theirs.add(Note(0.5, "x", "y"))
    theirs.save(source.state_dir / "runs")
    RunRecord("r1", "migrate", {"vm": "web"}).save(runs_dir())
    watched(source, MigrationResult(report=REPORT))
    kept = RunRecord.load(runs_dir() / "r1.json")
    assert kept.request == {"vm": "web", "disk_bytes": 7}
    assert (kept.forecast, len(kept.events)) == (None, 1)


def test_a_record_that_was_cut_off_says_how_the_run_ended(source: LocalHost) -> None:
    watched(source, LOST)
    result = RunRecord.load(runs_dir() / "r1.json").result
    assert result is not None
    assert result["outcome"] == "lost"
