"""Kinds of job, their request (`JobOrder`) and their result (`Outcome`)."""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Generic, NamedTuple, TypeVar

from vmckpt.codec import builtins, convert
from vmckpt.errors import NotFoundError, StorageError
from vmckpt.events.lines import to_line
from vmckpt.events.types import Emit, Event, ignore_event, unless_gone
from vmckpt.foreign import MalformedError
from vmckpt.hosts.host import HostEntry, entry_fields
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.values import pack_error
from vmckpt.jobs.files import JobFiles
from vmckpt.state.documents import Schema
from vmckpt.state.durable import fill, reserve

Q = TypeVar("Q")
R = TypeVar("R")
# Reserved up front, so that a full disk cannot lose the outcome (a few KiB).
OUTCOME_BYTES = 64 << 10
# Events kept in memory while the disk is full; later ones are dropped.
UNWRITTEN_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class JobOrder:
    """order.json: the VM, its host, and the request of the kind."""

    host: HostEntry
    vm: str
    request: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """outcome.json: the kind's result, or `error` as `pack_error` has it.

    A job may report its result before it has finished. Until `is_final`, an error replaces it;
    `is_over`: the job has finished.
    """

    result: Mapping[str, Any] | None = None
    error: tuple[str, ...] | None = None
    is_final: bool = True
    is_over: bool = True


ORDER = Schema(JobOrder, "see `vmckpt vm list`")
OUTCOME = Schema(Outcome, "`vmckpt vm list` shows where the VM is and how", omits_none=True)


class Job(Generic[Q, R]):
    """One job, as seen by the process that works on it or recovers it."""

    def __init__(self, files: JobFiles, host: LocalHost, vm: str, request: Q) -> None:
        self.files, self.host, self.vm, self.request = files, host, vm, request
        self.emit: Emit = ignore_event
        self._outcome: Outcome | None = None

    @property
    def run(self) -> str:
        """The run's id."""
        return self.files.run

    @property
    def outcome(self) -> Outcome | None:
        """The outcome so far."""
        return self._outcome

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Write events to the job's file for the duration of the block. Raises OSError."""
        with self.files.events.open("ab", buffering=0) as lines:
            self.emit = writer(lines)
            yield

    def reserve(self) -> None:
        """Reserve disk space for the outcome. Raises StorageError."""
        reserve(self.files.outcome, OUTCOME_BYTES)

    def resume(self) -> None:
        """Load the outcome that the dead process reported. Raises StorageError."""
        path = self.files.outcome
        if path.exists():
            self._outcome = OUTCOME.decode(path.read_bytes(), path, any_text=True)

    def tell(self, result: R, *, is_final: bool) -> None:
        """Report the result before the job has finished.

        If it cannot be written now, as on a full disk, it is with the end of the job, which has its
        room: what was done is done.
        """
        self._outcome = Outcome(builtins(result), None, is_final, is_over=False)
        part = self.files.outcome.with_name(".told")
        with suppress(OSError):
            part.write_text(OUTCOME.encode(self._outcome))
            part.rename(self.files.outcome)

    def succeed(self, result: R | None) -> None:
        """Finish with this result, or with the one already reported. Raises StorageError."""
        plain = None if result is None else builtins(result)
        if plain is None and self._outcome is not None:
            plain = self._outcome.result
        self._end(Outcome(plain))

    def fail(self, error: Exception) -> None:
        """Finish with an error; a final result is kept. Raises StorageError."""
        before = self._outcome
        stays = before.result if before is not None and before.is_final else None
        self._end(Outcome(stays, tuple(pack_error(error, self.host.name))))

    def _end(self, outcome: Outcome) -> None:
        self._outcome = outcome
        fill(self.files.outcome, OUTCOME.encode(outcome))


class JobWorker(NamedTuple, Generic[R]):
    """The two entry points of a job.

    `work` returns the result, or None if it was reported already. `recover` runs after the worker
    process died: it finishes or undoes the work, and returns like `work` or raises the error to
    report.
    """

    work: Callable[[], Awaitable[R | None]]
    recover: Callable[[], Awaitable[R | None]]


class JobKind(NamedTuple, Generic[Q, R]):
    """A kind of job.

    `worker` is a context that is left after the outcome was written, also for a revoked job: it
    releases what the order holds outside the job's directory.

    `what`: the noun in messages ("checkpoint"). `kept_s`: how long finished jobs are kept.
    """

    name: str
    what: str
    request: type[Q]
    result: type[R]
    worker: Callable[[Job[Q, R]], AbstractAsyncContextManager[JobWorker[R]]]
    kept_s: float = 86_400.0

    def order(self, host: Any, vm: str, request: Q) -> JobOrder:
        """Build an order for a host (`HostEntry` or `Host`)."""
        return JobOrder(HostEntry(**entry_fields(host)), vm, builtins(request))

    def read_order(self, data: bytes | str, path: Path, host: str = "") -> tuple[JobOrder, Q]:
        """Decode an order. Raises StorageError: damaged, or written by another version."""
        order = ORDER.decode(data, path, host, any_text=True)
        try:
            return order, convert(self.request, order.request)
        except MalformedError as exc:
            raise ORDER.damaged(path, str(exc), host) from exc

    def job(self, files: JobFiles) -> Job[Q, R]:
        """Load a local job. Raises NotFoundError."""
        try:
            order, request = self.read_order(files.order.read_bytes(), files.order)
        except (OSError, StorageError) as exc:
            raise NotFoundError(
                f"there is no {self.what} '{files.run}' here", why=str(exc), remedy=ORDER.remedy
            ) from exc
        return Job(files, LocalHost(**entry_fields(order.host)), order.vm, request)


def writer(lines: BinaryIO) -> Emit:
    """An emitter that appends lines; on a full disk it buffers them and never fails the job."""
    unwritten = bytearray()

    def tell(event: Event) -> None:
        if len(unwritten) < UNWRITTEN_BYTES:
            unwritten.extend(to_line(event).encode())
        # After a short write the rest of the line follows later.
        del unwritten[: lines.write(unwritten)]

    return unless_gone(tell)
