"""Every kind of job, through all that a job may go through: killed, frozen, full, cancelled, ...

The work is scripted (`tests/job_program.py`); requests, results and the runtime are the product's.
"""

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests import job_program
from tests.faulty_host import Fault, FaultyHost
from tests.job_examples import EXAMPLES
from vmckpt.cli.hidden.job import MODULES, kind_of
from vmckpt.codec import builtins
from vmckpt.deadlines import poll
from vmckpt.errors import (
    BusyError,
    CancelledByUserError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    VmckptError,
)
from vmckpt.events.trace import Detail, trace, untrace
from vmckpt.events.types import Event, Note, ignore_event
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes import process
from vmckpt.hosts.remote.values import pack_error
from vmckpt.jobs import handle as handles
from vmckpt.jobs.files import JobFiles, earlier_order, forget_old, jobs_dir
from vmckpt.jobs.handle import Handle, attach, begin, revoke
from vmckpt.jobs.kind import OUTCOME, JobKind, Outcome
from vmckpt.jobs.serve import serve

pytestmark = pytest.mark.contract


@dataclass(frozen=True, slots=True, kw_only=True)
class Playing(LocalHost):
    """A host whose own vmckpt does what STATE/plan.json says; `silent` counts down its silences."""

    silent: list[int] = field(default_factory=lambda: [0])

    async def own_command(self) -> list[str]:
        return job_program.command(self.state_dir)

    async def read_from(self, path: Path, offset_bytes: int) -> bytes:
        if self.silent[0]:
            self.silent[0] -= 1
            raise HostDownError("far is down", why="no answer", remedy="-")
        return await LocalHost.read_from(self, path, offset_bytes)


# A process takes half a second to start: `make long` has the others' turn.
SAMPLE = ("checkpoint", "migrate", "restore")


@pytest.fixture(
    params=[
        pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.long])
        for name in sorted(MODULES)
    ]
)
def kind(request: pytest.FixtureRequest) -> JobKind[Any, Any]:
    """Each of them: what its request, result or worker has a part in."""
    return kind_of(request.param)


@pytest.fixture
def one() -> JobKind[Any, Any]:
    """What is the runtime's alone; starting a process for each kind takes half a second."""
    return kind_of("migrate")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Playing]:
    monkeypatch.setattr(handles, "ALIVE_S", 0.05)
    host = Playing("far", tmp_path, "127.0.0.1")
    yield host
    for left in process.find_by_argument(f"{tmp_path}/jobs/"):
        process.kill(left)


def plan(
    host: LocalHost, *work: str, release: Sequence[str] = (), recovery: Sequence[str] = ()
) -> None:
    steps = {"work": work, "release": release, "recovery": recovery}
    (host.state_dir / "plan.json").write_text(json.dumps(steps))


async def started(kind: JobKind[Any, Any], host: LocalHost) -> Handle[Any, Any]:
    job = await begin(kind, host, "r1")
    await job.give("web", EXAMPLES[kind.name].request)
    return job


