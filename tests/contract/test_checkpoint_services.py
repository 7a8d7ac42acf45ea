"""The operator's side of checkpoints, restores and forks: what it leaves on the host, and when."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import job_program
from tests.contract.test_jobs import Playing, plan, until
from tests.faulty_host import Fault, FaultyHost, down, silence
from tests.job_examples import EXAMPLES
from vmckpt.checkpoint import operate
from vmckpt.checkpoint.catalogue.location import StoreLocation
from vmckpt.checkpoint.jobs import CHECKPOINT, FORK, RECOVER, RESTORE, RESTORE_DISKS
from vmckpt.checkpoint.operate import StoreJob
from vmckpt.errors import BusyError, OutcomeUnknownError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes import process
from vmckpt.jobs import handle as handles
from vmckpt.jobs.files import jobs_dir
from vmckpt.jobs.kind import JobKind
from vmckpt.store.open import Access

pytestmark = pytest.mark.contract


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Playing]:
    yield Playing("far", tmp_path, "127.0.0.1")
    for left in process.find_by_argument(f"{tmp_path}/jobs/"):
        process.kill(left)


def work_of(kind: JobKind[Any, Any], host: LocalHost) -> StoreJob[Any, Any]:
    def request(_store: object, _held_s: object) -> Any:
        return EXAMPLES[kind.name].request

    return StoreJob(kind, host, "web", request, StoreLocation(host, "/store"), Access())


def left(host: Playing, kind: JobKind[Any, Any]) -> list[Path]:
    directory = jobs_dir(host.state_dir, kind.name)
    return [path for path in directory.iterdir() if list(path.iterdir())]


@pytest.mark.parametrize(
    ("kind", "stays"),
    [(CHECKPOINT, 0), (RESTORE, 1), (RESTORE_DISKS, 0), (FORK, 0), (RECOVER, 0)],
    ids=lambda of: getattr(of, "name", None),
)
def test_the_files_of_a_job_go_unless_it_brings_memory(
    host: Playing, kind: JobKind[Any, Any], stays: int
) -> None:
    plan(host, "note one", "done")
    told = list[str]()
    result = asyncio.run(operate.have_done(work_of(kind, host), told.append))
    assert result == EXAMPLES[kind.name].result
    assert told == []  # a note that is no step is not shown
    assert len(left(host, kind)) == stays


def test_its_steps_are_shown_as_they_come(host: Playing) -> None:
    (host.state_dir / "plan.json").write_text('{"work": ["step one", "done"], "recovery": []}')
    told = list[str]()
    asyncio.run(operate.have_done(work_of(CHECKPOINT, host), told.append))
    assert told == ["one"]


def test_ctrl_c_undoes_it_and_leaves_nothing(host: Playing) -> None:
    plan(host, "wait")

    async def run() -> None:
        asking = asyncio.ensure_future(
            operate.have_done(work_of(CHECKPOINT, host), lambda step: None)
        )
        await until((host.state_dir / "waiting").exists)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert (host.state_dir / "undone").exists()
        assert not left(host, CHECKPOINT)

    asyncio.run(run())


def test_ctrl_c_does_not_wait_for_good_for_a_job_that_is_frozen(
    host: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is whose storage hangs: no signal ends it, and the command could not be ended."""
    monkeypatch.setattr(handles, "END_S", 0.5)
    plan(host, "note one", "freeze")

    async def run() -> None:
        asking = asyncio.ensure_future(
            operate.have_done(work_of(CHECKPOINT, host), lambda step: None)
        )
        directory = jobs_dir(host.state_dir, CHECKPOINT.name)
        await until(lambda: [one for one in directory.glob("*/events.jsonl") if one.read_text()])
        asking.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(BusyError, match="the checkpoint of 'web' on far has not ended"):
                await asking
        # What is done after its death, by its dead-man's switch, needs its order.
        assert list(directory.glob("*/order.json"))

    asyncio.run(run())


def cut_off(tmp_path: Path, *then: Fault) -> FaultyHost:
    """A host that `then` fails, just as its job is at work on the order that was written."""
    real = LocalHost("far", tmp_path, "127.0.0.1")

    async def order(path: Path, text: str) -> None:
        await real.write_text(path, text)
        await until((tmp_path / "waiting").exists)
        if not then:
            raise asyncio.CancelledError  # Ctrl-C
        raise down("far")

    faults = (
        Fault("own_command", answers=job_program.command(tmp_path)),
        Fault("write_text", of=lambda path, _: path.name == "order.json", by=order),
        *then,
    )
    return FaultyHost("far", tmp_path, "127.0.0.1", faults=faults)


@pytest.mark.parametrize("kind", [CHECKPOINT, RESTORE, FORK], ids=lambda kind: kind.name)
def test_ctrl_c_as_the_order_is_written_ends_the_job_first(
    host: Playing, tmp_path: Path, kind: JobKind[Any, Any]
) -> None:
    """The restore went on, unwatched: a VM came to run that no one knew of."""
    plan(host, "wait")
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(operate.have_done(work_of(kind, cut_off(tmp_path)), lambda _: None))
    assert (tmp_path / "undone").exists()
    assert not left(host, kind)


def full(host: str) -> StorageError:
    return StorageError(f"cannot write on {host}", why="No space left on device", remedy="-")


def test_a_full_disk_keeps_no_job_from_being_withdrawn(host: Playing, tmp_path: Path) -> None:
    """The restore went on, unwatched, after "cannot write"."""
    plan(host, "wait")
    far = cut_off(tmp_path)
    revoked = Fault("write_text", of=lambda path, _: path.name == "revoked", raises=full)
    far = FaultyHost("far", tmp_path, "127.0.0.1", faults=(*far.faults, revoked))
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(operate.have_done(work_of(RESTORE, far), lambda _: None))
    assert (tmp_path / "undone").exists()
    assert not left(host, RESTORE)


def test_a_host_that_falls_silent_as_the_order_is_written_keeps_the_jobs_files(
    host: Playing, tmp_path: Path
) -> None:
    plan(host, "wait")
    silent = cut_off(tmp_path, *silence("write_text", "interrupt", "remove"))
    with pytest.raises(OutcomeUnknownError, match="whether the restore of 'web' has begun on far"):
        asyncio.run(operate.have_done(work_of(RESTORE, silent), lambda _: None))
    assert not (tmp_path / "undone").exists()
    assert left(host, RESTORE)
