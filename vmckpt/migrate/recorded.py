"""The frame of every migration, of VMs and domains: its events and its record."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from vmckpt.codec import builtins
from vmckpt.errors import CancelledByUserError, VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Emit, Event, Note, unless_gone
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import own_command
from vmckpt.jobs.files import new_run
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.finding import WARN, Finding
from vmckpt.units import format_duration

if TYPE_CHECKING:
    from vmckpt.migrate.report import MigrationReport


class MigrationRun:
    """One migration's record. The migration reports to it, and calls `begin` and `end`.

    `began_s` is on the monotonic clock.
    """

    def __init__(
        self,
        run: str,
        request: Mapping[str, object],
        options: MigrationOptions,
        emit: Emit,
        forecast: Mapping[str, Any] | None = None,
    ) -> None:
        self.id = run
        self.began_s = time.monotonic()
        self._options, self._show = options, unless_gone(emit)
        self._record = RunRecord(run, "migrate", request, forecast=forecast)

    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self.began_s

    def tell(self, event: Event) -> None:
        """Record an event, and show it."""
        self._record.add(event)
        self._show(event)

    def note(self, code: str, text: str) -> None:
        """Report something that the operator should know."""
        self.tell(Note(self.elapsed_s(), code, text))

    def begin(self, settled: MigrationOptions, checks: Sequence[Finding]) -> None:
        """The checks are passed: from here on the record exists in any case."""
        self._record.save(runs_dir())
        for code, text in self._findings(settled, checks):
            self.note(code, text)

    def _findings(
        self, settled: MigrationOptions, checks: Sequence[Finding]
    ) -> Iterator[tuple[str, str]]:
        """What the operator should know beforehand, with codes."""
        if self._options.method is not settled.method and not settled.offline:
            over = f", over {settled.channels} channels" if settled.channels else ""
            stop = ": the guest is paused while its memory is sent"
            over = stop if settled.method is Method.STOP else over
            yield "method", f"auto selected {settled.method}{over}"
        yield from ((check.code, check.reason) for check in checks if check.verdict == WARN)

    def end(self, report: "MigrationReport", checks: Sequence[Finding]) -> "MigrationReport":
        """It succeeded: the report, with the request and the warnings."""
        report = replace(
            report,
            requested_method=self._options.method,
            warnings=tuple(check.reason for check in checks if check.verdict == WARN),
            run_record=str(runs_dir() / f"{self.id}.json"),
        )
        self.conclude(builtins(report))
        return report

    def conclude(self, result: dict[str, object]) -> None:
        """Write the record with its result; a failure to write it is only reported."""
        self._record.result = result
        try:
            self._record.save(runs_dir())
        except OSError as exc:
            self._show(Note(self.elapsed_s(), "record", f"the run record was not written: {exc}"))


@asynccontextmanager
async def recorded(
    request: Mapping[str, object],
    options: MigrationOptions,
    emit: Emit,
    run_id: str | None = None,
    *,
    forecast: Mapping[str, Any] | None = None,
) -> AsyncIterator[MigrationRun]:
    """A run for the block, with the given id if any; an error of the block completes its record.

    A violated constraint is reported at once. A cancellation becomes CancelledByUserError, which
    propagates once everything is undone.
    """
    run = MigrationRun(run_id or new_run(), request, options, emit, forecast)
    late = None
    if (within_s := options.finish_within_s) is not None:
        text = (
            f"not done within {format_duration(within_s)}, contrary to the forecast: it continues"
        )
        late = asyncio.get_running_loop().call_later(within_s, run.note, "late", text)
    try:
        yield run
    except asyncio.CancelledError as exc:
        error = CancelledByUserError(
            "the migration was cancelled",
            why="asked to stop",
            remedy=where_it_was(request["vm"], options),
        )
        run.conclude({"outcome": error.kind})
        raise error from exc
    except VmckptError as exc:
        run.conclude({"outcome": exc.kind, "what": exc.what, "why": exc.why, "remedy": exc.remedy})
        raise
    finally:
        if late:
            late.cancel()


@asynccontextmanager
async def dead_mans_switch(name: str, run: str) -> AsyncIterator[None]:
    """If this process dies in the block, another process recovers the VM at once."""
    runs_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    # A domain's name may begin with a dash.
    command = [*own_command(), "migrate", "--recover", "--insist", "--json", "--", name]
    with armed(command, runs_dir() / f"{run}.recovery.log"):
        yield


def where_it_was(vm: object, options: MigrationOptions) -> str:
    """What happens to a VM that was not moved, in words."""
    return f"'{vm}' {'is off' if options.offline else 'goes on'} where it was"


def request_of(vm: str, ends: tuple[Host, Host], options: MigrationOptions) -> dict[str, object]:
    """The request, for the run record."""
    facts = asdict(options)
    if options.at_target is not None:
        facts["at_target"] = options.at_target.recorded()
    return {"vm": vm, "source": ends[0].name, "target": ends[1].name} | facts
