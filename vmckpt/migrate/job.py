"""A migration that runs on its source host by itself: what it is to do, and what it leaves to read.

STATE/jobs/RUN on the source has job.json (the request; secret while the link is up), process.json
(who works on it), events.jsonl, and at the end result.json.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Self

from vmckpt.deadlines import poll
from vmckpt.errors import (
    CancelledByUserError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    StorageError,
    VmckptError,
)
from vmckpt.events.lines import to_line
from vmckpt.events.types import Emit, Event, Note, heard_or_not
from vmckpt.hosts.host import Entry, Host, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import PROCESS, identify
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import Session
from vmckpt.hosts.remote.tls import Place, open_link
from vmckpt.hosts.remote.values import pack_error
from vmckpt.migrate.insist import insist
from vmckpt.migrate.journal import STEPS
from vmckpt.migrate.recorded import where_it_was
from vmckpt.migrate.recover import FINISHED, Recovery, recover
from vmckpt.migrate.report import Report
from vmckpt.migrate.run import migrate
from vmckpt.options.migration import Options
from vmckpt.state.documents import Schema, save_to
from vmckpt.state.durable import fill, reserve
from vmckpt.vm.inventory import read_vm

# The operator may lose its connection for a while before it has said what is to be done.
REQUEST_S, REQUEST_POLL_S = 60.0, 0.005
# What a job told can be read for so long after its end.
KEPT_S = 7 * 86_400.0
# A report is a few KiB: its operator hears how it ended, whatever fills the disk meanwhile.
RESULT_BYTES = 64 << 10
# Events kept in memory while the disk is full; later ones are dropped.
UNWRITTEN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JobDir:
    """The files of one job, below a host's state directory."""

    path: Path

    @classmethod
    def of(cls, state_dir: Path, run: str) -> Self:
        """Where the job of a run has them; the target's listener has its own there too."""
        return cls(state_dir / "jobs" / run)

    @property
    def request(self) -> Path:
        """What is to be done."""
        return self.path / "job.json"

    @property
    def process(self) -> Path:
        """Which process does it."""
        return self.path / "process.json"

    @property
    def events(self) -> Path:
        """What it tells, a line of JSON each."""
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        """How it ended."""
        return self.path / "result.json"

    @property
    def log(self) -> Path:
        """What the process says besides."""
        return self.path / "job.log"


@dataclass(frozen=True, slots=True)
class Job:
    """One migration to run on `source`, which reaches the target through `link`."""

    run: str
    vm: str
    source: LocalHost
    target: Host
    options: Options
    link: Place
    forecast: Mapping[str, Any] | None = None

    @property
    def request(self) -> "Request":
        """What its file says."""
        source, target = (Entry(**entry_fields(host)) for host in (self.source, self.target))
        return Request(self.run, self.vm, source, target, self.options, self.link, self.forecast)

    @classmethod
    def of(cls, request: "Request") -> Self:
        """The same on its source, with a target that is reached over the link when it is asked."""
        there, link = request.target, request.link
        session = Session(there.name, there.state_dir, partial(open_link, there.name, link))
        return cls(
            request.run,
            request.vm,
            LocalHost(**entry_fields(request.source)),
            RemoteHost(**entry_fields(there), session=session),
            request.options,
            link,
            request.forecast,
        )


@dataclass(frozen=True, slots=True)
class Request:
    """job.json: `Job`, before there are hosts to ask."""

    run: str
    vm: str
    source: Entry
    target: Entry
    options: Options
    link: Place
    forecast: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """result.json: one of three. `error` is as `hosts.remote.values.pack_error` has it."""

    report: Report | None = None
    recovery: Recovery | None = None
    error: tuple[str, ...] | None = None


REQUEST = Schema(Request, "see `vmckpt runs list`")
RESULT = Schema(Result, "`vmckpt vm list` shows where the VM is", omits_none=True)


async def await_job(state_dir: Path, run: str) -> Job:
    """A job of this host's once its request has come; its process is started before that.

    Raises NotFoundError when its directory goes first, or nothing comes.
    """
    files = JobDir.of(state_dir, run)
    await poll(
        lambda: files.request.exists() or not files.path.exists(),
        every_s=REQUEST_POLL_S,
        within_s=REQUEST_S,
    )
    return read_job(state_dir, run)


def read_job(state_dir: Path, run: str) -> Job:
    """A job of this host's. Raises NotFoundError."""
    path = JobDir.of(state_dir, run).request
    try:
        return Job.of(REQUEST.decode(path.read_bytes(), path))
    except (OSError, StorageError) as exc:
        raise NotFoundError(
            f"there is no job '{run}' here", why=str(exc), remedy=REQUEST.remedy
        ) from exc


