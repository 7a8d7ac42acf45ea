"""What is left to do once it is clear who has a domain: nothing of it stays on the other end."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext, suppress
from dataclasses import replace

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.migrate.disk_files import hand_over_files, remove_files
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.settle import POLL_S, SILENT_S, look_at
from vmckpt.migrate.domains.whereabouts import Place
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd

# How long a source may take to see that the domain has gone: libvirt holds its locks for 30 s.
FORGET_S = 60.0


async def leave_on_source(
    journal: DomainJournal,
    target: Host,
    note: Callable[[str], None],
    *,
    patience_s: float = SILENT_S,
) -> None:
    """The domain stays: neither images made for it nor a definition that came stay on the target.

    A target that is silent for longer than `patience_s` is left to the next command on the domain:
    the journal stays.
    """
    try:
        if not journal.known_to_target:
            await _undefined(journal, target, note, patience_s)
        await remove_files(target, journal.run, journal.disks)
    except (HostDownError, OutcomeUnknownError, StorageError) as exc:
        note(_left_to_the_next(journal, target, exc))
        await replace(journal, stayed=True).write()
    else:
        await journal.remove()


async def _undefined(
    journal: DomainJournal, target: Host, note: Callable[[str], None], patience_s: float
) -> None:
    try:
        await _patiently(target, None, patience_s, lambda asked: give_back(asked, journal))
    except (LibvirtRefusedError, RefusedError) as exc:
        note(f"a definition of it may stay on {target.name}: {exc}")


async def leave_on_target(
    journal: DomainJournal,
    ends: tuple[Host, Host],
    note: Callable[[str], None],
    *,
    session: Libvirtd | None = None,
    patience_s: float = SILENT_S,
) -> None:
    """The domain has moved: neither it nor copied images stay on the source.

    `session` is one with the source's libvirtd, where there is one already. A source that is silent
    for longer than `patience_s` is left to the next command on the domain: the journal stays.
    """
    source, target = ends
    try:
        await hand_over_files(source, target, journal.run, journal.disks, note)
        # They must never be removed again: the domain may come back to where they were.
        journal = replace(journal, moved=True, disks=())
    except (HostDownError, StorageError) as exc:
        note(f"its old images may stay on {source.name}: {exc}")
    try:
        await _patiently(source, session, patience_s, lambda asked: forget(asked, journal))
    except (HostDownError, OutcomeUnknownError) as exc:
        note(_left_to_the_next(journal, source, exc))
        await journal.write()
        return
    except VmckptError as exc:
        note(f"its definition stays on {source.name}: {exc}")
    if not journal.disks:
        await journal.remove()


def _left_to_the_next(journal: DomainJournal, host: Host, exc: VmckptError) -> str:
    return (
        f"{host.name} may still have what is left of it, which is removed when it answers again, "
        f"by: vmckpt migrate --recover {journal.vm} ({exc})"
    )


async def _patiently(
    host: Host,
    session: Libvirtd | None,
    patience_s: float,
    work: Callable[[Libvirtd], Awaitable[None]],
) -> None:
    """Done, tried again for a while with a libvirtd that is being started anew."""
    given_up_s = time.monotonic() + patience_s
    while True:
        try:
            async with nullcontext(session) if session else libvirtd(host) as asked:
                await work(asked)
                return
        except (HostDownError, OutcomeUnknownError):
            session = None
            if time.monotonic() > given_up_s:
                raise
        await asyncio.sleep(POLL_S)


async def give_back(session: Libvirtd, journal: DomainJournal) -> None:
    """The target has no definition of a domain that the source has and that came only now.

    libvirt defines it there when all of it has arrived, just before it runs. A libvirtd that dies
    in that moment ends its QEMU when it is started again, and keeps the definition. Raises
    HostDownError; OutcomeUnknownError while it still waits there for the migration.
    """
    where, _ = await look_at(session, journal.uuid, is_source=False)
    if where is Place.OFF:
        with suppress(NotFoundError):
            await session.undefine(journal.uuid)
    elif where is Place.WAITING:
        raise OutcomeUnknownError(
            f"libvirtd does not see that '{journal.vm}' will not come",
            why=f"to it the domain {where.value}",
            remedy=f"if it stays so, see its log on {journal.target}: journalctl -u libvirtd",
        )


async def forget(session: Libvirtd, journal: DomainJournal) -> None:
    """The source has nothing of a domain that the target has, as libvirt itself sees to.

    Unless it is disturbed: one that was restarted meanwhile sees only after a while that all has
    gone, or is never told that the target runs it, and keeps the sent one, paused. Raises
    OutcomeUnknownError when it does not end, HostDownError.
    """
    given_up_s = time.monotonic() + FORGET_S
    while True:
        where, job = await look_at(session, journal.uuid, is_source=True)
        if where is Place.ABSENT:
            return
        if where is Place.OFF:
            with suppress(NotFoundError):
                await session.undefine(journal.uuid)
            return
        if where is Place.WAITING and not job:
            with suppress(LibvirtRefusedError, NotFoundError):  # libvirt has just ended it itself
                await session.destroy(journal.uuid)
        if time.monotonic() > given_up_s:
            raise OutcomeUnknownError(
                f"libvirtd does not see that '{journal.vm}' has gone",
                why=f"to it the domain {where.value}, after {FORGET_S:g} s",
                remedy=f"virsh destroy {journal.vm} there, and virsh undefine {journal.vm}",
            )
        await asyncio.sleep(POLL_S)
