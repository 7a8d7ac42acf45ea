"""The operator's side: start, watch, cancel, revoke, or reattach to a job."""

import asyncio
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, TypeVar

from vmckpt.codec import convert
from vmckpt.deadlines import poll
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    StorageError,
)
from vmckpt.events.lines import Lines
from vmckpt.events.trace import flags, relay
from vmckpt.events.types import Emit, Note, unless_gone
from vmckpt.foreign import MalformedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import PROCESS, ProcessId
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.jobs.files import JobFiles, jobs_dir
from vmckpt.jobs.kind import ORDER, OUTCOME, JobKind, Outcome
from vmckpt.jobs.serve import command, recovery
from vmckpt.state.documents import load_from, save_to

Q = TypeVar("Q")
R = TypeVar("R")
# Poll intervals: for events and the outcome, and for the process.
POLL_S, ALIVE_S = 0.02, 1.0
RECONNECT_S = 1.0
# Grace period after a process has ended, for its last output.
LAST_LINES_S = 3.0
START_TIMEOUT_S = 30.0
# Time limit for a cancelled job to undo its work.
END_S = 120.0


class Handle(NamedTuple, Generic[Q, R]):
    """A job on a host; `process` is set if this command started it."""

    kind: JobKind[Q, R]
    host: Host
    files: JobFiles
    process: ProcessId | None = None

    async def give(self, vm: str, request: Q) -> None:
        """Write the order that the process waits for. Raises StorageError, HostDownError."""
        order = self.kind.order(self.host, vm, request)
        await save_to(self.host, self.files.order, ORDER, order)

    async def outcome(self, emit: Emit, *, patience_s: float = 0.0) -> R:
        """Wait for the final result; pass all events to `emit`, from the first one on.

        An unreachable host is retried for `patience_s`. Raises the job's error; HostDownError;
        OperationFailedError: it did not start; OutcomeUnknownError: it ended without an outcome.
        """
        found = await _Watch(self, unless_gone(emit), patience_s).to_the_end()
        return self.result_of(found)

    def result_of(self, found: Outcome) -> R:
        """Decode an outcome's result. Raises its error; OutcomeUnknownError."""
        if found.result is None and found.error is not None:
            raise unpack_error(list(found.error))
        try:
            return convert(self.kind.result, found.result)
        except MalformedError as exc:
            raise OutcomeUnknownError(
                f"the result of the {self.kind.what} on {self.host.name} cannot be read",
                why=f"its result is malformed: {exc}",
                remedy="`vmckpt vm list` shows where the VM is and its state",
            ) from exc

    async def outcome_so_far(self) -> Outcome | None:
        """The outcome so far. Raises StorageError, HostDownError."""
        return await load_from(self.host, self.files.outcome, OUTCOME)

    async def worker(self) -> ProcessId | None:
        """The worker process; None: not known yet."""
        if self.process is not None:
            return self.process
        with suppress(StorageError):
            return await load_from(self.host, self.files.process, PROCESS)
        return None

    async def cancel(self, what: str, within_s: float | None = None) -> None:
        """Cancel it and wait, 120 s by default, until it has undone its work. `what`: for messages.

        If its process is not known, it may still be starting: then it will not begin. Raises
        BusyError: it did not end.
        """
        process = await self.worker()
        if process is None:
            await self.revoke()
            process = await self.worker()
        if process is None:
            return
        within_s = END_S if within_s is None else within_s
        await self.host.interrupt(process)
        if not await self.ended(within_s):
            raise BusyError(
                f"{what} on {self.host.name} has not ended",
                why=f"its process {process.pid} there was asked to {within_s:g} s ago; it is "
                "frozen, or waits for its storage",
                remedy="restore access to its storage, or kill it on that host: its work is "
                "then undone",
            )

    async def withdraw(self, what: str) -> None:
        """Take back a job whose order may have arrived: it has ended, and its files are gone.

        What its order names outside its files may be removed afterwards, not before. Raises
        OutcomeUnknownError: its host does not answer, or can write nothing and its process is not
        known; BusyError as `cancel`. Its files stay then.
        """
        try:
            await self.cancel(what)
            await self.remove()
        except (HostDownError, StorageError) as exc:
            raise OutcomeUnknownError(
                f"it is unknown whether {what} has begun on {self.host.name}",
                why=f"{exc.what}: {exc.why}",
                remedy="`vmckpt vm list` shows the VM's state, once that host answers",
            ) from exc

    async def revoke(self) -> None:
        """Keep it from beginning. Only then read process.json: a later process sees this."""
        await self.host.write_text(self.files.revoked, "")

    async def ended(self, within_s: float) -> bool:
        """Wait up to `within_s` for its process to end; returns whether it has."""
        process = await self.worker()
        return process is None or await ended(self.host, process, within_s)

    async def remove(self) -> None:
        """Remove its files; a job without an order then ends. Raises HostDownError."""
        await self.host.remove(self.files.path)


