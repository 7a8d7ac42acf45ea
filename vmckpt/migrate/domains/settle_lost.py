"""Make a domain whose memory is lost a stopped one, where it ran last."""

from collections.abc import Callable

from vmckpt.hosts.host import Host
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.tidy import leave_on_destination, leave_on_source
from vmckpt.migrate.domains.whereabouts import IN_POSTCOPY, DomainView, EndState
from vmckpt.migrate.steps.disk_files import keep_files
from vmckpt.vm.domains.sessions import libvirtd


async def settle_lost(
    journal: DomainJournal, view: DomainView, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    """End its remains on both ends, and clean up; may be repeated after an error.

    If it ran on the destination, copied disks are newest there, and a persistent domain is defined
    there. Otherwise it stays on the source; copies are kept if it may have run with them before it
    was ended on both.
    """
    source, destination = ends
    if not (IN_POSTCOPY & {view.source, view.destination} or _came_to_run(journal, view)):
        if _may_have_run(journal, view) and journal.disks:
            await keep_files(destination, journal.run, journal.disks)
            paths = ", ".join(disk.target for disk in journal.disks)
            note(f"{paths}: on both hosts, because it is unknown which is newer")
        await leave_on_source(journal, destination, note)
        return
    if journal.persistent and IN_POSTCOPY & {view.source, view.destination}:
        # Before anything is ended: while an end is in post-copy, it shows who ran last.
        async with libvirtd(source) as here, libvirtd(destination) as there:
            if await here.condition(journal.uuid) is not None:
                await there.define(await here.definition(journal.uuid))
    for host, where in zip(ends, (view.source, view.destination), strict=True):
        if where in IN_POSTCOPY:
            async with libvirtd(host) as session:
                await session.destroy(journal.uuid)
            note(f"ended what was left of it on {host.name}: half of its memory")
    await leave_on_destination(journal, ends, note)


def _came_to_run(journal: DomainJournal, view: DomainView) -> bool:
    """Whether the destination has a definition that the migration brought, or the only one.

    libvirt defines the domain there permanently once all of it has arrived, just before it runs.
    """
    if view.destination is not EndState.OFF:
        return False
    return view.source is EndState.ABSENT or not journal.known_to_target


def _may_have_run(journal: DomainJournal, view: DomainView) -> bool:
    """Whether no evidence remains, for example because the destination had a definition before.

    The source keeps its own definition if its host fails just before libvirt tells it that the
    guest runs.
    """
    defined_before = view.destination is EndState.OFF
    return journal.may_postcopy or view.source is not EndState.OFF or defined_before
