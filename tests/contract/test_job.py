"""The job of a migration between two hosts elsewhere: its beginning, and what its death leaves."""

import asyncio
import errno
import io
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import job_program
from tests.faulty_host import Fault, FaultyHost, down, silence
from tests.remote_hosts import PipedServes
from vmckpt.deadlines import poll
from vmckpt.errors import (
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
)
from vmckpt.events.lines import Lines
from vmckpt.events.types import Event, Note
from vmckpt.hosts.host import Host, HostEntry, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.processes import process
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.hosts.remote.values import pack_error, unpack_error
from vmckpt.jobs.files import JobFiles
from vmckpt.jobs.handle import attach
from vmckpt.jobs.kind import OUTCOME, Job, Outcome, writer
from vmckpt.jobs.serve import serve
from vmckpt.migrate.elsewhere.delegate import migrate_there
from vmckpt.migrate.elsewhere.job import MIGRATE, MigrationJob, MigrationRequest, finish
from vmckpt.migrate.outcome import retrying
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.outcome.recover import FINISHED
from vmckpt.options.migration import AtTarget, MigrationOptions
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

SPEC = 'name = "web"\nmemory = "64M"\n'
JOURNAL = MigrationJournal("r1", "web", "a", "b", "qa", "qb", "/nowhere", True, "handover")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "op"))
    return tmp_path


def a_vm(host: LocalHost) -> Vm:
    directory = vm_dir(host.state_dir, "web")
    spec = parse_spec(SPEC, "test", directory.path)
    return Vm(
        spec,
        host,
        directory,
        Qemu(directory.qemu("q"), ProcessId(0, 0), Platform("q35", "tcg", "qemu64")),
    )


@asynccontextmanager
async def ended(state: Path) -> AsyncIterator[None]:
    """Of the block no listener is left."""
    try:
        yield
    finally:
        for left in process.find_by_argument(str(state / "b/jobs")):
            process.kill(left)


def ignore(_: Event) -> None:
    pass


def test_a_job_that_may_have_begun_is_watched_and_keeps_its_link(state: Path) -> None:
    cut = OutcomeUnknownError("nobody knows", why="cut", remedy="-")

    def begins(_: Sequence[str], stderr_path: Path) -> None:
        stopped = NotFoundError("the job spoke", why="it began", remedy="-")
        outcome = Outcome(None, tuple(pack_error(stopped, "a")))
        (stderr_path.parent / "outcome.json").write_text(OUTCOME.encode(outcome))

    lost = Fault("spawn", first=begins, raises=lambda _: cut)
    source = FaultyHost("a", state / "a", "127.0.0.1", faults=(lost,))
    target = LocalHost("b", state / "b", "127.0.0.1")

    async def play() -> None:
        async with ended(state):
            with pytest.raises(NotFoundError, match="the job spoke"):
                await migrate_there(a_vm(source), target, MigrationOptions(), ignore)
            assert list((state / "b/jobs/migrate").iterdir())

    asyncio.run(play())


def test_a_job_that_does_not_begin_leaves_nothing_and_its_error_is_the_one(state: Path) -> None:
    full = StorageError("the disk is full", why="full", remedy="-")
    no_job = Fault("spawn", raises=lambda _: full)
    source = FaultyHost("a", state / "a", "127.0.0.1", faults=(no_job,))
    target = FaultyHost("b", state / "b", "127.0.0.1", faults=silence("remove"))

    async def play() -> None:
        async with ended(state):
            with pytest.raises(StorageError, match="the disk is full"):
                await migrate_there(a_vm(source), target, MigrationOptions(), ignore)
            assert not list((state / "a/jobs/migrate").iterdir())

    asyncio.run(play())
    assert source.unused() + target.unused() == []


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_job_that_may_have_its_order_ends_before_its_listener_does(
    state: Path, *, is_silent: bool
) -> None:
    """Ctrl-C, or the end of the connection, as the order is written. The job had no target then."""
    a = state / "a"
    real = LocalHost("a", a, "127.0.0.1")
    a.mkdir()
    (a / "plan.json").write_text('{"work": ["wait"], "release": [], "recovery": []}')
    had_ended: list[bool] = []

    async def order(path: Path, text: str) -> None:
        await real.write_text(path, text)
        async with asyncio.timeout(30):
            await poll((a / "waiting").exists, every_s=0.01)
        raise down("a") if is_silent else asyncio.CancelledError

    source = FaultyHost(
        "a",
        a,
        "127.0.0.1",
        faults=(
            Fault("own_command", answers=job_program.command(a)),
            Fault("write_text", of=lambda path, _: path.name == "order.json", by=order),
            *(silence("write_text", "interrupt", "remove") if is_silent else ()),
        ),
    )
    look = Fault("remove", first=lambda _: had_ended.append((a / "undone").exists()))
    target = FaultyHost("b", state / "b", "127.0.0.1", faults=(look,))

    async def play() -> None:
        async with ended(state):
            with pytest.raises(OutcomeUnknownError if is_silent else asyncio.CancelledError):
                await migrate_there(a_vm(source), target, MigrationOptions(), ignore)
            assert bool(list((state / "b/jobs/migrate").iterdir())) is is_silent
            assert bool(list((a / "jobs/migrate").iterdir())) is is_silent

    try:
        asyncio.run(play())
    finally:
        for left in process.find_by_argument(f"{a}/jobs/"):
            process.kill(left)
    assert had_ended == ([] if is_silent else [True])


