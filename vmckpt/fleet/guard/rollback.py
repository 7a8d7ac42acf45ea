"""Roll a VM back to its guard's checkpoint, wherever it is now."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry, catalogue
from vmckpt.checkpoint.jobs import RESTORE, Restore
from vmckpt.checkpoint.operate import restore_to
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.drivers.driver import Driver
from vmckpt.drivers.find import require_own
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    StorageError,
    VmckptError,
)
from vmckpt.fleet.guard.command import end_worker, environment
from vmckpt.fleet.guard.health import health_problems, parse_command
from vmckpt.fleet.guard.record import (
    GuardPhase,
    GuardRecord,
    GuardRestore,
    ended,
    load,
    save,
)
from vmckpt.fleet.schedule.run import clock
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts, find_host
from vmckpt.jobs.handle import attach, revoke

# How long to wait for operations that the command left running on the VM, such as a migration.
BUSY_S, BUSY_POLL_S = 120.0, 0.5
HOOK_TIMEOUT_S = 600.0
Tell = Callable[[str], None]
Find = Callable[[str, Tell], Awaitable[Driver]]


class GuardOpenError(OutcomeUnknownError):
    """A guard has neither succeeded nor rolled back: the operator must decide."""


def left_open(record: GuardRecord, why: str) -> GuardOpenError:
    """The error for a guard that is left open."""
    return GuardOpenError(
        f"the guard of '{record.vm}' is open",
        why=why,
        remedy=f"vmckpt guard rollback {record.vm}, or vmckpt guard commit {record.vm}; "
        "its checkpoint stays until then",
    )


async def point_of(record: GuardRecord) -> CatalogueEntry:
    """The guard's checkpoint. Raises NotFoundError, StorageError."""
    if record.checkpoint is None:
        raise NotFoundError(
            f"the guard of '{record.vm}' has no checkpoint",
            why="it was interrupted before that",
            remedy=f"end it: vmckpt guard resume {record.vm}",
        )
    found = await catalogue(all_hosts(), record.request.store, vm=record.vm)
    return found.find(record.checkpoint)


async def roll_back(
    record: GuardRecord, why: str, find: Find, tell: Tell, *, is_confirmed: bool = False
) -> GuardRecord:
    """End the command, roll the VM back, and run the commands for after that.

    If `record.restore` has already restored it, it is not restored again: the guest has run since.
    With `is_confirmed` it is rolled back even if it is uncertain whether the command has ended
    (`end_worker`), or whether it was restored; and again if it does not run. Raises GuardOpenError
    if it cannot be rolled back now.
    """
    record = _noted(record, tell, phase=GuardPhase.ROLLING_BACK, why=why)
    tell(f"rolling back: {why}")
    but = "not rolled back"
    try:
        if record.worker is not None:
            await end_worker(
                find_host(record.worker.host), record.worker, is_confirmed=is_confirmed
            )
        if not await _was_put_back(record, find, tell, is_confirmed=is_confirmed):
            record = await _put_back(record, find, tell)
        but = "it was rolled back, but"
        vm = await _require_well(record, find, tell)
    except VmckptError as exc:
        with suppress(VmckptError):  # its restore may have begun, and failed to report
            record = load(record.run)
        record = _noted(record, tell, phase=GuardPhase.OPEN, why=f"{why}; {but}: {exc}")
        raise left_open(record, record.why) from exc
    record = _noted(record, tell, **ended(record, GuardPhase.ROLLED_BACK, clock()), worker=None)
    for words in record.request.after_rollback:
        await run_hook(words, record, vm.host, tell)
    return record


def _noted(record: GuardRecord, tell: Tell, **changes: Any) -> GuardRecord:
    """The record with changes. A write error does not prevent the rollback."""
    try:
        return save(record, **changes)
    except StorageError as exc:
        tell(f"{exc.what}: {exc.why}")
        return replace(record, **changes)


