"""A guard's rollback that was interrupted: the VM is restored once, whatever died when."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_guard_records import record as new_record
from vmckpt.checkpoint.jobs import RESTORE
from vmckpt.checkpoint.restore.requests import Restored
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.fleet.guard import guard, rollback
from vmckpt.fleet.guard.guard import GuardTools
from vmckpt.fleet.guard.record import GuardPhase, GuardRecord, GuardRestore, load, save
from vmckpt.fleet.guard.rollback import GuardOpenError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import PROCESS, ProcessId
from vmckpt.jobs.files import JobFiles
from vmckpt.jobs.kind import OUTCOME, Outcome
from vmckpt.state.documents import save_to

pytestmark = pytest.mark.contract
RUN, JOB = "20261127-010203-abcd", "20261127-020304-beef"
GONE = ProcessId(1 << 22, 1)


@pytest.fixture
def restores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The restores that were begun. Each puts the VM back."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    begun: list[str] = []

    async def restore_to(*_: object, on_start: Callable[[str], None]) -> None:
        run = f"new-{len(begun)}"
        on_start(run)
        begun.append(run)

    async def point_of(_: GuardRecord) -> None:
        return None

    async def health_problems(*_: object) -> list[str]:
        return []

    monkeypatch.setattr(rollback, "restore_to", restore_to)
    monkeypatch.setattr(rollback, "point_of", point_of)
    monkeypatch.setattr(rollback, "health_problems", health_problems)
    monkeypatch.setattr(guard, "point_of", point_of)
    return begun


def tools(*, runs: bool = True) -> GuardTools:
    async def inspect() -> Any:
        return SimpleNamespace(is_on=runs)

    async def is_cut_off() -> bool:
        return False

    web = SimpleNamespace(
        name="web", host=local_host(), inspect=inspect, restore_is_cut_off=is_cut_off
    )

    async def find(*_: object) -> Any:
        return web

    async def ask(_: str) -> bool | None:
        return None

    return GuardTools(lambda _: None, lambda _: None, ask, 1, find)


def rolling_back(restore: GuardRestore | None) -> GuardRecord:
    (state_dir() / "guards").mkdir(parents=True, exist_ok=True)
    record = new_record(RUN, GuardPhase.ROLLING_BACK)
    return save(record, checkpoint="c", host=local_host().name, restore=restore)


async def job(*, process: bool = True, outcome: Outcome | None = None) -> GuardRestore:
    """A restore's files; its process is gone."""
    host = LocalHost("local", state_dir(), "127.0.0.1")
    files = JobFiles.of(host.state_dir, RESTORE.name, JOB)
    await host.make_dir(files.path)
    if process:
        await save_to(host, files.process, PROCESS, GONE)
    if outcome is not None:
        await save_to(host, files.outcome, OUTCOME, outcome)
    return GuardRestore(local_host().name, JOB)


DONE = Outcome({"vm": "web"})
FAILED = Outcome(error=("OperationFailedError", "it failed", "-", "-"))


def resumed(restore: Awaitable[GuardRestore] | None, **about: bool) -> GuardRecord | None:
    async def main() -> GuardRecord | None:
        record = rolling_back(None if restore is None else await restore)
        return await guard.resume(record, tools(**about))

    return asyncio.run(main())


def test_a_vm_that_was_put_back_is_not_restored_again(restores: list[str]) -> None:
    """The guest ran for hours between the restore and the operator's `guard resume`."""
    record = resumed(job(outcome=DONE))
    assert record is not None
    assert (record.phase, restores) == (GuardPhase.ROLLED_BACK, [])


@pytest.mark.parametrize("outcome", [FAILED, None])
def test_a_restore_that_did_not_happen_is_made(
    restores: list[str], outcome: Outcome | None
) -> None:
    record = resumed(job(process=outcome is not None, outcome=outcome))
    assert record is not None
    assert (record.phase, restores) == (GuardPhase.ROLLED_BACK, ["new-0"])
    assert record.restore == GuardRestore(local_host().name, "new-0")


def test_a_guard_whose_restore_left_no_outcome_stays_open_if_the_vm_runs(
    restores: list[str],
) -> None:
    with pytest.raises(GuardOpenError, match="unknown whether 'web' was rolled back"):
        resumed(job())
    assert (load(RUN).phase, restores) == (GuardPhase.OPEN, [])