async def begin(kind: JobKind[Q, R], host: Host, run: str, *, last: bool = False) -> Handle[Q, R]:
    """Start a job's process, which waits for its order. `last`: at low priority, below guests.

    It ends if its directory is removed or no order arrives. If the connection breaks meanwhile, the
    handle has no process, and whether it started shows on the host. Raises StorageError,
    HostDownError.
    """
    files = JobFiles.of(host.state_dir, kind.name, run)
    await host.make_dir(files.path)
    words = command(await host.own_command(), kind.name, files.path)
    options = [*(["--last"] if last else []), *flags()]
    process = None
    with suppress(OutcomeUnknownError):
        process = await host.spawn([*words, *options], files.log)
    return Handle(kind, host, files, process)


def attach(kind: JobKind[Q, R], host: Host, run: str) -> Handle[Q, R]:
    """A handle for a job that was started earlier."""
    return Handle(kind, host, JobFiles.of(host.state_dir, kind.name, run))


async def ended(host: Host, process: ProcessId, within_s: float) -> bool:
    """Wait up to `within_s` for a process to end; returns whether it has."""
    return not await poll(
        lambda: host.is_alive(process), operator.not_, every_s=POLL_S, within_s=within_s
    )


async def revoke(kind: JobKind[Q, Any], host: Host, unwanted: Callable[[str, Q], bool]) -> None:
    """Cancel the jobs of a kind that are `unwanted`, by VM and request, and wait for their undo.

    For jobs of a command that was killed. A job that has not started never will; reported results
    stand. Raises BusyError: one did not end.
    """
    for run in await host.list_dir(jobs_dir(host.state_dir, kind.name)):
        job = attach(kind, host, run)
        text = await host.read_text(job.files.order)
        try:
            order, request = kind.read_order(text or "", job.files.order, host.name)
        except StorageError:
            continue  # no order yet, or one of another version
        if not unwanted(order.vm, request):
            continue
        await job.revoke()
        outcome = None
        with suppress(StorageError):
            outcome = await job.outcome_so_far()
        if outcome is None:
            await job.cancel(f"the {kind.what} of '{order.vm}'")


