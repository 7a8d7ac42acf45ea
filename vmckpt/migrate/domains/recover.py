"""Cleanup after a domain's migration whose command died; libvirt itself continued it."""

import asyncio
from collections.abc import Callable

from vmckpt.errors import HostDownError, NotFoundError, OutcomeUnknownError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.migrate.domains.hold import restore_downtime_limit
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import (
    describe,
    inspect,
    lost,
    settle,
    settle_off,
    unknown,
)
from vmckpt.migrate.domains.settle_lost import settle_lost
from vmckpt.migrate.domains.tidy import leave_on_destination, leave_on_source
from vmckpt.migrate.domains.whereabouts import DomainMove, decide_left
from vmckpt.migrate.locks import wait_for_locks
from vmckpt.migrate.outcome.recover import FINISHED, UNDONE, Recovery
from vmckpt.migrate.steps.disk_files import keep_files

LAST_STEP = "transfer"


async def recover(name: str, note: Callable[[str], None]) -> Recovery | None:
    """Wait for the end of an interrupted migration, and clean up; None if there is none.

    Remains of earlier ones on formerly silent hosts are removed if these answer now. Raises
    BusyError while a command works on it, VmLostError, OutcomeUnknownError.
    """
    journal = await DomainJournal.read(name)
    if journal is not None and not journal.has_ended:
        return await _end(journal, note)
    for left in await DomainJournal.all_left(name):
        await _tidy(left, note)
    return None


async def _end(journal: DomainJournal, note: Callable[[str], None]) -> Recovery | None:
    ends = _ends(journal)
    async with await wait_for_locks(journal.vm, journal.run, ends):
        if await DomainJournal.read(journal.vm) != journal:
            return None
        note(f"run {journal.run} was interrupted: asking both libvirtds")
        releasing = asyncio.ensure_future(restore_downtime_limit(journal, ends[0]))
        try:
            if journal.offline:
                move, view = await settle_off(journal, ends)
            else:
                move, view = await settle(journal, ends, note)
        finally:
            releasing.cancel()
            await asyncio.wait({releasing})
        if move is DomainMove.DESTINATION_OWNS:
            await leave_on_destination(journal, ends, note)
            where, outcome = ends[1], FINISHED
        elif move is DomainMove.SOURCE_OWNS:
            await leave_on_source(journal, ends[1], note)
            where, outcome = ends[0], UNDONE
        elif move is DomainMove.LOST:
            await settle_lost(journal, view, ends, note)
            raise lost(journal, view, ends)
        else:
            raise await unknown(journal, move, view, ends)
    return Recovery(journal.run, journal.vm, where.name, LAST_STEP, outcome)


def _ends(journal: DomainJournal) -> tuple[Host, Host]:
    """Both hosts. Raises OutcomeUnknownError if one is no longer in the inventory."""
    try:
        return find_host(journal.source), find_host(journal.target)
    except NotFoundError as exc:
        raise OutcomeUnknownError(
            f"it is unknown where '{journal.vm}' runs: {exc.what}",
            why=f"run {journal.run}, from {journal.source} to {journal.target}, was "
            "interrupted, and both have to be asked",
            remedy=f"add the host again (vmckpt host add), then: vmckpt migrate --recover "
            f"{journal.vm}; if it is gone for good, see where the domain runs (virsh list), and "
            f"remove {journal.path}",
        ) from exc


async def _tidy(left: DomainJournal, note: Callable[[str], None]) -> None:
    """Clean up the end that was silent when a migration ended; tried once."""
    try:
        ends = find_host(left.source), find_host(left.target)
    except NotFoundError as exc:
        note(f"{exc.what}: what run {left.run} left of '{left.vm}' on {left.untidy} stays there")
        await left.remove()
        return
    try:
        async with await wait_for_locks(left.vm, left.run, ends):
            # Another command may have cleaned up meanwhile, or moved it on.
            if left in await DomainJournal.all_left(left.vm):
                await _tidy_held(left, ends, note)
    except (HostDownError, RefusedError) as exc:
        note(f"{exc.what}: what is left of '{left.vm}' on {left.untidy} is removed later")


async def _tidy_held(
    left: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    view = await inspect(left.uuid, ends)
    has_it = decide_left(view, moved=left.moved)
    if has_it is DomainMove.WAIT:
        seen = describe(view, ends)
        note(f"what is left of '{left.vm}' on {left.untidy} is removed later: {seen}")
    elif has_it is DomainMove.DESTINATION_OWNS and left.moved:
        await leave_on_destination(left, ends, note, patience_s=0.0)
    elif has_it is DomainMove.SOURCE_OWNS and left.stayed:
        await leave_on_source(left, ends[1], note, patience_s=0.0)
    else:
        # What is there now belongs to a later operation, not to this migration.
        note(f"'{left.vm}' has left {left.owner} meanwhile: what {left.untidy} has of it stays")
        await keep_files(ends[1], left.run, left.disks)
        await left.remove()
