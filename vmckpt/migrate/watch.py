"""Watching a migration that runs on its source host by itself, from its beginning to its end."""

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from vmckpt.errors import (
    CancelledByUserError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    StorageError,
)
from vmckpt.events.lines import Lines, from_record
from vmckpt.events.record import FORMAT, RunRecord
from vmckpt.events.types import Emit, Note, heard_or_not
from vmckpt.foreign import NUMBER, MalformedError, Shape, parse, require
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import MOST_TEXT_BYTES, Host
from vmckpt.hosts.inventory import all_hosts, runs_dir
from vmckpt.hosts.process import PROCESS, ProcessId
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.migrate.job import RESULT, JobDir, Result
from vmckpt.migrate.recover import Recovery
from vmckpt.migrate.report import Report
from vmckpt.sequence.steps import to_the_end
from vmckpt.state.documents import damaged, load_from
from vmckpt.state.durable import write_durably

POLL_S, LOOK_S = 0.1, 1.0
RECONNECT_S = 1.0
# Between the end of a process and what it wrote last.
LAST_WORDS_S = 3.0
START_TIMEOUT_S = 30.0
# In a run record's request: the host whose job it is.
JOB_ON = "job_on"


class WatchedNoLongerError(CancelledByUserError):
    """Asked to stop a second time: the migration goes on, or back, without this command."""


async def find_job(run: str) -> Host:
    """The host that a run is a job of. Raises NotFoundError, HostDownError when one is silent."""

    async def has_it(host: Host) -> Host | None:
        there = await host.exists(JobDir.of(host.state_dir, run).request)
        return host if there else None

    answers = await ask_every(all_hosts(), has_it)
    if found := next((host for host in answers.given if host), None):
        return found
    if answers.silent:
        raise answers.silent[0]
    raise NotFoundError(
        f"no host has a job '{run}'",
        why="it has ended, or never was one of a migration between two hosts elsewhere",
        remedy=f"see how it ended: vmckpt runs show {run}",
    )


async def watch(
    source: Host, run: str, emit: Emit, begun: ProcessId | None = None
) -> Report | Recovery:
    """Show a job's events from its beginning, over as many connections as it takes.

    `begun` is its process, where that is known already.
    A Recovery when the job was killed and its dead-man's switch has finished the migration. Raises
    what `run.migrate` raises. A cancellation cancels the job; a second one only stops watching.
    """
    emit = heard_or_not(emit)
    watching = asyncio.ensure_future(_Watch(source, run, emit, begun).to_the_end())
    interrupting: asyncio.Task[None] | None = None
    while not watching.done():
        try:
            await asyncio.wait({watching})
        except asyncio.CancelledError:
            if interrupting is not None:
                watching.cancel()
                await asyncio.wait({watching})
                raise WatchedNoLongerError(
                    "this command watches no longer",
                    why=f"asked to stop again before {source.name} had ended the migration",
                    remedy=f"see how it ends: vmckpt runs attach {run}",
                ) from None
            emit(Note(0.0, "cancel", f"asking {source.name} to cancel the migration"))
            interrupting = asyncio.create_task(_interrupt(source, run))
    if interrupting is not None:
        interrupting.cancel()
    return await to_the_end(_conclude(source, run, watching.result(), emit))


async def _interrupt(source: Host, run: str) -> None:
    """Have the job cancel itself, as soon as its host can be reached."""
    files = JobDir.of(source.state_dir, run)
    while True:
        with suppress(HostDownError):
            if process := await _process(source, files):
                await source.interrupt(process)
                return
        await asyncio.sleep(RECONNECT_S)


# Of a run's record: commands read all records, and one that is none would end them.
_RECORD: Shape = {
    "format": int,
    "began_unix_s": NUMBER,
    "request": {
        **dict.fromkeys(("vm?", "source?", "target?"), str),
        **dict.fromkeys(("disk_bytes??", "hole_pages??", "bandwidth_bytes_per_s??"), int),
    },
    "events": [{}],
    "samples": [{}],
    "result??": {
        "outcome": str,
        **dict.fromkeys(("total_time_s?", "transfer_time_s?"), NUMBER),
        **dict.fromkeys(("transferred_bytes?", "rounds?", "device_bytes?"), int),
        **dict.fromkeys(("device_out_s?", "device_back_s?"), NUMBER),
        **dict.fromkeys(("downtime_ms??", "guest_downtime_ms??"), NUMBER),
        "method?": str,
        "warnings?": [str],
    },
}
# Later ones have no date that can be shown.
LATEST_UNIX_S = 1 << 37