def test_what_only_a_domain_can_have_goes_to_no_host(state: Path) -> None:
    source, target = (LocalHost(name, state / name, "127.0.0.1") for name in ("a", "b"))
    options = MigrationOptions(at_target=AtTarget("web2", xml="<secret/>"))
    with pytest.raises(RefusedError, match=r"--dname, --xml"):
        asyncio.run(migrate_there(a_vm(source), target, options, ignore))
    assert not (state / "a/jobs").exists()


def a_job(state: Path, *, offline: bool = False) -> tuple[MigrationJob, LocalHost, LocalHost]:
    a, b = (LocalHost(name, state / name, "127.0.0.1") for name in ("a", "b"))
    files = JobFiles.of(a.state_dir, MIGRATE.name, "r1")
    there = HostEntry(**entry_fields(b))
    request = MigrationRequest(
        there, MigrationOptions(offline=offline), TlsEndpoint("127.0.0.1", 1, "", "")
    )
    return Job(files, a, "web", request), a, b


async def make_home(host: LocalHost) -> None:
    vm = a_vm(host)
    await host.make_dir(vm.directory.path)
    await host.write_text(vm.directory.spec, SPEC)
    await host.write_text(vm.directory.current, vm.qemu.to_json())


def test_a_recovery_waits_for_the_lock_and_sees_what_was_finished(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target holds the lock of the dead job's connection until it notices the silence."""
    monkeypatch.setattr(retrying, "RETRY_POLL_S", 0.05)
    job, a, b = a_job(state)

    async def play() -> None:
        await JOURNAL.write((a, b))
        async with b.lock(lock_path(b.state_dir, "web"), Owner("r1", "migrate to b", 1, 1.0)):
            finding = asyncio.create_task(finish(job, b))
            await asyncio.sleep(0.5)
            assert not finding.done()
            await make_home(b)
            await JOURNAL.remove((a, b))
        found = await asyncio.wait_for(finding, 20)
        assert found is not None
        assert found.recovery is not None
        assert (found.recovery.host, found.recovery.outcome) == ("b", FINISHED)

    asyncio.run(play())


@pytest.mark.parametrize(("offline", "is_now"), [(False, "goes on"), (True, "is off")])
def test_without_a_journal_a_vm_at_the_source_was_not_moved(
    state: Path, *, offline: bool, is_now: str
) -> None:
    job, a, b = a_job(state, offline=offline)

    async def play() -> None:
        await make_home(a)
        with pytest.raises(OperationFailedError, match="before it had changed anything") as caught:
            await finish(job, b)
        assert f"'web' {is_now} where it was" in caught.value.remedy
        await make_home(b)  # another of that name
        with pytest.raises(OperationFailedError, match="before it had changed anything"):
            await finish(job, b)

    asyncio.run(play())


@contextmanager
def with_target(monkeypatch: pytest.MonkeyPatch, target: Host) -> Iterator[None]:
    """Jobs of the block reach that target."""
    with monkeypatch.context() as patched:
        patched.setattr(MigrationRequest, "open_destination", lambda _: target)
        yield


def ordered(state: Path) -> JobFiles:
    """A job that may begin."""
    job, a, _ = a_job(state)
    given = attach(MIGRATE, a, "r1")
    given.files.path.mkdir(parents=True)
    asyncio.run(given.give("web", job.request))
    return given.files


def outcome(files: JobFiles) -> Outcome:
    return OUTCOME.decode(files.outcome.read_text(), files.outcome)


def test_files_that_cannot_be_written_are_the_jobs_result(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ordered(state)
    files.events.mkdir()
    with with_target(monkeypatch, LocalHost("b", state / "b", "127.0.0.1")):
        asyncio.run(serve(MIGRATE, files.path, ["vmckpt"]))
    error = unpack_error(list(outcome(files).error or ()))
    assert isinstance(error, StorageError)
    assert "events.jsonl" in error.what


def test_on_a_full_disk_too_the_target_is_let_go(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ordered(state)

    async def full(*_: object) -> None:
        raise StorageError("the disk is full", why="full", remedy="-")

    async def play() -> None:
        serves = PipedServes()
        target = serves.host(state / "b", "b")
        there = JobFiles.of(state / "b", MIGRATE.name, "r1").path
        there.mkdir(parents=True)
        # It is asked for something before, so that there is a connection to end.
        assert await target.exists(there)
        try:
            with with_target(monkeypatch, target):
                await serve(MIGRATE, files.path, ["vmckpt"])
            # The outcome has had its room on the disk since before.
            assert "the disk is full" in unpack_error(list(outcome(files).error or ())).what
            assert not there.exists()
            assert serves.children[0].wait(20) == 0
        finally:
            serves.end()

    monkeypatch.setattr(LocalHost, "write_text", full)
    asyncio.run(play())


def test_events_that_a_full_disk_kept_back_follow_whole() -> None:
    class Full(io.BytesIO):
        room = 10

        def write(self, data: Any, /) -> int:
            if not self.room:
                raise OSError(errno.ENOSPC, "full")
            part = bytes(data)[: self.room]
            self.room -= len(part)
            return super().write(part)

    lines, notes = Full(), [Note(float(n), "n", "text") for n in range(3)]
    tell = writer(lines)
    for note in notes[:2]:
        tell(note)
    lines.room = 10_000
    tell(notes[2])
    assert list(Lines().feed(lines.getvalue())) == notes
