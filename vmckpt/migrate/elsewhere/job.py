"""A migration that its source host runs by itself: a kind of job (vmckpt/jobs).

Its request is secret while the link is up.
"""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.events.types import Note
from vmckpt.hosts.host import Host, HostEntry, entry_fields
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import Session
from vmckpt.hosts.remote.tls import TlsEndpoint, open_link
from vmckpt.jobs.files import JobFiles
from vmckpt.jobs.kind import Job, JobKind, JobWorker
from vmckpt.migrate.outcome.journal import STEPS
from vmckpt.migrate.outcome.recover import FINISHED, Recovery, recover
from vmckpt.migrate.outcome.retrying import retry_recovery
from vmckpt.migrate.recorded import where_it_was
from vmckpt.migrate.report import MigrationReport
from vmckpt.migrate.run import migrate
from vmckpt.options.migration import MigrationOptions
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.inventory import read_vm, require_at_home

Noted = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MigrationRequest:
    """The destination, the link to it, and the options."""

    target: HostEntry
    options: MigrationOptions
    link: TlsEndpoint
    forecast: Mapping[str, Any] | None = None

    def open_destination(self) -> RemoteHost:
        """The destination host; it connects over the link on first use."""
        there = self.target
        session = Session(there.name, there.state_dir, partial(open_link, there.name, self.link))
        return RemoteHost(**entry_fields(there), session=session)


@dataclass(frozen=True, slots=True)
class MigrationResult:
    """A report, or what the dead-man's switch did."""

    report: MigrationReport | None = None
    recovery: Recovery | None = None


MigrationJob = Job[MigrationRequest, MigrationResult]


@asynccontextmanager
async def _migrates(job: MigrationJob) -> AsyncIterator[JobWorker[MigrationResult]]:
    destination = job.request.open_destination()
    try:
        yield JobWorker(partial(work, job, destination), partial(finish, job, destination))
    finally:
        await to_the_end(release_destination(job, destination))


async def work(job: MigrationJob, destination: Host) -> MigrationResult:
    """Migrate the VM. Raises what `run.migrate` does, NotFoundError."""
    vm = await require_at_home(job.host, job.vm)
    request = job.request
    report = await migrate(
        vm,
        destination,
        request.options,
        job.emit,
        run=job.run,
        has_switch=True,
        forecast=request.forecast,
    )
    return MigrationResult(report=report)


async def finish(job: MigrationJob, destination: Host) -> MigrationResult | None:
    """Finish or undo a dead process's migration; retry while a host is silent or a lock is held.

    Raises what `recover` raises; OperationFailedError if nothing had been changed.
    """
    if job.outcome is not None:
        return None
    job.emit(Note(0.0, "job-died", "the process of the migration was killed: recovering"))

    def note(text: str) -> None:
        job.emit(Note(0.0, "recovery", text))

    return MigrationResult(recovery=await retry_recovery(lambda: _ended(job, destination, note)))


async def _ended(job: MigrationJob, destination: Host, note: Noted) -> Recovery:
    if found := await recover(job.vm, note, (job.host, destination)):
        return found
    home, arrived = await read_vm(job.host, job.vm), await read_vm(destination, job.vm)
    if home is None and arrived is not None:
        # Everything was done except the report.
        return Recovery(job.run, job.vm, destination.name, STEPS[-1], FINISHED)
    raise OperationFailedError(
        "the migration was interrupted before it had changed anything",
        why=f"its process on {job.host.name} was killed",
        remedy=f"{where_it_was(job.vm, job.request.options)}; migrate it again",
    )


async def release_destination(job: MigrationJob, destination: Host) -> None:
    """Stop the destination's listener by removing its directory, and close the connection."""
    try:
        with suppress(HostDownError):  # otherwise the listener times out
            await destination.remove(JobFiles.of(destination.state_dir, MIGRATE.name, job.run).path)
    finally:
        if isinstance(destination, RemoteHost):
            await destination.close()


MIGRATE = JobKind(
    "migrate", "migration", MigrationRequest, MigrationResult, _migrates, kept_s=7 * 86_400.0
)
KINDS = (MIGRATE,)
