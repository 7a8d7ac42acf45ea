"""A migration that a command on this machine carried out is told again from its record."""

import asyncio
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from vmckpt.codec import builtins
from vmckpt.errors import CancelledByUserError, OperationFailedError, OutcomeUnknownError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Event, Note, PhaseBegan, Progress
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.migrate.elsewhere import replay as told
from vmckpt.migrate.elsewhere.watch import JOB_ON
from vmckpt.migrate.report import MigrationReport
from vmckpt.vm.paths import lock_path

pytestmark = pytest.mark.contract
RUN = "20261122-120000-abcd"
REPORT = MigrationReport(
    RUN, "web", "a", "b", "auto", "precopy", "x509", "completed", 2.5, 1.5, 30, None,
    None, None, None, 1 << 20, 2, ("a warning",), "here",
)  # fmt: skip
SAMPLE = Progress(1.0, "active", 1, 200, 100, 100, 5.0, 0.0, None, 0, 0, None)
EVENTS: tuple[Event, ...] = (PhaseBegan(0.1, "transfer"), SAMPLE, Note(1.5, "x", "so"))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    return tmp_path


def told_here(state: Path) -> MigrationReport:
    """The report, which names the record that stands here, wherever it was written."""
    return replace(REPORT, run_record=str(state / "runs" / f"{RUN}.json"))


def kept(state: Path, result: dict[str, object] | None, **request: str) -> RunRecord:
    record = RunRecord(RUN, "migrate", {"vm": "web", "source": "a", **request}, result=result)
    for event in (EVENTS[0], EVENTS[2], EVENTS[1]):
        record.add(event)
    record.save(state / "runs")
    return record


def retold() -> tuple[MigrationReport, list[Event]]:
    heard: list[Event] = []
    return asyncio.run(told.replay_run(RUN, heard.append)), heard


def test_one_that_ended_well_is_told_in_its_order(state: Path) -> None:
    kept(state, builtins(REPORT))
    assert told.is_done_here(RUN)
    assert retold() == (told_here(state), list(EVENTS))


def test_one_that_failed_raises_what_it_raised(state: Path) -> None:
    kept(state, {"outcome": "cancelled"})
    with pytest.raises(CancelledByUserError):
        retold()
    kept(state, {"outcome": "refused-by-libvirt", "what": "no", "why": "so", "remedy": "wait"})
    with pytest.raises(OperationFailedError, match="no") as caught:
        retold()
    assert (caught.value.exit_code, caught.value.why) == (7, "so")


def test_a_hosts_job_and_an_unknown_run_are_not_this_machines(state: Path) -> None:
    assert not told.is_done_here(RUN)
    kept(state, None, **{JOB_ON: "a"})
    assert not told.is_done_here(RUN)


@pytest.mark.timeout(30)
def test_one_whose_command_was_killed_is_cut_off(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(told, "LAST_LINES_S", 0.1)
    kept(state, None)
    with pytest.raises(OutcomeUnknownError, match="interrupted"):
        retold()


@pytest.mark.timeout(30)
def test_one_under_way_is_waited_for(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "LAST_LINES_S", 0.1)
    monkeypatch.setattr(told, "POLL_S", 0.01)
    record = kept(state, None)
    host, owner = LocalHost("local", state, "127.0.0.1"), Owner(RUN, "migrate", 1, 0.0)

    async def main() -> MigrationReport:
        waiting = asyncio.Event()
        async with host.lock(lock_path(state, "web"), owner):
            attached = asyncio.ensure_future(told.replay_run(RUN, lambda _: waiting.set()))
            await waiting.wait()
            await asyncio.sleep(0.3)
            assert not attached.done()
            replace(record, result=asdict(REPORT)).save(state / "runs")
            return await attached

    assert asyncio.run(main()) == told_here(state)
