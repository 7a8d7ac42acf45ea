"""A domain whose memory is lost becomes a stopped one, where it ran last."""

from collections.abc import Callable

from vmckpt.hosts.host import Host
from vmckpt.migrate.disk_files import keep_files
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import leave_on_source, leave_on_target
from vmckpt.migrate.domains.whereabouts import IN_POSTCOPY, View
from vmckpt.vm.domains.libvirtd import libvirtd


async def bury(
    journal: DomainJournal, view: View, ends: tuple[Host, Host], note: Callable[[str], None]
) -> None:
    """End what is left of it on either end, and tidy up; may be repeated after an error.

    In post-copy it ran on the target, where copied disks are newest: a persistent domain is
    defined there from now on. Else it stays where it came from; copies stay, too, where it may have
    been in post-copy before somebody ended it on both.
    """
    source, target = ends
    if not IN_POSTCOPY & {view.source, view.target}:
        if journal.may_postcopy and journal.disks:
            await keep_files(target, journal.run, journal.disks)
            paths = ", ".join(disk.target for disk in journal.disks)
            note(f"{paths}: on both hosts, since nobody can say which is newer")
        await leave_on_source(journal, target)
        return
    if journal.persistent:
        # Before anything is ended: as long as one end is in post-copy it can be seen who ran last.
        async with libvirtd(source) as here, libvirtd(target) as there:
            if await here.condition(journal.uuid) is not None:
                await there.define(await here.definition(journal.uuid))
    for host, where in zip(ends, (view.source, view.target), strict=True):
        if where in IN_POSTCOPY:
            async with libvirtd(host) as session:
                await session.destroy(journal.uuid)
            note(f"ended what was left of it on {host.name}: half of its memory")
    await leave_on_target(journal, ends, note)