async def _was_put_back(record: GuardRecord, find: Find, tell: Tell, *, is_confirmed: bool) -> bool:
    """Whether the recorded restore put the VM back; a running one is cancelled first.

    With `is_confirmed` only if the VM runs. Raises OutcomeUnknownError: it may have, and the VM
    runs.
    """
    if record.restore is None:
        return False
    host = find_host(record.restore.host)
    await _revoke_restores(record, host)
    job = attach(RESTORE, host, record.restore.run)
    outcome = await job.outcome_so_far()
    if outcome is not None:
        return outcome.result is not None and (not is_confirmed or await _runs(record, find, tell))
    if await host.exists(job.files.path) and await job.worker() is None:
        return False  # it never began
    try:
        vm = await find(record.vm, tell)
    except NotFoundError:
        return False
    if is_confirmed or await vm.restore_is_cut_off():
        return False
    if (await vm.inspect()).is_on:
        raise OutcomeUnknownError(
            f"it is unknown whether '{record.vm}' was rolled back",
            why=f"restore {record.restore.run} on {host.name} left no outcome, and the VM runs",
            remedy="check what the guest has done since: a rollback discards it",
        )
    return False


async def was_restored(record: GuardRecord, tell: Tell) -> bool:
    """Whether an interrupted rollback has restored the VM; a running one is cancelled first.

    False if its host does not say, which is reported. Raises BusyError: it does not end.
    """
    if record.restore is None:
        return False
    try:
        host = find_host(record.restore.host)
        await _revoke_restores(record, host)
        outcome = await attach(RESTORE, host, record.restore.run).outcome_so_far()
    except (HostDownError, NotFoundError, StorageError) as exc:
        tell(f"whether '{record.vm}' was rolled back is unknown: {exc}")
        return False
    return outcome is not None and outcome.result is not None


async def _runs(record: GuardRecord, find: Find, tell: Tell) -> bool:
    try:
        return not await health_problems(await find(record.vm, tell), ())
    except NotFoundError:
        return False


async def _revoke_restores(record: GuardRecord, host: Host) -> None:
    """A killed guard's job that restored the VM after us would discard what it did since."""

    def puts_back(vm: str, restore: Restore) -> bool:
        return (vm, restore.checkpoint) == (record.vm, record.checkpoint)

    await revoke(RESTORE, host, puts_back)


async def _put_back(record: GuardRecord, find: Find, tell: Tell) -> GuardRecord:
    entry = await point_of(record)
    given_up_s = time.monotonic() + BUSY_S
    while True:
        try:
            host, in_place = await _home(record, find, tell)
            await _revoke_restores(record, host)
            if in_place:
                await require_own(record.vm, host)
            options = RestoreOptions(
                name=None, in_place=in_place, eager=False, plugged=True, keep_macs=True
            )

            def note(run: str, host: Host = host) -> None:
                nonlocal record
                record = _noted(record, tell, restore=GuardRestore(host.name, run))

            await restore_to(host, entry, options, tell, on_start=note)
            return record
        except BusyError as exc:
            if time.monotonic() > given_up_s:
                raise
            tell(f"waiting: {exc.why}")
        await asyncio.sleep(BUSY_POLL_S)


async def _require_well(record: GuardRecord, find: Find, tell: Tell) -> Driver:
    vm = await find(record.vm, tell)
    if found := await health_problems(vm, ()):
        raise OutcomeUnknownError(
            f"'{record.vm}' was rolled back and does not run",
            why="; ".join(found),
            remedy=f"see vmckpt vm show {record.vm}",
        )
    return vm


async def _home(record: GuardRecord, find: Find, tell: Tell) -> tuple[Host, bool]:
    """The host for the rollback, and whether something of the VM is there."""
    try:
        return (await find(record.vm, tell)).host, True
    except NotFoundError:
        if record.host is None:
            raise
        return find_host(record.host), False


async def run_hook(words: str, record: GuardRecord, host: Host, tell: Tell) -> None:
    """Run a command after a rollback. A failure is only reported: the VM is back."""
    try:
        child = await asyncio.create_subprocess_exec(
            *parse_command(words),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=2,
            env=environment(record, host.name),
        )
    except OSError as exc:
        tell(f"after the rollback: {words}: {exc.strerror}")
        return
    try:
        async with asyncio.timeout(HOOK_TIMEOUT_S):
            code = await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()
        tell(f"after the rollback: {words}: no end within {HOOK_TIMEOUT_S:g} s, killed")
        return
    if code:
        tell(f"after the rollback: {words}: exit status {code}")
