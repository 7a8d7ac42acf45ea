"""One migration from beginning to end: what holds it, what is checked, and its record."""

import asyncio
import secrets
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from vmckpt.errors import CancelledByUserError, VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.events.types import Emit, Event, Note, heard_or_not
from vmckpt.hosts.deadman import armed
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import state_dir
from vmckpt.migrate.check import WARN
from vmckpt.migrate.migration import Migration
from vmckpt.migrate.options import Options
from vmckpt.migrate.preflight import Preflight, preflight
from vmckpt.migrate.recover import locked
from vmckpt.migrate.report import Report
from vmckpt.vm.inventory import Vm
from vmckpt.vm.lifecycle import read_again
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.start import sweep


async def migrate(
    vm: Vm,
    target: Host,
    options: Options,
    emit: Emit,
    *,
    run: str | None = None,
    on_death: Sequence[str] | None = None,
    forecast: Mapping[str, Any] | None = None,
) -> Report:
    """Move the running `vm` to `target`; returns when the source holds nothing of it any more.

    Every event goes to `emit` and into the run record, with the `forecast` made beforehand. `run`
    is the run's id if it has one already, `on_death` the command that recovers the VM should this
    process die. Raises RefusedError (nothing was changed), BusyError, OperationFailedError or
    TimedOutError (undone: the VM is on the source), CancelledByUserError (likewise), VmLostError,
    OutcomeUnknownError (ask both ends).
    """
    run = run or new_run()
    request = request_of(vm, target, options)
    record = RunRecord(run, "migrate", request, forecast=forecast)
    began_s = time.monotonic()

    show = heard_or_not(emit)

    def tell(event: Event) -> None:
        record.add(event)
        show(event)

    def conclude(result: dict[str, object]) -> None:
        try:
            _save(record, result)
        except OSError as exc:
            words = f"the run record was not written: {exc}"
            show(Note(time.monotonic() - began_s, "record", words))

    try:
        action = f"migrate to {target.name}"
        async with (
            _dead_mans_switch(vm.name, run, on_death),
            locked(vm.name, (vm.host,), action, run),
        ):
            vm = await read_again(vm)
            checked = await preflight(vm, target, options)
            checked.require(vm.name, target.name)
            request["disk_bytes"] = sum(copy.allocated_bytes for copy in checked.copies)
            _save(record, None)
            for code, text in _findings(options, checked):
                tell(Note(time.monotonic() - began_s, code, text))
            async with locked(vm.name, (target,), action, run):
                there = vm_dir(target.state_dir, vm.name)
                if not await target.exists(there.journal):
                    await sweep(target, vm.spec, there, None)
                migration = Migration(vm, target, checked, run=run, began_s=began_s, emit=tell)
                report = await migration.run()
    except asyncio.CancelledError as exc:
        error = CancelledByUserError(
            "the migration was cancelled",
            why="asked to stop",
            remedy=f"'{vm.name}' goes on where it was",
        )
        conclude({"outcome": error.kind})
        raise error from exc
    except VmckptError as exc:
        conclude({"outcome": exc.kind, "what": exc.what, "why": exc.why, "remedy": exc.remedy})
        raise
    warnings = tuple(check.reason for check in checked.checks if check.verdict == WARN)
    record_path = str(runs_dir() / f"{run}.json")
    report = replace(
        report, requested_method=options.method, warnings=warnings, run_record=record_path
    )
    conclude(report.to_json())
    return report


def _findings(asked: Options, checked: Preflight) -> Iterator[tuple[str, str]]:
    """What the operator should know beforehand, each with its code."""
    if asked.method is not checked.options.method:
        yield "method", f"auto comes to {checked.options.method} here"
    yield from ((check.code, check.reason) for check in checked.checks if check.verdict == WARN)


@asynccontextmanager
async def _dead_mans_switch(
    name: str, run: str, on_death: Sequence[str] | None
) -> AsyncIterator[None]:
    """For the block: if this process dies in it, another one recovers the VM at once."""
    runs_dir().mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "vmckpt.cli.entry", "migrate", "--recover", name, "--json"]
    with armed(on_death or command, runs_dir() / f"{run}.recovery.log"):
        yield


def runs_dir() -> Path:
    """Where the run records of this machine's commands stand."""
    return state_dir() / "runs"


def new_run() -> str:
    """The id of a run that begins now."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


def request_of(vm: Vm, target: Host, options: Options) -> dict[str, object]:
    """What was asked for, for the run record."""
    plain = asdict(options)
    return {"vm": vm.name, "source": vm.host.name, "target": target.name} | plain


def _save(record: RunRecord, result: dict[str, object] | None) -> None:
    record.result = result
    record.save(runs_dir())