class _Watch:
    """Reads what a job tells, over as many connections as it takes."""

    def __init__(self, source: Host, run: str, emit: Emit, begun: ProcessId | None) -> None:
        self._source, self._run, self._emit, self._begun = source, run, emit, begun
        self._files = JobDir.of(source.state_dir, run)
        self._lines, self._offset = Lines(), 0
        self._lost, self._at_s = False, 0.0
        self._process: ProcessId | None = None
        self._looked_s: float | None = None
        self._died_s: float | None = None
        self._began_s = asyncio.get_running_loop().time()

    async def to_the_end(self) -> Result:
        """What stands in the job's result."""
        while True:
            try:
                if (result := await self._look()) is not None:
                    return result
                self._say_found()
                await self._source.await_path(self._files.result, POLL_S)
            except HostDownError as exc:
                self._say_lost(exc)
                await asyncio.sleep(RECONNECT_S)

    async def _look(self) -> Result | None:
        # Asked first: what it told before its end is whole then.
        text = await self._source.read_text(self._files.result)
        while data := await self._source.read_from(self._files.events, self._offset):
            self._offset += len(data)
            for event in self._lines.feed(data):
                self._at_s = max(self._at_s, event.at_s)
                self._emit(event)
        if text is not None:
            return RESULT.decode(text, self._files.result, self._source.name)
        await self._check_alive()
        return None

    async def _check_alive(self) -> None:
        now_s = asyncio.get_running_loop().time()
        if self._process is None:
            self._process = await _process(self._source, self._files)
        if self._process is None:
            await self._check_begins(now_s)
            return
        if self._looked_s is not None and now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        # The switch is there as long as the job, and then does its work.
        recovery = f"{self._run}\0--recover"
        if await self._source.is_alive(self._process) or await self._source.find_processes(
            recovery
        ):
            self._died_s = None
        elif self._died_s is None:
            self._died_s = now_s
        elif now_s - self._died_s > LAST_WORDS_S:
            raise OutcomeUnknownError(
                "nobody knows how the migration ended",
                why=f"its process on {self._source.name} is gone, and so is its dead-man's switch",
                remedy="vmckpt vm show VM ends what was cut off, and says where the VM is",
            )

    async def _check_begins(self, now_s: float) -> None:
        """A process that has not said yet that it works on it is still starting."""
        starts = self._begun is None or await self._source.is_alive(self._begun)
        if starts and now_s - self._began_s < START_TIMEOUT_S:
            return
        if await self._source.exists(self._files.process):
            return  # it has said so at this moment
        words = (await self._source.read_text(self._files.log) or "").strip()
        raise OperationFailedError(
            f"the migration does not begin on {self._source.name}",
            why=words[-300:] or f"no process within {START_TIMEOUT_S:g} s",
            remedy=f"vmckpt host check {self._source.name}",
        )

    def _say_lost(self, exc: HostDownError) -> None:
        if not self._lost:
            text = f"{exc.what}: {exc.why}; the migration goes on there, waiting to see it again"
            self._emit(Note(self._at_s, "connection", text))
        self._lost = True

    def _say_found(self) -> None:
        if self._lost:
            self._emit(Note(self._at_s, "connection", f"{self._source.name} answers again"))
        self._lost = False


async def _process(source: Host, files: JobDir) -> ProcessId | None:
    """Which process does it; None: it has not said so yet."""
    try:
        return await load_from(source, files.process, PROCESS)
    except StorageError:
        return None


async def _conclude(source: Host, run: str, result: Result, emit: Emit) -> Report | Recovery:
    """The result as a value or an error; the run record is fetched.

    That the record cannot be written is only said: how the migration ended comes first.
    """
    path = runs_dir() / f"{run}.json"
    error = unpack_error(list(result.error)) if result.error is not None else None
    recovery = result.recovery
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
    if result.report is None:
        raise OutcomeUnknownError(
            f"how the migration ended on {source.name} cannot be read",
            why="its result has neither a report nor an error",
            remedy=RESULT.remedy,
        )
    return replace(result.report, run_record=str(path))


async def _fetch(source: Host, path: Path) -> None:
    """Write the source's record of a run, unless it is silent or has none.

    In one step: on a full disk there is none here, and not a part of one. Raises StorageError, also
    when it is no record: what this machine has of the run stays then.
    """
    theirs = source.state_dir / "runs" / path.name
    text = None
    with suppress(HostDownError):
        text = await source.read_text(theirs)
    if not text:
        return
    try:
        data = parse(text, most_bytes=MOST_TEXT_BYTES)
        require(_RECORD, data)
        for told in (*data["events"], *({"event": "Progress", **one} for one in data["samples"])):
            from_record(told)
        if data["format"] != FORMAT:
            raise MalformedError("written by another version of vmckpt")
        if not 0 <= data["began_unix_s"] <= LATEST_UNIX_S:
            raise MalformedError(f"it began at {data['began_unix_s']}")
    except MalformedError as exc:
        raise damaged(theirs, str(exc), "see what that host runs", source.name) from exc
    data["forecast"] = None
    with suppress(NotFoundError):  # what was asked for is known here, unless that was elsewhere
        own = RunRecord.load(path)
        names = ("vm", "source", "target", JOB_ON)
        data["request"] |= {name: own.request[name] for name in names if name in own.request}
        data["forecast"] = own.forecast
    fields = {name: data.get(name) for name in RunRecord.__slots__}
    record = {"format": data["format"], **fields, "run": path.stem, "operation": "migrate"}
    write_durably(path, json.dumps(record))


def _complete(path: Path, result: dict[str, str]) -> None:
    """Say in a record that was cut off how the run ended."""
    with suppress(NotFoundError):
        record = RunRecord.load(path)
        if record.result is None:
            record.result = result
            record.save(path.parent)