def test_one_whose_vm_is_off_is_restored(restores: list[str]) -> None:
    record = resumed(job(), runs=False)
    assert record is not None
    assert (record.phase, restores) == (GuardPhase.ROLLED_BACK, ["new-0"])


def test_an_operator_may_roll_back_once_more(restores: list[str]) -> None:
    resumed(job(outcome=DONE))
    asyncio.run(guard.undo(load(RUN), tools()))
    assert restores == ["new-0"]


def test_the_job_is_recorded_before_it_restores(
    restores: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[object] = []

    async def dies(*_: object, on_start: Callable[[str], None]) -> Restored:
        on_start("job")
        recorded.append(load(RUN).restore)
        raise OperationFailedError("no", why="-", remedy="-")

    monkeypatch.setattr(rollback, "restore_to", dies)
    with pytest.raises(GuardOpenError):
        resumed(None)
    assert recorded == [GuardRestore(local_host().name, "job")]
    # It may have restored the VM all the same: `guard rollback` asks for its outcome.
    assert load(RUN).restore == recorded[0]


def test_a_vm_that_was_put_back_unseen_is_not_put_back_again(
    restores: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host was out of reach after the restore: "could not be rolled back", and hours later
    `guard rollback` discarded what the guest had done since.
    """

    async def no_answer(*_: object) -> list[str]:
        raise HostDownError("no route", why="-", remedy="-")

    async def main() -> GuardRecord:
        record = rolling_back(await job(outcome=DONE))
        with monkeypatch.context() as later:
            later.setattr(rollback, "health_problems", no_answer)
            with pytest.raises(GuardOpenError, match="was rolled back, but: no route"):
                await guard.resume(record, tools())
        assert load(RUN).phase is GuardPhase.OPEN
        return await guard.undo(load(RUN), tools())

    record = asyncio.run(main())
    assert (record.phase, restores) == (GuardPhase.ROLLED_BACK, [])


def test_a_vm_that_was_put_back_and_does_not_run_is_put_back_again_if_asked(
    restores: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def paused(*_: object) -> list[str]:
        return [] if restores else ["it is paused"]

    monkeypatch.setattr(rollback, "health_problems", paused)
    with pytest.raises(GuardOpenError, match="does not run"):
        resumed(job(outcome=DONE))
    assert restores == []
    asyncio.run(guard.undo(load(RUN), tools()))
    assert (load(RUN).phase, restores) == (GuardPhase.ROLLED_BACK, ["new-0"])


def test_an_operator_may_put_back_what_may_have_been_put_back(restores: list[str]) -> None:
    with pytest.raises(GuardOpenError, match="unknown whether 'web' was rolled back"):
        resumed(job())
    asyncio.run(guard.undo(load(RUN), tools()))
    assert (load(RUN).phase, restores) == (GuardPhase.ROLLED_BACK, ["new-0"])


def test_what_was_put_back_is_not_kept(restores: list[str]) -> None:
    """The operator's machine lost power in the rollback; `guard commit` said "succeeded"."""

    async def main() -> GuardRecord:
        return await guard.commit(rolling_back(await job(outcome=DONE)), print)

    with pytest.raises(RefusedError, match="'web' was rolled back") as refused:
        asyncio.run(main())
    assert "vmckpt guard rollback web" in refused.value.remedy
    assert load(RUN).phase is GuardPhase.ROLLING_BACK
    asyncio.run(guard.undo(load(RUN), tools()))
    assert (load(RUN).phase, restores) == (GuardPhase.ROLLED_BACK, [])


def test_a_restore_that_is_under_way_is_ended_before_a_guard_is_kept(
    restores: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have discarded afterwards what was to be kept."""
    revoked: list[object] = []

    async def revoke(_: object, host: LocalHost, unwanted: Callable[..., bool]) -> None:
        revoked.append(unwanted("web", SimpleNamespace(checkpoint="c")))

    monkeypatch.setattr(rollback, "revoke", revoke)

    async def main() -> GuardRecord:
        return await guard.commit(rolling_back(await job(outcome=FAILED)), print)

    assert asyncio.run(main()).phase is GuardPhase.KEPT
    assert revoked == [True]


def test_what_may_have_been_put_back_can_be_kept_when_its_host_is_gone(
    restores: list[str],
) -> None:
    told: list[str] = []
    kept = guard.commit(rolling_back(GuardRestore("gone", JOB)), told.append)
    assert asyncio.run(kept).phase is GuardPhase.KEPT
    assert "whether 'web' was rolled back is unknown" in told[0]
