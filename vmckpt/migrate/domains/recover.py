"""Tidying up after a migration of a domain whose command died; libvirt itself went on with it."""

from collections.abc import Callable

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import find_host
from vmckpt.migrate.domains.bury import bury
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import lost, settle, unknown
from vmckpt.migrate.domains.tidy import leave_on_source, leave_on_target
from vmckpt.migrate.domains.whereabouts import Move
from vmckpt.migrate.recover import FINISHED, UNDONE, Recovery, wait_for_locks

LAST_STEP = "transfer"


async def recover(name: str, note: Callable[[str], None]) -> Recovery | None:
    """Wait for the end of a migration that was cut off, and tidy up; None when there is none.

    Raises BusyError while a command works on it, VmLostError, OutcomeUnknownError.
    """
    journal = await DomainJournal.read(name)
    if journal is None:
        return None
    ends = find_host(journal.source), find_host(journal.target)
    if journal.moved:
        await _tidy_source(journal, ends, note)
        return None
    async with await wait_for_locks(journal.vm, journal.run, ends):
        journal = await DomainJournal.read(name)
        if journal is None:
            return None
        note(f"run {journal.run} was cut off: asking both libvirtds")
        move, view = await settle(journal, ends, note)
        if move is Move.TARGET_OWNS:
            await leave_on_target(journal, ends, note)
            where, outcome = ends[1], FINISHED
        elif move is Move.SOURCE_OWNS:
            await leave_on_source(journal, ends[1])
            where, outcome = ends[0], UNDONE
        elif move is Move.LOST:
            await bury(journal, view, ends, note)
            raise lost(journal, view, ends)
        else:
            raise await unknown(journal, move, view, ends)
    return Recovery(journal.run, journal.vm, where.name, LAST_STEP, outcome)


async def _tidy_source(
    journal: DomainJournal, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    """What a migration that went well left on a source that was silent; asked once."""
    try:
        async with await wait_for_locks(journal.vm, journal.run, ends):
            await leave_on_target(journal, ends, note, patience_s=0.0)
    except HostDownError as exc:
        note(f"{exc.what}: what is left of '{journal.vm}' there is removed later")
