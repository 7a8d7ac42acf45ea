"""Watch a migration that its source host runs by itself, from beginning to end."""

import asyncio
import json
import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict

from vmckpt.codec import convert, require_within
from vmckpt.errors import (
    CancelledByUserError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.events.lines import from_record
from vmckpt.events.record import FORMAT, RunRecord
from vmckpt.events.types import Emit, Note, unless_gone
from vmckpt.foreign import MOST_INTEGER, MalformedError, parse
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.jobs.files import earlier_order
from vmckpt.jobs.handle import Handle, attach
from vmckpt.migrate.elsewhere.job import MIGRATE, MigrationRequest, MigrationResult
from vmckpt.migrate.outcome.recover import Recovery
from vmckpt.migrate.report import MigrationReport
from vmckpt.sequence.steps import to_the_end
from vmckpt.state.documents import damaged
from vmckpt.state.durable import write_durably

RECONNECT_S = 1.0
# Its samples are some 4 KB for each second; more than eight hours of them are not kept.
MOST_RECORD_BYTES = 128 << 20
# In a run record's request: the host that runs the job.
JOB_ON = "job_on"


class WatchedNoLongerError(CancelledByUserError):
    """Asked to stop a second time: the migration, or its undoing, continues without this
    command.
    """


async def find_job(run: str) -> Handle[MigrationRequest, MigrationResult]:
    """Find a run's migration on any host. Raises NotFoundError, RefusedError.

    Raises HostDownError if a silent host may have it.
    """

    async def has_it(host: Host) -> Handle[MigrationRequest, MigrationResult] | None:
        job = attach(MIGRATE, host, run)
        if await host.exists(earlier_order(host.state_dir, run)):
            raise RefusedError(
                f"run {run} on {host.name} was begun by an earlier version of vmckpt",
                why="this one cannot read its events",
                remedy="wait for its end: vmckpt vm list shows where the VM is",
            )
        return job if await host.exists(job.files.order) else None

    answers = await ask_every(all_hosts(), has_it)
    if found := next((job for job in answers.given if job), None):
        return found
    if answers.silent:
        raise answers.silent[0]
    raise NotFoundError(
        f"no host has a job '{run}'",
        why="it has ended, or never was one of a migration between two hosts elsewhere",
        remedy=f"see how it ended: vmckpt runs show {run}",
    )


async def watch(
    job: Handle[MigrationRequest, MigrationResult], emit: Emit
) -> MigrationReport | Recovery:
    """Show a migration's events from its beginning, over as many connections as it takes.

    Returns a Recovery if the job was killed and its dead-man's switch has finished the migration.
    Raises what `run.migrate` raises. A cancellation cancels the job; a second one only stops
    watching.
    """
    emit, source = unless_gone(emit), job.host
    watching = asyncio.ensure_future(job.outcome(emit, patience_s=math.inf))
    interrupting: asyncio.Task[None] | None = None
    while not watching.done():
        try:
            await asyncio.wait({watching})
        except asyncio.CancelledError:
            if interrupting is not None:
                watching.cancel()
                await asyncio.wait({watching})
                raise WatchedNoLongerError(
                    "this command no longer watches the migration",
                    why=f"asked to stop again before {source.name} had ended the migration",
                    remedy=f"see how it ends: vmckpt runs attach {job.files.run}",
                ) from None
            emit(Note(0.0, "cancel", f"asking {source.name} to cancel the migration"))
            interrupting = asyncio.create_task(_interrupt(job))
    if interrupting is not None:
        interrupting.cancel()
    return await to_the_end(_conclude(job, watching, emit))


async def _interrupt(job: Handle[MigrationRequest, MigrationResult]) -> None:
    """Have the job cancel itself, as soon as its host can be reached."""
    while True:
        with suppress(HostDownError):
            if process := await job.worker():
                await job.host.interrupt(process)
                return
        await asyncio.sleep(RECONNECT_S)


class _RecordedRequest(TypedDict, total=False):
    vm: str
    source: str
    target: str
    driver: str
    method: str
    channels: int | None
    compression: str | None
    max_downtime_ms: int
    disk_bytes: int | None
    hole_pages: int | None
    bandwidth_bytes_per_s: int | None
    held_s: float | None
    guest_agent: bool
    in_turn: bool


class _RecordedResult(TypedDict, total=False):
    outcome: Required[str]
    total_time_s: float
    transfer_time_s: float
    transferred_bytes: int
    rounds: int
    device_bytes: int
    device_out_s: float
    device_back_s: float
    downtime_ms: float | None
    guest_downtime_ms: float | None
    method: str
    warnings: list[str]


class _RecordedRun(TypedDict):
    """What commands use of a run record: they read all of them, and fail on an invalid one."""

    format: int
    began_unix_s: float
    request: _RecordedRequest
    events: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    result: NotRequired[_RecordedResult | None]


# Later times have no date that can be shown.
LATEST_UNIX_S = 1 << 37
# No run takes as many milliseconds, and no sum of such figures is infinite.
_MOST_TIME = 1 << 50


async def _conclude(
    job: Handle[MigrationRequest, MigrationResult],
    watched: asyncio.Future[MigrationResult],
    emit: Emit,
) -> MigrationReport | Recovery:
    """Return or raise the result, and fetch the run record.

    If the record cannot be written, that is only reported: the migration's outcome comes first.
    """
    source, path = job.host, runs_dir() / f"{job.files.run}.json"
    error = watched.exception()
    if error is not None and not isinstance(error, VmckptError):
        raise error
    recovery = None if error else watched.result().recovery
    try:
        await _fetch(source, path)
        if error:
            _complete(path, {"outcome": error.kind, "what": error.what, "why": error.why})
        elif recovery:
            _complete(path, {"outcome": recovery.outcome})
    except (OSError, StorageError) as exc:
        emit(Note(0.0, "record", f"the run record was not written: {exc}"))
    if error:
        raise error
    if recovery:
        if recovery.host == source.name:
            raise OperationFailedError(
                f"the migration was {recovery.outcome}",
                why=f"its process on {source.name} was killed at step '{recovery.step}'",
                remedy="migrate it again",
            )
        return recovery
    report = watched.result().report
    if report is None:
        raise OutcomeUnknownError(
            f"how the migration ended on {source.name} cannot be read",
            why="its result has neither a report nor an error",
            remedy="`vmckpt vm list` shows where the VM is",
        )
    return replace(report, run_record=str(path))


async def _fetch(source: Host, path: Path) -> None:
    """Copy the source's record of a run, unless the source is silent or has none.

    Atomically: on a full disk there is no partial record. Raises StorageError, also if it is not a
    record: then this machine's own record of the run stays.
    """
    theirs = source.state_dir / "runs" / path.name
    text = b""
    with suppress(HostDownError):
        text = await _whole(source, theirs)
    if not text:
        return
    try:
        data = parse(text, most_bytes=MOST_RECORD_BYTES)
        run = convert(_RecordedRun, data)
        _require_plausible(run["request"])
        if result := run.get("result"):
            _require_plausible(result)
            if result["outcome"] == "completed":
                convert(MigrationReport, data["result"])
        for event in (*data["events"], *({"event": "Progress", **one} for one in data["samples"])):
            from_record(event)
        if data["format"] != FORMAT:
            raise MalformedError("written by another version of vmckpt")
        if not 0 <= data["began_unix_s"] <= LATEST_UNIX_S:
            raise MalformedError(f"it began at {data['began_unix_s']}")
    except MalformedError as exc:
        raise damaged(theirs, str(exc), "see what that host runs", source.name) from exc
    data["forecast"] = None
    with suppress(NotFoundError):  # the request is known here, unless it was made elsewhere
        own = RunRecord.load(path)
        names = ("vm", "source", "target", JOB_ON)
        data["request"] |= {name: own.request[name] for name in names if name in own.request}
        data["forecast"] = own.forecast
    fields = {name: data.get(name) for name in RunRecord.__slots__}
    record = {"format": data["format"], **fields, "run": path.stem, "operation": "migrate"}
    write_durably(path, json.dumps(record))


async def _whole(host: Host, path: Path) -> bytes:
    """A file of any length, as far as a record can be long. Raises HostDownError."""
    found = bytearray()
    while len(found) <= MOST_RECORD_BYTES and (part := await host.read_from(path, len(found))):
        found += part
    return bytes(found)


def _require_plausible(figures: _RecordedRequest | _RecordedResult) -> None:
    """Raises MalformedError: forecasts and metrics add them up."""
    for name, value in figures.items():
        if isinstance(value, int | float):
            require_within(name, value, _MOST_TIME if isinstance(value, float) else MOST_INTEGER)


def _complete(path: Path, result: dict[str, str]) -> None:
    """Add how the run ended to an incomplete record."""
    with suppress(NotFoundError):
        record = RunRecord.load(path)
        if record.result is None:
            record.result = result
            record.save(path.parent)