class _Watch:
    """Follows a job's events and outcome across reconnects."""

    def __init__(self, job: Handle[Any, Any], emit: Emit, patience_s: float) -> None:
        self._job, self._host, self._files = job, job.host, job.files
        self._emit, self._patience_s = emit, patience_s
        self._lines, self._offset = Lines(), 0
        self._traced, self._traced_bytes = b"", 0
        self._at_s = 0.0
        self._process: ProcessId | None = None
        self._checked_s: float | None = None
        self._died_s: float | None = None
        self._lost_s: float | None = None
        self._clock = asyncio.get_running_loop().time
        self._began_s = self._clock()

    async def to_the_end(self) -> Outcome:
        """The final outcome, or the last one that a dead process reported."""
        while True:
            try:
                found = await self._read()
                self._say_found()
                if found is not None and found.is_final:
                    return found
                if found is not None and self._died_s is not None:
                    # It may have failed after this was read.
                    return await self._job.outcome_so_far() or found
                if found is None:
                    await self._host.await_path(self._files.outcome, POLL_S)
                else:
                    await asyncio.sleep(POLL_S)
            except HostDownError as exc:
                now_s = self._clock()
                self._lost_s = now_s if self._lost_s is None else self._lost_s
                if now_s - self._lost_s >= self._patience_s:
                    raise
                self._say_lost(exc, is_new=now_s == self._lost_s)
                await asyncio.sleep(RECONNECT_S)

    async def _read(self) -> Outcome | None:
        # Read first: then all events up to it are complete.
        found = await self._job.outcome_so_far()
        while data := await self._host.read_from(self._files.events, self._offset):
            self._offset += len(data)
            for event in self._lines.feed(data):
                self._at_s = max(self._at_s, event.at_s)
                self._emit(event)
        if flags():
            await self._relay_trace()
        if found is None or not found.is_final:
            await self._check_alive(has_ended=found is not None)
        return found

    async def _relay_trace(self) -> None:
        while data := await self._host.read_from(self._files.trace, self._traced_bytes):
            self._traced_bytes += len(data)
            *whole, self._traced = (self._traced + data).split(b"\n")
            for line in whole:
                relay(line.decode(errors="replace"))

    async def _check_alive(self, *, has_ended: bool) -> None:
        now_s = self._clock()
        if self._process is None:
            with suppress(StorageError):
                self._process = await load_from(self._host, self._files.process, PROCESS)
        if self._process is None:
            await self._check_begins(now_s)
            return
        if self._checked_s is not None and now_s - self._checked_s < ALIVE_S:
            return
        self._checked_s = now_s
        if await self._host.is_alive(self._process) or (
            not has_ended and await self._is_being_recovered()
        ):
            self._died_s = None
            return
        self._died_s = now_s if self._died_s is None else self._died_s
        if not has_ended and now_s - self._died_s > LAST_LINES_S:
            words = (await self._host.read_text(self._files.log) or "").strip().splitlines()
            raise OutcomeUnknownError(
                f"it is unknown how the {self._job.kind.what} ended",
                why=f"its process on {self._host.name} is gone, and so is its dead-man's switch"
                + "".join(f"; {line}" for line in words[-2:]),
                remedy="vmckpt vm show VM recovers what was interrupted, and says where the VM is",
            )

    async def _is_being_recovered(self) -> bool:
        # The switch waits beside the job, and runs the recovery when the job dies.
        mark = "\0".join(recovery((), self._job.kind.name, self._files.path))
        return bool(await self._host.find_processes(mark))

    async def _check_begins(self, now_s: float) -> None:
        """Without process.json the process is still starting, or failed to."""
        begun = self._job.process
        starts = begun is None or await self._host.is_alive(begun)
        if starts and now_s - self._began_s < START_TIMEOUT_S:
            return
        if (
            await self._host.exists(self._files.process)
            or await self._job.outcome_so_far() is not None
        ):
            return  # it has just started
        words = (await self._host.read_text(self._files.log) or "").strip()
        silence = f"no process within {START_TIMEOUT_S:g} s" if starts else "its process was killed"
        raise OperationFailedError(
            f"the {self._job.kind.what} did not start on {self._host.name}",
            why=words[-300:] or silence,
            remedy=f"vmckpt host check {self._host.name}",
        )

    def _say_lost(self, exc: HostDownError, *, is_new: bool) -> None:
        if is_new:
            text = f"{exc.what}: {exc.why}; the job continues there; waiting to reconnect"
            self._emit(Note(self._at_s, "connection", text))

    def _say_found(self) -> None:
        if self._lost_s is not None:
            self._emit(Note(self._at_s, "connection", f"{self._host.name} answers again"))
        self._lost_s = None
