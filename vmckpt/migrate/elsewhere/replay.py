"""Replay a migration that a command on this machine carries out, from its record."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vmckpt import errors
from vmckpt.codec import convert
from vmckpt.errors import NotFoundError, OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.events.lines import from_record
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Emit, Event, Note, Progress
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.migrate.elsewhere.watch import JOB_ON
from vmckpt.migrate.report import MigrationReport
from vmckpt.vm.inventory import running_operations

POLL_S = 0.5
# The time between the release of a VM's lock and the last line of the record.
LAST_LINES_S = 3.0


def is_done_here(run: str) -> bool:
    """Whether a command on this machine carries it out, or did; otherwise it may be a host's
    job.
    """
    try:
        record = _record(run)
    except NotFoundError:
        return False
    return record.operation == "migrate" and JOB_ON not in record.request


async def replay_run(run: str, emit: Emit) -> MigrationReport:
    """Emit everything in the record from its beginning, once a running migration has ended.

    Raises what the migration raised, OutcomeUnknownError if its command was killed.
    """
    record = _record(run)
    if record.result is None:
        emit(Note(0.0, "waiting", "another command here shows its progress; this one its outcome"))
        record = await _ended(run)
    for event in _events(record):
        emit(event)
    return _report(run, record.result or {})


def _path(run: str) -> Path:
    return runs_dir() / f"{run}.json"


def _record(run: str) -> RunRecord:
    return RunRecord.load(_path(run))


async def _ended(run: str) -> RunRecord:
    silent_s = 0.0
    while silent_s < LAST_LINES_S:
        if (record := _record(run)).result is not None:
            return record
        silent_s = 0.0 if run in await running_operations() else silent_s + POLL_S
        await asyncio.sleep(POLL_S)
    raise OutcomeUnknownError(
        f"run {run} was interrupted",
        why="its command was killed before it could say how it ended",
        remedy="vmckpt vm show VM ends what was interrupted, and says where the VM is",
    )


def _events(record: RunRecord) -> Iterator[Event]:
    samples = [Progress(**sample) for sample in record.samples]
    events = [from_record(event) for event in record.events]
    yield from sorted([*events, *samples], key=lambda event: event.at_s)


def _report(run: str, result: Mapping[str, Any]) -> MigrationReport:
    if result["outcome"] == "completed":
        # A record that came from a host names the host's own file.
        return convert(MigrationReport, {**result, "run_record": str(_path(run))})
    kind = next((kind for kind in _kinds() if kind.kind == result["outcome"]), OperationFailedError)
    raise kind(
        result.get("what", f"run {run} ended as '{result['outcome']}'"),
        why=result.get("why", "according to its record"),
        remedy=result.get("remedy", f"see vmckpt runs show {run}"),
    )


def _kinds() -> Iterator[type[VmckptError]]:
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, VmckptError):
            yield value