async def run_job(job: Job, own_command: Sequence[str]) -> None:
    """Migrate, telling of it in files; should this process die, another one recovers the VM."""
    files = JobDir.of(job.source.state_dir, job.run)
    await _end(job, files, await _result(job, _work(job, files, own_command)))


async def _work(job: Job, files: JobDir, own_command: Sequence[str]) -> Result:
    forget_old(job.source.state_dir, time.time())
    process = identify(os.getpid())
    reserve(files.result, RESULT_BYTES)
    if process is not None:
        await save_to(job.source, files.process, PROCESS, process)
    on_death = [*own_command, "job", job.run, "--recover"]
    with files.events.open("ab", buffering=0) as lines:
        tell = _teller(lines)
        try:
            vm = await read_vm(job.source, job.vm)
            if vm is None:
                raise NotFoundError(
                    f"'{job.vm}' is not on {job.source.name} any more",
                    why="it was moved or removed meanwhile",
                    remedy="see `vmckpt vm list`",
                )
            report = await migrate(
                vm,
                job.target,
                job.options,
                tell,
                run=job.run,
                on_death=on_death,
                forecast=job.forecast,
            )
        except asyncio.CancelledError as exc:
            raise _cancelled(job) from exc
    return Result(report=report)


def forget_old(state_dir: Path, now_unix_s: float) -> None:
    """Remove the files of jobs, ended or cut off, in which nothing was written for a week."""
    for directory in (state_dir / "jobs").glob("*"):
        with suppress(FileNotFoundError):  # another job removes it too
            last_unix_s = max(path.stat().st_mtime for path in (directory, *directory.iterdir()))
            if now_unix_s - last_unix_s > KEPT_S:
                shutil.rmtree(directory)


async def recover_job(job: Job) -> None:
    """After the death of its process: finish or undo the migration, and say which."""
    files = JobDir.of(job.source.state_dir, job.run)
    await _end(job, files, await _result(job, _recover(job, files)))


async def _recover(job: Job, files: JobDir) -> Result:
    with files.events.open("ab", buffering=0) as lines:
        tell = _teller(lines)
        tell(Note(0.0, "job-died", "the process of the migration was killed: recovering"))

        def note(text: str) -> None:
            tell(Note(0.0, "recovery", text))

        return Result(recovery=await find_out(job, note))


async def find_out(job: Job, note: Callable[[str], None]) -> Recovery:
    """End the migration of a dead process for good, over minutes of silence or a lock that is held.

    Raises what `recover` raises, OperationFailedError when there is nothing to end.
    """
    return await insist(lambda: _ended(job, note))


async def _ended(job: Job, note: Callable[[str], None]) -> Recovery:
    if found := await recover(job.vm, note, (job.source, job.target)):
        return found
    home, arrived = await read_vm(job.source, job.vm), await read_vm(job.target, job.vm)
    if home is None and arrived is not None:
        # All was done but for the report.
        return Recovery(job.run, job.vm, job.target.name, STEPS[-1], FINISHED)
    raise OperationFailedError(
        "the migration was cut off before it had changed anything",
        why=f"its process on {job.source.name} was killed",
        remedy=f"{where_it_was(job.vm, job.options)}; migrate it again",
    )


async def _result(job: Job, work: Coroutine[Any, Any, Result]) -> Result:
    """What the work gives; an error of it as a result."""
    try:
        return await work
    except (VmckptError, OSError) as exc:
        return Result(error=tuple(pack_error(exc, job.source.name)))


async def _end(job: Job, files: JobDir, result: Result) -> None:
    """Say how it ended, and let the target's listener go."""
    try:
        fill(files.result, RESULT.encode(result))
    finally:
        await _let_go(job)


async def _let_go(job: Job) -> None:
    if isinstance(job.target, RemoteHost):
        try:
            with suppress(HostDownError):  # then it ends by itself when nobody comes for minutes
                await job.target.remove(JobDir.of(job.target.state_dir, job.run).path)
        finally:
            await job.target.close()


def _teller(lines: BinaryIO) -> Emit:
    """Writes each event as a line; on a full disk it keeps them, and no migration from its end."""
    unwritten = bytearray()

    def tell(event: Event) -> None:
        if len(unwritten) < UNWRITTEN_BYTES:
            unwritten.extend(to_line(event).encode())
        # What is there of a line that does not fit is its beginning: the rest may follow.
        del unwritten[: lines.write(unwritten)]

    return heard_or_not(tell)


def _cancelled(job: Job) -> CancelledByUserError:
    return CancelledByUserError(
        "the migration was cancelled",
        why="asked to stop before it had begun",
        remedy=where_it_was(job.vm, job.options),
    )