async def until(state: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        await poll(state, every_s=0.01)


async def released(host: LocalHost, times: int = 1) -> None:
    await until((host.state_dir / "released").exists)
    await until(lambda: not process.find_by_argument(f"{host.state_dir}/jobs/"))
    assert (host.state_dir / "released").read_text() == "x" * times


def played(host: LocalHost, play: Callable[[], Awaitable[object]]) -> None:
    async def timed() -> None:
        async with asyncio.timeout(60):
            await play()

    asyncio.run(timed())


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(MODULES)


@pytest.mark.parametrize("detail", [Detail.NOTHING, Detail.NAMES])
def test_a_trace_is_passed_on_if_it_is_asked_for(
    one: JobKind[Any, Any], host: Playing, detail: Detail
) -> None:
    plan(host, "trace stop", "trace cont", "done")
    lines = list[str]()

    async def play() -> None:
        job = await started(one, host)
        await job.outcome(ignore_event)
        assert job.files.trace.exists() is bool(detail)
        await released(host)

    trace(detail, lines.append)
    try:
        played(host, play)
    finally:
        untrace()
    outcome = [line.partition(" ")[2] for line in lines]
    assert [line for line in outcome if line.startswith("web: ")] == (
        ["web: stop", "web: cont"] if detail else []
    )


def test_its_events_and_result_are_told(kind: JobKind[Any, Any], host: Playing) -> None:
    plan(host, "note one", "note two", "done")

    async def play() -> None:
        outcome = list[Event]()
        result = await (await started(kind, host)).outcome(outcome.append)
        assert result == EXAMPLES[kind.name].result
        assert [event.text for event in outcome if isinstance(event, Note)] == ["one", "two"]
        await released(host)

    played(host, play)


def test_its_error_is_raised_where_it_was_asked_for(one: JobKind[Any, Any], host: Playing) -> None:
    plan(host, "refuse")

    async def play() -> None:
        with pytest.raises(RefusedError, match="it is refused"):
            await (await started(one, host)).outcome(ignore_event)
        await released(host)

    played(host, play)


def test_a_bug_in_it_is_told_as_one(one: JobKind[Any, Any], host: Playing) -> None:
    plan(host, "break")

    async def play() -> None:
        job = await started(one, host)
        with pytest.raises(VmckptError, match="vmckpt has a bug") as outcome:
            await job.outcome(ignore_event)
        assert "KeyError" in outcome.value.why
        await released(host)
        assert "KeyError" in job.files.log.read_text()

    played(host, play)


def test_an_error_that_comes_between_two_looks_is_not_missed(tmp_path: Path) -> None:
    """A restore whose guest ran and that failed then was taken for one that had gone well."""
    kind = kind_of("restore")
    failed = Outcome(None, tuple(pack_error(RefusedError("late", why="so", remedy="-"), "far")))

    files = JobFiles.of(tmp_path, kind.name, "r1")

    def fail(*_: object) -> None:
        files.outcome.write_text(OUTCOME.encode(failed))

    dies = Fault("is_alive", first=fail, answers=False)
    host = FaultyHost("far", tmp_path, "127.0.0.1", faults=(dies,))

    async def play() -> None:
        job = attach(kind, host, "r1")
        await host.make_dir(files.path)
        outcome = Outcome(builtins(EXAMPLES[kind.name].result), None, is_final=False, is_over=False)
        files.outcome.write_text(OUTCOME.encode(outcome))
        files.process.write_text('{"pid": 2, "start_ticks": 1}')
        with pytest.raises(RefusedError, match="late"):
            await job.outcome(ignore_event)

    asyncio.run(play())


def test_one_that_is_killed_is_recovered_and_says_that_it_was_cut_off(
    kind: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "note one", "die")

    async def play() -> None:
        with pytest.raises(OperationFailedError, match="was interrupted"):
            await (await started(kind, host)).outcome(ignore_event)
        await released(host)
        assert (host.state_dir / "recovered").exists()

    played(host, play)


def test_one_that_is_killed_and_finished_by_its_recovery_is_done(
    one: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "die", recovery=["done"])

    async def play() -> None:
        result = await (await started(one, host)).outcome(ignore_event)
        assert result == EXAMPLES[one.name].result
        await released(host)

    played(host, play)


@pytest.mark.parametrize("tell", ["tell", "tell finally"])
def test_one_that_is_killed_after_it_has_told_its_result_is_done(
    kind: JobKind[Any, Any], host: Playing, tell: str
) -> None:
    plan(host, tell, "die")

    async def play() -> None:
        job = await started(kind, host)
        assert await job.outcome(ignore_event) == EXAMPLES[kind.name].result
        await released(host)
        outcome = await job.outcome_so_far()
        assert outcome is not None
        assert (outcome.is_over, outcome.error) == (True, None)

    played(host, play)


@pytest.mark.parametrize("ends", ["refuse", "done"])
def test_one_that_is_killed_after_its_end_keeps_its_outcome(
    one: JobKind[Any, Any], host: Playing, ends: str
) -> None:
    """Its error became 'was interrupted'."""
    plan(host, ends, release=["die"])

    async def play() -> None:
        job = await started(one, host)
        await released(host)
        assert not (host.state_dir / "recovered").exists()
        if ends == "refuse":
            with pytest.raises(RefusedError, match="it is refused"):
                await job.outcome(ignore_event)
        else:
            assert await job.outcome(ignore_event) == EXAMPLES[one.name].result

    played(host, play)


@pytest.mark.parametrize(("tell", "fails"), [("tell", True), ("tell finally", False)])
def test_an_error_takes_a_result_back_until_that_is_final(
    one: JobKind[Any, Any], host: Playing, tell: str, fails: bool
) -> None:
    plan(host, tell, "refuse")

    async def play() -> None:
        job = await started(one, host)
        await released(host)
        if fails:
            with pytest.raises(RefusedError):
                await job.outcome(ignore_event)
        else:
            assert await job.outcome(ignore_event) == EXAMPLES[one.name].result
        outcome = await job.outcome_so_far()
        assert outcome is not None
        assert outcome.error is not None

    played(host, play)


@pytest.mark.parametrize("times", [1, 3])
def test_one_that_is_cancelled_however_often_undoes_what_it_has_begun(
    kind: JobKind[Any, Any], host: Playing, times: int
) -> None:
    plan(host, "wait")

    async def play() -> None:
        job = await started(kind, host)
        await until((host.state_dir / "waiting").exists)
        for _ in range(times - 1):
            assert job.process is not None
            await host.interrupt(job.process)
            await asyncio.sleep(0.05)
        await job.cancel("the work")
        assert (host.state_dir / "undone").exists()
        with pytest.raises(CancelledByUserError, match="of 'web' was cancelled"):
            await job.outcome(ignore_event)
        await released(host)

    played(host, play)


def test_one_that_is_cancelled_before_anything_is_known_of_it_never_begins(
    one: JobKind[Any, Any], host: Playing
) -> None:
    """Its connection broke as it was started: it worked on, although it had been cancelled."""
    plan(host, "wait")

    async def play() -> None:
        job = attach(one, host, "r1")
        await host.make_dir(job.files.path)
        await job.give("web", EXAMPLES[one.name].request)
        await job.cancel("the work")
        await begin(one, host, "r1")
        with pytest.raises(CancelledByUserError):
            await job.outcome(ignore_event)
        assert not (host.state_dir / "waiting").exists()

    played(host, play)


def test_one_that_is_frozen_is_not_waited_for_for_good(
    one: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "note one", "freeze")

    async def play() -> None:
        job = await started(one, host)
        await until(lambda: job.files.events.exists() and job.files.events.read_text())
        with pytest.raises(BusyError, match="the work on far has not ended"):
            await job.cancel("the work", within_s=0.5)
        # What is done after its death needs its order.
        assert job.files.order.exists()
        assert job.process is not None
        os.kill(job.process.pid, signal.SIGKILL)
        with pytest.raises(OperationFailedError, match="was interrupted"):
            await job.outcome(ignore_event)

    played(host, play)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_disk_that_is_full_keeps_no_job_from_telling_its_end(
    kind: JobKind[Any, Any], tmp_path: Path
) -> None:
    state = tmp_path / "small"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "tmpfs", str(state)]
    subprocess.run(mount, check=True)
    host = Playing("far", state, "127.0.0.1")
    plan(host, "note one", "fill", "note two", "done")

    async def play() -> None:
        job, outcome = await started(kind, host), list[Event]()
        assert await job.outcome(outcome.append) == EXAMPLES[kind.name].result
        assert outcome[:1] == [Note(0.0, "note", "one")]
        await until(lambda: not process.find_by_argument(f"{state}/jobs/"))

    try:
        played(host, play)
    finally:
        for left in process.find_by_argument(f"{state}/jobs/"):
            process.kill(left)
        subprocess.run(["umount", "--lazy", str(state)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
@pytest.mark.parametrize("tell", ["tell", "tell finally"])
def test_what_is_done_is_done_although_a_full_disk_keeps_it_from_being_told_at_once(
    one: JobKind[Any, Any], tmp_path: Path, tell: str
) -> None:
    """As a restore, which tells it when the guest runs: it was said to have failed."""
    state = tmp_path / "small"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=0700", "tmpfs", str(state)]
    subprocess.run(mount, check=True)
    host = Playing("far", state, "127.0.0.1")
    plan(host, "note one", "fill", tell)

    async def play() -> None:
        job = await started(one, host)
        assert await job.outcome(ignore_event) == EXAMPLES[one.name].result
        await until(lambda: not process.find_by_argument(f"{state}/jobs/"))

    try:
        played(host, play)
    finally:
        for left in process.find_by_argument(f"{state}/jobs/"):
            process.kill(left)
        subprocess.run(["umount", "--lazy", str(state)], check=True)


def test_one_that_is_revoked_before_it_begins_never_does(
    kind: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "wait")

    async def play() -> None:
        job = attach(kind, host, "r1")
        await host.make_dir(job.files.path)
        await job.give("web", EXAMPLES[kind.name].request)
        await revoke(kind, host, lambda vm, _: vm == "db")
        assert not job.files.revoked.exists()
        await revoke(kind, host, lambda vm, asked: (vm, asked) == ("web", EXAMPLES[kind.name][0]))
        await begin(kind, host, "r1")
        with pytest.raises(CancelledByUserError):
            await job.outcome(ignore_event)
        assert not (host.state_dir / "waiting").exists()
        await released(host)

    played(host, play)


@pytest.mark.parametrize("tell", [None, "tell", "tell finally"])
def test_one_that_is_revoked_at_work_is_undone_and_what_was_told_stays(
    one: JobKind[Any, Any], host: Playing, tell: str | None
) -> None:
    plan(host, *([tell] if tell else []), "wait")

    async def play() -> None:
        await started(one, host)
        await until((host.state_dir / "waiting").exists)
        await revoke(one, host, lambda vm, _: vm == "web")
        assert (host.state_dir / "undone").exists() is (tell is None)

    played(host, play)


@pytest.mark.parametrize("order", ["", "{}", "[", "[1]", '{"vm": "web"}', '{"format": 9}'])
def test_what_is_no_order_keeps_no_other_from_being_revoked(
    one: JobKind[Any, Any], host: Playing, order: str
) -> None:
    """It ended a guard's rollback: vmckpt had a bug."""

    async def play() -> None:
        for run in ("r0", "r1"):
            job = attach(one, host, run)
            await host.make_dir(job.files.path)
            await job.give("web", EXAMPLES[one.name].request)
        other, mine = attach(one, host, "r0"), attach(one, host, "r1")
        other.files.order.write_text(order)
        mine.files.process.write_text('{"pid": 1, "is": "init"}')
        await revoke(one, host, lambda vm, _: vm == "web")
        assert mine.files.revoked.exists()
        assert not other.files.revoked.exists()

    played(host, play)


def test_after_a_reboot_nothing_says_how_it_ended(
    kind: JobKind[Any, Any], host: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "LAST_LINES_S", 0.2)

    async def play() -> None:
        job = attach(kind, host, "r1")
        await host.make_dir(job.files.path)
        await job.give("web", EXAMPLES[kind.name].request)
        job.files.process.write_text('{"pid": 2, "start_ticks": 1}')
        with pytest.raises(OutcomeUnknownError, match="it is unknown how the"):
            await job.outcome(ignore_event)

    played(host, play)


def test_one_whose_directory_goes_before_its_order_comes_ends(
    one: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "done")

    async def play() -> None:
        job = await begin(one, host, "r1")
        await job.remove()
        assert await job.ended(30)
        assert not (host.state_dir / "released").exists()

    played(host, play)


def test_an_order_that_comes_late_is_waited_for(one: JobKind[Any, Any], host: Playing) -> None:
    plan(host, "done")

    async def play() -> None:
        job = await begin(one, host, "r1")
        await asyncio.sleep(1.0)
        await job.give("web", EXAMPLES[one.name].request)
        assert await job.outcome(ignore_event) == EXAMPLES[one.name].result

    played(host, play)


def test_one_that_cannot_begin_says_why(one: JobKind[Any, Any], host: Playing) -> None:
    (host.state_dir / "plan.json").write_text("no plan")

    async def play() -> None:
        with pytest.raises(OperationFailedError, match="did not start on far") as failed:
            await (await started(one, host)).outcome(ignore_event)
        assert "JSONDecodeError" in failed.value.why

    played(host, play)


def test_one_that_is_killed_before_it_has_begun_says_so(
    one: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "done")

    async def play() -> None:
        job = await begin(one, host, "r1")
        assert job.process is not None
        await host.kill(job.process)
        await job.give("web", EXAMPLES[one.name].request)
        with pytest.raises(OperationFailedError, match="did not start on far") as failed:
            await job.outcome(ignore_event)
        assert failed.value.why == "its process was killed"
        assert not (host.state_dir / "released").exists()

    played(host, play)


def test_a_host_that_is_silent_for_a_while_is_asked_again(
    one: JobKind[Any, Any], host: Playing
) -> None:
    plan(host, "note one", "done")
    host.silent[0] = 2

    async def play() -> None:
        job, outcome = await started(one, host), list[Event]()
        with pytest.raises(HostDownError, match="far is down"):
            await job.outcome(ignore_event)
        assert await job.outcome(outcome.append, patience_s=30) == EXAMPLES[one.name].result
        codes = [event.code for event in outcome if isinstance(event, Note)]
        assert sorted(codes) == ["connection", "connection", "note"]

    played(host, play)


HOSTILE: list[dict[str, Any]] = [
    {"result": None}, {"result": {"id": 7}}, {"result": []}, {"error": []}, {"error": [7]},
    {"error": ["OSError", "a", "b", "c"]}, {"result": {}, "is_final": "x"}, {},
]  # fmt: skip


@pytest.mark.parametrize("outcome", HOSTILE)
def test_an_outcome_that_makes_no_sense_is_an_error_of_ours(
    host: Playing, outcome: dict[str, Any]
) -> None:
    """One that says that it is done, and nothing else, ended the scheduler: vmckpt had a bug."""

    async def play() -> None:
        job = attach(kind_of("checkpoint"), host, "r1")
        await host.make_dir(job.files.path)
        job.files.outcome.write_text(json.dumps(outcome))
        with pytest.raises(VmckptError):
            await job.outcome(ignore_event)

    played(host, play)


def test_a_field_of_another_type_makes_a_result_unreadable(
    kind: JobKind[Any, Any], host: Playing
) -> None:
    result = builtins(EXAMPLES[kind.name].result)
    for name in result:
        spoilt = OUTCOME.encode(Outcome({**result, name: 7.5 if name != "took_s" else "x"}))

        async def play(text: str = spoilt) -> None:
            job = attach(kind, host, "r1")
            await host.make_dir(job.files.path)
            job.files.outcome.write_text(text)
            with pytest.raises(OutcomeUnknownError, match="cannot be read"):
                await job.outcome(ignore_event)

        if not isinstance(result[name], float):
            played(host, play)


def test_where_there_is_no_order_there_is_no_job(kind: JobKind[Any, Any], tmp_path: Path) -> None:
    files = JobFiles.of(tmp_path, kind.name, "r1")
    with pytest.raises(NotFoundError, match=f"there is no {kind.what} 'r1' here"):
        asyncio.run(serve(kind, files.path, ["true"]))


def test_jobs_that_ended_long_ago_are_forgotten(kind: JobKind[Any, Any], tmp_path: Path) -> None:
    old, new = kind.kept_s + 10, kind.kept_s - 10
    ages = {"ended": (old, old), "cut-off": (old, None), "new": (new, new), "tells": (old, new)}
    for name, (asked, last) in ages.items():
        files = JobFiles.of(tmp_path, kind.name, name)
        files.path.mkdir(parents=True)
        for path, age in ((files.order, asked), (files.events, last)):
            if age is not None:
                path.touch()
                os.utime(path, (1e9 - age, 1e9 - age))
        os.utime(files.path, (1e9 - asked, 1e9 - asked))
    directory = jobs_dir(tmp_path, kind.name)
    forget_old(tmp_path, kind.name, kind.kept_s, 1e9)
    assert sorted(path.name for path in directory.iterdir()) == ["new", "tells"]
    forget_old(tmp_path / "nowhere", kind.name, kind.kept_s, 1e9)


def test_one_that_runs_is_not_forgotten_as_the_clock_jumps(
    one: JobKind[Any, Any], tmp_path: Path
) -> None:
    """A host without a clock's battery gets the time after its first jobs have begun."""
    files = JobFiles.of(tmp_path, one.name, "runs")
    files.path.mkdir(parents=True)
    me = process.identify(os.getpid())
    assert me is not None
    later_s = time.time() + one.kept_s + 10
    for which in (me, me.__class__(me.pid, me.start_ticks + 1)):
        assert files.path.exists()
        files.process.write_text(process.PROCESS.encode(which))
        forget_old(tmp_path, one.name, one.kept_s, later_s)
    assert not files.path.exists()


def test_an_old_job_that_cannot_be_removed_is_no_reason_to_fail(
    one: JobKind[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = JobFiles.of(tmp_path, one.name, "old")
    files.path.mkdir(parents=True)

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("shutil.rmtree", refuse)
    forget_old(tmp_path, one.name, one.kept_s, time.time() + one.kept_s + 10)
    assert files.path.exists()


def test_what_jobs_of_earlier_versions_told_is_forgotten(tmp_path: Path) -> None:
    kind = kind_of("migrate")
    earlier = [earlier_order(tmp_path, "r1"), tmp_path / "checkpointing/r2/request.json"]
    mine = attach(kind, LocalHost("a", tmp_path, "127.0.0.1"), "r3").files.order
    for path in (*earlier, mine):
        path.parent.mkdir(parents=True)
        path.touch()
    now = time.time()
    forget_old(tmp_path, kind.name, kind.kept_s, now)
    assert all(path.exists() for path in earlier)
    forget_old(tmp_path, kind.name, kind.kept_s, now + kind.kept_s + 10)
    assert not any(path.parent.exists() for path in (*earlier, mine))
