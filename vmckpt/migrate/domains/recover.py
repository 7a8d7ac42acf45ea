"""Tidying up after a migration of a domain whose command died; libvirt itself went on with it."""

import asyncio
from collections.abc import Callable

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import find_host
from vmckpt.migrate.disk_files import keep_files
from vmckpt.migrate.domains.bury import bury
from vmckpt.migrate.domains.hold import let_go
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import look, lost, settle, settle_off, unknown
from vmckpt.migrate.domains.tidy import leave_on_source, leave_on_target
from vmckpt.migrate.domains.whereabouts import Move, Place, decide
from vmckpt.migrate.locks import wait_for_locks
from vmckpt.migrate.recover import FINISHED, UNDONE, Recovery

LAST_STEP = "transfer"


async def recover(name: str, note: Callable[[str], None]) -> Recovery | None:
    """Wait for the end of a migration that was cut off, and tidy up; None when there is none.

    Raises BusyError while a command works on it, VmLostError, OutcomeUnknownError.
    """
    journal = await DomainJournal.read(name)
    if journal is None:
        return None
    ends = find_host(journal.source), find_host(journal.target)
    if journal.moved or journal.stayed:
        await _tidy(journal, ends, note)
        return None
    async with await wait_for_locks(journal.vm, journal.run, ends):
        journal = await DomainJournal.read(name)
        if journal is None:
            return None
        note(f"run {journal.run} was cut off: asking both libvirtds")
        letting_go = asyncio.ensure_future(let_go(journal, ends[0]))
        try:
            if journal.offline:
                move, view = await settle_off(journal, ends)
            else:
                move, view = await settle(journal, ends, note)
        finally:
            letting_go.cancel()
            await asyncio.wait({letting_go})
        if move is Move.TARGET_OWNS:
            await leave_on_target(journal, ends, note)
            where, outcome = ends[1], FINISHED
        elif move is Move.SOURCE_OWNS:
            await leave_on_source(journal, ends[1], note)
            where, outcome = ends[0], UNDONE
        elif move is Move.LOST:
            await bury(journal, view, ends, note)
            raise lost(journal, view, ends)
        else:
            raise await unknown(journal, move, view, ends)
    return Recovery(journal.run, journal.vm, where.name, LAST_STEP, outcome)


async def _tidy(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    """What a migration whose end is known left on the other end, which was silent; asked once."""
    try:
        async with await wait_for_locks(journal.vm, journal.run, ends):
            if journal.moved:
                await leave_on_target(journal, ends, note, patience_s=0.0)
            else:
                await _tidy_target(journal, ends, note)
    except HostDownError as exc:
        other = ends[0 if journal.moved else 1].name
        note(f"{exc.what}: what is left of '{journal.vm}' on {other} is removed later")


async def _tidy_target(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    view = await look(journal.uuid, ends)
    if view.source is Place.SILENT:
        note(f"libvirtd on {ends[0].name} is silent: {ends[1].name} is tidied up later")
    elif view.source is Place.ABSENT or decide(view) in (Move.TARGET_OWNS, Move.UNKNOWN):
        # Somebody has moved it since: what the target has is theirs.
        await keep_files(ends[1], journal.run, journal.disks)
        await journal.remove()
    else:
        await leave_on_source(journal, ends[1], note, patience_s=0.0)
